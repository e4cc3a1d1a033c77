"""The door of a signed run: what it lets in, what it tells, and that it costs no request."""

from __future__ import annotations

import itertools

import pytest

from jdiloco.protocol.keys import BeatKey, ContributionKey, Keys
from jdiloco.protocol.signing import RunKey
from jdiloco.store import MemoryStore, open_store
from jdiloco.store.signed import (
    BYTES,
    FORGED_MAX,
    NAME,
    UNSIGNED,
    Forged,
    SignedStore,
    signer_of,
)
from jdiloco.testing.conformance import StoreConformance
from jdiloco.testing.faults import FaultyStore

KEY = RunKey(b"0123456789abcdef")
KEYS = Keys("run1")
_numbers = itertools.count()
RECORD = KEYS.record(7)
BEAT = KEYS.beat(BeatKey("ada", 1, 7, "training", 100, 42))
SENT = KEYS.contribution(ContributionKey(7, "ada", 1, False))


class TestSignedStore(StoreConformance):
    """A store with a door keeps all the promises of the store behind it."""

    @pytest.fixture
    def store(self):
        return SignedStore(MemoryStore(f"signed-{next(_numbers)}"), KEY)

    def reopen(self, store):
        return SignedStore(open_store(store.url), KEY)


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def told() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def store(inner, told) -> SignedStore:
    return SignedStore(inner, KEY, Forged(lambda name, because: told.append((name, because))))


def keys_of(store, prefix: str = "", after: str = "") -> list[str]:
    return [entry.key for entry in store.list(prefix, after=after)]


@pytest.mark.parametrize("key", ["manifest", RECORD, BEAT, SENT, KEYS.incarnation("ada", 1)])
def test_what_was_written_through_the_door_is_read_through_it(store, inner, told, key):
    assert store.create(key, [b"one", b"two"])
    assert not store.create(key, b"three")
    assert store.get(key) == b"onetwo"
    assert store.get(key, start=2, stop=4) == b"et"
    assert keys_of(store) == [key]
    assert keys_of(inner) == [KEY.name(key)]
    store.delete([key])
    assert keys_of(inner) == []
    assert not told


def test_listings_begin_where_they_do_without_a_key(store):
    for round in range(4):
        store.create(KEYS.record(round), b"")
        store.create(KEYS.contribution(ContributionKey(round, "ada", 1, False)), b"")
        store.create(KEYS.contribution(ContributionKey(round, "ada", 1, True)), b"")
    store.create(BEAT, b"")
    found = keys_of(store, KEYS.log, after=KEYS.after(2))
    assert found == sorted(found)
    assert found[0] == KEYS.record(2)
    assert len(found) == 7


def test_files_of_a_checkpoint_are_listed_by_its_prefix(store):
    one, two = (KEYS.checkpoint(7, "ada", 1, number) for number in (1, 2))
    for prefix in (one, two):
        store.create(f"{prefix}/params/_METADATA", b"")
        store.create(f"{prefix}/run", b"")
    assert keys_of(store, f"{one}/") == [f"{one}/params/_METADATA", f"{one}/run"]
    assert len(keys_of(store, KEYS.saves)) == 4
    assert keys_of(store, KEYS.saves, after=f"{one}/run") == keys_of(store, f"{two}/")


def test_a_forged_name_is_not_there_and_told_once(store, inner, told):
    inner.create(RECORD, b"{}")
    inner.create(f"{RECORD}.{'0' * 32}", b"{}")
    for _ in range(3):
        assert keys_of(store, KEYS.log) == []
        assert store.get(RECORD) is None
    assert told == [(RECORD, NAME), (f"{RECORD}.{'0' * 32}", NAME)]


def test_what_was_written_over_is_not_there_and_told_once(store, inner, told):
    store.create(RECORD, b"{}")
    name = KEY.name(RECORD)
    inner.delete([name])
    inner.create(name, b"forged")
    assert keys_of(store, KEYS.log) == [RECORD]
    assert store.get(RECORD) is None
    assert store.get(RECORD) is None
    assert store.within(1.0).get(RECORD) is None
    assert told == [(name, BYTES)]


def test_a_flood_of_forged_objects_is_remembered_up_to_a_limit(store, inner, told):
    for number in range(FORGED_MAX + 50):
        inner.create(f"{KEYS.log}live/{number}", b"")
    assert keys_of(store) == []
    assert len(told) == len(store.forged.found) == FORGED_MAX


def test_other_things_in_the_mailbox_are_seen_and_nobodys_business(store, inner, told):
    inner.create("notes.txt", b"mine")
    assert keys_of(store) == ["notes.txt"]
    assert store.get("notes.txt") == b"mine"
    assert not told


def test_the_door_costs_no_request():
    counted = FaultyStore(MemoryStore(), {})
    store = SignedStore(counted, KEY)
    store.create(RECORD, b"{}")
    store.get(RECORD)
    store.get(SENT, start=0, stop=8)
    store.list(KEYS.log, after=KEYS.after(7))
    store.delete([SENT])
    assert [call.verb for call in counted.calls] == ["create", "get", "get", "list", "delete"]


def test_who_signs_is_the_door():
    store = SignedStore(MemoryStore(), KEY)
    signature = signer_of(store).sign(SENT, "head")
    assert signer_of(store).vouches(SENT, "head", signature)
    assert not signer_of(store).vouches(SENT, "other", signature)
    assert store.forged.found == {KEY.name(SENT): BYTES}
    assert signer_of(MemoryStore()) is UNSIGNED


def test_without_a_key_what_is_signed_is_refused():
    """Nobody here could check it, so somebody has forgotten the key."""
    assert UNSIGNED.vouches(SENT, "head", UNSIGNED.sign(SENT, "head"))
    assert not UNSIGNED.vouches(SENT, "head", KEY.sign(SENT, "head"))
