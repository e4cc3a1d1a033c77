"""The library against the float64 oracle, on random trees, and `jit` against eager."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import assume, given
from hypothesis import strategies as st

from jdiloco.algo import Rda, diloco_outer, rda, weighted_mean
from jdiloco.algo.merges import merge_tree
from jdiloco.testing import oracle
from tests.algo.support import SEEDS, distance, few, fingerprint, length, more, random_rows

# Few shapes, so that compiling does not take the time.
SHAPES = {"scalar": (), "mlp/w": (3, 4), "embed/w": (2, 3), "b": (17,)}
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
DTYPES = [(F32, F32, F32, F32), (F16, F32, BF16, BF16)]
SLOTS = 6  # Every stack is padded to this many rows.

rounds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, SEEDS),
        "rows": st.integers(1, SLOTS),
        "dtypes": st.sampled_from(DTYPES),
        "weights": st.lists(st.floats(1e-3, 1e12), min_size=SLOTS, max_size=SLOTS),
        "zeros": st.sets(st.integers(0, SLOTS - 1), max_size=2),
        "scale": st.sampled_from([1e-6, 1e-3, 1.0, 1e3]),
    }
)

_merge = jax.jit(lambda merge, *rest: merge_tree(merge, *rest), static_argnums=0)


def tree_of(seed, rows, dtypes, zeros, scale, **_):
    """A stack of `SLOTS` rows; those from `rows` on hold what must not be looked at."""
    rng = np.random.default_rng(seed)
    tree = {}
    for (name, shape), dtype in zip(SHAPES.items(), dtypes, strict=True):
        values = rng.normal(size=(SLOTS, *shape)) * rng.choice([0.1, 1, 10], size=SLOTS).reshape(
            -1, *(1 for _ in shape)
        )
        values[list(zeros)] = 0
        values[rows:] = np.nan
        tree[name] = jnp.asarray(values * scale, dtype)
    return tree


def padded(weights, rows):
    return jnp.asarray([*weights[:rows], *[0.0] * (SLOTS - rows)], jnp.float32)


def tolerance(deltas, weights, merge, name):
    """What fp32 can hold, relative to the length of the result."""
    if isinstance(merge, Rda) and "embed" not in name:
        u = oracle.mean_direction(deltas, weights)
        assume(u == 0 or u > 1e-5)
        return 1e-6 if u >= 0.1 or u == 0 else 2e-7 / u
    want = length(oracle.weighted_mean(deltas, weights))
    lengths = oracle.weighted_mean([oracle.norm(d) for d in deltas], weights)
    return 1e-6 + 1e-7 * float(lengths) / max(want, 1e-30)


def plain(merge, name):
    direct = not isinstance(merge, Rda) or "embed" in name
    return oracle.weighted_mean if direct else oracle.rda


@more
@given(drawn=rounds, merge=st.sampled_from([rda(), weighted_mean()]))
def test_both_merges_agree_with_the_oracle_on_random_trees(drawn, merge):
    tree, rows = tree_of(**drawn), drawn["rows"]
    result, turnout = _merge(merge, tree, padded(drawn["weights"], rows))
    assert turnout.merged == rows
    for name, stack in tree.items():
        deltas, weights = list(stack[:rows]), drawn["weights"][:rows]
        want = plain(merge, name)(deltas, weights)
        error = length(result[name] - want)
        assert error <= tolerance(deltas, weights, merge, name) * length(want), name


@few
@given(
    seed=st.integers(0, SEEDS),
    noise=st.sampled_from([0.1, 0.01, 1e-3]),
    factor=st.floats(0.01, 100),
)
def test_directions_that_nearly_cancel_are_as_exact_as_fp32_allows_under_jit(seed, noise, factor):
    d, e = random_rows(seed, 2, (1000,))
    deltas = [d, -factor * (d + noise * e)]
    deltas = [np.asarray(x, np.float32) for x in deltas]
    tree, _ = _merge(rda(), {"w": jnp.asarray(np.stack(deltas))}, jnp.ones(2))
    u = oracle.mean_direction(deltas, [1, 1])
    assert distance(tree["w"], oracle.rda(deltas, [1, 1])) <= max(1e-6, 2e-7 / u)


@few
@given(seed=st.integers(0, SEEDS), factor=st.floats(1e-6, 1e6), size=st.sampled_from([2, 100]))
def test_random_directions_that_cancel_give_zero_at_any_length_under_jit(seed, factor, size):
    d = random_rows(seed, 1, (size,))[0]
    stack = jnp.asarray(np.stack([d, np.float32(-factor) * d]))
    tree, _ = _merge(rda(), {"w": stack}, jnp.ones(2))
    assert not tree["w"].any()


@few
@given(drawn=rounds, merge=st.sampled_from([rda(), weighted_mean()]))
def test_jit_and_eager_run_the_same_kernels(drawn, merge):
    tree, weights = tree_of(**drawn), padded(drawn["weights"], drawn["rows"])
    eager, _ = merge_tree(merge, tree, weights)
    jitted, _ = _merge(merge, tree, weights)
    for name, stack in tree.items():
        deltas, used = list(stack[: drawn["rows"]]), drawn["weights"][: drawn["rows"]]
        limit = tolerance(deltas, used, merge, name) * length(eager[name])
        assert length(jitted[name] - eager[name]) <= limit


@few
@given(
    drawn=rounds,
    lr=st.floats(0.01, 2.0),
    momentum=st.floats(0.0, 0.95),
    merge=st.sampled_from([rda(), weighted_mean()]),
)
def test_three_rounds_of_diloco_outer_agree_with_the_oracle(drawn, lr, momentum, merge):
    """fp32 parameters; the merge's own tolerance is the test above."""
    names, rows = list(SHAPES), drawn["rows"]
    rng = np.random.default_rng(drawn["seed"])
    params = {n: jnp.asarray(rng.normal(size=SHAPES[n]), jnp.float32) for n in names}
    tx = diloco_outer(merge, lr, momentum)
    state, want = tx.init(params), {n: (params[n], np.zeros(SHAPES[n])) for n in names}
    for shift in range(3):
        tree = tree_of(**{**drawn, "seed": (drawn["seed"] + shift) % SEEDS})
        updates, state = tx.update(tree, state, params, weights=padded(drawn["weights"], rows))
        params = optax.apply_updates(params, updates)
        merged, _ = _merge(merge, tree, padded(drawn["weights"], rows))
        for n in names:
            want[n] = oracle.outer_step(*want[n], merged[n], outer_lr=lr, outer_momentum=momentum)
    for n in names:
        scale = max(length(want[n][0]), length(want[n][1]), 1.0)
        assert length(params[n] - want[n][0]) <= 3e-6 * scale
        assert length(state[1].momentum[n] - want[n][1]) <= 3e-6 * scale


