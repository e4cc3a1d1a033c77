"""Run by test_sharded on eight pretended devices: stacks, parameters and state that are sharded."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jdiloco.algo import diloco_outer, rda
from jdiloco.algo.alignment import blended, carried


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


CUT = {"w": P("x"), "v": P(None, "x"), "embed": P("x"), "b": P("x")}
SHAPES = {"w": (16, 8), "v": (24, 8), "embed": (32, 4), "b": (8,)}


def rounds(tx, init, params, mine, since, deltas, mesh=None):
    """Three outer steps: parameters, momentum, master, and what two alignments make of them."""
    if mesh is not None:
        params, mine, since = (lying(mesh, CUT, tree) for tree in (params, mine, since))
        deltas = [lying(mesh, {k: P(None, *cut) for k, cut in CUT.items()}, d) for d in deltas]
    state, update = init(params), jax.jit(tx.update)
    for rows in deltas:
        updates, state = update(rows, state, params, weights=jnp.array([1.0, 2.0, 3.0]))
        params = jax.jit(optax.apply_updates)(params, updates)
        jax.block_until_ready(params)
    mixed = blended(mine, params, mixing=0.25), carried(mine, since, params)
    return jax.block_until_ready((params, state[1].momentum, state[2].master, *mixed))


def lying(mesh, specs, tree):
    return {name: put(mesh, specs[name], leaf) for name, leaf in tree.items()}


def cut_eight_ways(mode):
    """Every tensor in eight parts gives what it gives whole, and so do momentum and master lie."""
    rng = np.random.default_rng(1)

    def draw(*rows):
        return {k: rng.normal(size=(*rows, *s)).astype(np.float32) for k, s in SHAPES.items()}

    def narrow(tree):
        return {k: jnp.asarray(x, jnp.bfloat16 if k == "v" else None) for k, x in tree.items()}

    tx = diloco_outer(rda())
    params, mine, since = narrow(draw()), narrow(draw()), narrow(draw())
    stacks = [draw(3) for _ in range(3)]
    want = rounds(tx, tx.init, params, mine, since, stacks)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(mode,))
    with jax.set_mesh(mesh):
        for init in (tx.init, jax.jit(tx.init)):
            found = rounds(tx, init, params, mine, since, stacks, mesh)
            for which, (got, single) in enumerate(zip(found, want, strict=True)):
                for name, leaf in single.items():
                    compare(mesh, (mode, which, name), got[name], leaf)


def compare(mesh, tag, got, want):
    if want is None:
        assert got is None, tag
        return
    a, b = (np.asarray(x, np.float32) for x in (got, want))
    assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b), (tag, a, b)
    wanted = NamedSharding(mesh, CUT[tag[2]])
    assert got.sharding.is_equivalent_to(wanted, got.ndim), (tag, got.sharding)
    held = {shard.data.nbytes * 8 for shard in got.addressable_shards}
    assert held == {got.nbytes}, (tag, held)


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    for mode in (AxisType.Auto, AxisType.Explicit):
        cut_eight_ways(mode)
    want = single()
    for mode in (AxisType.Auto, AxisType.Explicit):
        for momentum in check(mode):
            assert np.linalg.norm(momentum - want) <= 1e-6 * np.linalg.norm(want), mode
    print("agreed")
