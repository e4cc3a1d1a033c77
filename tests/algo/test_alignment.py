"""What parameters become when a commit arrives, against plain NumPy."""

# Trees of arrays, which the checker takes for opaque type variables.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

from jdiloco.algo import alignment
from jdiloco.testing import oracle
from tests.algo.support import distance, fingerprint

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ULP = {"float32": 2e-7, "bfloat16": 2**-8, "float16": 2**-11}


def leaf(seed: int, dtype: str = "float32", shape: tuple[int, ...] = (500,)) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(values.astype(DTYPES[dtype]))


def three(dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    """Parameters, what they were at a snapshot, and a commit."""
    since = leaf(1, dtype)
    return since + leaf(2, dtype) / 8, since, since + leaf(3, dtype) / 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mixing", [0.1, 0.5, 0.9])
def test_blending_is_the_formula_narrowed_once(mixing, dtype):
    params, _, committed = three(dtype)
    found = alignment.blended(params, committed, mixing=mixing)
    assert found.dtype == params.dtype
    assert not found.weak_type
    wanted = oracle.blended(params, committed, mixing)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=ULP[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_carrying_is_the_formula_in_fp32_narrowed_once(dtype):
    """To the bit; at the parameters' own precision the difference would be rounded before it."""
    params, since, committed = three(dtype)
    found = alignment.carried(params, since, committed)
    assert (found.dtype, found.weak_type) == (params.dtype, False)
    wide = [np.asarray(x).astype(np.float32) for x in (params, since, committed)]
    wanted = (wide[2] + (wide[0] - wide[1])).astype(DTYPES[dtype])
    np.testing.assert_array_equal(np.asarray(found), wanted)
    exact = oracle.narrow(oracle.carried(params, since, committed), DTYPES[dtype])
    assert distance(found, exact) <= ULP[dtype]
    if dtype != "float32":
        twice = np.asarray(committed) + (np.asarray(params) - np.asarray(since))
        assert (np.asarray(found) != twice).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_carrying_nothing_is_overwriting_to_the_bit(dtype):
    params, _, committed = three(dtype)
    assert fingerprint(alignment.carried(params, params, committed)) == fingerprint(committed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_next_delta_is_exactly_what_was_carried(dtype):
    """`anchor − params` after carrying is the rest, turned round: nothing merged is in it."""
    params, since, committed = three(dtype)
    after = alignment.carried(params, since, committed)
    rest = oracle.widen(params) - oracle.widen(since)
    delta = oracle.delta(committed, after)
    np.testing.assert_allclose(delta, -rest, atol=4 * ULP[dtype])


TREES = {
    "dict": lambda x: {"a": x, "b": {"c": x[:7]}},
    "frozen": lambda x: FrozenDict({"a": x}),
    "tuple": lambda x: (x, [x[:3]]),
    "state": lambda x: nnx.State({"a": nnx.Param(x)}),
    "alone": lambda x: x,
    "empty": lambda x: {},
    "scalar": lambda x: {"s": x[0]},
    "types": lambda x: {"a": x, "b": x.astype(jnp.bfloat16), "c": x.astype(jnp.float16)},
}


@pytest.mark.parametrize("kind", TREES)
def test_any_tree_comes_back_as_it_was(kind):
    params, since, committed = map(TREES[kind], three())
    for found in (
        alignment.blended(params, committed, mixing=0.5),
        alignment.carried(params, since, committed),
        alignment.copied(params),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(params)
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(t)] for t in (found, params)]
        assert shapes[0] == shapes[1]
    assert bool(alignment.is_finite(params, since))


def test_eager_jit_and_vmap_give_the_same_bits():
    params, since, committed = three()
    want = fingerprint(alignment.carried(params, since, committed))
    again = jax.jit(lambda *x: alignment.carried(*x))(params, since, committed)
    assert fingerprint(again) == want
    rows = [x.reshape(5, 100) for x in (params, since, committed)]
    assert fingerprint(jax.vmap(alignment.carried)(*rows).reshape(-1)) == want


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_single_element_that_is_not_finite_is_seen(bad):
    params, since, _ = three()
    assert bool(alignment.is_finite({"a": params, "b": since}, {"a": since, "b": since}))
    sick = params.at[499].set(bad)
    assert not bool(alignment.is_finite({"a": params, "b": sick}, {"a": since, "b": since}))


def test_a_copy_is_memory_of_its_own_and_survives_donation():
    params = {"w": leaf(4, shape=(4096,))}
    before = fingerprint(params)
    copy = alignment.copied(params)
    assert copy["w"].unsafe_buffer_pointer() != params["w"].unsafe_buffer_pointer()
    gone = jax.jit(lambda t: jax.tree.map(lambda x: x * 3, t), donate_argnums=0)(params)
    jax.block_until_ready(gone)
    assert params["w"].is_deleted()
    assert fingerprint(copy) == before


def test_arguments_stay_as_they_are_and_one_program_serves_every_round():
    params, since, committed = three()
    before = fingerprint((params, since, committed))
    for _ in range(3):
        alignment.carried(params, since, committed)
        alignment.blended(params, committed, mixing=0.5)
    assert fingerprint((params, since, committed)) == before
    programs = [f._cache_size() for f in (alignment.carried, alignment.blended)]
    alignment.carried(committed, params, since)
    alignment.blended(since, params, mixing=0.5)
    assert [f._cache_size() for f in (alignment.carried, alignment.blended)] == programs
