"""How a node comes into a run: find it or create it, and read where it stands.

These, and taking up a life (`lives`), are sequences of requests to a store in which every answer
decides the next request. They are written as generators that yield a request and are sent its
answer, so that the runtime, a simulator and a test that kills after the k-th request can all drive
the same lines:

    request                answer
    List(prefix, after)    keys, in order
    Get(key)               bytes, or None
    ReadHead(key)          a contribution's ContributionHead, or None for nothing or nonsense
    Create(key, data)      True: created now. False: taken, or no clear answer; read back
    Delete(keys)           -
    Sleep(seconds)         seconds that passed
    Look(lives)            `work.View`: what the member of a node that has joined knows of them
    SaveInitial(prefix)    -            begins to write the first run checkpoint
    Saved(seconds)         Checkpoint, or None when it is not complete after `seconds`

A request that the store does not answer is tried again by whoever performs it, and raises
StoreUnavailable into the generator once that is hopeless. Only then is joining over: it needs the
store, unlike training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from jdiloco.errors import FormatError
from jdiloco.protocol import chain as chains
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.keys import (
    CREATING,
    MANIFEST,
    ContributionKey,
    Keys,
    RecordKey,
)
from jdiloco.protocol.records import (
    Checkpoint,
    Manifest,
    RoundRecord,
    seal,
    sha256,
    unseal,
)
from jdiloco.protocol.rules import Life
from jdiloco.protocol.sweep import Shelf


@dataclasses.dataclass(frozen=True, slots=True)
class List:
    prefix: str
    after: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Get:
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReadHead:
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Create:
    key: str
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float
    because: str = ""  # What is waited for, where that may take longer than a moment.


@dataclasses.dataclass(frozen=True, slots=True)
class SaveInitial:
    prefix: str


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    lives: tuple[Life, ...]


Request = Look | List | Get | ReadHead | Create | Delete | Sleep | SaveInitial | Saved
T = TypeVar("T")
Steps = Generator[Request, Any, T]


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """How long a joining node waits for what."""

    poll_seconds: float
    beat_seconds: float
    lease_seconds: float


# Finding or creating the run


@dataclasses.dataclass(frozen=True, slots=True)
class Creator:
    """Who would create the run, and as which one."""

    node: str
    nonce: str  # Fresh, `[a-z0-9]+`: tells two starts of one node apart.
    run: str  # Fresh too.

    @property
    def name(self) -> str:
        return f"{self.node}.{self.nonce}"

    @property
    def prefix(self) -> str:
        """Where its first checkpoint goes; nobody else ever writes there."""
        return Keys(self.run).checkpoint(-1, self.node, 1, 1)


def find_or_create(
    creator: Creator, waiting: Waiting, describe: Callable[[Checkpoint], Manifest]
) -> Steps[tuple[bytes, bool]]:
    """Returns the manifest's bytes, and whether this node wrote them.

    A node that finds somebody creating the run waits while that creator's beat changes, and creates
    the run itself once it has not for a lease timeout. Of several that begin at once the one whose
    name comes first goes on. Should two get through, the manifest decides, created once.
    """
    beat = 1
    silent: set[str] = set()
    while True:
        if (data := (yield Get(MANIFEST))) is not None:
            yield from _clear(creator)
            return data, False
        if (yield from _await_creators(creator, waiting, silent, everybody=True)):
            continue
        yield Create(f"{CREATING}{creator.name}.{beat:08}", b"")
        beat += 1
        if not (yield from _await_creators(creator, waiting, silent, everybody=False)):
            break
    made = yield from _create(creator, waiting, describe, beat)
    yield from _clear(creator)
    return made


def _clear(creator: Creator) -> Steps[None]:
    keys = yield List(f"{CREATING}{creator.name}.")
    if keys:
        yield Delete(tuple(keys))


def _await_creators(
    creator: Creator, waiting: Waiting, silent: set[str], *, everybody: bool
) -> Steps[bool]:
    """Waits a while for other creators; False once there is none that has beaten lately.

    Before its own first beat a node waits for everybody; after it, so that two that began at once
    do not wait for each other, only for those whose name comes before its own.
    """
    first = yield from _creators(creator, silent, everybody=everybody)
    names = ", ".join(sorted({key.removeprefix(CREATING).partition(".")[0] for key in first}))
    because = f"{names} began to create the run; no longer than {waiting.lease_seconds:g} s if dead"
    unchanged = 0.0
    while first and unchanged < waiting.lease_seconds:
        unchanged += yield Sleep(waiting.poll_seconds, because)
        if (yield Get(MANIFEST)) is not None:
            return True
        if (yield from _creators(creator, silent, everybody=everybody)) != first:
            return True
    silent.update(first)
    return False


def _creators(creator: Creator, silent: set[str], *, everybody: bool) -> Steps[tuple[str, ...]]:
    """Beats of other creators."""
    keys = yield List(CREATING)
    names = [(key.removeprefix(CREATING).rpartition(".")[0], key) for key in keys]
    return tuple(
        key
        for name, key in names
        if key not in silent and name != creator.name and (everybody or name < creator.name)
    )


def _create(
    creator: Creator,
    waiting: Waiting,
    describe: Callable[[Checkpoint], Manifest],
    beat: int,
) -> Steps[tuple[bytes, bool]]:
    yield SaveInitial(creator.prefix)
    while (checkpoint := (yield Saved(waiting.beat_seconds))) is None:
        beat += 1
        yield Create(f"{CREATING}{creator.name}.{beat:08}", b"")
    manifest = describe(checkpoint)
    data = seal(MANIFEST, manifest)
    found = yield from settle(MANIFEST, data, waiting)
    if found == data:
        return data, True
    keys = yield List(f"{creator.prefix}/")
    if keys:
        yield Delete(tuple(keys))
    return found, False


def settle(key: str, data: bytes, waiting: Waiting) -> Steps[bytes]:
    """Creates a contested object and returns what lies there: these bytes, or the winner's."""
    while True:
        if (yield Create(key, data)):
            return data
        if (found := (yield Get(key))) is not None:
            return found
        yield Sleep(waiting.poll_seconds)


