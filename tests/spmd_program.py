"""Run by test_spmd on eight pretended devices: learners along an axis of a mesh."""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdiloco
from jdiloco import spmd

LEARNERS, ROUNDS = 8, 6
OPTIMIZER = optax.adam(1e-2)
TRUTH = jnp.arange(64.0).reshape(16, 4) / 64
PARAMS = {"w": jnp.zeros((16, 4)), "embed": jnp.ones((4,))}


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["embed"] - x @ TRUTH) ** 2)


def step(params, inner, batch):
    opt_state, key = inner
    key, noise = jax.random.split(key)
    batch = batch + 0.01 * jax.random.normal(noise, batch.shape)
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), (opt_state, key), value


def train(algorithm, params, **where):
    inner = (OPTIMIZER.init(params), jax.random.key(1))
    state = spmd.init(algorithm, params, inner, learners=LEARNERS, **where)
    data = np.random.default_rng(0).normal(size=(ROUNDS, LEARNERS, 4, 8, 16))
    for batches in data.astype(np.float32):
        state, losses = spmd.round(algorithm, step, state, batches, samples=8, **where)
        jax.block_until_ready(state)
        assert losses.shape == (LEARNERS, 4)
    return state


def on_mesh(algorithm, shape, mode):
    mesh = jax.make_mesh(shape, ("learner", "model"), axis_types=(mode, mode))
    cut = {"w": P("model"), "embed": P()}
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, {k: NamedSharding(mesh, s) for k, s in cut.items()})
        state = train(algorithm, params, mesh=mesh)
    held = state.params["w"]
    assert held.sharding.spec[0] == "learner", held.sharding
    rows = LEARNERS // shape[0]
    assert held.addressable_shards[0].data.shape == (rows, 16 // shape[1], 4), held.sharding
    momentum = next(o[1].momentum["w"] for o in state.outer if "w" in o[1].momentum)
    assert momentum.addressable_shards[0].data.shape == (16 // shape[1], 4), momentum.sharding
    return state


def walk(params, inner, batch):
    """Training without sums, so that whatever differs on a mesh differs in the rounds."""
    return {name: x + batch[name] for name, x in params.items()}, inner, jnp.zeros(())


def blended(algorithm, params, **where):
    """What is committed, and what the learners hold, after rounds that blend."""
    rng = np.random.default_rng(2)
    state = spmd.init(algorithm, params, learners=LEARNERS, **where)
    for _ in range(ROUNDS):
        size = (LEARNERS, 4)
        batch = {k: rng.normal(size=(*size, *x.shape)) for k, x in PARAMS.items()}
        batch = {k: x.astype(np.float32) for k, x in batch.items()}
        state, _ = spmd.round(algorithm, walk, state, batch, samples=1.0, **where)
        jax.block_until_ready(state)
    return state.anchor, state.params


def check_blended():
    algorithm = jdiloco.DiLoCo(
        sync_every=8, fragments=2, in_flight=2, outer_momentum=0.5, alignment=jdiloco.blend(0.5)
    )
    want = blended(algorithm, PARAMS)
    for mode in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("learner", "model"), axis_types=(mode, mode))
        with jax.set_mesh(mesh):
            params = {
                "w": jax.device_put(PARAMS["w"], NamedSharding(mesh, P("model"))),
                "embed": jax.device_put(PARAMS["embed"], NamedSharding(mesh, P())),
            }
            found = blended(algorithm, params, mesh=mesh)
        for name in PARAMS:
            for got, single in zip(found, want, strict=True):
                a, b = np.asarray(got[name]), np.asarray(single[name])
                assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b), (mode, name)


def main():
    assert len(jax.devices()) == 8
    check_blended()
    for algorithm in (
        jdiloco.DiLoCo(sync_every=4, fragments=1, outer_momentum=0.5),
        jdiloco.DiLoCo(
            sync_every=8, fragments=2, in_flight=2, outer_momentum=0.5, alignment=jdiloco.carry()
        ),
    ):
        want = train(algorithm, PARAMS)
        for shape in ((8, 1), (4, 2)):
            for mode in (AxisType.Auto, AxisType.Explicit):
                found = on_mesh(algorithm, shape, mode)
                for name in PARAMS:
                    a, b = np.asarray(found.anchor[name]), np.asarray(want.anchor[name])
                    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), (shape, mode, name)
    print("agreed")


if __name__ == "__main__":
    main()
