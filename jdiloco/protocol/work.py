"""Shared work: who trains which unit, whatever dies or wakes up.

A *unit* of work is a sequence of batches; a pool of them is a queue, or the slices of `ranks`. Like
joining, taking and giving back are sequences of requests, written as generators.

    n-th claim    created once by whoever takes the unit; says how many batches were behind it
    .back         given back: the next claim goes on after that many batches
    .done         complete

None is ever deleted and the highest number counts. So a claim that lands late, from a node that was
given up, takes a number that nobody else then holds, or none; there is never a second owner. Only
the holder of a claim marks it, and it does so only for batches that are *settled*: covered by a
contribution that lies in the mailbox, or such that it will never publish them.

Whoever takes over from a holder whose lease has ended first ends that life: it creates the node's
next incarnation, whose list of valid contributions every closer honours, and a beat of it that says
`left`, and lists until it sees that beat. From then on nothing that the old life still sends is
merged; whatever a closer might have taken before lies in that listing or in a record. So the
furthest batch that any of it covers is final, and the next claim begins there. Every contribution
covers all units that its node holds, from the start, so the newest one tells.

    no row is merged twice into one fragment, whatever dies or wakes up;
    without a death or a restart every row is trained exactly once;
    what a dead node had trained and not published is trained again;
    what it had published for some fragments and not yet for others is lost for the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import msgspec

from jdiloco.errors import FormatError, RunConfigMismatch
from jdiloco.protocol import lives
from jdiloco.protocol.joining import (
    Create,
    Get,
    List,
    Look,
    ReadHead,
    Sleep,
    Steps,
    Waiting,
    settle,
)
from jdiloco.protocol.keys import BeatKey, ContributionKey, Keys, Pool, UnitKey
from jdiloco.protocol.member.state import MemberState, has_ended
from jdiloco.protocol.records import (
    ContributionHead,
    Covered,
    Incarnation,
    Participant,
    RoundRecord,
    WorkClaim,
    WorkMark,
    seal,
    unseal,
)
from jdiloco.protocol.rules import Life


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Answers Look: what the member of this node knows."""

    ended: frozenset[Life]  # Of those asked for, whose lease has ended or who have a successor.
    round: int  # The newest whose record it has read, -1 for none.


