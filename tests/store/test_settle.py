import itertools

import pytest

from jdiloco.errors import FormatError, StoreUnavailable
from jdiloco.store import MemoryStore, create_contested, create_owned
from jdiloco.store.counting import CountingStore
from jdiloco.store.settle import TAIL_BYTES
from jdiloco.testing.faults import FAIL, LOSE_ANSWER, SAY_TAKEN, FaultyStore

OURS, RIVAL = b"write id 1: ours", b"write id 2: the rival's"
WAITS = (1.0, 2.0)  # Three tries: at most a create and a get each.
FAULTS = (None, FAIL, LOSE_ANSWER, SAY_TAKEN)
SCRIPTS = list(itertools.product(FAULTS, repeat=6))


def expected(faults, there):
    """What three tries end with under these faults: (bytes or None, what is stored, requests).

    Written without the code under test: one line for each row of a table.
    """
    for number in (0, 2, 4):
        create, get = faults[number], faults[number + 1]
        if create is None and there is None:
            return OURS, OURS, number + 1
        if create is LOSE_ANSWER and there is None:
            there = OURS
        if get in (None, SAY_TAKEN) and there is not None:
            return there, there, number + 2
    return None, there, 6


@pytest.mark.parametrize("there", [None, RIVAL], ids=["free", "taken"])
def test_a_contested_key_is_settled_under_every_combination_of_faults(there):
    for faults in SCRIPTS:
        inner = MemoryStore()
        if there is not None:
            inner.create("k", there)
        store = FaultyStore(inner, dict(enumerate(faults, 1)))
        waited = []
        settled, stored, requests = expected(faults, there)
        if settled is None:
            with pytest.raises(StoreUnavailable, match="after 3 tries"):
                create_contested(store, "k", OURS, waits=WAITS, sleep=waited.append)
            assert waited == list(WAITS)
        else:
            found = create_contested(store, "k", OURS, waits=WAITS, sleep=waited.append)
            assert found == settled, faults
        assert (inner.get("k"), len(store.calls)) == (stored, requests), faults


def test_an_owned_key_is_settled_under_every_combination_of_faults():
    for faults in SCRIPTS:
        inner = MemoryStore()
        store = FaultyStore(inner, dict(enumerate(faults, 1)))
        waited = []
        settled, stored, requests = expected(faults, None)
        if settled is None:
            with pytest.raises(StoreUnavailable, match="after 3 tries"):
                create_owned(store, "k", OURS, waits=WAITS, sleep=waited.append)
        else:
            create_owned(store, "k", OURS, waits=WAITS, sleep=waited.append)
        assert (inner.get("k"), len(store.calls)) == (stored, requests), faults


@pytest.mark.parametrize("moment", range(1, 5))
def test_a_rival_that_lands_at_any_moment_settles_the_key_for_both(moment):
    """Whatever is returned is what is stored, whenever the rival's delayed write arrives."""
    for faults in itertools.product(FAULTS, repeat=4):
        inner = MemoryStore()

        def script(call, inner=inner, faults=faults):
            if call.number == moment:
                inner.create("k", RIVAL)
            return faults[call.number - 1]

        store = FaultyStore(inner, script)
        try:
            found = create_contested(store, "k", OURS, waits=WAITS[:1], sleep=lambda _: None)
        except StoreUnavailable:
            continue
        assert found == inner.get("k"), faults


def test_a_write_whose_answer_is_lost_is_settled_without_a_second_one():
    """Case B66: our own write is no conflict, and counts once."""
    store = FaultyStore(MemoryStore(), {1: LOSE_ANSWER})
    assert create_contested(store, "k", OURS, waits=WAITS, sleep=never) == OURS
    assert [call.verb for call in store.calls] == ["create", "get"]


def test_taken_with_nothing_there_is_sent_again():
    """Case B68: twice refused in a race that nobody won, then created."""
    store = FaultyStore(MemoryStore(), {1: SAY_TAKEN, 3: SAY_TAKEN})
    waited = []
    assert create_contested(store, "k", OURS, waits=WAITS, sleep=waited.append) == OURS
    assert [call.verb for call in store.calls] == ["create", "get", "create", "get", "create"]
    assert waited == [1.0, 2.0]


def test_without_waits_there_is_one_try():
    store = FaultyStore(MemoryStore(), {1: FAIL})
    with pytest.raises(StoreUnavailable, match="may or may not have been created after 1 tries"):
        create_contested(store, "k", OURS, waits=(), sleep=never)
    assert len(store.calls) == 2


def test_waits_may_go_on_for_ever():
    store = FaultyStore(MemoryStore(), lambda call: FAIL if call.number < 1000 else None)
    create_owned(store, "k", OURS, waits=itertools.repeat(1.0), sleep=lambda _: None)
    assert store.inner.get("k") == OURS


def test_a_sleep_that_raises_ends_the_waiting():
    store = FaultyStore(MemoryStore(), lambda call: FAIL)
    with pytest.raises(KeyboardInterrupt):
        create_owned(store, "k", OURS, waits=WAITS, sleep=interrupt)
    assert len(store.calls) == 2


@pytest.mark.parametrize("size", [0, 1, TAIL_BYTES - 1, TAIL_BYTES, TAIL_BYTES + 1, 5_000_000])
def test_an_owned_object_is_known_by_its_length_and_its_end(size):
    """A gigabyte is not sent back only to learn that it has arrived."""
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    counting = CountingStore(MemoryStore())
    store = FaultyStore(counting, {1: LOSE_ANSWER})
    create_owned(store, "k", [data[: size // 3], data[size // 3 :]], waits=WAITS, sleep=never)
    assert counting.get("k") == data
    assert counting.tallies["get"].bytes - size == min(size, TAIL_BYTES)


@pytest.mark.parametrize(
    "foreign", [b"", b"x" * 99, b"x" * 101, b"y" * 100, b"x" * 99 + b"y", b"y" + b"x" * 100]
)
def test_other_bytes_under_an_owned_key_are_an_error_of_their_own(foreign):
    store = MemoryStore()
    store.create("k", foreign)
    with pytest.raises(FormatError, match="Somebody uses its name"):
        create_owned(store, "k", b"x" * 100, waits=WAITS, sleep=never)
    assert store.get("k") == foreign


def test_the_error_names_key_store_and_the_last_doubt():
    store = FaultyStore(MemoryStore("demo"), lambda call: SAY_TAKEN)
    with pytest.raises(StoreUnavailable, match=r"`a/k` in memory://demo .* nothing is there"):
        create_contested(store, "a/k", OURS, waits=(), sleep=never)


def never(seconds):
    """A sleep for callers that must not wait."""
    raise AssertionError(f"waited {seconds} s")


def interrupt(seconds):
    """A sleep during which somebody presses Ctrl-C."""
    raise KeyboardInterrupt