@few
@given(drawn=rounds, dtype=st.sampled_from([jnp.bfloat16, jnp.float16]))
def test_narrow_parameters_are_the_rounding_of_the_oracles_master(drawn, dtype):
    """The oracle is given fp32 momentum and master, so that only the rounding is compared."""
    rng = np.random.default_rng(drawn["seed"])
    params = {"b": jnp.asarray(rng.normal(size=(17,)), dtype)}
    tx = diloco_outer(weighted_mean())
    state = tx.init(params)
    for _ in range(3):
        deltas = {"b": jnp.asarray(rng.normal(size=(2, 17)) * 1e-3, jnp.float32)}
        updates, state = tx.update(deltas, state, params, weights=[1.0, 2.0])
        params = optax.apply_updates(params, updates)
        assert updates["b"].dtype == jnp.float32
        assert params["b"].dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(params["b"]), oracle.narrow(state[2].master["b"], dtype)
        )


def test_equal_inputs_give_equal_bytes():
    tree = {"w": jnp.asarray(random_rows(0, 4, (1000,))), "embed": jnp.ones((4, 3))}
    first, _ = _merge(rda(), tree, jnp.arange(1.0, 5.0))
    for _ in range(5):
        again, _ = _merge(rda(), tree, jnp.arange(1.0, 5.0))
        assert fingerprint(again) == fingerprint(first)
