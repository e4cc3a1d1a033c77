"""The head of a contribution, read without its tensors."""

from __future__ import annotations

import numpy as np
import pytest

from jdiloco.protocol.keys import ContributionKey, Keys
from jdiloco.protocol.records import ContributionHead, Covered, Ledger
from jdiloco.runtime import contributions
from jdiloco.runtime.contributions import Contribution, Rejection
from jdiloco.store.memory import MemoryStore
from jdiloco.testing.faults import FaultyStore
from jdiloco.types import Counters

KEYS = Keys("run1")
KEY = ContributionKey(0, "a", 1, False)


def head(position: int = 40) -> ContributionHead:
    work = (Covered("unit", 1, 3),)
    return ContributionHead("run1", 0, 0, 0, "a", 1, Counters(4, 32), Ledger(), position, work=work)


def sent(tensors: int = 1, size: int = 8) -> FaultyStore:
    store = FaultyStore(MemoryStore(), {})
    arrays = {f"a/long/name/of/a/tensor/{i}": np.ones(size, np.float32) for i in range(tensors)}
    store.create("k", contributions.encode("k", head(), arrays))
    return store


@pytest.mark.parametrize(("tensors", "size"), [(0, 8), (1, 8), (1, 10**6), (2000, 8)])
def test_a_head_is_read_from_a_header_of_any_length(tensors, size):
    assert contributions.read_head(sent(tensors, size), "k") == head()


def test_what_is_no_contribution_has_no_head():
    store = MemoryStore()
    for key, data in (("none", b""), ("short", b"abc"), ("long", b"\xff" * 100)):
        store.create(key, data)
        assert contributions.read_head(store, key) is None
    assert contributions.read_head(store, "absent") is None


def check(position: int) -> None:
    found = Contribution(head(position), {}, "")
    contributions.check(found, KEY, KEYS, (), fragment=0, version=0, delta_dtype=None)


@pytest.mark.parametrize("position", [3, 2**53 + 1])
def test_a_position_that_no_learner_can_have_reached_is_rejected(position):
    """Whoever trained four steps has at least four batches behind it."""
    check(4)
    with pytest.raises(Rejection, match="counters"):
        check(position)


@pytest.mark.parametrize(("round", "version"), [(5, 0), (0, 1)])
def test_a_contribution_of_another_round_or_version_is_stale(round, version):
    """B58: it is listed as such and takes no part."""
    key = ContributionKey(round, "a", 1, False)
    with pytest.raises(Rejection, match="stale"):
        contributions.check(
            Contribution(head(), {}, ""),
            key,
            KEYS,
            (),
            fragment=0,
            version=version,
            delta_dtype=None,
        )
