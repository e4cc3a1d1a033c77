"""The weight of a contribution: samples squared over steps, in exact integers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.algo import contribution_weight
from jdiloco.errors import UsageError
from jdiloco.testing import oracle
from tests.algo.support import more


@pytest.mark.parametrize(
    ("steps", "samples", "weight"),
    [(12, 3_072, 786_432), (6, 1_536, 393_216), (12, 1_536, 196_608), (1, 2, 4), (1, 1, 1)],
)
def test_the_table_of_learners_comes_out_exactly(steps, samples, weight):
    assert contribution_weight(steps=steps, samples=samples) == weight


def test_with_equal_batches_weights_are_in_the_ratio_of_samples():
    a = contribution_weight(steps=12, samples=12 * 256)
    b = contribution_weight(steps=6, samples=6 * 256)
    assert a / b == 2


def test_twice_the_steps_for_the_same_samples_weigh_half():
    b = contribution_weight(steps=6, samples=1_536)
    c = contribution_weight(steps=12, samples=1_536)
    assert b / c == 2


def test_samples_beyond_32_bits_keep_their_ratio():
    """Equal batches, three billion samples against one: deltas 1 and 5 average to 2."""
    w = [
        contribution_weight(steps=3_000, samples=3_000_000_000),
        contribution_weight(steps=1_000, samples=1_000_000_000),
    ]
    assert oracle.weighted_mean([1.0, 5.0], w) == pytest.approx(2.0, abs=1e-15)


@pytest.mark.parametrize(("steps", "mean"), [((10, 10), 4.6), ((10, 30), 4.0)])
def test_steps_decide_between_two_merges_of_the_same_samples(steps, mean):
    w = [contribution_weight(steps=k, samples=s) for k, s in zip(steps, (100, 300), strict=True)]
    assert oracle.weighted_mean([1.0, 5.0], w) == pytest.approx(mean)


@more
@given(steps=st.integers(1, 2**53), samples=st.integers(1, 2**53))
def test_the_weight_is_the_float_nearest_to_the_true_quotient(steps, samples):
    weight = contribution_weight(steps=steps, samples=samples)
    assert weight == float(Fraction(samples) ** 2 / steps) == oracle.weight(steps, samples)


def test_numpy_integers_are_integers():
    assert contribution_weight(steps=np.int32(10), samples=np.int64(50_000)) == 2.5e8


@pytest.mark.parametrize("bad", [0, -1, 1.0, 1.5, True, "1", None, 2**53 + 1, float("nan")])
@pytest.mark.parametrize("field", ["steps", "samples"])
def test_what_is_no_positive_integer_is_refused_by_name(field, bad):
    counts = {"steps": 1, "samples": 1} | {field: bad}
    with pytest.raises(UsageError, match=f"`{field}` must be an integer from 1"):
        contribution_weight(**counts)
