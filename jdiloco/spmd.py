"""K learners in one JAX program: a `lax.scan` of your own steps, then the outer step.

    algorithm = jdiloco.DiLoCo(sync_every=100, fragments=1)

    def step(params, inner, batch):                       # your own, for one learner
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, inner = optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner, loss

    state = spmd.init(algorithm, params, optimizer.init(params), learners=4)
    for batches in data:                                  # (learners, steps, ...)
        state, losses = spmd.round(algorithm, step, state, batches, samples=batch_size)
    params = state.anchor                                 # the committed model

The learners share one device (`vmap`) or, with `mesh`, lie along one of its axes; other axes of the
mesh are the compiler's, so a model may be sharded over them. Rounds, fragments, weights, merge and
outer step are those of a run in a mailbox in lock step, and give the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jdiloco.algo import alignment, wire
from jdiloco.algo.merges import finite_rows, per_row, subtracted
from jdiloco.algo.outer import diloco_outer
from jdiloco.algo.paths import NamedTree, named_leaves
from jdiloco.errors import UsageError
from jdiloco.protocol.alignment import Adaptive, Alignment, Blend, Carry
from jdiloco.protocol.schedule import gap
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.schema import Schema

Step = Callable[[Any, Any, Any], tuple[Any, Any, Any]]
"""`(params, inner, batch) -> (params, inner, aux)` for one learner and one step.

