"""The outer step as optax transformations: merge, Nesterov momentum over rounds, fp32 master.

`diloco_outer()` is `optax.chain(merge_deltas(rda()), outer_nesterov(), fp32_master())`; with a
`commit_dtype` its last link is `narrow_updates(commit_dtype)` instead. They are public because a
transformation may stand between them:

    optax.chain(
        merge_deltas(rda()), optax.clip_by_global_norm(1.0), outer_nesterov(), fp32_master()
    )

They are ordinary transformations with one difference: what goes in is not one gradient but the
deltas of a round, stacked on a leading axis, and their weights, as the keyword `weights`. From
`merge_deltas` on everything has the shapes of the parameters.

Inside `shard_map`, `pmap` or `vmap` with an `axis_name`, each replica passes its own delta and its
own weight instead, and all of them get the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jdiloco.algo.checks import (
    aligned,
    as_weights,
    check_dtype,
    check_floating,
    check_number,
    check_shapes,
    check_stacked,
)
from jdiloco.algo.merges import Merge, Rda, Turnout, check_merge, merge_tree
from jdiloco.algo.narrowing import (
    fp32_master,
    laid_as,
    narrow_updates,
    transformation,
    wide,
    zeros,
)
from jdiloco.algo.sums import HERE, mapped

Scalar = float | int | Array
ScalarOrSchedule = Scalar | Callable[[Array], Any]


class MergeDeltasState(NamedTuple):
    """Who took part in the last round; for the reader, nothing depends on it but `diloco_outer`."""

    turnout: Turnout


class OuterNesterovState(NamedTuple):
    """What one round hands to the next."""

    round: Array  # shape=(), int32. Rounds applied so far.
    momentum: PyTree[Any]  # Same tree and shardings as the parameters, in `momentum_dtype`.


def merge_deltas(
    merge: Merge | Any, *, axis_name: str | tuple[str, ...] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Merges the deltas of a round: leaves `(rows, *leaf)` become `(*leaf)`, in fp32 or better.

    `update(deltas, state, params, weights=weights)` needs the keyword `weights`, of shape
    `(rows,)`, as `contribution_weight` gives them; they are cast to fp32 and normalised. A row
    takes no part if its weight is not positive or if it holds a value that is not finite, anywhere
    in the tree. So pad to a fixed number of rows with zeros, and the program compiles once.
    `state.turnout` says how many rows took part and how many were left out as not finite.

    With `axis_name`, the mapped axis (or axes) over which the learners lie, each replica passes its
    own delta, in the parameters' shapes, and one number as `weights`; or a local stack and as many
    weights, which is what `shard_map` hands over. Every replica gets the merge of all, the same
    bytes. Norms go over whole tensors, however other axes of the mesh cut them.

    Raises `UsageError` when a leaf is not floating point or its first axis has not the length of
    `weights`, and, where `params` are given, when it is not one axis longer than its parameter.

    Limit cases: one contribution under the weighted mean is the identity; when no row takes part
    the merged delta is zero (and a momentum after it coasts on: see `diloco_outer`).
    """
    check_merge(merge)

    def init(params: Any) -> MergeDeltasState:
        check_floating(params, "parameter")
        return MergeDeltasState(Turnout(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)))

    def update(
        deltas: Any,
        state: MergeDeltasState,
        params: Any = None,
        *,
        weights: Any = None,
        **extra: Any,
    ) -> tuple[Any, MergeDeltasState]:
        del state, extra  # Part of the optax signature; a merge remembers nothing.
        where = mapped(axis_name)
        if where != HERE and weights is not None and jnp.ndim(weights) == 0:
            weights, deltas = jax.tree.map(_alone, (weights, deltas))
        rows = as_weights(weights)
        check_stacked(deltas, rows.shape[0], params)
        merged, turnout = merge_tree(merge, deltas, rows, where)
        return merged, MergeDeltasState(turnout)

    return transformation(init, update)


MOMENTA = ("float32", "bfloat16")
"""What `momentum_dtype` may be. float16 ends at 6e-8, and the momentum of small deltas with it."""