# Reading where the run stands


def list_manifests() -> Steps[list[str]]:
    """What is called a manifest: of several runs, were one with and another without a key."""
    return (yield List(MANIFEST))


def read_manifest() -> Steps[bytes | None]:
    """The manifest's bytes, None when there is no run."""
    return (yield Get(MANIFEST))


def await_manifest(waiting: Waiting) -> Steps[bytes]:
    """The manifest's bytes, once somebody has created the run."""
    because = "there is no run in the mailbox yet; a node that brings parameters creates it"
    while (data := (yield Get(MANIFEST))) is None:
        yield Sleep(waiting.poll_seconds, because)
    return data


def read_chain(
    manifest: Manifest, data: bytes, listed: Iterable[str] | None = None
) -> Steps[Chain]:
    """The chain at the newest record of a listing, of a new one unless it is given."""
    keys = Keys(manifest.run)
    newest = newest_round(keys, (yield List(keys.log)) if listed is None else listed)
    return (yield from read_chain_at(manifest, data, newest))


def read_chain_at(manifest: Manifest, data: bytes, newest: int) -> Steps[Chain]:
    """The chain as it was when `newest` was the newest round with a record, -1 for none.

    Needs that record and one per fragment, however long the run is.
    """
    keys = Keys(manifest.run)
    chain = chains.begin(manifest, data)
    if newest < 0:
        return chain
    found = yield from read_record(keys, newest)
    records = {newest: found}
    for head in found[0].heads:
        if head >= 0 and head not in records:
            records[head] = yield from read_record(keys, head)
    heads = [records.get(head) for head in found[0].heads]
    bases = tuple(sha256(data if head is None else head[1]) for head in heads)
    made = tuple(None if head is None else head[0] for head in heads)
    return chains.resume(chain, *found, made, bases)


def newest_round(keys: Keys, listed: Iterable[str]) -> int:
    """The newest round that has a record in a listing, -1 for none."""
    rounds = [key.round for name in listed if isinstance(key := keys.parse(name), RecordKey)]
    return max(rounds, default=-1)


def find_old(keys: Keys, read: int, listed: Iterable[str]) -> Steps[Shelf]:
    """What lies in the mailbox of rounds up to `read`, for this node to sweep when it closes.

    Whoever wrote it may be gone, and with it the knowledge that it is there. `listed` is the log.
    """
    logged = [keys.parse(name) for name in listed]
    contributions = [
        key for key in logged if isinstance(key, ContributionKey) and key.round <= read
    ]
    data = [(keys.round_of(name), name) for name in (yield List(f"{keys.run}/data/"))]
    saved = [(keys.round_of(name), keys.checkpoint_of(name)) for name in (yield List(keys.saves))]
    return Shelf(
        contributions=tuple(contributions),
        payloads=tuple(
            (round, name) for round, name in data if round is not None and round <= read
        ),
        strays=tuple(dict.fromkeys((r, prefix) for r, prefix in saved if r is not None)),
    )


def read_record(keys: Keys, round: int) -> Steps[tuple[RoundRecord, bytes]]:
    """A round's record and its bytes."""
    key = keys.record(round)
    data = yield Get(key)
    if data is None:
        raise FormatError(f"{key!r} was listed and is not there. Round records are never removed.")
    return unseal(key, data, RoundRecord), data
