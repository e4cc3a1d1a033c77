"""Coming into a run: every sequence of requests, killed after each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jdiloco.errors import FormatError, NodeIdInUse, StoreIgnoresConditions, StoreUnavailable
from jdiloco.protocol import joining
from jdiloco.protocol.joining import Creator, Person, Steps, Waiting
from jdiloco.protocol.keys import CREATING, MANIFEST, BeatKey, ContributionKey, Keys
from jdiloco.protocol.records import (
    FORMAT,
    Checkpoint,
    Incarnation,
    Manifest,
    Payload,
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


def take_up(store: Store, elsewhere: Callable[[float], object] | None = None) -> Life:
    return Driver(store, elsewhere).run(joining.take_up_life(KEYS, person(), WAITING))


def test_lives_are_numbered_and_each_is_created_once():
    store = MemoryStore()
    assert [take_up(store) for _ in range(3)] == [Life("a", n) for n in (1, 2, 3)]


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
        life = take_up(FaultyStore(store, {number: fault}))
        assert [e.key for e in store.list(KEYS.incarnations("a"))] == [KEYS.incarnation("a", 1)]
        assert life == Life("a", 1)


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
    driver.run(joining.take_up_life(KEYS, person(), WAITING))
    assert driver.slept == WAITING.lease_seconds


@pytest.mark.parametrize("when", [0.0, 2.0])
def test_an_id_that_has_left_is_free_at_once(when):
    store = MemoryStore()
    live(store, 1)
    leaves = Driver(store, lambda slept: live(store, 2, phase="left") if slept >= when else None)
    if not when:
        live(store, 2, phase="left")
    leaves.run(joining.take_up_life(KEYS, person(), WAITING))
    assert leaves.slept <= when


def test_a_life_vouches_for_what_earlier_ones_sent_to_open_rounds():
    store = MemoryStore()
    sent = [ContributionKey(round, "a", 1, False) for round in (3, 4, 5)]
    for key in sent:
        store.create(KEYS.contribution(key), b"")
    store.create(KEYS.contribution(ContributionKey(4, "b", 1, False)), b"")
    store.create(KEYS.record(3), b"")
    take_up(store)
    data = store.get(KEYS.incarnation("a", 1))
    assert data is not None
    found = unseal(KEYS.incarnation("a", 1), data, Incarnation)
    assert found.valid == tuple(KEYS.contribution(key) for key in sent[1:])


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
