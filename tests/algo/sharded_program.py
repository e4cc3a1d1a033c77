"""Run by test_sharded on eight pretended devices: stacks, parameters and state that are sharded."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jdiloco.algo import diloco_outer, rda


def put(mesh, spec, value):
    return jax.device_put(value, NamedSharding(mesh, spec))


def check(mode):
    mesh = jax.make_mesh((4, 2), ("learner", "model"), axis_types=(mode, mode))
    tx, rng = diloco_outer(rda()), np.random.default_rng(0)
    host = rng.normal(size=(8, 64, 32)).astype(np.float32)
    with jax.set_mesh(mesh):
        params = {"w": put(mesh, P(None, "model"), jnp.ones((64, 32), jnp.bfloat16))}
        for init in (tx.init, jax.jit(tx.init)):
            state = init(params)
            for leaf in (state[1].momentum["w"], state[2].master["w"]):
                assert leaf.sharding.spec == P(None, "model"), (mode, leaf.sharding)
                assert leaf.addressable_shards[0].data.shape == (64, 16)
        for spec, weight_spec in (
            (P("learner", None, "model"), P()),
            (P("learner"), P("learner")),
            (P(None, "learner", "model"), P()),
        ):
            deltas = {"w": put(mesh, spec, host)}
            weights = put(mesh, weight_spec, jnp.arange(1.0, 9.0))
            for update in (tx.update, jax.jit(tx.update)):
                updates, after = update(deltas, state, params, weights=weights)
                jax.block_until_ready(updates)
                if mode == AxisType.Explicit:
                    assert after[1].momentum["w"].sharding.spec == P(None, "model")
                yield np.asarray(after[1].momentum["w"])


def single():
    tx, host = diloco_outer(rda()), np.random.default_rng(0).normal(size=(8, 64, 32))
    params = {"w": jnp.ones((64, 32), jnp.bfloat16)}
    deltas = {"w": jnp.asarray(host, jnp.float32)}
    _, state = tx.update(deltas, tx.init(params), params, weights=jnp.arange(1.0, 9.0))
    return np.asarray(state[1].momentum["w"])


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    want = single()
    for mode in (AxisType.Auto, AxisType.Explicit):
        for momentum in check(mode):
            assert np.linalg.norm(momentum - want) <= 1e-6 * np.linalg.norm(want), mode
    print("agreed")
