"""Taking up a life: the next incarnation of a node, and how far it is in its data.

Written as `joining` is. Under an id whose lease may be live a node waits: NodeIdInUse once the beat
changes. Then

    list           what earlier lives have sent to open rounds
    incarnation    names of it what stays valid
    beat           from here on every closer knows that there is a newer life
    list           again, until the beat is in it

Whatever else an earlier life sends is rejected by every closer whose listing shows the beat. A
closer whose listing does not may still merge what it sees, but that was there before the beat, so
this node sees it too, or reads the record that merged it. Hence nothing that can be merged of
earlier lives lies beyond the position found. Listings may be late without harm, as long as each
shows the mailbox as it was at one moment.

Valid stays what the newest life has sent or vouched for itself: a life before that may have trained
the same rows. A node that resumes vouches for what its checkpoint has outstanding, too, unless it
is overtaken (see `resuming`). Should that show only after it is born, it ends that life at once,
and takes up one that vouches for nothing of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jdiloco.errors import FormatError, NodeIdInUse, StoreIgnoresConditions
from jdiloco.protocol.joining import (
    Create,
    Get,
    List,
    ReadHead,
    Sleep,
    Steps,
    Waiting,
    newest_round,
    read_record,
    settle,
)
from jdiloco.protocol.keys import BeatKey, ContributionKey, Keys
from jdiloco.protocol.records import ContributionHead, Incarnation, RoundRecord, seal, unseal
from jdiloco.protocol.resuming import Private
from jdiloco.protocol.rules import Life


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
    overtaken: bool = False  # What its private checkpoint has pending must be dropped.


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """What earlier lives of a node have sent, as far as it has been looked at."""

    position: int = 0  # The furthest of any of it.
    read: int = -1  # The newest round seen to have a record; of older ones the position knows.
    work: tuple[str, ...] = ()  # Contributions to rounds after that.
    valid: tuple[str, ...] = ()  # What the new life vouches for.
    overtaken: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """Looks for contributions of one node, and for such as its checkpoint does not know of."""

    keys: Keys
    node: str
    saved: Private | None = None

    def note(self, past: Past, record: RoundRecord) -> Past:
        """Takes up what a record merged."""
        mine = [who for who in record.participants if who.node == self.node]
        strange = any(self._is_strange(record.round, who.incarnation) for who in mine)
        return self.reached(past, (who.position for who in mine), strange=strange)

    def reached(self, past: Past, positions: Iterable[int], *, strange: bool = False) -> Past:
        """Takes up how far contributions reach."""
        position = max([past.position, *positions])
        beyond = self.saved is not None and position > self.saved.position
        overtaken = past.overtaken or strange or beyond
        return dataclasses.replace(past, position=position, overtaken=overtaken)

    def look(self, listed: Iterable[str]) -> Past:
        """What a listing shows of rounds without a record; the heads are still to be read."""
        read = newest_round(self.keys, listed)
        mine = {
            name: key
            for name in listed
            if isinstance(key := self.keys.parse(name), ContributionKey)
            and key.node == self.node
            and key.round > read
        }
        strange = any(self._is_strange(key.round, key.incarnation) for key in mine.values())
        return Past(0, read, tuple(mine), overtaken=strange)

    def _is_strange(self, round: int, incarnation: int) -> bool:
        return self.saved is not None and not self.saved.knows(round, incarnation)

    def inherited(self, past: Past) -> tuple[str, ...]:
        """What the checkpoint has outstanding, whether it has landed or not."""
        if self.saved is None or past.overtaken:
            return ()
        keys = (key for key in self.saved.keys if key.round > past.read)
        return tuple(self.keys.contribution(key) for key in keys)


def take_up_life(
    keys: Keys, person: Person, waiting: Waiting, saved: Private | None = None
) -> Steps[Birth]:
    """Creates the next incarnation of a node, in the order above."""
    search = Search(keys, person.node, saved)
    given_up: dict[int, int] = {}  # Own lives that vouched for too much, and those before them.
    while True:
        number = yield from _newest_life(keys, person.node)
        listed = yield from _await_silence(keys, person, waiting, number)
        before = yield from _look_back(search, given_up.get(number, number), listed)
        life = Life(person.node, number + 1)
        if not (yield from _be_born(keys, person, number + 1, waiting, before)):
            continue  # Somebody else is.
        beat, listed = yield from _show_life(keys, life, waiting, before.read + 1)
        past = yield from _look_again(search, before, listed)
        if past.overtaken == before.overtaken or not search.inherited(before):
            return Birth(life, past.position, beat, tuple(listed), past.overtaken)
        given_up[number + 1] = given_up.get(number, number)
        last = BeatKey(life.node, life.incarnation, beat + 1, "left", 0, past.read + 1)
        yield Create(keys.beat(last), b"")


def _newest_life(keys: Keys, node: str) -> Steps[int]:
    names = yield List(keys.incarnations(node))
    numbers = [parsed[1] for name in names if (parsed := keys.parse_incarnation(name))]
    return max(numbers, default=0)


def _look_back(search: Search, number: int, listed: list[str]) -> Steps[Past]:
    """What lives up to `number` have sent.

    From the newest record back to the first that this life took part in, which went on from
    everything before it; else to its birth, or to where the checkpoint was taken: both tell of what
    came before.
    """
    past = search.look(listed)
    if not number:
        return dataclasses.replace(past, valid=past.work)
    newest = yield from read_incarnation(search.keys, search.node, number)
    past = search.reached(past, [newest.position])
    floor = newest.round
    if search.saved is not None:
        floor = min(floor, search.saved.read)
        work_is_gone = yield from _others_have_its_work(search, search.saved, number)
        past = dataclasses.replace(past, overtaken=past.overtaken or work_is_gone)
    for round in range(past.read, floor, -1):
        record, _ = yield from read_record(search.keys, round)
        past = search.note(past, record)
        if any((w.node, w.incarnation) == (search.node, number) for w in record.participants):
            break
    past, _ = yield from _read_heads(search, past, past.work)
    valid = [n for n in past.work if n in newest.valid or _is_of(search.keys, n, number)]
    valid += search.inherited(past)
    return dataclasses.replace(past, valid=tuple(dict.fromkeys(valid)))


def _others_have_its_work(search: Search, saved: Private, number: int) -> Steps[bool]:
    """Whether what the checkpoint has pending may be trained by others.

    They may go on with claimed work as soon as the lease of its holder has ended; a life that
    others ended says that they have.
    """
    if saved.claimed:
        return True
    for later in range(saved.life.incarnation + 1, number + 1):
        life = yield from read_incarnation(search.keys, search.node, later)
        if life.ended_by:
            return True
    return False


def _look_again(search: Search, past: Past, listed: list[str]) -> Steps[Past]:
    """What has come since. Work that is gone before it is read has been merged, or never will be:
    the records that a further listing shows tell."""
    while True:
        now = search.look(listed)
        for round in range(past.read + 1, now.read + 1):
            record, _ = yield from read_record(search.keys, round)
            past = search.note(past, record)
        new = tuple(name for name in now.work if name not in past.work)
        past, complete = yield from _read_heads(search, past, new)
        past = dataclasses.replace(
            past,
            read=max(past.read, now.read),
            work=(*past.work, *new),
            overtaken=past.overtaken or now.overtaken,
        )
        if complete:
            return past
        listed = yield List(search.keys.log)


def _read_heads(search: Search, past: Past, names: Iterable[str]) -> Steps[tuple[Past, bool]]:
    """How far contributions reach, and whether all of them could be read."""
    complete = True
    for name in names:
        head: ContributionHead | None = yield ReadHead(name)
        complete = complete and head is not None
        past = search.reached(past, [head.position] if head else [])
    return past, complete


def _is_of(keys: Keys, name: str, incarnation: int) -> bool:
    key = keys.parse(name)
    return isinstance(key, ContributionKey) and key.incarnation == incarnation


def inherit(keys: Keys, life: Life, *, round: int) -> Steps[Incarnation]:
    """The next life of a node that somebody else ends, with what it vouches for.

    `round` is the newest whose record has been read.
    """
    listed = yield List(keys.log, keys.after(max(0, round)))
    past = yield from _look_back(Search(keys, life.node), life.incarnation - 1, listed)
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
    because = (
        f"a process that ran as {person.node!r} has not said that it left; it counts as gone once "
        f"it has been silent for {waiting.lease_seconds:g} s"
    )
    unchanged = 0.0
    while beat is not None and beat.phase != "left" and unchanged < waiting.lease_seconds:
        unchanged += yield Sleep(waiting.poll_seconds, because)
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
        other = yield from read_incarnation(keys, beat.node, beat.incarnation)
        where = f"as process {other.process} on {other.host}"
    except FormatError as error:
        where = f"somewhere ({error})"
    raise NodeIdInUse(
        f"Node id {person.node!r} is alive {where}; this is process {person.process} on "
        f"{person.host}. Give each node its own `node_id`, or none."
    )


def read_incarnation(keys: Keys, node: str, number: int) -> Steps[Incarnation]:
    """What a life says of itself."""
    key = keys.incarnation(node, number)
    data = yield Get(key)
    if data is None:
        raise FormatError(f"{key!r} is not there. Incarnations are never removed.")
    return unseal(key, data, Incarnation)
