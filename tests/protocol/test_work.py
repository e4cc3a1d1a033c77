"""Who trains which unit: two claimants, lost answers, deaths at every request, and zombies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from jdiloco.errors import FormatError, RunConfigMismatch, StoreUnavailable
from jdiloco.protocol import joining, work
from jdiloco.protocol.desk import Desk
from jdiloco.protocol.joining import Look, Steps, Waiting
from jdiloco.protocol.keys import BeatKey, ContributionKey, Keys, Pool, UnitKey
from jdiloco.protocol.records import (
    Checkpoint,
    ContributionHead,
    Covered,
    Incarnation,
    Ledger,
    Participant,
    Payload,
    RoundRecord,
    Timing,
    WorkClaim,
    WorkMark,
    seal,
    unseal,
)
from jdiloco.protocol.rules import Life
from jdiloco.protocol.work import Claims, Held, Tally, View
from jdiloco.store.base import Store
from jdiloco.store.memory import MemoryStore
from jdiloco.testing.faults import (
    FAIL,
    LOSE_ANSWER,
    SAY_TAKEN,
    FaultyStore,
    crash_prefixes,
)
from jdiloco.types import Counters

WAITING = Waiting(poll_seconds=0.5, beat_seconds=2.0, lease_seconds=6.0)
KEYS = Keys("run1")
POOL = Pool.queue("work", 3)
A, B, C = Life("a", 1), Life("b", 1), Life("c", 1)
IN_FLIGHT = 2


class Driver:
    """Performs requests on a store at once. `ended` and `read` are what the member would say."""

    def __init__(
        self,
        store: Store,
        ended: Iterable[Life] = (),
        read: int = -1,
        between: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.store = store
        self.ended = frozenset(ended)
        self.read = read
        self.requests = 0
        self._between = between

    def run(self, steps: Steps) -> Any:
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as done:
                return done.value
            self._between(self.requests)
            self.requests += 1
            try:
                answer = self._perform(request)
            except StoreUnavailable:
                answer = False if isinstance(request, joining.Create) else self._perform(request)

    def _perform(self, request: Any) -> Any:
        match request:
            case Look(lives):
                return View(self.ended & set(lives), self.read)
            case joining.List(prefix, after):
                return [entry.key for entry in self.store.list(prefix, after=after)]
            case joining.Get(key):
                return self.store.get(key)
            case joining.ReadHead(key):
                data = self.store.get(key)
                return None if data is None else unseal(key, data, ContributionHead)
            case joining.Create(key, data):
                return self.store.create(key, data)
            case joining.Sleep(seconds):
                return seconds
        raise AssertionError(request)


def mailbox() -> MemoryStore:
    """Where four nodes have begun to live."""
    store = MemoryStore()
    for node in "abcd":
        be_born(store, Life(node, 1))
    return store


def be_born(store: Store, life: Life, position: int = 0, round: int = -1) -> None:
    key = KEYS.incarnation(life.node, life.incarnation)
    made = Incarnation(life.node, life.incarnation, "host", 1, "cpu", (), round, position, "w")
    store.create(key, seal(key, made))


def claims(me: Life, pool: Pool = POOL, nonce: str = "x") -> Claims:
    return Claims(KEYS, pool, me, WAITING, in_flight=IN_FLIGHT, nonce=f"{me}{nonce}")


def take(store: Store, me: Life, ended: Iterable[Life] = (), read: int = -1, **more: Any) -> Any:
    """What a node gets that has not looked before."""
    return Driver(store, ended, read).run(claims(me, **more).take())


def publish(store: Store, round: int, life: Life, *covered: Covered) -> str:
    """Puts a contribution there, and returns its key."""
    key = KEYS.contribution(ContributionKey(round, life.node, life.incarnation, False))
    head = ContributionHead(
        run="run1",
        round=round,
        fragment=0,
        version=0,
        node=life.node,
        incarnation=life.incarnation,
        counters=Counters(1, 1),
        ledger=Ledger(),
        position=0,
        work=covered,
    )
    store.create(key, seal(key, head))
    return key


def commit(store: Store, round: int, life: Life, *covered: Covered) -> None:
    """Puts a record there that merged a contribution of `life`."""
    who = Participant(
        node=life.node,
        incarnation=life.incarnation,
        counters=Counters(1, 1),
        ledger=Ledger(),
        position=0,
        weight=1.0,
        sha256="",
        work=covered,
    )
    record = RoundRecord(
        format=1,
        run="run1",
        round=round,
        fragment=0,
        version=round + 1,
        write_id="",
        closer="z",
        incarnation=1,
        previous="",
        base="",
        participants=(who,),
        rejected=(),
        expected=1,
        next_closer="z",
        next_incarnation=1,
        heads=(round,),
        versions=(round + 1,),
        timing=Timing(),
        checkpoint=Checkpoint(-1, (0,), "", ()),
        anchor=Payload("", 0, ""),
    )
    store.create(KEYS.record(round), seal(KEYS.record(round), record))


def unit(number: int, batches: int, claim: int = 1) -> Covered:
    return Covered(POOL.unit(number), claim, batches)


def owners(store: Store) -> dict[int, list[tuple[int, str, int]]]:
    """Per unit its claims: number, node and where it begins."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    prefix, _ = KEYS.units(POOL)
    for entry in store.list(prefix):
        key = KEYS.parse_unit(POOL, entry.key)
        assert key is not None
        if not key.mark:
            claim = unseal(entry.key, store.get(entry.key) or b"", WorkClaim)
            found.setdefault(key.unit, []).append((key.claim, claim.node, claim.begin))
    return found