`inner` is whatever else a step carries: optimiser state, random key, batch statistics. It stays the
learner's own. Pass the same function every round: another one is another program.
"""


Part = tuple[tuple[str, int], ...]
"""The tensors of a fragment: each name, and which leaf it is in tree order."""

Parts = tuple[Part, ...]


class SpmdState(NamedTuple):
    """K learners between two rounds. `round` donates it: the one that went in is gone."""

    round: Array  # shape=(), int32. The round that comes next.
    params: PyTree[Any]  # (K, *leaf). Each learner's own parameters.
    inner: PyTree[Any]  # (K, ...). What else each learner's step carries.
    anchor: PyTree[Any]  # (*leaf). The newest committed values: evaluate and keep these.
    outer: tuple[Any, ...]  # Per fragment, the state of `diloco_outer` over its tensors.
    snapshots: tuple[Any, ...]  # Per fragment, what its tensors were when its delta was taken.
    steps: Array  # shape=(K, P), int32. Trained since the fragment's last snapshot or alignment.
    samples: Array  # shape=(K, P), fp32. The same in samples.


def steps_of(algorithm: DiLoCo, round: int) -> int:
    """Steps that `round` covers: `sync_every / fragments`, give or take one where that is broken.

    Limit case: with one fragment every round has `sync_every` steps.
    """
    return gap(round, sync_every=algorithm.sync_every, fragments=algorithm.fragments)


def init(
    algorithm: DiLoCo,
    params: PyTree[Any],
    inner: PyTree[Any] = (),
    *,
    learners: int,
    mesh: Mesh | None = None,
    axis_name: str = "learner",
) -> SpmdState:
    """`learners` copies of `params` and `inner`; typed random keys in `inner` are split instead.

    With `mesh` the copies lie along `axis_name`, as many on each of its devices; a leaf that is
    sharded over other axes of the mesh stays so. To begin with unlike learners, replace `inner`:
    `state._replace(inner=...)`.

    Raises `UsageError` when `learners` is no multiple of the axis, and for settings that a lock
    step cannot have.
    """
    _check(algorithm, learners, mesh, axis_name)
    fragments = _fragments(algorithm, params)
    tx = _outer_step(algorithm, None)
    anchor = jax.tree.map(jnp.copy, params)
    leaves = jax.tree.leaves(anchor)
    counts = np.zeros((learners, len(fragments)))
    spread = functools.partial(_spread, learners=learners, mesh=mesh, axis_name=axis_name)
    place = functools.partial(_place, mesh=mesh, axis_name=axis_name)
    copied = fragments if _takes_snapshots(algorithm) else ()
    return SpmdState(
        round=jnp.zeros((), jnp.int32),
        params=jax.tree.map(spread, params),
        inner=jax.tree.map(spread, inner),
        anchor=anchor,
        outer=tuple(tx.init({name: leaves[at] for name, at in part}) for part in fragments),
        snapshots=tuple({name: spread(leaves[at]) for name, at in part} for part in copied),
        steps=place(jnp.asarray(counts, jnp.int32)),
        samples=place(jnp.asarray(counts, jnp.float32)),
    )


def round(
    algorithm: DiLoCo,
    step: Step,
    state: SpmdState,
    batches: PyTree[Any],
    *,
    samples: Any,
    mesh: Mesh | None = None,
    axis_name: str = "learner",
) -> tuple[SpmdState, Any]:
    """Every learner trains `batches`, then one fragment is merged, stepped and aligned.

    Leaves of `batches` are `(K, steps, ...)` with `steps_of(algorithm, round)` steps; `samples` is
    how many rows a step of a learner trains on, one number or K. Returns the state after the round
    and what `step` returned last, stacked to `(K, steps, ...)`. A learner whose delta is not finite
    takes no part and goes back to the anchor.

    The first call compiles one program, and a second one where `sync_every` is no multiple of
    `fragments`. `state` is donated. `mesh` and `axis_name` are those given to `init`.

    Limit case: one learner, `sync_every=1, outer_lr=1, outer_momentum=0` is your own `step`, to
    half an ulp of the anchor.
    """
    learners = state.steps.shape[0]
    _check(algorithm, learners, mesh, axis_name)
    _check_batches(algorithm, batches, learners)
    if state.steps.shape[1] != algorithm.fragments:
        raise UsageError(
            f"`algorithm` has {algorithm.fragments} fragments, and the state was made with "
            f"{state.steps.shape[1]}. Pass the settings that `spmd.init` was given."
        )
    place = functools.partial(_place, mesh=mesh, axis_name=axis_name)
    batches, rows = jax.tree.map(place, (batches, _rows(samples, learners)))
    return _round(algorithm, step, mesh, axis_name, state, batches, rows)


def _check(algorithm: DiLoCo, learners: int, mesh: Mesh | None, axis_name: str) -> None:
    if isinstance(learners, bool) or not isinstance(learners, int) or learners < 1:
        raise UsageError(f"`learners` must be an integer of at least 1, got {learners!r}.")
    if not isinstance(axis_name, str):
        raise UsageError(f"`axis_name` is the name of one axis of the mesh, not {axis_name!r}.")
    if algorithm.overlap_steps:
        raise UsageError(
            f"`overlap_steps` is {algorithm.overlap_steps}: here a commit is taken at the end of a "
            "round, its own (0) or `in_flight - 1` rounds later (None)."
        )
    if isinstance(algorithm.alignment, Adaptive):
        raise UsageError(
            "`adaptive()` decides by the record of a round in a mailbox. Use `overwrite()`, "
            "`blend(mixing)` or `carry()` here."
        )
    if mesh is None:
        return
    if axis_name not in mesh.shape:
        raise UsageError(
            f"`axis_name` is {axis_name!r}; the mesh has {', '.join(map(repr, mesh.shape))}."
        )
    if learners % mesh.shape[axis_name]:
        raise UsageError(
            f"{learners} learners do not divide over the {mesh.shape[axis_name]} devices of axis "
            f"{axis_name!r}. Use a multiple."
        )


def _check_batches(algorithm: DiLoCo, batches: Any, learners: int) -> None:
    few, more = divmod(algorithm.sync_every, algorithm.fragments)
    allowed = {few, few + 1} if more else {few}
    shapes = {jnp.shape(leaf)[:2] for leaf in jax.tree.leaves(batches)}
    if not shapes:
        raise UsageError(
            "`batches` holds no array, so nothing says how many steps a round has. Pass what the "
            "steps are to read, if only `jnp.zeros((learners, steps))`."
        )
    if shapes - {(learners, steps) for steps in allowed}:
        raise UsageError(
            f"The leaves of `batches` begin with {sorted(shapes)}, wanted ({learners}, "
            f"{' or '.join(map(str, sorted(allowed)))}): learners, then the steps of the round "
            "(`spmd.steps_of`)."
        )


def _rows(samples: Any, learners: int) -> Array:
    try:
        rows = samples if isinstance(samples, jax.Array) else np.asarray(samples, np.float32)
    except (TypeError, ValueError):
        raise UsageError(f"`samples` is {samples!r:.60}, wanted numbers: rows per step.") from None
    if rows.shape not in ((), (learners,)):
        raise UsageError(
            f"`samples` has shape {rows.shape}, wanted one number or {learners}: rows per step."
        )
    on_host = isinstance(rows, np.ndarray)  # To look at others would wait for the device.
    if on_host and not (np.isfinite(rows).all() and (rows >= 0).all()):
        raise UsageError(f"`samples` is {rows.tolist()}: a step trains on 0 rows or more.")
    return jnp.broadcast_to(rows, (learners,)).astype(jnp.float32)


# Where things lie


def _fragments(algorithm: DiLoCo, params: Any) -> Parts:
    """The plan of fragments for this model, the same as that of a run in a mailbox."""
    named: NamedTree = named_leaves(params)
    if len(set(named.places)) != len(named.places):
        raise UsageError(
            "These parameters hold one variable in several places. Pass `nnx.state(module, "
            "nnx.Param)`, which holds it once."
        )
    where = {named.leaves[place].name: at for at, place in enumerate(named.places)}
    plan = Schema.of(named.specs, algorithm).plan
    return tuple(tuple((name, where[name]) for name in names) for names in plan)


def _spread(leaf: Any, *, learners: int, mesh: Mesh | None, axis_name: str) -> Array:
    """A copy of a leaf for every learner, each on its own device where there is a mesh."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _place(jax.random.split(leaf, learners), mesh=mesh, axis_name=axis_name)
    leaf = jnp.asarray(leaf)
    if mesh is not None and axis_name in _axes(_spec(leaf)):
        raise UsageError(
            f"A leaf is cut over {axis_name!r}, along which the learners lie: each has all of it. "
            "Put it on the other axes of the mesh, or on none."
        )
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(axis_name, *_spec(leaf)))
    copies = jax.jit(lambda x: jnp.broadcast_to(x, (learners, *x.shape)), out_shardings=sharding)
    return copies(leaf)


