"""How a node comes into a run: find it or create it, take up a life, read where the run stands.

Each is a sequence of requests to a store in which every answer decides the next request. They are
written as generators that yield a request and are sent its answer, so that the runtime, a simulator
and a test that kills after the k-th request can all drive the same lines:

    request                answer
    List(prefix, after)    keys, in order
    Get(key)               bytes, or None
    Create(key, data)      True: created now. False: taken, or no clear answer; read back
    Delete(keys)           -
    Sleep(seconds)         seconds that passed
    SaveInitial(prefix)    -            begins to write the first run checkpoint
    Saved(seconds)         Checkpoint, or None when it is not complete after `seconds`

A request that the store does not answer is tried again by whoever performs it, and raises
StoreUnavailable into the generator once that is hopeless. Only then is joining over: it needs the
store, unlike training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from jdiloco.errors import FormatError, NodeIdInUse, StoreIgnoresConditions
from jdiloco.protocol import chain as chains
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.keys import (
    CREATING,
    MANIFEST,
    BeatKey,
    ContributionKey,
    Keys,
    RecordKey,
)
from jdiloco.protocol.records import (
    Checkpoint,
    Incarnation,
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
class Create:
    key: str
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class SaveInitial:
    prefix: str


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    seconds: float


Request = List | Get | Create | Delete | Sleep | SaveInitial | Saved
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
    unchanged = 0.0
    while first and unchanged < waiting.lease_seconds:
        unchanged += yield Sleep(waiting.poll_seconds)
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
    found = yield from _settle(MANIFEST, data, waiting)
    if found == data:
        return data, True
    keys = yield List(f"{creator.prefix}/")
    if keys:
        yield Delete(tuple(keys))
    return found, False


def _settle(key: str, data: bytes, waiting: Waiting) -> Steps[bytes]:
    """Creates a contested object and returns what lies there: these bytes, or the winner's."""
    while True:
        if (yield Create(key, data)):
            return data
        if (found := (yield Get(key))) is not None:
            return found
        yield Sleep(waiting.poll_seconds)


# Taking up a life


@dataclasses.dataclass(frozen=True, slots=True)
class Person:
    """What a life says of itself, for whoever meets its name again."""

    node: str
    host: str
    process: int
    backend: str
    nonce: str


def take_up_life(keys: Keys, person: Person, waiting: Waiting) -> Steps[Life]:
    """Creates the next incarnation of a node.

    Under an id whose lease may be live it waits: NodeIdInUse once the beat changes. The order is
    list, create, and (by the caller) list again: a contribution of an earlier life is either named
    as valid here, or every closer that reads this incarnation rejects it.
    """
    listed = yield List(keys.log)
    yield from _await_silence(keys, person, waiting, listed)
    while True:
        listed = yield List(keys.log)
        lives = yield List(keys.incarnations(person.node))
        numbers = [parsed[1] for key in lives if (parsed := keys.parse_incarnation(key))]
        number = max(numbers, default=0) + 1
        if (yield from _be_born(keys, person, number, waiting, _open_work(keys, person, listed))):
            return Life(person.node, number)


def _open_work(keys: Keys, person: Person, listed: list[str]) -> tuple[str, ...]:
    """Contributions of this node to rounds that have no record yet."""
    parsed = [(name, keys.parse(name)) for name in listed]
    newest = max((key.round for _, key in parsed if isinstance(key, RecordKey)), default=-1)
    return tuple(
        name
        for name, key in parsed
        if isinstance(key, ContributionKey) and key.node == person.node and key.round > newest
    )


def _be_born(
    keys: Keys, person: Person, number: int, waiting: Waiting, valid: tuple[str, ...]
) -> Steps[bool]:
    """Creates one incarnation, twice: a store that lets the second pass can carry no run."""
    key = keys.incarnation(person.node, number)

    def named(write_id: str) -> bytes:
        return seal(
            key,
            Incarnation(
                node=person.node,
                incarnation=number,
                host=person.host,
                process=person.process,
                backend=person.backend,
                valid=valid,
                write_id=write_id,
            ),
        )

    data = named(f"{person.nonce}.1")
    found = yield from _settle(key, data, waiting)
    if found != data:
        return False
    if (yield Create(key, named(f"{person.nonce}.2"))) or (yield Get(key)) != data:
        raise StoreIgnoresConditions(
            f"This store created {key!r} a second time, over an object that was there. Two nodes "
            "would commit different values for one round. Use a folder, or a bucket whose server "
            "honours `If-None-Match: *`."
        )
    return True


def _await_silence(keys: Keys, person: Person, waiting: Waiting, listed: list[str]) -> Steps[None]:
    """Waits until nobody of this id beats any more."""
    beat = _newest_beat(keys, person.node, listed)
    unchanged = 0.0
    while beat is not None and beat.phase != "left" and unchanged < waiting.lease_seconds:
        unchanged += yield Sleep(waiting.poll_seconds)
        newer = _newest_beat(keys, person.node, (yield List(keys.log)))
        if newer is not None and newer != beat:
            if newer.phase == "left":
                return
            yield from _refuse(keys, person, newer)


def _newest_beat(keys: Keys, node: str, listed: list[str]) -> BeatKey | None:
    beats = [key for name in listed if isinstance(key := keys.parse(name), BeatKey)]
    mine = [beat for beat in beats if beat.node == node]
    return max(mine, key=lambda beat: (beat.incarnation, beat.beat), default=None)


def _refuse(keys: Keys, person: Person, beat: BeatKey) -> Steps[None]:
    key = keys.incarnation(beat.node, beat.incarnation)
    data = yield Get(key)
    where = "somewhere"
    if data is not None:
        try:
            other = unseal(key, data, Incarnation)
            where = f"as process {other.process} on {other.host}"
        except FormatError as error:
            where = f"somewhere ({error})"
    raise NodeIdInUse(
        f"Node id {person.node!r} is alive {where}; this is process {person.process} on "
        f"{person.host}. Give each node its own `node_id`, or none."
    )


# Reading where the run stands


def read_manifest() -> Steps[bytes | None]:
    """The manifest's bytes, None when there is no run."""
    return (yield Get(MANIFEST))


def read_chain(manifest: Manifest, data: bytes) -> Steps[Chain]:
    """The chain at the newest record.

    Needs the newest record and one per fragment, however long the run is.
    """
    keys = Keys(manifest.run)
    chain = chains.begin(manifest, data)
    listed = yield List(keys.log)
    rounds = [key.round for name in listed if isinstance(key := keys.parse(name), RecordKey)]
    if not rounds:
        return chain
    newest = max(rounds)
    found = yield from _read_record(keys, newest)
    records = {newest: found}
    for head in found[0].heads:
        if head >= 0 and head not in records:
            records[head] = yield from _read_record(keys, head)
    heads = [records.get(head) for head in found[0].heads]
    bases = tuple(sha256(data if head is None else head[1]) for head in heads)
    made = tuple(None if head is None else head[0] for head in heads)
    return chains.resume(chain, *found, made, bases)


def find_old(keys: Keys, read: int) -> Steps[Shelf]:
    """What lies in the mailbox of rounds up to `read`, for this node to sweep when it closes.

    Whoever wrote it may be gone, and with it the knowledge that it is there.
    """
    logged = [keys.parse(name) for name in (yield List(keys.log))]
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


def _read_record(keys: Keys, round: int) -> Steps[tuple[RoundRecord, bytes]]:
    key = keys.record(round)
    data = yield Get(key)
    if data is None:
        raise FormatError(f"{key!r} was listed and is not there. Round records are never removed.")
    return unseal(key, data, RoundRecord), data
