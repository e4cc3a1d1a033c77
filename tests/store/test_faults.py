import copy
import itertools
import threading

import numpy as np
import pytest

from jdiloco.errors import StoreUnavailable
from jdiloco.store import FolderStore, MemoryStore, Store
from jdiloco.store.counting import CountingStore, Tally
from jdiloco.testing.conformance import StoreConformance, in_threads
from jdiloco.testing.faults import (
    CRASH,
    FAIL,
    IGNORE_CONDITION,
    LOSE_ANSWER,
    SAY_TAKEN,
    Call,
    Crash,
    Crashed,
    FaultyStore,
    Hide,
    crash_after,
    crash_after_writes,
    crash_prefixes,
)
from jdiloco.types import Spent

names = itertools.count()
VERBS = {
    "create": lambda store: store.create("k", b"1"),
    "get": lambda store: store.get("k"),
    "list": lambda store: store.list("k"),
    "delete": lambda store: store.delete(["k"]),
}


class TestFaultyStoreWithoutFaults(StoreConformance):
    """A script that orders nothing leaves the store as it was."""

    @pytest.fixture
    def store(self):
        return FaultyStore(MemoryStore(f"faultless-{next(names)}"), {})


class TestCountingStore(StoreConformance):
    """Counting changes nothing."""

    @pytest.fixture
    def store(self):
        return CountingStore(MemoryStore(f"counted-{next(names)}"))


@pytest.fixture
def inner():
    store = MemoryStore()
    store.create("there", b"1")
    return store


def keys(store, prefix=""):
    return [row.key for row in store.list(prefix)]


# Faults


@pytest.mark.parametrize("verb", VERBS)
def test_a_request_made_to_fail_never_arrives(inner, verb):
    counting = CountingStore(inner)
    with pytest.raises(StoreUnavailable, match=f"{verb} `k`"):
        VERBS[verb](FaultyStore(counting, {1: FAIL}))
    assert counting.requests == 0


@pytest.mark.parametrize("verb", VERBS)
def test_a_request_whose_answer_is_lost_is_carried_out(inner, verb):
    counting = CountingStore(inner)
    with pytest.raises(StoreUnavailable, match="answer lost"):
        VERBS[verb](FaultyStore(counting, {1: LOSE_ANSWER}))
    assert counting.tallies[verb].requests == 1


def test_a_create_whose_answer_is_lost_has_landed(inner):
    with pytest.raises(StoreUnavailable):
        FaultyStore(inner, {1: LOSE_ANSWER}).create("k", b"1")
    assert inner.get("k") == b"1"


def test_taken_can_be_said_of_a_key_with_nothing_stored(inner):
    store = FaultyStore(inner, {1: SAY_TAKEN})
    assert store.create("k", b"1") is False
    assert store.get("k") is None
    assert store.create("k", b"1") is True


def test_a_store_that_ignores_the_condition_lets_the_second_create_replace_the_first(inner):
    store = FaultyStore(inner, {2: IGNORE_CONDITION})
    assert store.create("k", b"1") is True
    assert store.create("k", b"2") is True
    assert store.get("k") == b"2"


def test_a_created_key_can_stay_out_of_the_next_listings(inner):
    store = FaultyStore(inner, {1: Hide(lists=2)})
    store.create("k", b"1")
    store.create("k2", b"1")
    assert store.get("k") == b"1"
    assert [keys(store) for _ in range(3)] == [
        ["k2", "there"],
        ["k2", "there"],
        ["k", "k2", "there"],
    ]


def test_keys_with_a_part_can_stay_out_of_listings_from_one_on(inner):
    store = FaultyStore(inner, {2: Hide(lists=2, part="her")})
    assert [keys(store) for _ in range(4)] == [["there"], [], [], ["there"]]


