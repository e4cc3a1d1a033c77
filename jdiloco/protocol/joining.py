"""How a node comes into a run: find it or create it, take up a life, read where the run stands.

Each is a sequence of requests to a store in which every answer decides the next request. They are
written as generators that yield a request and are sent its answer, so that the runtime, a simulator
and a test that kills after the k-th request can all drive the same lines:

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
    ContributionHead,
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


# Taking up a life


@dataclasses.dataclass(frozen=True, slots=True)
class Person:
    """What a life says of itself, for whoever meets its name again."""

    node: str
    host: str
    process: int
    backend: str
    nonce: str


@dataclasses.dataclass(frozen=True, slots=True)
class Birth:
    """What a node knows as soon as it lives."""

    life: Life
    position: int  # Batches of its data that contributions of earlier lives cover.
    beat: int  # Of its newest beat.
    listed: tuple[str, ...]  # The log; it shows that beat.


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """What earlier lives of a node have sent, as far as it has been looked at."""

    position: int = 0  # The furthest of any of it.
    read: int = -1  # The newest round seen to have a record; of older ones the position knows.
    work: tuple[str, ...] = ()  # Contributions to rounds after that.
    valid: tuple[str, ...] = ()  # Of these, what the newest life sent or vouches for.


def take_up_life(keys: Keys, person: Person, waiting: Waiting) -> Steps[Birth]:
    """Creates the next incarnation of a node, and finds out how far it is in its data.

    Under an id whose lease may be live it waits: NodeIdInUse once the beat changes. Then

        list           what earlier lives have sent to open rounds
        incarnation    names it as valid
        beat           from here on every closer knows that there is a newer life
        list           again, until the beat is in it

    Whatever else an earlier life sends is rejected by every closer whose listing shows the beat. A
    closer whose listing does not may still merge what it sees, but that was there before the beat,
    so this node sees it too, or reads the record that merged it. Hence nothing that can be merged
    of earlier lives lies beyond `position`. Listings may be late without harm, as long as each
    shows the mailbox as it was at one moment.
    """
    while True:
        number = yield from _newest_life(keys, person.node)
        listed = yield from _await_silence(keys, person, waiting, number)
        past = yield from _look_back(keys, person.node, number, listed)
        life = Life(person.node, number + 1)
        if (yield from _be_born(keys, person, life.incarnation, waiting, past)):
            break
    beat, listed = yield from _show_life(keys, life, waiting, past.read + 1)
    past = yield from _look_again(keys, person.node, past, listed)
    return Birth(life, past.position, beat, tuple(listed))


def _newest_life(keys: Keys, node: str) -> Steps[int]:
    names = yield List(keys.incarnations(node))
    numbers = [parsed[1] for name in names if (parsed := keys.parse_incarnation(name))]
    return max(numbers, default=0)


def _look_back(keys: Keys, node: str, number: int, listed: list[str]) -> Steps[Past]:
    """What lives up to `number` have sent: from the newest record back to the birth of that life,
    or to the first that it took part in, since it has gone on from there.

    What a life before that one sent is valid only if that one vouched for it: it may have trained
    the same rows since.
    """
    read, work = _newest_round(keys, listed), _open_work(keys, node, listed)
    if not number:
        return Past(0, read, work, work)
    before = yield from _read_incarnation(keys, node, number)
    position = before.position
    for round in range(read, before.round, -1):
        record, _ = yield from _read_record(keys, round)
        found, lives = _merged(record, node)
        position = max(position, found)
        if number in lives:
            break
    position, _ = yield from _read_heads(work, position)
    valid = tuple(name for name in work if name in before.valid or _is_of(keys, name, number))
    return Past(position, read, work, valid)


def _is_of(keys: Keys, name: str, incarnation: int) -> bool:
    key = keys.parse(name)
    return isinstance(key, ContributionKey) and key.incarnation == incarnation


def inherit(keys: Keys, life: Life, *, round: int) -> Steps[Incarnation]:
    """The next life of a node that somebody else ends, with what it vouches for.

    `round` is the newest whose record has been read.
    """
    listed = yield List(keys.log, keys.after(max(0, round)))
    past = yield from _look_back(keys, life.node, life.incarnation - 1, listed)
    return Incarnation(
        node=life.node,
        incarnation=life.incarnation,
        host="",
        process=0,
        backend="",
        valid=past.valid,
        round=past.read,
        position=past.position,
        write_id="",
    )


def _look_again(keys: Keys, node: str, past: Past, listed: list[str]) -> Steps[Past]:
    """What has come since. Work that is gone before it is read has been merged, or never will be:
    the records that a further listing shows tell."""
    while True:
        read, work = _newest_round(keys, listed), _open_work(keys, node, listed)
        position = past.position
        for round in range(past.read + 1, read + 1):
            record, _ = yield from _read_record(keys, round)
            position = max(position, _merged(record, node)[0])
        new = tuple(name for name in work if name not in past.work)
        position, complete = yield from _read_heads(new, position)
        past = Past(position, max(past.read, read), (*past.work, *new), past.valid)
        if complete:
            return past
        listed = yield List(keys.log)


def _read_heads(names: tuple[str, ...], position: int) -> Steps[tuple[int, bool]]:
    """The furthest position, and whether all of them could be read."""
    complete = True
    for name in names:
        head: ContributionHead | None = yield ReadHead(name)
        complete = complete and head is not None
        position = max(position, head.position if head else 0)
    return position, complete


def _merged(record: RoundRecord, node: str) -> tuple[int, frozenset[int]]:
    """How far a record's contributions of a node reach, and of which lives they are."""
    mine = [who for who in record.participants if who.node == node]
    lives = frozenset(who.incarnation for who in mine)
    return max((who.position for who in mine), default=0), lives


