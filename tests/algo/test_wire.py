"""Eight and four bits on the wire."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.algo import wire
from jdiloco.errors import UsageError
from tests.algo.support import SEEDS, few, random_rows

F8, F4 = wire.SMALL


def there_and_back(x, dtype):
    x = jnp.asarray(x)
    small = wire.encode(x, dtype)
    assert (small.values.shape, small.scales.shape) == wire.shapes(dtype, x.shape)
    return np.asarray(wire.decode(small, dtype, x.shape))


def half_steps(x, dtype):
    """Half a step of the format next to each element, at the scale of its tensor or block."""
    x = np.abs(np.asarray(x, np.float64))
    if dtype == F8:
        least = 2.0 ** (np.floor(np.log2(x.max())) - 7 - 6)  # Where the type has subnormals.
        return np.maximum(2.0 ** (np.floor(np.log2(np.maximum(x, 1e-300))) - 4), least / 16)
    largest = np.repeat(x.reshape(-1, wire.BLOCK).max(1), wire.BLOCK).reshape(x.shape)
    scale = 2.0 ** np.ceil(np.log2(largest / wire.LARGEST))
    step = np.where(x / scale < 2, 0.5, np.where(x / scale < 4, 1.0, 2.0))
    return step / 2 * scale


@pytest.mark.parametrize("dtype", wire.SMALL)
@few
@given(seed=st.integers(0, SEEDS), power=st.integers(-100, 100))
def test_the_error_is_at_most_half_a_step_at_any_length(dtype, seed, power):
    """B16. Nothing is cut off: the largest of a block is no further off than the others."""
    x = random_rows(seed, 4, (2 * wire.BLOCK,), scale=2.0**power)
    error = np.abs(there_and_back(x, dtype).astype(np.float64) - x)
    assert np.all(error <= half_steps(x, dtype) * (1 + 1e-6))


@pytest.mark.parametrize("dtype", wire.SMALL)
@pytest.mark.parametrize(
    "x",
    [
        np.zeros(1000, np.float32),
        np.full(1000, 3.0, np.float32),
        np.zeros((0, 4), np.float32),
        np.float32(1.5),
        np.array([[0.0, -0.0], [1.0, -4.0]], np.float32),
    ],
    ids=["zeros", "threes", "empty", "scalar", "signs"],
)
def test_zeros_and_steps_of_the_type_come_back_exact(dtype, x):
    """B16: a tensor of zeros must not become NaN."""
    np.testing.assert_array_equal(there_and_back(x, dtype), x)


@pytest.mark.parametrize("dtype", wire.SMALL)
@pytest.mark.parametrize("tail", [1e-30, 1e-38, 3e38])
def test_one_odd_element_among_zeros_is_finite_and_leaves_them_zero(dtype, tail):
    x = np.zeros(1000, np.float32)
    x[-1] = tail
    found = there_and_back(x, dtype)
    assert np.isfinite(found).all()
    assert not found[:-1].any()


@pytest.mark.parametrize("dtype", wire.SMALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_such(dtype, bad):
    """Four bits know no NaN, and eight no infinity: the scale says it."""
    x = np.ones(100, np.float32)
    x[3] = bad
    assert np.isnan(there_and_back(x, dtype)[3])


@few
@given(seed=st.integers(0, SEEDS))
def test_four_bits_round_as_the_type_does(seed):
    """To the nearest, ties to even, at every multiple of a quarter and in between."""
    rng = np.random.default_rng(seed)
    x = rng.choice(np.arange(-24, 25) / 4, size=(8, wire.BLOCK)).astype(np.float32)
    x += rng.choice([0.0, 0.0, 1e-3, -1e-3], size=x.shape).astype(np.float32)
    x = np.clip(x, -6, 6)
    x[:, 0] = 6  # The scale of every block is 1.
    want = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(there_and_back(x, F4), want)


def test_two_values_share_a_byte_the_earlier_one_in_the_low_half():
    small = wire.encode(jnp.array([0.5, 6.0, -1.0]), F4)
    assert np.asarray(small.values).tolist() == [0x71, 0x0A]
    assert np.asarray(small.scales).view(np.uint8).tolist() == [127]


def test_eight_bits_bring_the_largest_to_128_or_more():
    """Rounding up from below 448 cannot reach 465, which would be NaN."""
    for largest in (1.0, 1.99999, 255.9, 3e-5, 1e20):
        values = wire.encode(jnp.array([largest, 0.1 * largest]), F8).values
        top = float(np.asarray(values)[0])
        assert 128 <= top <= 256


@pytest.mark.parametrize("dtype", wire.SMALL)
@pytest.mark.parametrize("given", [jnp.bfloat16, jnp.float16])
def test_narrow_tensors_are_widened_first(dtype, given):
    x = jnp.asarray(random_rows(1, 1, (100,)), given)
    np.testing.assert_array_equal(
        there_and_back(x, dtype), there_and_back(x.astype(jnp.float32), dtype)
    )


@pytest.mark.parametrize("dtype", wire.SMALL)
def test_under_jit_the_same_bytes_go_out(dtype):
    x = jnp.asarray(random_rows(2, 3, (41,)))
    eager, jitted = wire.encode(x, dtype), jax.jit(lambda x: wire.encode(x, dtype))(x)
    for a, b in zip(eager, jitted, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_wide_format_needs_no_scales():
    with pytest.raises(UsageError, match="'bfloat16' needs no scales"):
        wire.encode(jnp.ones(3), "bfloat16")