# Taking and giving back


def test_nodes_take_the_lowest_free_units_each_another():
    store = mailbox()
    assert [take(store, life) for life in (A, B, C)] == [Held(n, 1, 0) for n in range(3)]
    assert take(store, Life("d", 1)) == Tally(free=0, held=3, mine=0, done=0)


def test_a_unit_given_back_is_taken_by_the_next_where_it_was_left():
    store = mailbox()
    held = take(store, A)
    Driver(store).run(claims(A).give_back(held, 7))
    assert take(store, B) == Held(0, 2, 7)
    assert take(store, C) == Held(1, 1, 0)
    assert owners(store)[0] == [(1, "a", 0), (2, "b", 7)]


def test_a_complete_unit_is_taken_by_nobody_and_not_listed_again():
    store = mailbox()
    mine = claims(A)
    driver = Driver(store)
    for number in range(3):
        held = driver.run(mine.take())
        assert held == Held(number, 1, 0)
        driver.run(mine.complete(held, 4))
    tally = driver.run(mine.take())
    assert tally == Tally(free=0, held=0, mine=0, done=3)
    assert tally.complete
    assert take(store, B) == tally


def test_a_listing_shows_only_units_from_the_first_that_is_not_complete():
    store = mailbox()
    pool = Pool.queue("long", 100_000)
    mine, listed = claims(A, pool), []
    driver = Driver(store)
    perform = driver._perform

    def counting(request: Any) -> Any:
        answer = perform(request)
        if isinstance(request, joining.List):
            listed.append(len(answer))
        return answer

    driver._perform = counting  # type: ignore[method-assign]
    for _ in range(50):
        driver.run(mine.complete(driver.run(mine.take()), 1))
    assert max(listed) <= 2
    assert driver.requests <= 50 * 6


def test_a_claim_whose_answer_was_lost_is_recognised():
    for fault in (LOSE_ANSWER, SAY_TAKEN, FAIL):
        for number in range(1, 6):
            store = mailbox()
            assert take(FaultyStore(store, {number: fault}), A) == Held(0, 1, 0)
            assert owners(store) == {0: [(1, "a", 0)]}


def test_a_claim_that_lands_when_its_sender_has_stopped_waiting_is_taken_up_by_it():
    """Else the unit would stay with a node that does not know of it."""
    store = mailbox()
    mine = claims(A)
    steps = mine.take()
    request = next(steps)
    while not isinstance(request, joining.Create):
        request = steps.send(Driver(store)._perform(request))
    steps.close()  # The store did not answer for so long that the whole call is made again.
    store.create(request.key, request.data)
    assert Driver(store).run(mine.take()) == Held(0, 1, 0)
    assert Driver(store).run(mine.take()) == Held(1, 1, 0)


@pytest.mark.parametrize("when", range(8))
def test_of_two_that_take_at_once_each_gets_another_unit(when):
    store = mailbox()
    other = []

    def between(count: int) -> None:
        if count == when:
            other.append(take(store, B))

    first = Driver(store, between=between).run(claims(A).take())
    other = other or [take(store, B)]
    assert {first.unit, other[0].unit} == {0, 1}