def _spec(leaf: Any) -> PartitionSpec:
    return getattr(getattr(leaf, "sharding", None), "spec", PartitionSpec())


def _axes(spec: PartitionSpec) -> set[Any]:
    return {name for part in spec for name in (part if isinstance(part, tuple) else (part,))}


def _place(stack: Any, *, mesh: Mesh | None, axis_name: str) -> Any:
    """Puts each learner's row on its device, unless it is there already."""
    if mesh is None or tuple(_spec(stack))[:1] == (axis_name,):
        return stack
    return jax.device_put(stack, NamedSharding(mesh, PartitionSpec(axis_name)))


# The program


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _round(
    algorithm: DiLoCo,
    step: Step,
    mesh: Mesh | None,
    axis_name: str,
    state: SpmdState,
    batches: Any,
    rows: Array,
) -> tuple[SpmdState, Any]:
    if mesh is None:
        return _learn(algorithm, step, None, state, batches, rows)
    each, same = PartitionSpec(axis_name), PartitionSpec()
    layout: tuple[Any, ...] = (same, each, each, same, same, each, each, each)
    specs = SpmdState(*layout)
    program = jax.shard_map(
        functools.partial(_learn, algorithm, step, axis_name),
        mesh=mesh,
        in_specs=(specs, each, each),
        out_specs=(specs, each),
        axis_names={axis_name},
    )
    return program(state, batches, rows)


def _learn(
    algorithm: DiLoCo,
    step: Step,
    axis_name: str | None,
    state: SpmdState,
    batches: Any,
    rows: Array,
) -> tuple[SpmdState, Any]:
    """One round of the learners at hand, which are all of them or those of one device."""

    def one_step(carry: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Any]:
        params, inner, aux = _of_step(step(*carry, batch))
        return (params, inner), aux

    def train(params: Any, inner: Any, batches: Any) -> tuple[tuple[Any, Any], Any]:
        return jax.lax.scan(one_step, (params, inner), batches)

    (params, inner), aux = jax.vmap(train)(state.params, state.inner, batches)
    count = jax.tree.leaves(batches)[0].shape[1]
    state = state._replace(
        # Or the deltas would be those of parameters that nobody has rounded.
        params=jax.lax.optimization_barrier(params),
        inner=inner,
        steps=state.steps + count,
        samples=state.samples + count * rows[:, None],
    )
    parts = _fragments(algorithm, state.anchor)
    synced = [
        functools.partial(_sync, algorithm, axis_name, parts, index) for index in range(len(parts))
    ]
    if len(synced) == 1:
        return synced[0](state), aux
    return jax.lax.switch(state.round % len(synced), synced, state), aux


def _of_step(result: Any) -> tuple[Any, Any, Any]:
    if isinstance(result, tuple) and len(result) == 3:
        return result
    found = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
    raise UsageError(
        f"`step` returned {found}, wanted three: `(params, inner, aux)`. Where there is nothing to "
        "carry or to tell return () for it."
    )


def _outer_step(algorithm: DiLoCo, axis_name: str | None) -> Any:
    return diloco_outer(
        algorithm.merge,
        algorithm.outer_lr,
        algorithm.outer_momentum,
        axis_name=axis_name,
        commit_dtype=algorithm.commit_dtype,
        momentum_dtype=algorithm.momentum_dtype,
    )


def _delay(algorithm: DiLoCo) -> int:
    """Rounds between the commit of a fragment and its alignment."""
    return 0 if algorithm.overlap_steps == 0 else algorithm.rounds_in_flight - 1


def _takes_snapshots(algorithm: DiLoCo) -> bool:
    """In step with its commit, what was trained since a snapshot is nothing."""
    return isinstance(algorithm.alignment, Carry) and _delay(algorithm) > 0


