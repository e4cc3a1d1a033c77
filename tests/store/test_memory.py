import itertools

import pytest

from jdiloco.errors import UsageError
from jdiloco.store import MemoryStore, open_store
from jdiloco.testing.conformance import StoreConformance

names = itertools.count()


class TestMemoryStore(StoreConformance):
    """The contract, in memory."""

    @pytest.fixture
    def store(self):
        return MemoryStore(f"conformance-{next(names)}")


def test_stores_of_one_name_are_one_store():
    MemoryStore("shared").create("k", b"1")
    assert open_store("memory://shared").get("k") == b"1"


def test_stores_of_other_names_and_of_none_hold_other_objects():
    MemoryStore("mine").create("k", b"1")
    nameless = MemoryStore()
    nameless.create("k", b"2")
    for other in (MemoryStore("yours"), MemoryStore("mine/too"), MemoryStore()):
        assert other.list("") == []


def test_a_store_in_memory_needs_a_name_to_be_opened():
    with pytest.raises(UsageError, match="memory://demo"):
        open_store(MemoryStore().url)