def view(state: MemberState, lives: Iterable[Life]) -> View:
    """Answers Look. Whoever does tells the member first what is watched (`effects.Watched`)."""
    ended = frozenset(life for life in lives if has_ended(state, life))
    return View(ended, state.chain.read)


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A unit that this node has taken."""

    unit: int
    claim: int
    begin: int  # Batches that were behind it.


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """Where the units of a pool stand."""

    free: int  # Never taken, given back, or held by a life that has ended.
    held: int  # By others that live.
    mine: int
    done: int

    @property
    def complete(self) -> bool:
        return not (self.free or self.held or self.mine)


@dataclasses.dataclass(frozen=True, slots=True)
class _Unit:
    """One unit, as a listing shows it."""

    number: int
    claim: int = 0  # The highest; 0 for none.
    mark: str = ""  # Of that claim.


class Claims:
    """How one life takes units from one pool and gives them back.

    It remembers what cannot change: claims it has read, lives it has ended, and below which number
    every unit is complete, so that a listing of a long queue shows only where the work is.
    """

    def __init__(
        self, keys: Keys, pool: Pool, me: Life, waiting: Waiting, *, in_flight: int, nonce: str
    ) -> None:
        self.pool = pool
        self._keys = keys
        self._me = me
        self._waiting = waiting
        self._in_flight = in_flight
        self._nonce = nonce
        self._tries = 0
        self._low = 0
        self._taken: set[tuple[int, int]] = set()  # Claims of this life that it knows of.
        self._claims: dict[tuple[int, int], WorkClaim | None] = {}  # None: damaged.
        self._covered: dict[Life, Mapping[str, int]] = {}  # Of lives that have ended.

    def take(self) -> Steps[Held | Tally]:
        """Takes the lowest unit that is free; where the pool stands when there is none.

        May be called again when it was not answered to the end: a claim that has landed meanwhile
        is found.
        """
        units = yield from self._survey()
        view = yield from self._look(units)
        for number in range(self._low, self.pool.count):
            unit = units.get(number, _Unit(number))
            stands = self._stands(unit, view)
            held = None
            if stands == "mine":
                held = self._landed(unit)
            elif stands == "free":
                held = yield from self._claim(unit, view)
            if held is not None:
                self._taken.add((held.unit, held.claim))
                return held
        return self._tally(units, view)

    def _landed(self, unit: _Unit) -> Held | None:
        """A claim of this life that it had given up as not made."""
        claim = self._holds(unit)
        if claim is None or (unit.number, unit.claim) in self._taken:
            return None
        return Held(unit.number, unit.claim, claim.begin)

    def count(self) -> Steps[Tally]:
        """Where the pool stands."""
        units = yield from self._survey()
        view = yield from self._look(units)
        return self._tally(units, view)

    def give_back(self, held: Held, batches: int) -> Steps[None]:
        """Lets others go on after `batches`; this node must never publish any beyond them."""
        yield from self._mark(held, "back", batches)

    def complete(self, held: Held, batches: int) -> Steps[None]:
        """Nothing of the unit is left; every batch of it must be settled."""
        yield from self._mark(held, "done", batches)

    def _mark(self, held: Held, mark: str, batches: int) -> Steps[None]:
        key = self._keys.unit(self.pool, UnitKey(held.unit, held.claim, mark))
        made = WorkMark(self._me.node, self._me.incarnation, batches)
        yield from settle(key, seal(key, made), self._waiting)

    # Where the units stand

    def _survey(self) -> Steps[dict[int, _Unit]]:
        """The units that a listing shows, from the first on that is not complete."""
        prefix, after = self._keys.units(self.pool, self._low)
        found: dict[int, _Unit] = {}
        for name in (yield List(prefix, after)):
            key = self._keys.parse_unit(self.pool, name)
            if key is None or key.unit < self._low:
                continue
            before = found.get(key.unit, _Unit(key.unit))
            if key.claim >= before.claim:
                found[key.unit] = _Unit(key.unit, key.claim, key.mark)
        while self._low in found and found[self._low].mark == "done":
            self._low += 1
        return found

    def _look(self, units: Mapping[int, _Unit]) -> Steps[View]:
        """Reads whose the held units are, and asks who of them lives."""
        for unit in units.values():
            if not unit.mark:
                yield from self._read(unit)
        held = [claim for unit in units.values() if (claim := self._holds(unit)) is not None]
        lives = {Life(claim.node, claim.incarnation) for claim in held}
        view: View = yield Look(tuple(sorted(lives)))
        ended = view.ended | {life for life in lives if self._is_past(life)}
        for claim in held:
            self._check(claim, ended)
        return View(frozenset(ended) - {self._me}, view.round)

    def _is_past(self, life: Life) -> bool:
        return life.node == self._me.node and life.incarnation < self._me.incarnation

    def _check(self, claim: WorkClaim, ended: set[Life] | frozenset[Life]) -> None:
        """Nodes that train together mean the same by a unit's number."""
        if claim.units == self.pool.count or Life(claim.node, claim.incarnation) in ended:
            return
        raise RunConfigMismatch(
            f"{self.pool.name!r} has {self.pool.count} units here and {claim.units} at node "
            f"{claim.node!r}. Pass the same items, in the same order, on every node."
        )

    def _read(self, unit: _Unit) -> Steps[WorkClaim | None]:
        at = (unit.number, unit.claim)
        if at not in self._claims:
            key = self._keys.unit(self.pool, UnitKey(*at))
            data = yield Get(key)
            try:
                self._claims[at] = unseal(key, data or b"", WorkClaim)
            except FormatError:
                self._claims[at] = None
        return self._claims[at]

    def _holds(self, unit: _Unit) -> WorkClaim | None:
        return None if unit.mark else self._claims.get((unit.number, unit.claim))

    def _stands(self, unit: _Unit, view: View) -> str:
        """ "free", "held", "mine" or "done".

        A unit whose claim is damaged is left alone, as if it were complete: nobody can tell what of
        it has been merged.
        """
        if unit.mark == "done":
            return "done"
        if unit.mark == "back" or not unit.claim:
            return "free"
        claim = self._holds(unit)
        if claim is None:
            return "done"
        holder = Life(claim.node, claim.incarnation)
        if holder == self._me:
            return "mine"
        return "free" if holder in view.ended else "held"

    def _tally(self, units: Mapping[int, _Unit], view: View) -> Tally:
        found = [self._stands(unit, view) for unit in units.values() if unit.number >= self._low]
        free = found.count("free") + self.pool.count - self._low - len(found)
        return Tally(
            free, found.count("held"), found.count("mine"), self._low + found.count("done")
        )

    # Taking one

    def _claim(self, unit: _Unit, view: View) -> Steps[Held | None]:
        begin = yield from self._begin(unit, view)
        if begin is None:
            return None
        number = unit.claim + 1
        self._tries += 1
        key = self._keys.unit(self.pool, UnitKey(unit.number, number))
        claim = WorkClaim(
            node=self._me.node,
            incarnation=self._me.incarnation,
            units=self.pool.count,
            begin=begin,
            round=view.round,
            write_id=f"{self._nonce}.{self._tries}",
        )
        data = seal(key, claim)
        found = yield from settle(key, data, self._waiting)
        return Held(unit.number, number, begin) if found == data else None

    def _begin(self, unit: _Unit, view: View) -> Steps[int | None]:
        """Batches that are behind a free unit for good; None when nobody can tell."""
        if not unit.claim:
            return 0
        if unit.mark == "back":
            key = self._keys.unit(self.pool, UnitKey(unit.number, unit.claim, "back"))
            try:
                return unseal(key, (yield Get(key)) or b"", WorkMark).batches
            except FormatError:
                return None
        claim = self._holds(unit)
        assert claim is not None
        covered = yield from self._end(Life(claim.node, claim.incarnation), view)
        return max(claim.begin, covered.get(self.pool.unit(unit.number), 0))

    def _end(self, holder: Life, view: View) -> Steps[Mapping[str, int]]:
        """Ends a life, once, and finds out how far all that it held is covered."""
        if holder not in self._covered:
            claims = [claim for claim in self._claims.values() if claim is not None]
            mine = [c.round for c in claims if Life(c.node, c.incarnation) == holder]
            yield from end_life(self._keys, holder, self._me, self._waiting, round=view.round)
            self._covered[holder] = yield from read_work(
                self._keys, holder, since=min(mine), read=view.round, in_flight=self._in_flight
            )
        return self._covered[holder]


