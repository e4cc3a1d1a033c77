"""When rounds are due."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.protocol.schedule import due, fragment_of, gap

SIZES = [(every, fragments) for every in (1, 2, 3, 7, 10, 96, 100) for fragments in (1, 2, 3, 8)]


@pytest.mark.parametrize(("every", "fragments"), [pair for pair in SIZES if pair[1] <= pair[0]])
def test_every_fragment_is_due_exactly_once_in_every_cycle(every, fragments):
    """B28: 100 steps and 8 fragments stay 100 and 8."""
    steps = [due(round, sync_every=every, fragments=fragments) for round in range(4 * fragments)]
    assert steps == sorted(set(steps))
    assert steps[0] > 0
    for fragment in range(fragments):
        mine = [s for round, s in enumerate(steps) if fragment_of(round, fragments) == fragment]
        assert [later - earlier for earlier, later in itertools.pairwise(mine)] == [every] * 3


@given(st.integers(1, 200), st.integers(1, 200), st.integers(0, 10**6))
def test_gaps_add_up_to_the_formula_and_are_never_empty(every, fragments, round):
    """So measuring by differences is the formula in lock step, however far a run has come."""
    sizes = {"sync_every": max(every, fragments), "fragments": min(every, fragments)}
    assert due(-1, **sizes) == 0
    assert gap(round, **sizes) >= 1
    assert due(round - 1, **sizes) + gap(round, **sizes) == due(round, **sizes)


def test_standard_diloco_is_due_every_h_steps():
    assert [due(round, sync_every=8, fragments=1) for round in range(3)] == [8, 16, 24]
