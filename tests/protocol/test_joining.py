"""Coming into a run: every sequence of requests, killed after each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jdiloco.errors import FormatError, NodeIdInUse, StoreIgnoresConditions, StoreUnavailable
from jdiloco.protocol import joining, lives
from jdiloco.protocol.joining import Creator, Steps, Waiting
from jdiloco.protocol.keys import CREATING, MANIFEST, BeatKey, ContributionKey, Keys
from jdiloco.protocol.lives import Birth, Person
from jdiloco.protocol.records import (
    FORMAT,
    Checkpoint,
    ContributionHead,
    Incarnation,
    Ledger,
    Manifest,
    Participant,
    Payload,
    RoundRecord,
    Timing,
    seal,
    sha256,
    unseal,
)
from jdiloco.protocol.rules import Life
from jdiloco.store.base import Store
from jdiloco.store.memory import MemoryStore
from jdiloco.testing.faults import (
    FAIL,
    LOSE_ANSWER,
    SAY_TAKEN,
    FaultyStore,
    IgnoreCondition,
    crash_prefixes,
)
from jdiloco.types import Counters

WAITING = Waiting(poll_seconds=0.5, beat_seconds=2.0, lease_seconds=6.0)
KEYS = Keys("run1")


def creator(node: str = "a", run: str = "run1") -> Creator:
    return Creator(node, "nonce", run)


def person(node: str = "a", nonce: str = "x") -> Person:
    return Person(node, "host", 7, "cpu", nonce)


def describe(who: Creator) -> Callable[[Checkpoint], Manifest]:
    def manifest(checkpoint: Checkpoint) -> Manifest:
        plan = (("w",), ("v",))
        return Manifest(FORMAT, who.run, {}, (), plan, checkpoint, who.node, who.name)

    return manifest


class Driver:
    """Performs requests on a store at once; sleeping lets `elsewhere` happen."""

    def __init__(self, store: Store, elsewhere: Callable[[float], object] | None = None) -> None:
        self.store = store
        self.slept = 0.0
        self.saves = 0
        self._elsewhere = elsewhere
        self._prefix = ""

    def run(self, steps: Steps) -> Any:
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as done:
                return done.value
            try:
                answer = self._perform(request)
            except StoreUnavailable:
                answer = False if isinstance(request, joining.Create) else self._perform(request)

    def _perform(self, request: joining.Request) -> Any:
        match request:
            case joining.List(prefix, after):
                return [entry.key for entry in self.store.list(prefix, after=after)]
            case joining.Get(key):
                return self.store.get(key)
            case joining.ReadHead(key):
                data = self.store.get(key)
                return msgspec.json.decode(data, type=ContributionHead) if data else None
            case joining.Create(key, data):
                return self.store.create(key, data)
            case joining.Delete(keys):
                return self.store.delete(keys)
            case joining.Sleep(seconds):
                self.slept += seconds
                if self._elsewhere is not None:
                    self._elsewhere(self.slept)
                return seconds
            case joining.SaveInitial(prefix):
                self._prefix = prefix
                return None
            case joining.Saved():
                self.saves += 1
                return self._save() if self.saves > 1 else None
        raise AssertionError(request)

    def _save(self) -> Checkpoint:
        self.store.create(f"{self._prefix}/0", b"values")
        return Checkpoint(-1, (0, 0), self._prefix, (Payload("0", 6, sha256(b"values")),))


def create_run(store: Store, who: Creator | None = None) -> tuple[Manifest, bool]:
    who = who or creator()
    data, created = Driver(store).run(joining.find_or_create(who, WAITING, describe(who)))
    return unseal(MANIFEST, data, Manifest), created


# Creating


def test_the_first_node_creates_the_run_and_the_second_finds_it():
    store = MemoryStore()
    assert create_run(store) == (create_run(store, creator("b", "run2"))[0], True)
    assert create_run(store, creator("b", "run2"))[1] is False
    assert [entry.key for entry in store.list(CREATING)] == []


def test_a_creator_that_is_killed_after_any_request_leaves_no_run_or_the_whole_run():
    """B75: and whoever comes next ends up in one complete run."""
    outcomes = set()
    for _, store in crash_prefixes(MemoryStore, lambda store: create_run(store)):
        left = store.get(MANIFEST)
        outcomes.add(left is not None)
        manifest, created = create_run(store, creator("b", "run2"))
        assert created == (left is None)
        assert manifest.run == ("run1" if left else "run2")
        file = manifest.checkpoint.files[0]
        assert store.get(f"{manifest.checkpoint.prefix}/{file.key}") == b"values"
    assert outcomes == {False, True}


@pytest.mark.parametrize("fault", [FAIL, LOSE_ANSWER, SAY_TAKEN])
def test_a_run_is_created_once_whatever_one_answer_says(fault):
    for number in range(1, 16):
        store = MemoryStore()
        create_run(FaultyStore(store, {number: fault}))
        assert create_run(store, creator("b", "run2"))[1] is False


def test_a_node_waits_while_a_creator_beats_and_creates_the_run_when_it_is_silent():
    store = MemoryStore()
    store.create(f"{CREATING}a.nonce.00000001", b"")

    def beats(slept: float) -> None:
        if slept <= 20.0 and slept % 2 == 0:
            store.create(f"{CREATING}a.nonce.{int(slept):08}", b"")

    driver, who = Driver(store, beats), creator("b", "run2")
    _, created = driver.run(joining.find_or_create(who, WAITING, describe(who)))
    assert created
    assert 26.0 <= driver.slept <= 27.0


def test_of_two_creators_the_manifest_decides_and_the_loser_cleans_up_after_itself():
    store = MemoryStore()
    who = creator("b", "run2")
    steps = joining.find_or_create(who, WAITING, describe(who))
    driver = Driver(store)
    perform = driver._perform

    def lose(request: joining.Request) -> Any:
        if isinstance(request, joining.Create) and request.key == MANIFEST:
            create_run(store, creator("c", "run3"))
        return perform(request)

    driver._perform = lose  # type: ignore[method-assign]
    store.delete([e.key for e in store.list(CREATING)])
    data, created = driver.run(steps)
    assert not created
    assert unseal(MANIFEST, data, Manifest).run == "run3"
    assert [entry.key for entry in store.list("run2/")] == []


# Taking up a life


def live(store: Store, number: int, *, life: int = 1, phase: str = "training") -> None:
    store.create(KEYS.beat(BeatKey("a", life, number, phase, 1, 0)), b"")


def be_born(store: Store, elsewhere: Callable[[float], object] | None = None) -> Birth:
    return Driver(store, elsewhere).run(lives.take_up_life(KEYS, person(), WAITING))


def take_up(store: Store, elsewhere: Callable[[float], object] | None = None) -> Life:
    return be_born(store, elsewhere).life


def incarnation(store: Store, number: int) -> Incarnation:
    key = KEYS.incarnation("a", number)
    data = store.get(key)
    assert data is not None
    return unseal(key, data, Incarnation)


def head(round: int, position: int, *, life: int = 1, node: str = "a") -> ContributionHead:
    counters = Counters(1, 8)
    return ContributionHead("run1", round, round % 2, 0, node, life, counters, Ledger(), position)


def send(store: Store, round: int, position: int, *, life: int = 1, node: str = "a") -> str:
    """A contribution comes to lie in the log."""
    key = KEYS.contribution(ContributionKey(round, node, life, False))
    store.create(key, msgspec.json.encode(head(round, position, life=life, node=node)))
    return key


def commit(store: Store, round: int, *merged: ContributionHead) -> None:
    """A round gets a record that names these contributions."""
    participants = tuple(
        Participant(h.node, h.incarnation, h.counters, h.ledger, h.position, 1.0, "s")
        for h in merged
    )
    record = RoundRecord(
        format=FORMAT,
        run="run1",
        round=round,
        fragment=round % 2,
        version=1,
        write_id="w",
        closer="b",
        incarnation=1,
        previous="p",
        base="b",
        participants=participants,
        rejected=(),
        expected=1,
        next_closer="b",
        next_incarnation=1,
        heads=(-1, -1),
        versions=(0, 0),
        timing=Timing(),
        checkpoint=Checkpoint(-1, (0, 0), "p", ()),
    )
    store.create(KEYS.record(round), seal(KEYS.record(round), record))


def test_lives_are_numbered_and_each_is_created_once():
    store = MemoryStore()
    lives = []
    for number in (1, 2, 3):
        lives.append(take_up(store))
        live(store, 2, life=number, phase="left")
    assert lives == [Life("a", n) for n in (1, 2, 3)]


def test_a_node_that_is_killed_while_it_takes_up_a_life_takes_up_another_one():
    def program(store: Store) -> None:
        take_up(store)

    for requests, store in crash_prefixes(MemoryStore, program):
        born = store.get(KEYS.incarnation("a", 1)) is not None
        assert take_up(store) == Life("a", 2 if born else 1), requests


@pytest.mark.parametrize("fault", [FAIL, LOSE_ANSWER, SAY_TAKEN])
def test_one_doubtful_answer_gives_one_life(fault):
    for number in range(1, 9):
        store = MemoryStore()
        birth = be_born(FaultyStore(store, {number: fault}))
        assert [e.key for e in store.list(KEYS.incarnations("a"))] == [KEYS.incarnation("a", 1)]
        assert birth.life == Life("a", 1)
        assert any(f"/live/a.0001.{birth.beat:08}." in key for key in birth.listed)


def test_a_store_that_ignores_the_condition_is_refused():
    def ignore(call):
        return IgnoreCondition() if call.verb == "create" else None

    with pytest.raises(StoreIgnoresConditions, match="a second time"):
        take_up(FaultyStore(MemoryStore(), ignore))


def test_a_store_that_ignores_the_condition_and_loses_the_answer_is_refused_too():
    def ignore(call):
        return IgnoreCondition() if call.verb == "create" else None

    class Silent(FaultyStore):
        def create(self, key, data):
            created = super().create(key, data)
            if len([c for c in self.calls if c.verb == "create"]) == 2:
                raise StoreUnavailable("The answer was lost.")
            return created

    with pytest.raises(StoreIgnoresConditions):
        take_up(Silent(MemoryStore(), ignore))


def test_an_id_whose_beat_changes_is_in_use_and_both_are_named():
    store = MemoryStore()
    assert take_up(store) == Life("a", 1)
    live(store, 1)
    with pytest.raises(NodeIdInUse, match="process 7 on host"):
        take_up(store, lambda slept: live(store, 2) if slept > 3 else None)


def test_an_id_whose_beat_stands_still_for_a_lease_is_free():
    store = MemoryStore()
    live(store, 1)
    driver = Driver(store)
    driver.run(lives.take_up_life(KEYS, person(), WAITING))
    assert driver.slept == WAITING.lease_seconds


@pytest.mark.parametrize("when", [0.0, 2.0])
def test_an_id_that_has_left_is_free_at_once(when):
    store = MemoryStore()
    live(store, 1)
    leaves = Driver(store, lambda slept: live(store, 2, phase="left") if slept >= when else None)
    if not when:
        live(store, 2, phase="left")
    leaves.run(lives.take_up_life(KEYS, person(), WAITING))
    assert leaves.slept <= when


class Meanwhile(Driver):
    """Something happens once, just before the first request that `when` picks out."""

    def __init__(
        self,
        store: Store,
        when: Callable[[joining.Request], bool],
        happens: Callable[[], object],
        elsewhere: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(store, elsewhere)
        self._when = when
        self._happens = [happens]

    def _perform(self, request: joining.Request) -> Any:
        if self._happens and self._when(request):
            self._happens.pop()()
        return super()._perform(request)

    def be_born(self) -> Birth:
        birth = self.run(lives.take_up_life(KEYS, person(), WAITING))
        assert not self._happens
        return birth


def creates(part: str) -> Callable[[joining.Request], bool]:
    return lambda request: isinstance(request, joining.Create) and part in request.key


def test_of_two_processes_that_start_within_milliseconds_the_second_is_refused():
    """Though it looks when the first has its incarnation and has not beaten yet."""
    store = MemoryStore()

    def second() -> None:
        beats = iter(range(1, 100))
        with pytest.raises(NodeIdInUse):
            take_up(store, lambda slept: live(store, next(beats), phase="joining"))

    birth = Meanwhile(store, creates("/live/"), second).be_born()
    assert birth.life == Life("a", 1)


def test_of_two_processes_that_take_up_one_life_the_one_that_gets_none_is_refused():
    store = MemoryStore()

    def first() -> None:
        Driver(store).run(lives.take_up_life(KEYS, person(nonce="y"), WAITING))

    beats = iter(range(2, 100))
    slower = Meanwhile(store, creates("/node/"), first, lambda slept: live(store, next(beats)))
    with pytest.raises(NodeIdInUse):
        slower.be_born()


def lived(store: Store) -> None:
    """The node has lived once, and left."""
    take_up(store)
    live(store, 2, phase="left")


def test_a_life_vouches_for_what_earlier_ones_sent_to_open_rounds():
    store = MemoryStore()
    lived(store)
    sent = [send(store, round, 10 + round) for round in (3, 4, 5)]
    send(store, 4, 99, node="b")
    for round in range(4):
        commit(store, round)
    birth = be_born(store)
    found = incarnation(store, 2)
    assert found.valid == tuple(sent[1:])
    assert (found.round, found.position, birth.position) == (3, 15, 15)


def test_a_first_life_begins_at_the_start_of_its_data_and_asks_for_little():
    store = MemoryStore()
    commit(store, 0)
    counting = FaultyStore(store, {})
    assert be_born(counting).position == 0
    asked = [(call.verb, call.key) for call in counting.calls]
    log, lives, born = KEYS.log, KEYS.incarnations("a"), KEYS.incarnation("a", 1)
    assert [key for verb, key in asked if verb == "list"] == [lives, log, log]
    assert [key for verb, key in asked if verb == "get"] == [born]


def records_read(store: FaultyStore) -> list[str]:
    return [call.key for call in store.calls if call.verb == "get" and call.key.endswith(".0")]


def test_the_position_is_found_in_records_once_contributions_are_swept():
    store = MemoryStore()
    lived(store)
    for round in range(6):
        commit(store, round, *([head(round, 10 * round)] if 1 <= round <= 3 else []))
    counting = FaultyStore(store, {})
    assert be_born(counting).position == 30
    assert records_read(counting) == [KEYS.record(round) for round in (5, 4, 3)]


def test_records_from_before_the_newest_life_are_not_read_again():
    """What they say is in its incarnation."""
    store = MemoryStore()
    lived(store)
    for round in range(4):
        commit(store, round, head(round, 10 + round))
    assert be_born(store).position == 13
    live(store, 2, life=2, phase="left")
    commit(store, 4)
    counting = FaultyStore(store, {})
    assert be_born(counting).position == 13
    assert records_read(counting) == [KEYS.record(4)]


def test_what_arrives_while_a_life_is_taken_up_does_not_stay_valid_but_counts():
    """A closer may have seen it before it could know of the new life."""
    store = MemoryStore()
    lived(store)
    birth = Meanwhile(store, creates("/node/"), lambda: send(store, 0, 7)).be_born()
    assert (incarnation(store, 2).valid, incarnation(store, 2).position) == ((), 0)
    assert birth.position == 7


def test_what_is_merged_and_swept_while_a_life_is_taken_up_counts():
    store = MemoryStore()
    lived(store)
    merged = Meanwhile(store, creates("/node/"), lambda: commit(store, 0, head(0, 7)))
    assert merged.be_born().position == 7


def test_work_that_is_swept_while_it_is_looked_at_is_found_in_its_record():
    store = MemoryStore()
    lived(store)
    sent = send(store, 0, 7)

    def swept() -> None:
        store.delete([sent])
        commit(store, 0, head(0, 7))

    looked = Meanwhile(store, lambda request: isinstance(request, joining.ReadHead), swept)
    assert looked.be_born().position == 7


def test_a_listing_counts_once_it_shows_the_new_life():
    """One that is late shows the mailbox as it was, and so no beat of this life."""
    store = MemoryStore()
    lived(store)
    late: list[list[str]] = []

    class Late(Driver):
        def _perform(self, request: joining.Request) -> Any:
            if creates("/live/")(request) and not self.slept:
                late.append([entry.key for entry in store.list(KEYS.log)])
                send(store, 0, 7)
            if isinstance(request, joining.List) and late:
                return late.pop()
            return super()._perform(request)

    birth = Late(store).run(lives.take_up_life(KEYS, person(), WAITING))
    assert (birth.position, birth.beat) == (7, 2)


# Reading where the run stands


def test_a_run_without_rounds_stands_where_its_manifest_says():
    store = MemoryStore()
    manifest, _ = create_run(store)
    data = store.get(MANIFEST)
    assert data is not None
    chain = Driver(store).run(joining.read_chain(manifest, data))
    assert (chain.read, chain.versions, chain.tip) == (-1, (0, 0), sha256(data))
    assert chain.named == Life("a", 1)


def test_a_listed_record_that_is_not_there_is_an_error_and_not_a_guess():
    store = MemoryStore()
    manifest, _ = create_run(store)
    store.create(KEYS.record(0), seal(KEYS.record(1), manifest))
    with pytest.raises(FormatError, match="do not match their digest"):
        Driver(store).run(joining.read_chain(manifest, store.get(MANIFEST) or b""))