# Barriers


def come(keys: Keys, name: str, me: Life, waiting: Waiting) -> Steps[frozenset[str]]:
    """Comes to a barrier and answers who has come so far, dead or alive."""
    yield from settle(keys.arrival(name, me.node, me.incarnation), b"", waiting)
    listed = yield List(keys.barrier(name))
    came = [node for key in listed if (node := keys.parse_arrival(name, key)) is not None]
    return frozenset(came)


# A life that has ended


def end_life(keys: Keys, life: Life, me: Life, waiting: Waiting, *, round: int) -> Steps[None]:
    """Ends a life: from here on nothing that it still sends is merged.

    Its node gets a further incarnation, unless it has one, and a beat of it that says `left`: every
    closer whose listing shows that beat takes of the old life only what the incarnation names.
    `round` is the newest whose record this node has read.
    """
    successor = Life(life.node, life.incarnation + 1)
    key = keys.incarnation(successor.node, successor.incarnation)
    data = yield Get(key)
    if data is None:
        made = yield from lives.inherit(keys, successor, round=round)
        ending = msgspec.structs.replace(made, ended_by=str(me), write_id=f"{me}.ends")
        data = yield from settle(key, seal(key, ending), waiting)
    yield from _show_successor(keys, successor, waiting, round, started=not _is_end(key, data))


def _is_end(key: str, data: bytes) -> bool:
    try:
        return bool(unseal(key, data, Incarnation).ended_by)
    except FormatError:
        return False


def _show_successor(
    keys: Keys, life: Life, waiting: Waiting, round: int, *, started: bool
) -> Steps[None]:
    """Waits for a listing that shows a beat of `life` or of a later one.

    One that was started beats by itself, or has died before it could; the last beat of any other is
    written here, with a number below that of every beat of a life that trains.
    """
    last = BeatKey(life.node, life.incarnation, 0, "left", 0, round + 1)
    unseen = 0.0
    while True:
        if not started or unseen >= waiting.lease_seconds:
            yield Create(keys.beat(last), b"")
        listed = yield List(keys.log, keys.after(max(0, round)))
        beats = [key for name in listed if isinstance(key := keys.parse(name), BeatKey)]
        if any(b.node == life.node and b.incarnation >= life.incarnation for b in beats):
            return
        unseen += yield Sleep(waiting.poll_seconds)


def read_work(
    keys: Keys, life: Life, *, since: int, read: int, in_flight: int
) -> Steps[Mapping[str, int]]:
    """How far the contributions of a life that has ended cover each unit that it held.

    Contributions cover all units, from the start, so of those that records name the newest is
    enough; none to a round up to `since` can cover any. Open rounds are asked for by name. What is
    read there is gone only once a record of its round has been there for a while, and then that
    tells.
    """
    covered: dict[str, int] = {}
    newest = read
    while True:
        newest = yield from _newest_record(keys, newest)
        for head in (yield from _open_heads(keys, life, newest, in_flight)):
            _cover(covered, head.work)
        if (yield Get(keys.record(newest + 1))) is None:
            break
    for round in range(newest, since, -1):
        who = yield from _participant(keys, life, round)
        if who is not None:
            _cover(covered, who.work)
            break
    return covered


def _cover(covered: dict[str, int], work: tuple[Covered, ...]) -> None:
    for item in work:
        covered[item.unit] = max(item.batches, covered.get(item.unit, 0))


def _newest_record(keys: Keys, known: int) -> Steps[int]:
    while (yield Get(keys.record(known + 1))) is not None:
        known += 1
    return known


def _open_heads(
    keys: Keys, life: Life, newest: int, in_flight: int
) -> Steps[list[ContributionHead]]:
    """What lies there of rounds without a record; nobody publishes more than `in_flight` ahead."""
    found = []
    for round in range(newest + 1, newest + in_flight + 1):
        for final in (False, True):
            key = ContributionKey(round, life.node, life.incarnation, final)
            head = yield ReadHead(keys.contribution(key))
            if head is not None:
                found.append(head)
    return found


def _participant(keys: Keys, life: Life, round: int) -> Steps[Participant | None]:
    key = keys.record(round)
    data = yield Get(key)
    record = unseal(key, data or b"", RoundRecord)
    for who in record.participants:
        if Life(who.node, who.incarnation) == life:
            return who
    return None
