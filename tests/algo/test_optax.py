"""diloco_outer among other optax transformations, under NNX, and under JAX's own maps."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import functools
import re

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jdiloco.algo import diloco_outer, fp32_master, merge_deltas, outer_nesterov, rda
from jdiloco.algo.checks import CHAIN
from jdiloco.errors import UsageError
from tests.algo.support import distance, fingerprint, random_rows

P = {"a": jnp.ones((4, 5)), "b": jnp.ones(3)}
D = {"a": jnp.ones((3, 4, 5)), "b": jnp.ones((3, 3))}
W = [1.0, 1.0, 1.0]
LABELS = {"a": "trained", "b": "frozen"}
MASK = {"a": True, "b": False}


def one_round(tx, deltas=D, params=P, weights=W):
    updates, _ = tx.update(deltas, tx.init(params), params, weights=weights)
    return optax.apply_updates(params, updates)


def test_the_chain_in_every_error_is_python_that_works():
    names = {"optax": optax, "merge_deltas": merge_deltas, "rda": rda}
    names |= {"outer_nesterov": outer_nesterov, "fp32_master": fp32_master}
    after = one_round(eval(CHAIN, names))
    moved = jax.tree.map(jnp.subtract, P, after)
    assert optax.tree.norm(moved) == pytest.approx(1.33, rel=1e-5)


def test_diloco_outer_is_its_chain():
    params = {"a": jnp.ones((4, 5), jnp.bfloat16), "b": jnp.ones(3)}
    chain = optax.chain(merge_deltas(rda()), outer_nesterov(), fp32_master())
    results = []
    for tx in (diloco_outer(), chain):
        state = tx.init(params)
        _, state = tx.update(D, state, params, weights=W)
        results.append(fingerprint(tx.update(D, state, params, weights=W)))
    assert results[0] == results[1]
    assert jax.tree.structure(diloco_outer().init(params)) == jax.tree.structure(chain.init(params))


AFTER_THE_MERGE = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "masked": lambda tx: optax.masked(tx, MASK),
    "partition": lambda tx: optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, LABELS),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda step, **_: step >= 0, forward_extra_args=False
    ),
    "clip before": lambda tx: optax.chain(optax.clip(10.0), tx),
    "clip after": lambda tx: optax.chain(tx, optax.clip(10.0)),
    "flatten": optax.flatten,
}


@pytest.mark.parametrize("name", AFTER_THE_MERGE)
def test_what_wraps_or_masks_works_after_the_merge(name):
    tx = optax.chain(merge_deltas(rda()), AFTER_THE_MERGE[name](outer_nesterov()))
    after = one_round(tx)
    np.testing.assert_allclose(after["a"], 1 - 1.33, atol=1e-6)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, P)


def test_a_frozen_group_stays_where_it_is():
    tx = optax.chain(merge_deltas(rda()), AFTER_THE_MERGE["partition"](outer_nesterov()))
    np.testing.assert_array_equal(one_round(tx)["b"], P["b"])


def test_a_group_without_leaves_is_no_trouble():
    groups = {"trained": diloco_outer(), "frozen": diloco_outer(), "empty": diloco_outer()}
    after = one_round(optax.partition(groups, LABELS))
    np.testing.assert_allclose(after["b"], 1 - 1.33, atol=1e-6)


def test_other_optimisers_may_take_the_outer_step():
    tx = optax.chain(merge_deltas(rda()), optax.adam(1e-3), fp32_master())
    np.testing.assert_allclose(one_round(tx)["a"], 1 - 1e-3, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda tx: optax.MultiSteps(tx, 2), optax.flatten])
def test_wrapping_the_merge_itself_is_refused_with_the_chain_that_works(wrap):
    with pytest.raises(UsageError, match=re.escape(CHAIN)):
        one_round(wrap(diloco_outer()))


def test_masking_the_merge_alone_is_refused_with_the_chain_that_works():
    """The leaf that is masked out stays stacked."""
    for masked in (
        optax.masked(merge_deltas(rda()), MASK),
        optax.partition({"trained": merge_deltas(rda()), "frozen": optax.set_to_zero()}, LABELS),
    ):
        with pytest.raises(UsageError, match=rf"'b' has shape \(3, 3\).*{re.escape(CHAIN)}"):
            one_round(optax.chain(masked, outer_nesterov()))


def test_what_jax_and_optax_refuse_first_is_worded_as_our_documentation_says():
    documented = " ".join((diloco_outer.__doc__ or "").split())
    for tx, message in [
        (optax.apply_if_finite(diloco_outer(), 3), "cond branches must have equal output types"),
        (optax.lookahead(diloco_outer(), 5, 0.5), "unexpected keyword argument 'weights'"),
    ]:
        params = P
        if "weights" in message:
            params = optax.LookaheadParams.init_synced(P)
        with pytest.raises(TypeError, match=message):
            tx.update(D, tx.init(params), params, weights=W)
        assert message in documented
    state = TrainState.create(apply_fn=lambda x: x, params=P, tx=diloco_outer())
    with pytest.raises(UsageError, match="got None"):
        state.apply_gradients(grads=D, weights=W)
    with pytest.raises(OverflowError):
        jax.jit(lambda w: one_round(diloco_outer(), weights=w))([3_000_000_000, 1, 1])


# --- Hyperparameters.


def test_injected_hyperparameters_can_be_changed_between_rounds():
    tx = optax.inject_hyperparams(diloco_outer)(merge=rda(), outer_lr=0.7, outer_momentum=0.0)
    state = tx.init(P)
    state.hyperparams["outer_lr"] = jnp.float32(0.1)
    updates, _ = jax.jit(tx.update)(D, state, P, weights=W)
    np.testing.assert_allclose(updates["b"], -0.1, rtol=1e-6)


def test_an_injected_schedule_counts_rounds():
    tx = optax.inject_hyperparams(diloco_outer)(
        outer_lr=optax.linear_schedule(1.0, 0.0, 2), outer_momentum=0.0
    )
    state, seen = tx.init(P), []
    for _ in range(3):
        updates, state = tx.update(D, state, P, weights=W)
        seen.append(float(updates["b"][0]))
    assert seen == pytest.approx([-1.0, -0.5, 0.0])


def test_a_schedule_of_optax_counts_rounds_under_jit():
    tx = diloco_outer(outer_lr=optax.linear_schedule(1.0, 0.0, 2), outer_momentum=0.0)
    state, seen, update = tx.init(P), [], jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(D, state, P, weights=W)
        seen.append(float(updates["b"][0]))
    assert seen == pytest.approx([-1.0, -0.5, 0.0])


def test_injection_keeps_the_rate_of_narrow_parameters_in_fp32_when_told_to():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), P)
    rates = []
    for options in ({"hyperparam_dtype": jnp.float32}, {}):
        tx = optax.inject_hyperparams(diloco_outer, **options)(outer_lr=0.7)
        _, state = tx.update(D, tx.init(params), params, weights=W)
        rates.append(float(state.hyperparams["outer_lr"]))
    assert rates == pytest.approx([0.7, 0.69921875])


# --- NNX and Linen.


class Tiny(nnx.Module):
    def __init__(self, dtype):
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0), param_dtype=dtype)
        self.embed = nnx.Embed(3, 2, rngs=nnx.Rngs(1), param_dtype=dtype)


def stack_of(state):
    return jax.tree.map(lambda x: jnp.stack([x, 3 * x]).astype(jnp.float32) / 100, state)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_nnx_optimizer_takes_the_outer_step_eager_and_jitted_alike(dtype):
    results = []
    for wrap in (lambda f: f, nnx.jit):
        model = Tiny(dtype)
        optimizer = nnx.Optimizer(model, diloco_outer(), wrt=nnx.Param)
        deltas = stack_of(nnx.state(model, nnx.Param))
        before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        step = wrap(lambda model, optimizer, deltas, w: optimizer.update(model, deltas, weights=w))
        for _ in range(2):
            step(model, optimizer, deltas, jnp.array([1.0, 1.0]))
        after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(dtype)}
        results.append(after)
    for eager, jitted in zip(*map(jax.tree.leaves, results), strict=True):
        assert distance(eager.astype(jnp.float32), jitted.astype(jnp.float32)) < 1e-6
    # Both deltas lie along the parameters: 2 % of them, times 1.33 and 1.33 + 1.897 - 1.33.
    kernel, was = after["linear"]["kernel"], before["linear"]["kernel"]
    assert distance(kernel.astype(jnp.float32), (1 - 0.02 * 3.227) * was) < 0.004


def test_a_linen_train_state_steps_through_its_transformation():
    params = linen.Dense(2).init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    state = TrainState.create(apply_fn=lambda x: x, params=params, tx=diloco_outer())
    deltas = jax.tree.map(lambda p: jnp.stack([p, p]), params)
    updates, _ = state.tx.update(deltas, state.opt_state, state.params, weights=[1.0, 2.0])
    after = optax.apply_updates(state.params, updates)
    np.testing.assert_allclose(after["kernel"], (1 - 1.33) * params["kernel"], rtol=1e-5)


# --- JAX's own transformations.


def test_one_program_serves_every_set_of_weights():
    tx = diloco_outer()
    update = jax.jit(lambda *args, **kwargs: tx.update(*args, **kwargs))
    for w in ([1.0, 1, 1], [0.0, 2, 0], [5.0, 5, 1]):
        update(D, tx.init(P), P, weights=jnp.array(w))
    assert update._cache_size() == 1


def test_many_models_step_at_once_under_vmap():
    tx = diloco_outer()
    anchors = jnp.asarray(random_rows(0, 4, (5,)), jnp.bfloat16)
    deltas = jnp.asarray(random_rows(1, 4, (3, 5)))
    weights = jnp.asarray(random_rows(2, 4, (3,))) ** 2

    def step(anchor, stack, w):
        updates, _ = tx.update({"w": stack}, tx.init({"w": anchor}), {"w": anchor}, weights=w)
        return updates["w"]

    together = jax.vmap(step)(anchors, deltas, weights)
    for i in range(4):
        assert distance(together[i], step(anchors[i], deltas[i], weights[i])) < 1e-6


def test_rounds_can_be_scanned():
    tx = diloco_outer()

    def body(carry, _):
        params, state = carry
        updates, state = tx.update({"w": jnp.ones((2, 1))}, state, params, weights=jnp.ones(2))
        return (optax.apply_updates(params, updates), state), params["w"][0]

    params = {"w": jnp.zeros(1)}
    (last, _), _ = jax.lax.scan(body, (params, tx.init(params)), length=4)
    np.testing.assert_allclose(last["w"], -8.50087, atol=1e-5)


def test_state_and_parameters_can_be_donated():
    tx = diloco_outer()
    params = jax.tree.map(jnp.copy, P)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(deltas, state, params):
        updates, state = tx.update(deltas, state, params, weights=W)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(2):
        params, state = step(D, state, params)
    np.testing.assert_allclose(params["b"], 1 - 3.227, atol=1e-5)


def test_leaves_that_are_none_pass():
    params, deltas = {"w": jnp.ones(2), "none": None}, {"w": jnp.ones((1, 2)), "none": None}
    assert one_round(diloco_outer(), deltas, params, [1.0])["none"] is None