def _newest_round(keys: Keys, listed: Iterable[str]) -> int:
    """The newest round that has a record in a listing, -1 for none."""
    rounds = [key.round for name in listed if isinstance(key := keys.parse(name), RecordKey)]
    return max(rounds, default=-1)


def _open_work(keys: Keys, node: str, listed: list[str]) -> tuple[str, ...]:
    """Contributions of this node to rounds that have no record yet."""
    newest = _newest_round(keys, listed)
    return tuple(
        name
        for name in listed
        if isinstance(key := keys.parse(name), ContributionKey)
        and key.node == node
        and key.round > newest
    )


def _show_life(
    keys: Keys, life: Life, waiting: Waiting, next_round: int
) -> Steps[tuple[int, list[str]]]:
    """Beats until a listing shows it; returns the newest beat's number and that listing."""
    number = 0
    while True:
        number += 1
        beat = BeatKey(life.node, life.incarnation, number, "joining", 0, next_round)
        yield Create(keys.beat(beat), b"")
        listed = yield List(keys.log)
        shown = [key for name in listed if isinstance(key := keys.parse(name), BeatKey)]
        if any(Life(key.node, key.incarnation) == life for key in shown):
            return number, listed
        yield Sleep(waiting.poll_seconds)


def _be_born(keys: Keys, person: Person, number: int, waiting: Waiting, past: Past) -> Steps[bool]:
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
                valid=past.valid,
                round=past.read,
                position=past.position,
                write_id=write_id,
            ),
        )

    data = named(f"{person.nonce}.1")
    found = yield from settle(key, data, waiting)
    if found != data:
        return False
    if (yield Create(key, named(f"{person.nonce}.2"))) or (yield Get(key)) != data:
        raise StoreIgnoresConditions(
            f"This store created {key!r} a second time, over an object that was there. Two nodes "
            "would commit different values for one round. Use a folder, or a bucket whose server "
            "honours `If-None-Match: *`."
        )
    return True


def _await_silence(keys: Keys, person: Person, waiting: Waiting, number: int) -> Steps[list[str]]:
    """Waits until nobody of this id beats any more; returns the log as it is then.

    Of life `number` no beat may be left, or none be there yet because it is being born this moment:
    it is given a poll to show one.
    """
    listed = yield List(keys.log)
    beat = _newest_beat(keys, person.node, listed)
    if number and (beat is None or beat.incarnation < number):
        yield Sleep(waiting.poll_seconds)
        listed = yield List(keys.log)
        beat = _newest_beat(keys, person.node, listed)
    unchanged = 0.0
    while beat is not None and beat.phase != "left" and unchanged < waiting.lease_seconds:
        unchanged += yield Sleep(waiting.poll_seconds)
        listed = yield List(keys.log)
        newer = _newest_beat(keys, person.node, listed)
        if newer is not None and newer > beat:
            if newer.phase != "left":
                yield from _refuse(keys, person, newer)
            beat = newer
    return listed


def _newest_beat(keys: Keys, node: str, listed: list[str]) -> BeatKey | None:
    beats = [key for name in listed if isinstance(key := keys.parse(name), BeatKey)]
    mine = [beat for beat in beats if beat.node == node]
    return max(mine, key=lambda beat: (beat.incarnation, beat.beat), default=None)


def _refuse(keys: Keys, person: Person, beat: BeatKey) -> Steps[None]:
    try:
        other = yield from _read_incarnation(keys, beat.node, beat.incarnation)
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


def await_manifest(waiting: Waiting) -> Steps[bytes]:
    """The manifest's bytes, once somebody has created the run."""
    while (data := (yield Get(MANIFEST))) is None:
        yield Sleep(waiting.poll_seconds)
    return data


def read_chain(
    manifest: Manifest, data: bytes, listed: Iterable[str] | None = None
) -> Steps[Chain]:
    """The chain at the newest record of a listing, of a new one unless it is given.

    Needs the newest record and one per fragment, however long the run is.
    """
    keys = Keys(manifest.run)
    chain = chains.begin(manifest, data)
    newest = _newest_round(keys, (yield List(keys.log)) if listed is None else listed)
    if newest < 0:
        return chain
    found = yield from _read_record(keys, newest)
    records = {newest: found}
    for head in found[0].heads:
        if head >= 0 and head not in records:
            records[head] = yield from _read_record(keys, head)
    heads = [records.get(head) for head in found[0].heads]
    bases = tuple(sha256(data if head is None else head[1]) for head in heads)
    made = tuple(None if head is None else head[0] for head in heads)
    return chains.resume(chain, *found, made, bases)


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


def _read_incarnation(keys: Keys, node: str, number: int) -> Steps[Incarnation]:
    key = keys.incarnation(node, number)
    data = yield Get(key)
    if data is None:
        raise FormatError(f"{key!r} is not there. Incarnations are never removed.")
    return unseal(key, data, Incarnation)


def _read_record(keys: Keys, round: int) -> Steps[tuple[RoundRecord, bytes]]:
    key = keys.record(round)
    data = yield Get(key)
    if data is None:
        raise FormatError(f"{key!r} was listed and is not there. Round records are never removed.")
    return unseal(key, data, RoundRecord), data