def _sync(
    algorithm: DiLoCo, axis_name: str | None, parts: Parts, index: int, state: SpmdState
) -> SpmdState:
    """Commits one fragment, and aligns the one whose commit has been on its way long enough."""
    before = state.round
    state, finite = _commit(algorithm, axis_name, parts[index], index, state)
    delay = _delay(algorithm)
    late = (index - delay) % len(parts)
    aligned = _align(algorithm, parts[late], late, state)
    if delay:
        aligned = jax.tree.map(
            lambda new, old: jnp.where(before >= delay, new, old), aligned, state
        )
    return _go_back(aligned, finite)._replace(round=before + 1)


def _commit(
    algorithm: DiLoCo, axis_name: str | None, part: Part, index: int, state: SpmdState
) -> tuple[SpmdState, Array]:
    """Merges what every learner trained, and takes the outer step. Also: whose delta is finite."""
    leaves, (anchors, treedef) = jax.tree.leaves(state.params), jax.tree.flatten(state.anchor)
    held = {name: anchors[at] for name, at in part}
    deltas = {name: _delta(anchors[at], leaves[at], algorithm.delta_dtype) for name, at in part}
    weights = jnp.square(state.samples[:, index]) / state.steps[:, index]
    updates, outer = _outer_step(algorithm, axis_name).update(
        deltas, state.outer[index], held, weights=weights
    )
    committed: Any = optax.apply_updates(held, updates)
    for name, at in part:
        anchors[at] = committed[name]
    finite = jnp.ones(weights.shape, bool)
    for delta in deltas.values():
        finite = finite_rows(delta, finite)
    zero = jnp.zeros_like(state.steps[:, index])
    state = _counted(state, index, zero, zero)._replace(
        anchor=jax.tree.unflatten(treedef, anchors), outer=_put(state.outer, index, outer)
    )
    if _takes_snapshots(algorithm):
        taken = {name: leaves[at] for name, at in part}
        state = state._replace(snapshots=_put(state.snapshots, index, taken))
    return state, finite


def _delta(anchor: Array, params: Array, dtype: str | None) -> Array:
    """The delta of every learner, as it would arrive."""
    if dtype not in wire.SMALL:
        return subtracted(anchor, params, dtype)
    delta = subtracted(anchor, params, "float32")
    return jax.vmap(lambda one: wire.decode(wire.encode(one, dtype), dtype, one.shape))(delta)


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _counted(state: SpmdState, index: int, steps: Array, samples: Array) -> SpmdState:
    """What counts of a fragment's training from here on."""
    return state._replace(
        steps=state.steps.at[:, index].set(steps),
        samples=state.samples.at[:, index].set(samples.astype(jnp.float32)),
    )


def _align(algorithm: DiLoCo, part: Part, index: int, state: SpmdState) -> SpmdState:
    """Every learner takes the committed values of a fragment; see `jdiloco.protocol.alignment`."""
    how = algorithm.alignment
    leaves, treedef = jax.tree.flatten(state.params)
    anchors = jax.tree.leaves(state.anchor)
    for name, at in part:
        mine, committed = leaves[at], jnp.broadcast_to(anchors[at], leaves[at].shape)
        if isinstance(how, Blend):
            leaves[at] = alignment.blended(mine, committed, mixing=how.mixing)
        elif _takes_snapshots(algorithm):
            leaves[at] = alignment.carried(mine, state.snapshots[index][name], committed)
        else:
            leaves[at] = committed
    steps, samples = _kept(how, state.steps[:, index], state.samples[:, index])
    return _counted(state, index, steps, samples)._replace(
        params=jax.tree.unflatten(treedef, leaves)
    )


def _kept(how: Alignment, steps: Array, samples: Array) -> tuple[Array, Array]:
    """What counters keep of the training since the snapshot: all, nothing, or a share."""
    if isinstance(how, Carry):
        return steps, samples
    share = how.mixing if isinstance(how, Blend) else 0.0
    some = (jnp.floor(share * steps).astype(steps.dtype), jnp.floor(share * samples))
    whole = (some[0] > 0) & (some[1] > 0)
    return jnp.where(whole, some[0], 0), jnp.where(whole, some[1], 0)


def _go_back(state: SpmdState, finite: Array) -> SpmdState:
    """A learner that is not finite goes back to the anchor as a whole: one step spreads it."""

    def held(mine: Array, anchor: Array) -> Array:
        if not jnp.issubdtype(mine.dtype, jnp.floating):
            return mine
        return jnp.where(per_row(finite, mine), mine, anchor)

    return state._replace(
        params=jax.tree.map(held, state.params, state.anchor),
        steps=jnp.where(finite[:, None], state.steps, 0),
        samples=jnp.where(finite[:, None], state.samples, 0),
    )
