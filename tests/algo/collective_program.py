"""Run by test_collective on eight pretended devices: learners that are replicas of one program."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jdiloco.algo import diloco_outer, rda, weighted_mean

LEARNERS = 4
MERGES = (rda(), weighted_mean())
WEIGHTS = np.arange(1.0, LEARNERS + 1, dtype=np.float32)
PARAMS = {"w": jnp.ones((64, 32), jnp.bfloat16), "embed": jnp.ones((8, 6)), "b": jnp.ones(6)}
CUT = {"w": P(None, "model"), "embed": P(), "b": P()}  # Over the axis that is not the learners'.


@functools.cache
def deltas(rows=LEARNERS, bad=None):
    """A stack for each parameter; row `bad` of one tensor holds a NaN in a corner."""
    rng = np.random.default_rng(0)
    tree = {k: rng.normal(size=(rows, *p.shape)).astype(np.float32) for k, p in PARAMS.items()}
    if bad is not None:
        tree["w"][bad, -1, -1] = np.nan
    return tree


def wanted(merge, weights=WEIGHTS, **which):
    """What the stacked form gives for the same contributions."""
    tx = diloco_outer(merge)
    return tx.update(deltas(**which), tx.init(PARAMS), PARAMS, weights=weights)


def agree(found, want, tag):
    """Momentum of every tensor to 1e-6, and the same turnout."""
    assert found[0].turnout == want[0].turnout, (tag, found[0], want[0])
    for name, momentum in want[1].momentum.items():
        error = np.linalg.norm(np.asarray(found[1].momentum[name]) - momentum)
        assert error <= 1e-6 * np.linalg.norm(momentum), (tag, name, error)


def identical(tree, tag):
    """Every shard of every leaf that is meant to be the same holds the same bytes."""
    for leaf in jax.tree.leaves(tree):
        by_index = {}
        for shard in leaf.addressable_shards:
            by_index.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(seen) == 1 for seen in by_index.values()), tag


def step(tx, delta, weight, params):
    return tx.update(delta, tx.init(params), params, weights=weight)


def state_specs(tx):
    """The specs of a state: momentum and master lie as the parameters do."""
    merge, outer, master = jax.eval_shape(tx.init, PARAMS)
    held = {k: None if v is None else CUT[k] for k, v in master.master.items()}
    return (jax.tree.map(lambda _: P(), merge), type(outer)(P(), CUT), type(master)(held))


def under_shard_map(mode, check_vma, merge, **which):
    """All axes manual: the learners' own, and one that cuts `w`."""
    mesh = jax.make_mesh((LEARNERS, 2), ("learner", "model"), axis_types=(mode, mode))
    tx = diloco_outer(merge, axis_name="learner")
    specs = ({k: P("learner", *spec) for k, spec in CUT.items()}, P("learner"), CUT)
    program = jax.shard_map(
        functools.partial(step, tx),
        mesh=mesh,
        in_specs=specs,
        out_specs=(CUT, state_specs(tx)),
        check_vma=check_vma,
    )
    place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        inputs = jax.device_put((deltas(**which), WEIGHTS, PARAMS), place(specs))
        updates, state = jax.jit(program)(*inputs)
        jax.block_until_ready(updates)
    assert state[1].momentum["w"].addressable_shards[0].data.shape == (64, 16)
    assert state[2].master["w"].sharding.spec == CUT["w"]
    identical((updates, state), (mode, check_vma))
    return state


def under_part_of_a_mesh(mode, merge):
    """The learners' axis is manual; the other one is the compiler's."""
    mesh = jax.make_mesh((LEARNERS, 2), ("learner", "model"), axis_types=(mode, mode))
    tx = diloco_outer(merge, axis_name="learner")
    program = jax.shard_map(
        functools.partial(step, tx),
        mesh=mesh,
        in_specs=(P("learner"), P("learner"), P()),
        out_specs=P(),
        axis_names={"learner"},
    )
    learners = NamedSharding(mesh, P("learner"))
    lies = {k: NamedSharding(mesh, spec) for k, spec in CUT.items()}
    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, lies)
        updates, state = jax.jit(program)(*jax.device_put((deltas(), WEIGHTS), learners), params)
        jax.block_until_ready(updates)
    return state


def under_two_axes(merge):
    """16 learners on 8 devices over two axes: each device holds a stack of two."""
    mesh = jax.make_mesh((2, 4), ("slice", "host"), axis_types=(AxisType.Auto,) * 2)
    tx = diloco_outer(merge, axis_name=("slice", "host"))
    both = P(("slice", "host"))
    program = jax.shard_map(
        functools.partial(step, tx), mesh=mesh, in_specs=(both, both, P()), out_specs=P()
    )
    weights = np.arange(1.0, 17.0, dtype=np.float32)
    _, state = jax.jit(program)(deltas(rows=16), weights, PARAMS)
    agree(jax.block_until_ready(state), wanted(merge, weights, rows=16)[1], "two axes")


def under_pmap(merge):
    tx = diloco_outer(merge, axis_name="learner")
    program = jax.pmap(functools.partial(step, tx), axis_name="learner", in_axes=(0, 0, None))
    _, state = jax.block_until_ready(program(deltas(), WEIGHTS, PARAMS))
    for leaf in map(np.asarray, jax.tree.leaves(state)):
        assert all(row.tobytes() == leaf[0].tobytes() for row in leaf)
    return jax.tree.map(lambda leaf: leaf[0], state)


def under_vmap(merge):
    """`out_axes=None` keeps one copy of the state, since it is the same for all."""
    tx = diloco_outer(merge, axis_name="learner")
    program = jax.vmap(
        functools.partial(step, tx), in_axes=(0, 0, None), out_axes=None, axis_name="learner"
    )
    return jax.jit(program)(deltas(), WEIGHTS, PARAMS)[1]


def main():
    assert len(jax.devices()) == 8
    for merge in MERGES:
        _, want = wanted(merge)
        for mode in (AxisType.Auto, AxisType.Explicit):
            for check_vma in (True, False):
                agree(under_shard_map(mode, check_vma, merge), want, (mode, check_vma))
            agree(under_part_of_a_mesh(mode, merge), want, (mode, "part"))
        agree(under_pmap(merge), want, "pmap")
        agree(under_vmap(merge), want, "vmap")
        under_two_axes(merge)
        bad = under_shard_map(AxisType.Auto, True, merge, bad=1)
        agree(bad, wanted(merge, bad=1)[1], "not finite on one shard of one learner")
    print("agreed")


if __name__ == "__main__":
    main()
