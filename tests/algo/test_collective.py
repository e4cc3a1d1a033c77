"""Learners that are replicas of one program: the merge goes over a mapped axis."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdiloco.algo import diloco_outer, rda, weighted_mean
from jdiloco.errors import UsageError
from tests.algo.support import distance, random_rows
from tests.algo.test_sharded import on_eight_devices


@pytest.mark.multiprocess
def test_every_replica_gets_what_the_stacked_form_gives():
    """Under shard_map on automatic and explicit axes, all of them manual or some; under pmap and
    vmap; with a tensor that another axis cuts, and a local stack of learners."""
    assert "agreed" in on_eight_devices("tests.algo.collective_program")


def learners(tx, deltas, weights, params):
    """Updates and state, the same for every learner, over a mapped axis."""

    def one(delta, weight):
        return tx.update(delta, tx.init(params), params, weights=weight)

    return jax.vmap(one, axis_name="learner", out_axes=None)(deltas, weights)


@pytest.mark.parametrize("merge", [rda(), weighted_mean()])
def test_a_replica_whose_weight_is_zero_takes_no_part_whatever_it_holds(merge):
    params = {"w": jnp.ones(5)}
    rows = random_rows(0, 3, (5,))
    tx = diloco_outer(merge, axis_name="learner")
    padded = {"w": jnp.asarray(np.vstack([rows, np.full((1, 5), np.inf)], dtype=np.float32))}
    updates, state = learners(tx, padded, jnp.array([1.0, 2, 3, 0]), params)
    stacked = diloco_outer(merge)
    want, _ = stacked.update(
        {"w": jnp.asarray(rows)}, stacked.init(params), params, weights=[1.0, 2, 3]
    )
    assert distance(updates["w"], want["w"]) <= 1e-6
    assert state[0].turnout == (3, 0)


def test_where_no_replica_takes_part_the_round_is_void():
    params = {"w": jnp.ones(3)}
    tx = diloco_outer(axis_name="learner")
    deltas = {"w": jnp.full((2, 3), jnp.nan)}
    updates, state = learners(tx, deltas, jnp.ones(2), params)
    assert not updates["w"].any()
    assert (int(state[0].turnout.nonfinite), int(state[1].round)) == (2, 0)


def test_directions_that_cancel_over_the_axis_give_zero():
    d = random_rows(3, 1, (1000,))[0]
    tx = diloco_outer(axis_name="learner")
    deltas = {"w": jnp.asarray(np.stack([d, -2 * d]))}
    updates, _ = learners(tx, deltas, jnp.ones(2), {"w": jnp.zeros(1000)})
    assert not updates["w"].any()


def test_weights_may_be_plain_numbers():
    params = {"w": jnp.zeros(3)}
    tx = diloco_outer(weighted_mean(), outer_lr=1.0, outer_momentum=0.0, axis_name="learner")
    update = functools.partial(tx.update, state=tx.init(params), params=params, weights=2.5)
    deltas = {"w": jnp.asarray([[1.0, 2, 3], [3.0, 2, 1]])}
    updates, _ = jax.vmap(lambda d: update(d), axis_name="learner", out_axes=None)(deltas)
    np.testing.assert_array_equal(updates["w"], [-2.0, -2, -2])


def test_an_axis_that_nobody_maps_is_refused_with_the_way_out():
    params = {"w": jnp.ones(3)}
    tx = diloco_outer(axis_name="learner")
    with pytest.raises(UsageError, match=r"no such axis is mapped.*shard_map"):
        tx.update({"w": jnp.ones(3)}, tx.init(params), params, weights=1.0)


def test_a_local_stack_without_as_many_weights_is_refused():
    """What `shard_map` hands over is one axis longer; taken for a delta it would change shape."""
    params = {"w": jnp.ones(3)}
    tx = diloco_outer(axis_name="learner")
    with pytest.raises(UsageError, match=r"has shape \(1, 1, 3\), wanted \(1, 3\)"):
        learners(tx, {"w": jnp.ones((2, 1, 3))}, jnp.ones(2), params)
