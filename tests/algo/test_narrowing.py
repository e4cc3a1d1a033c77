"""Updates that a narrow commit can carry, as a transformation: by the oracle, and what is kept."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.algo import diloco_outer, narrow_updates, outer_nesterov, weighted_mean
from jdiloco.algo.wire import BITS, narrows, on_wire
from jdiloco.errors import UsageError
from jdiloco.testing import oracle
from tests.algo.support import SEEDS, few, fingerprint, random_rows

DTYPES = ("float32", "bfloat16", "float16")
SIZE = (4, 40)


def steps_of(seed, rounds, scale=1e-2):
    return random_rows(seed, rounds, SIZE, scale=scale)


def start(seed, dtype):
    return random_rows(seed, 1, SIZE)[0].astype(dtype)


def play(tx, params, steps, *, jit=True):
    """Parameters and state after each update."""
    update, state = jax.jit(tx.update) if jit else tx.update, tx.init(params)
    for step in steps:
        updates, state = update(jnp.asarray(step), state, params)
        params = optax.apply_updates(params, updates)
        yield params, state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", BITS)
def test_parameters_go_where_a_learner_goes_that_adds_what_arrives(wire, dtype):
    """By the oracle, over 20 rounds, to the rounding of fp32."""
    anchor, master = start(1, dtype), oracle.widen(start(1, dtype))
    steps = steps_of(2, 20)
    found = play(narrow_updates(wire), jnp.asarray(anchor), steps)
    for step, (params, _) in zip(steps, found, strict=True):
        master = master + step
        if narrows(wire, dtype):
            sent = oracle.on_wire(master - oracle.widen(anchor), wire)
            anchor = oracle.rebuilt(anchor, sent)
        else:
            anchor = oracle.narrow(master, dtype)
        close = 1e-5 if dtype == "float32" else 0.0
        np.testing.assert_allclose(oracle.widen(params), oracle.widen(anchor), atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", [wire for wire in BITS if wire != "float32"])
@few
@given(seed=st.integers(0, SEEDS), power=st.integers(-20, 8))
def test_nothing_is_lost(wire, dtype, seed, power):
    """Parameters and rest add up to the exact sum of all updates."""
    scale = 2.0**power
    exact = oracle.widen((start(seed, "float32") * scale).astype(dtype))
    steps = steps_of(seed + 1, 5, scale=scale / 50)
    size = np.abs(exact).max()
    params = jnp.asarray(exact.astype(dtype))
    for step, (now, state) in zip(steps, play(narrow_updates(wire), params, steps), strict=True):
        exact = exact + step
        rest = 0.0 if state.rest is None else oracle.widen(state.rest)
        np.testing.assert_allclose(oracle.widen(now) + rest, exact, atol=1e-6 * size)


def test_commits_in_float32_pass_float32_parameters_through():
    tx = narrow_updates("float32")
    params = jnp.ones(3)
    assert tx.init(params).rest is None
    updates, _ = tx.update(jnp.full(3, 0.1), tx.init(params))
    np.testing.assert_array_equal(updates, np.full(3, 0.1, np.float32))


def test_parameters_that_were_changed_from_outside_go_on_from_where_they_are():
    tx = narrow_updates("float8_e4m3fn")
    *_, (params, state) = play(tx, jnp.zeros(40), steps_of(3, 4)[:, 0])
    updates, _ = tx.update(jnp.zeros(40), state, params + 5)
    np.testing.assert_allclose(params + 5 + updates, params + 5, atol=1e-3)


def test_a_sum_beyond_the_type_stays_at_its_end():
    tx = narrow_updates("float8_e4m3fn")
    params = jnp.asarray([60000.0, 1.0], jnp.float16)
    updates, _ = tx.update(jnp.asarray([9000.0, 0.5]), tx.init(params), params)
    found = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(found, np.array([65504, 1.5], np.float16))


@pytest.mark.parametrize("wire", BITS)
def test_eager_and_jitted_updates_have_the_same_bytes(wire):
    steps, params = steps_of(4, 3), jnp.asarray(start(4, "float32"))
    runs = [list(play(narrow_updates(wire), params, steps, jit=jit)) for jit in (False, True)]
    assert fingerprint(runs[0]) == fingerprint(runs[1])


def test_what_arrives_is_cut_off_at_the_end_of_a_format():
    x = jnp.asarray([1e6, -1e6, 1.0])
    np.testing.assert_array_equal(on_wire(x, "float16"), [65504, -65504, 1])
    assert np.isfinite(on_wire(jnp.asarray([3.4e38, -3.4e38]), "float8_e4m3fn")).all()


def test_parameters_are_needed_where_something_is_narrowed():
    tx = narrow_updates("float8_e4m3fn")
    with pytest.raises(UsageError, match="not passing `params`"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
    with pytest.raises(UsageError, match="`commit_dtype` 'int4' is not one of 'float32'"):
        narrow_updates("int4")


def test_a_void_round_leaves_the_rest_as_it_was():
    tx = diloco_outer(weighted_mean(), commit_dtype="float4_e2m1fn")
    params = {"w": jnp.zeros(SIZE)}
    deltas = {"w": jnp.asarray(random_rows(5, 1, SIZE))}
    updates, state = tx.update(deltas, tx.init(params), params, weights=[1.0])
    params = optax.apply_updates(params, updates)
    updates, after = tx.update(deltas, state, params, weights=[0.0])
    assert not updates["w"].any()
    assert fingerprint(after[1:]) == fingerprint(state[1:])


def test_momentum_in_bfloat16_is_the_computed_one_rounded_to_nearest():
    tx = outer_nesterov(momentum_dtype="bfloat16")
    deltas = random_rows(6, 10, SIZE)
    state, momentum = tx.init(jnp.zeros(SIZE)), np.zeros(SIZE)
    for delta in deltas:
        out, state = jax.jit(tx.update)(jnp.asarray(delta), state)
        step, momentum = oracle.outer_step(
            np.zeros(SIZE), momentum, delta, momentum_dtype="bfloat16"
        )
        assert state.momentum.dtype == jnp.bfloat16
        np.testing.assert_array_equal(oracle.widen(state.momentum), momentum)
        np.testing.assert_allclose(out, step, rtol=1e-6, atol=1e-6)
    with pytest.raises(UsageError, match="`momentum_dtype` 'float16' is not one of"):
        outer_nesterov(momentum_dtype="float16")