def outer_nesterov(
    outer_lr: ScalarOrSchedule = 0.7,
    outer_momentum: Scalar = 0.9,
    *,
    momentum_dtype: str = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Nesterov SGD over rounds, in fp32 or better. With `Δ` the merged delta of a round:

        m   <- outer_momentum · m + Δ
        out <- -outer_lr · (Δ + outer_momentum · m)

    `outer_lr` may be an optax schedule; it is asked with the number of rounds applied before.
    `init` gives the momentum its parameter's sharding, also under `jit`. `momentum_dtype` is what
    it is kept in: under "bfloat16" `m` is computed in fp32, rounded to nearest, and that is the `m`
    of the step and of the next round.

    Raises `UsageError` when a merged delta has not the shape of its momentum, and for parameters
    that are not floating point.

    Limit cases: `outer_momentum=0, outer_lr=1` lands on `anchor - Δ`, for the weighted mean the
    average of the learners; from zero momentum the first step is `1.33 Δ` with the defaults, and
    under a constant `Δ` the steps grow to `7 Δ`.

    Source: DiLoCo (arXiv 2311.08105).
    """
    check_number("outer_lr", outer_lr, upto=math.inf)
    check_number("outer_momentum", outer_momentum, upto=1.0)
    check_dtype("momentum_dtype", momentum_dtype, MOMENTA)
    kept = None if momentum_dtype == "float32" else momentum_dtype

    def init(params: Any) -> OuterNesterovState:
        check_floating(params, "parameter")
        momentum = jax.tree.map(lambda param: zeros(param, kept), params)
        return OuterNesterovState(jnp.zeros((), jnp.int32), momentum)

    def update(
        merged: Any, state: OuterNesterovState, params: Any = None, **extra: Any
    ) -> tuple[Any, OuterNesterovState]:
        del params, extra  # Part of the optax signature; unused here.
        rate = outer_lr(state.round) if callable(outer_lr) else outer_lr
        deltas, treedef = jax.tree.flatten(merged)
        momenta = aligned(merged, state.momentum, "momentum")
        check_shapes(merged, momenta, "momentum")
        pairs = [
            _nesterov(delta, momentum, rate, outer_momentum)
            for delta, momentum in zip(deltas, momenta, strict=True)
        ]
        steps, momenta = ([pair[i] for pair in pairs] for i in (0, 1))
        state = OuterNesterovState(state.round + 1, jax.tree.unflatten(treedef, momenta))
        return jax.tree.unflatten(treedef, steps), state

    return transformation(init, update)


def diloco_outer(
    merge: Merge | Any = Rda(),  # noqa: B008 (frozen, so one default serves all calls)
    outer_lr: ScalarOrSchedule = 0.7,
    outer_momentum: Scalar = 0.9,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    commit_dtype: str | None = None,
    momentum_dtype: str = "float32",
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo's outer optimiser: `chain(merge_deltas(...), outer_nesterov(...), fp32_master())`.

        tx = diloco_outer()
        state = tx.init(anchor)
        updates, state = tx.update(deltas, state, anchor, weights=weights)
        anchor = optax.apply_updates(anchor, updates)

    `deltas` are `anchor - params` of each contribution, stacked on a leading axis; `weights` are
    theirs. Updates are fp32, whatever the parameters are. One thing it adds to the chain: when no
    row takes part (all weights zero, or nothing finite) the round is void, the updates are zero and
    momentum, master and round stay as they were. The bare chain would coast on its momentum.

    Where the learners are replicas of one program, `axis_name` takes the place of the stack:

        tx = diloco_outer(axis_name="learner")                     # in shard_map, pmap or vmap
        delta = jax.tree.map(lambda a, p: a - p, anchor, params)   # this replica's
        updates, state = tx.update(delta, state, anchor, weights=weight)

    Every replica then holds the same anchor and state; momentum and master lie as the parameters
    do. See `merge_deltas`.

    `momentum_dtype` is what the momentum is kept in (`outer_nesterov`). With a `commit_dtype` the
    last link is `narrow_updates(commit_dtype)`: the anchor moves by what such a commit can carry.

    Use it as any optax optimiser, with these differences:

    * `nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, deltas, weights=weights)` works, with
      `deltas` a State. `TrainState.apply_gradients` cannot pass `weights` on: call
      `state.tx.update(deltas, state.opt_state, state.params, weights=weights)`.
    * What clips, wraps or masks goes after the merge, not around or before it, as in the chain
      above. Around it `apply_if_finite` and `conditionally_transform` fail in JAX before we can
      speak ("cond branches must have equal output types"), `lookahead` in optax ("unexpected
      keyword argument 'weights'"), and `masked` or a `partition` with `set_to_zero` leaves leaves
      stacked, silently. Before it `clip_by_global_norm` clips all contributions together, silently.
    * Under `inject_hyperparams` with bf16 or fp16 parameters pass `hyperparam_dtype=jnp.float32`,
      or an `outer_lr` of 0.7 becomes 0.699.
    * Python integers from 2**31 on as arguments of your own `jit` are refused by JAX before we can
      speak ("OverflowError"): pass floats, as `contribution_weight` gives.

    Raises `UsageError` (see the three parts).

    Limit case: `outer_lr=1, outer_momentum=0` with the weighted mean is parameter averaging.
    """
    chain = optax.chain(
        merge_deltas(merge, axis_name=axis_name),
        outer_nesterov(outer_lr, outer_momentum, momentum_dtype=momentum_dtype),
        fp32_master() if commit_dtype is None else narrow_updates(commit_dtype),
    )

    def update(
        deltas: Any, state: Any, params: Any = None, *, weights: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        updates, after = chain.update(deltas, state, params, weights=weights, **extra)
        merge_state, *later = cast("tuple[Any, ...]", after)
        held = merge_state.turnout.merged > 0
        updates = jax.tree.map(lambda step: _choose(held, step, 0), updates)
        later = jax.tree.map(lambda new, old: _choose(held, new, old), tuple(later), state[1:])
        return updates, (merge_state, *later)

    return transformation(chain.init, update)


@jax.jit
def _nesterov(
    delta: Float[Array, " *leaf"], momentum: Float[Array, " *leaf"], rate: Any, beta: Any
) -> tuple[Float[Array, " *leaf"], Float[Array, " *leaf"]]:
    working = wide(momentum.dtype)
    delta, rate, beta = (jnp.asarray(x).astype(working) for x in (delta, rate, beta))
    delta = laid_as(momentum, delta)
    kept = beta * momentum.astype(working) + delta
    if momentum.dtype != working:
        kept = jax.lax.optimization_barrier(kept.astype(momentum.dtype))
    return -rate * (delta + beta * kept.astype(working)), kept


def _alone(x: Any) -> Array:
    """A replica's own delta, or its weight, as a stack of one."""
    return jax.lax.expand_dims(jnp.asarray(x), (0,))


@jax.jit
def _choose(held: Array, then: Array, otherwise: Any) -> Array:
    return jnp.where(held, then, otherwise)