def test_nodes_that_disagree_about_the_queue_are_told_so():
    store = mailbox()
    take(store, A)
    with pytest.raises(RunConfigMismatch, match="4 units here and 3 at node 'a'"):
        take(store, B, pool=Pool.queue("work", 4))
    assert take(store, B, ended=[A], pool=Pool.queue("work", 4)).unit == 0  # It has grown since.


def test_a_damaged_claim_is_left_alone():
    store = mailbox()
    store.create(KEYS.unit(POOL, UnitKey(0, 1)), b"rubbish")
    assert take(store, A) == Held(1, 1, 0)


def test_how_the_pool_stands_can_be_asked_without_taking_any():
    store = mailbox()
    take(store, A)
    Driver(store).run(claims(B).complete(take(store, B), 1))
    tally = Driver(store).run(claims(A).count())
    assert tally == Tally(free=1, held=0, mine=1, done=1)
    assert Driver(store, ended=[A]).run(claims(B).count()) == Tally(2, 0, 0, 1)


# Taking over


def test_what_a_dead_node_covered_is_not_trained_again_and_the_rest_is():
    store = mailbox()
    take(store, A)
    publish(store, 0, A, unit(0, 4))
    publish(store, 1, A, unit(0, 6))
    assert take(store, B, ended=[A]) == Held(0, 2, 6)


def test_what_records_merged_counts_when_the_contributions_are_gone():
    store = mailbox()
    take(store, A)
    commit(store, 0, A, unit(0, 4))
    commit(store, 1, A, unit(0, 6))
    for round in range(2, 9):
        commit(store, round, C)
    assert take(store, B, ended=[A], read=5) == Held(0, 2, 6)


def test_records_from_before_the_claim_are_not_read():
    store = mailbox()
    for round in range(20):
        commit(store, round, C)
    late = Life("late", 1)
    be_born(store, late, round=19)
    take(store, late, read=19)
    commit(store, 20, C)
    driver = Driver(store, [late], 20)
    assert driver.run(claims(B).take()) == Held(0, 2, 0)
    assert driver.requests < 20


def test_the_life_is_ended_before_its_work_goes_on():
    """What it published by then stays valid; closers reject whatever comes later."""
    store = mailbox()
    take(store, A)
    seen = publish(store, 1, A, unit(0, 6))
    take(store, B, ended=[A])
    key = KEYS.incarnation("a", 2)
    ending = unseal(key, store.get(key) or b"", Incarnation)
    assert ending.valid == (seen,)
    assert ending.ended_by == str(B)
    beats = [KEYS.parse(entry.key) for entry in store.list(KEYS.log + "live/")]
    assert beats == [BeatKey("a", 2, 0, "left", 0, 0)]


def test_every_unit_of_a_dead_node_is_taken_where_its_newest_contribution_left_it():
    store = mailbox()
    mine = claims(A)
    for _ in range(2):
        Driver(store).run(mine.take())
    publish(store, 0, A, unit(0, 4))
    publish(store, 1, A, unit(0, 9), unit(1, 2))
    taker = claims(B)
    driver = Driver(store, [A])
    assert driver.run(taker.take()) == Held(0, 2, 9)
    before = driver.requests
    assert driver.run(taker.take()) == Held(1, 2, 2)
    assert driver.requests - before <= 5  # The life is ended once.


def test_a_taker_that_dies_too_is_followed_from_where_it_was():
    store = mailbox()
    take(store, A)
    publish(store, 0, A, unit(0, 4))
    assert take(store, B, ended=[A]) == Held(0, 2, 4)
    assert take(store, C, ended=[A, B]) == Held(0, 3, 4)
    publish(store, 0, C, unit(0, 5, claim=3))
    assert take(store, Life("d", 1), ended=[A, B, C]) == Held(0, 4, 5)


def test_a_node_that_was_started_again_takes_up_its_own_units():
    store = mailbox()
    take(store, A)
    publish(store, 0, A, unit(0, 3))
    again = Life("a", 2)
    be_born(store, again, 3)
    store.create(KEYS.beat(BeatKey("a", 2, 1, "joining", 0, 0)), b"")
    assert take(store, again) == Held(0, 2, 3)
    assert store.get(KEYS.incarnation("a", 3)) is None


def a_takeover(store: Store, me: Life) -> None:
    """Takes the dead node's unit, publishes one batch of it, and hands it on."""
    mine = claims(me)
    driver = Driver(store, [A])
    held = driver.run(mine.take())
    assert held.unit == 0
    driver.run(mine.give_back(held, held.begin))