def test_two_hidden_keys_are_counted_apart(inner):
    store = FaultyStore(inner, {1: Hide(lists=1), 2: Hide(lists=3)})
    store.create("a", b"")
    store.create("b", b"")
    assert [keys(store) for _ in range(4)] == [
        *(["there"], ["a", "there"], ["a", "there"], ["a", "b", "there"])
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_a_dead_process_sends_nothing_more(inner, verb):
    counting = CountingStore(inner)
    store = FaultyStore(counting, {2: CRASH})
    store.create("first", b"1")
    for _ in range(3):
        with pytest.raises(Crashed):
            VERBS[verb](store)
    assert counting.requests == 2
    assert inner.get("first") == b"1"


def test_a_process_can_die_before_its_request(inner):
    with pytest.raises(Crashed):
        FaultyStore(inner, {1: Crash(before=True)}).create("k", b"1")
    assert inner.get("k") is None


def test_no_clause_for_errors_survives_a_crash():
    assert not issubclass(Crashed, Exception)


@pytest.mark.parametrize("fault", [SAY_TAKEN, IGNORE_CONDITION, Hide()])
def test_a_fault_that_a_verb_does_not_have_leaves_it_as_it_is(inner, fault):
    store = FaultyStore(inner, {1: fault, 2: fault})
    assert store.get("there") == b"1"
    store.delete(["there"])
    assert inner.list("") == []


# Scripts


def test_a_script_sees_number_verb_and_key_of_every_request(inner):
    seen = []
    store = FaultyStore(inner, seen.append)
    store.create("a/k", b"1")
    store.get("a/k", start=1)
    store.list("a/", after="a")
    store.delete(iter(["a/k", "b"]))
    wanted = [("create", "a/k"), ("get", "a/k"), ("list", "a/"), ("delete", "a/k b")]
    assert seen == store.calls == [Call(n, *pair) for n, pair in enumerate(wanted, 1)]


def test_an_outage_of_one_verb_is_a_function_of_its_calls(inner):
    def outage(call):
        return FAIL if call.verb == "list" and call.number < 4 else None

    store = FaultyStore(inner, outage)
    answers = []
    for verb in ("list", "get", "list", "list"):
        try:
            answers.append(VERBS[verb](store))
        except StoreUnavailable:
            answers.append("failed")
    assert answers == ["failed", None, "failed", []]


def test_requests_of_many_threads_each_get_a_number_of_their_own(inner):
    store = FaultyStore(inner, {})
    in_threads(8, range(200), lambda n: store.create(f"k/{n}", b""))
    assert [call.number for call in store.calls] == list(range(1, 201))


def test_a_script_that_blocks_holds_up_its_request_only(inner):
    arrived, free = threading.Event(), threading.Event()

    def slow(call):
        if call.verb == "create" and call.key == "large":
            arrived.set()
            assert free.wait(30.0)

    store = FaultyStore(inner, slow)
    upload = threading.Thread(target=store.create, args=("large", b"1"))
    upload.start()
    assert arrived.wait(30.0)
    assert store.create("small", b"1")
    assert store.get("large") is None
    free.set()
    upload.join()
    assert store.get("large") == b"1"


# Crash prefixes


@pytest.mark.parametrize("requests", range(4))
def test_a_process_dies_after_so_many_requests(requests):
    inner = MemoryStore()
    store = FaultyStore(inner, crash_after(requests))
    with pytest.raises(Crashed):
        in_threads(1, range(5), lambda n: store.create(f"{n}", b""))
    assert len(inner.list("")) == requests


@pytest.mark.parametrize("writes", range(6))
def test_a_process_dies_after_so_many_changes_even_in_the_middle_of_a_delete(writes):
    """What is read does not count, nor what is beside the point."""
    inner = MemoryStore()
    store = FaultyStore(inner, crash_after_writes(writes, besides=("beat",)))
    with pytest.raises(Crashed):
        program(store)
    assert store.crashed
    left = [entry.key for entry in inner.list("") if "beat" not in entry.key]
    assert left == [[], ["a"], ["a", "b"], ["b"], [], ["c"]][writes]
    with pytest.raises(Crashed):
        store.get("a")


def program(store):
    store.create("a", b"")
    store.create("beat", b"")
    store.list("")
    store.create("b", b"")
    store.delete(["a", "b"])
    store.create("c", b"")
    store.create("d", b"")


@pytest.mark.parametrize("kind", [MemoryStore, FolderStore])
def test_a_commit_is_old_or_new_after_every_crash_prefix(kind, tmp_path):
    """Case B75, for the way every commit here is made: payloads first, then the record."""
    folders = itertools.count()

    def make() -> Store:
        store = kind(f"{tmp_path}/{next(folders)}")
        commit(store, 1)
        return store

    def commit(store, version):
        store.create(f"data/{version}.anchor", b"%d" % version)
        store.create(f"data/{version}.outer", b"%d" % version)
        store.create(f"log/{version}", b"")
        store.delete([f"data/{version - 1}.anchor", f"data/{version - 1}.outer"])

    newest = []
    for requests, store in crash_prefixes(make, lambda store: commit(store, 2)):
        version = keys(store, "log/")[-1].removeprefix("log/")
        assert store.get(f"data/{version}.anchor") == store.get(f"data/{version}.outer")
        assert store.get(f"data/{version}.anchor") == version.encode()
        newest.append((requests, version))
    assert newest == [(0, "1"), (1, "1"), (2, "1"), (3, "2"), (4, "2"), (4, "2")]


def test_a_program_that_does_not_end_is_said_not_to():
    def endless(store):
        while True:
            store.get("k")

    with pytest.raises(AssertionError, match="after 5 requests"):
        list(crash_prefixes(MemoryStore, endless, requests_max=5))


# Counting


def test_requests_keys_and_bytes_are_counted_per_verb():
    store = CountingStore(MemoryStore())
    store.create("a/k", [b"123", np.zeros(2, np.float32).data])
    store.create("a/k", b"1")
    store.get("a/k", start=4)
    store.get("a/missing")
    store.list("a/")
    store.list("z")
    store.delete(["a/k", "a/missing"])
    assert store.tallies == {
        "create": Tally(requests=2, keys=1, bytes=12),
        "get": Tally(requests=2, keys=1, bytes=7),
        "list": Tally(requests=2, keys=1, bytes=3),
        "delete": Tally(requests=1, keys=2),
    }
    assert (store.requests, store.bytes) == (7, 22)


def limits(*stores):
    return tuple(getattr(store.inner, "limit", None) for store in stores)


class TwoWays(MemoryStore):
    """A store with a way of its own for small requests."""

    limit: float | None = None

    def within(self, seconds):
        small = copy.copy(self)
        small.limit = seconds
        return small


def test_small_requests_go_their_own_way_and_are_counted_with_all_others():
    store = CountingStore(TwoWays())
    small = store.within(2.5)
    assert limits(store, small) == (None, 2.5)
    store.create("k", b"123")
    small.get("k")
    assert (store.requests, small.requests) == (2, 2)
    assert store.spent == Spent(creates=1, gets=1, sent=3, received=3)


def test_small_requests_go_their_own_way_and_are_broken_with_all_others():
    store = FaultyStore(TwoWays(), {2: Hide(lists=2), 3: LOSE_ANSWER, 5: CRASH})
    small = store.within(2.5)
    assert limits(store, small) == (None, 2.5)
    store.create("a", b"1")
    store.create("b", b"1")
    with pytest.raises(StoreUnavailable):
        small.get("a")
    assert keys(small) == ["a"]
    with pytest.raises(Crashed):
        small.get("a")
    assert store.crashed
    with pytest.raises(Crashed):
        store.get("a")
    assert [call.verb for call in store.calls] == ["create", "create", "get", "list", "get"]


def test_a_store_that_has_one_way_is_wrapped_as_it_is():
    inner = MemoryStore()
    assert FaultyStore(inner, {}).within(1.0).inner is inner
    assert CountingStore(inner).within(1.0).inner is inner


def test_a_request_that_gets_no_answer_is_counted_too(inner):
    store = CountingStore(FaultyStore(inner, lambda call: FAIL))
    for request in VERBS.values():
        with pytest.raises(StoreUnavailable):
            request(store)
    assert store.requests == 4


# The conformance suite notices


def always(verb, fault):
    return lambda call: fault if call.verb == verb else None


CONTRACT = StoreConformance()
BROKEN = {
    "ignores the condition": (
        always("create", IGNORE_CONDITION),
        CONTRACT.test_create_refuses_what_exists_and_keeps_the_first_bytes,
    ),
    "lets two racing writers win": (
        always("create", IGNORE_CONDITION),
        CONTRACT.test_one_of_many_threads_wins_each_key_and_its_bytes_stay,
    ),
    "says taken of a free key": (
        always("create", SAY_TAKEN),
        CONTRACT.test_a_created_object_reads_back_as_it_was_written,
    ),
    "lists late": (always("create", Hide()), CONTRACT.test_a_write_is_read_and_listed_at_once),
    "lists a part": (
        always("list", Hide(part="/07")),
        CONTRACT.test_a_long_listing_is_complete,
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_suite_finds_a_store_that(fault):
    script, claim = BROKEN[fault]
    store = FaultyStore(MemoryStore(f"broken-{next(names)}"), script)
    with pytest.raises(AssertionError):
        claim(store)


def test_the_suite_finds_a_listing_that_is_remembered():
    """Case B69: one store object hides from another what it wrote."""
    ours = MemoryStore(f"broken-{next(names)}")

    class Remembering(StoreConformance):
        def reopen(self, store):
            return FaultyStore(store, always("list", Hide(part="k/")))

    with pytest.raises(AssertionError):
        Remembering().test_another_store_object_sees_each_write_in_its_next_listing(ours)