def test_a_takeover_that_dies_after_any_request_leaves_a_unit_that_others_can_take():
    for requests, store in crash_prefixes(_with_a_dead_node, lambda store: a_takeover(store, B)):
        held = take(store, C, ended=[A, B])
        assert (held.unit, held.begin) == (0, 4), requests
        numbers = [number for number, _, _ in owners(store)[0]]
        assert numbers == list(range(1, held.claim + 1))


def _with_a_dead_node() -> MemoryStore:
    store = mailbox()
    take(store, A)
    publish(store, 0, A, unit(0, 4))
    return store


@pytest.mark.parametrize("when", range(14))
def test_whatever_a_zombie_sends_during_a_takeover_is_counted_or_never_valid(when):
    """It publishes further batches between any two requests of the takeover."""
    store = _with_a_dead_node()
    late = []

    def between(count: int) -> None:
        if count == when:
            late.append(publish(store, 1, A, unit(0, 9)))

    held = Driver(store, [A], between=between).run(claims(B).take())
    key = KEYS.incarnation("a", 2)
    valid = unseal(key, store.get(key) or b"", Incarnation).valid
    counted = held.begin == 9
    assert held.begin in (4, 9)
    assert counted or not set(late) & set(valid)


@pytest.mark.parametrize("when", range(16))
def test_of_two_that_take_over_at_once_one_gets_the_unit(when):
    store = _with_a_dead_node()
    other: list[Held] = []

    def between(count: int) -> None:
        if count == when:
            other.append(take(store, C, ended=[A]))

    first = Driver(store, [A], between=between).run(claims(B).take())
    other = other or [take(store, C, ended=[A])]
    assert {first.unit, other[0].unit} == {0, 1}
    assert [(n, begin) for n, _, begin in owners(store)[0]] == [(1, 0), (2, 4)]


def test_a_record_that_comes_while_contributions_are_read_is_read_too():
    """Its contributions may be swept before they are looked at."""
    store = _with_a_dead_node()
    key = KEYS.contribution(ContributionKey(0, "a", 1, False))

    def between(count: int) -> None:
        if count == 0:
            store.delete([key])
            commit(store, 0, A, unit(0, 4))

    driver = Driver(store, read=-1, between=between)
    steps = work.read_work(KEYS, A, since=-1, read=-1, in_flight=IN_FLIGHT)
    assert driver.run(steps) == {POOL.unit(0): 4}


def test_a_record_that_is_damaged_stops_a_takeover():
    """Nobody can tell what it merged."""
    store = _with_a_dead_node()
    store.create(KEYS.record(0), b"rubbish")
    with pytest.raises(FormatError):
        take(store, B, ended=[A])


# Marks


def test_a_mark_tells_who_made_it_and_how_far_it_was():
    store = mailbox()
    held = take(store, A)
    Driver(store).run(claims(A).give_back(held, 5))
    key = KEYS.unit(POOL, UnitKey(0, 1, "back"))
    assert unseal(key, store.get(key) or b"", WorkMark) == WorkMark("a", 1, 5)


def test_a_mark_of_an_older_claim_changes_nothing():
    """The old holder wakes up and gives back what has been taken over."""
    store = _with_a_dead_node()
    assert take(store, B, ended=[A]) == Held(0, 2, 4)
    Driver(store).run(claims(A).give_back(Held(0, 1, 0), 9))
    assert take(store, C) == Held(1, 1, 0)
    Driver(store).run(claims(A).complete(Held(0, 1, 0), 9))
    assert take(store, C, ended=[B, C]) == Held(0, 3, 4)


# What is in hand


def test_a_node_does_not_end_on_a_tally_older_than_what_it_gave_back():
    """Found by a simulated run: it left with the unit free, which nobody else was there to take."""
    desk, mine, driver = Desk(POOL), claims(A), Driver(mailbox())
    for _ in range(POOL.count):
        assert desk.ask()
        desk.answered(driver.run(mine.take()))
        assert (piece := desk.next()) is not None
    before = driver.run(mine.take())
    assert before == Tally(free=0, held=0, mine=POOL.count, done=0)
    desk.recall()
    for piece in list(desk.pieces):
        driver.run(mine.give_back(piece.held, piece.trained))
        desk.marked(piece)
    desk.answered(before)
    assert not desk.over(stay=True)
    desk.answered(driver.run(mine.take()))
    assert desk.ready
