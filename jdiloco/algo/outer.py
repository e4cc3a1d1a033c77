"""The outer step as optax transformations: merge, Nesterov momentum over rounds, fp32 master.

`diloco_outer()` is `optax.chain(merge_deltas(rda()), outer_nesterov(), fp32_master())`. The three
are public because a transformation may stand between them:

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
    check_floating,
    check_number,
    check_shapes,
    check_stacked,
)
from jdiloco.algo.merges import Merge, Rda, Turnout, check_merge, merge_tree
from jdiloco.algo.sums import HERE, mapped
from jdiloco.errors import UsageError

_NO_PARAMS = (  # The sentence of optax, which does not export it, and what it means here.
    "You are using a transformation that requires the current value of parameters, but you are not "
    "passing `params` when calling `update`. bf16 and fp16 parameters are rounded from a master."
)

Scalar = float | int | Array
ScalarOrSchedule = Scalar | Callable[[Array], Any]


class MergeDeltasState(NamedTuple):
    """Who took part in the last round; for the reader, nothing depends on it but `diloco_outer`."""

    turnout: Turnout


class OuterNesterovState(NamedTuple):
    """What one round hands to the next."""

    round: Array  # shape=(), int32. Rounds applied so far.
    momentum: PyTree[Any]  # Same tree and shardings as the parameters, in fp32 or better.


class Fp32MasterState(NamedTuple):
    """The parameters as they would be without rounding."""

    master: PyTree[Any]  # fp32 where the parameter is bf16 or fp16, None where it is wide enough.


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
        deltas: Any, state: MergeDeltasState, params: Any = None, *, weights: Any, **extra: Any
    ) -> tuple[Any, MergeDeltasState]:
        del state, extra  # Part of the optax signature; a merge remembers nothing.
        where = mapped(axis_name)
        if where != HERE and jnp.ndim(weights) == 0:
            weights, deltas = jax.tree.map(_alone, (weights, deltas))
        rows = as_weights(weights)
        check_stacked(deltas, rows.shape[0], params)
        merged, turnout = merge_tree(merge, deltas, rows, where)
        return merged, MergeDeltasState(turnout)

    return _transformation(init, update)


def outer_nesterov(
    outer_lr: ScalarOrSchedule = 0.7, outer_momentum: Scalar = 0.9
) -> optax.GradientTransformationExtraArgs:
    """Nesterov SGD over rounds, in fp32 or better. With `Δ` the merged delta of a round:

        m   <- outer_momentum · m + Δ
        out <- -outer_lr · (Δ + outer_momentum · m)

    `outer_lr` may be an optax schedule; it is asked with the number of rounds applied before.
    `init` gives the momentum its parameter's sharding, also under `jit`.

    Raises `UsageError` when a merged delta has not the shape of its momentum, and for parameters
    that are not floating point.

    Limit cases: `outer_momentum=0, outer_lr=1` lands on `anchor - Δ`, for the weighted mean the
    average of the learners; from zero momentum the first step is `1.33 Δ` with the defaults, and
    under a constant `Δ` the steps grow to `7 Δ`.

    Source: DiLoCo (arXiv 2311.08105).
    """
    check_number("outer_lr", outer_lr, upto=math.inf)
    check_number("outer_momentum", outer_momentum, upto=1.0)

    def init(params: Any) -> OuterNesterovState:
        check_floating(params, "parameter")
        return OuterNesterovState(jnp.zeros((), jnp.int32), jax.tree.map(_zeros, params))

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

    return _transformation(init, update)


def fp32_master() -> optax.GradientTransformationExtraArgs:
    """Lets steps smaller than half an ulp of a bf16 or fp16 parameter add up. The last link.

        master <- master + update
        out    <- narrow(master) - params        in fp32

    so that `optax.apply_updates` arrives at `narrow(master)`, unless a value changes by more than
    2^16 times its size in one round (2^13 for fp16). An element whose master no longer rounds to
    the parameter it is given was changed from outside (other parameters loaded, a transformation
    after this one) and starts again from the parameter. Where a master leaves the type's range, its
    parameter stays at the largest finite value.

    Wide parameters have no master; their updates pass through. `update` without `params` raises
    optax's usual error where there is a master, and works otherwise.

    Limit case: 100 updates of 0.001 take a bf16 parameter from 1 to 1.1015625, the bf16 number next
    to 1.1; without a master it stays at 1.
    """

    def init(params: Any) -> Fp32MasterState:
        check_floating(params, "parameter")
        return Fp32MasterState(jax.tree.map(_master_of, params))

    def update(
        updates: Any, state: Fp32MasterState, params: Any = None, **extra: Any
    ) -> tuple[Any, Fp32MasterState]:
        del extra  # Part of the optax signature; unused here.
        leaves, treedef = jax.tree.flatten(updates)
        masters = aligned(updates, state.master, "master copies")
        if params is None and any(master is not None for master in masters):
            raise UsageError(_NO_PARAMS)
        if params is None:
            return updates, state
        params_flat = aligned(updates, params, "parameters")
        check_shapes(updates, params_flat, "parameter")
        pairs = [
            (update, None) if master is None else _advance(update, param, master)
            for update, param, master in zip(leaves, params_flat, masters, strict=True)
        ]
        steps, masters = ([pair[i] for pair in pairs] for i in (0, 1))
        return jax.tree.unflatten(treedef, steps), Fp32MasterState(
            jax.tree.unflatten(treedef, masters)
        )

    return _transformation(init, update)


def diloco_outer(
    merge: Merge | Any = Rda(),  # noqa: B008 (frozen, so one default serves all calls)
    outer_lr: ScalarOrSchedule = 0.7,
    outer_momentum: Scalar = 0.9,
    *,
    axis_name: str | tuple[str, ...] | None = None,
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

    Use it as any optax optimiser, with these differences:

    * `nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, deltas, weights=weights)` works, with
      `deltas` a State. `TrainState.apply_gradients` cannot pass `weights` on ("missing 1 required
      keyword-only argument: 'weights'"): call `state.tx.update(deltas, state.opt_state,
      state.params, weights=weights)`.
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
        outer_nesterov(outer_lr, outer_momentum),
        fp32_master(),
    )

    def update(
        deltas: Any, state: Any, params: Any = None, *, weights: Any, **extra: Any
    ) -> tuple[Any, Any]:
        updates, after = chain.update(deltas, state, params, weights=weights, **extra)
        merge_state, *later = cast("tuple[Any, ...]", after)
        held = merge_state.turnout.merged > 0
        updates = jax.tree.map(lambda step: _choose(held, step, 0), updates)
        later = jax.tree.map(lambda new, old: _choose(held, new, old), tuple(later), state[1:])
        return updates, (merge_state, *later)

    return _transformation(chain.init, update)


def _transformation(init: Any, update: Any) -> optax.GradientTransformationExtraArgs:
    """optax's type has no place for a required keyword, and calls what comes in `updates`."""
    return optax.GradientTransformationExtraArgs(init, update)


@jax.jit
def _zeros(param: Float[Array, " *leaf"]) -> Float[Array, " *leaf"]:
    """Zeros that depend on the parameter: plain ones come out of a jitted `init` replicated."""
    wide = jnp.abs(param.astype(_wide(param.dtype)))  # 0 · -1 would be -0.
    return jnp.where(jnp.isfinite(wide), 0 * wide, 0)


@jax.jit
def _nesterov(
    delta: Float[Array, " *leaf"], momentum: Float[Array, " *leaf"], rate: Any, beta: Any
) -> tuple[Float[Array, " *leaf"], Float[Array, " *leaf"]]:
    delta, rate, beta = (jnp.asarray(x).astype(momentum.dtype) for x in (delta, rate, beta))
    delta = _laid_as(momentum, delta)
    momentum = beta * momentum + delta
    return -rate * (delta + beta * momentum), momentum


def _master_of(param: Any) -> Array | None:
    dtype = jnp.result_type(param)
    return None if _wide(dtype) == dtype else _widen(param)


@jax.jit
def _widen(param: Float[Array, " *leaf"]) -> Float[Array, " *leaf"]:
    return param.astype(jnp.float32)


@jax.jit
def _advance(
    update: Float[Array, " *leaf"], param: Float[Array, " *leaf"], master: Float[Array, " *leaf"]
) -> tuple[Float[Array, " *leaf"], Float[Array, " *leaf"]]:
    shown, update = param.astype(jnp.float32), _laid_as(master, update)
    master = jnp.where(_narrow(master, param.dtype) == param, master, shown)
    master = master + update.astype(jnp.float32)
    return _narrow(master, param.dtype).astype(jnp.float32) - shown, master


def _narrow(master: Float[Array, " *leaf"], dtype: Any) -> Float[Array, " *leaf"]:
    """Rounds, behind a barrier: XLA may leave out a rounding that is widened again at once."""
    largest = float(jnp.finfo(dtype).max)
    return jax.lax.optimization_barrier(jnp.clip(master, -largest, largest).astype(dtype))


def _laid_as(like: Array, x: Array) -> Array:
    """On explicit axes, `x` where `like` lies, so that state stays with its parameter."""
    want, have = jax.typeof(like).sharding, jax.typeof(x).sharding
    return jax.sharding.reshard(x, want) if want.mesh == have.mesh and want != have else x


def _alone(x: Any) -> Array:
    """A replica's own delta, or its weight, as a stack of one."""
    return jax.lax.expand_dims(jnp.asarray(x), (0,))


@jax.jit
def _choose(held: Array, then: Array, otherwise: Any) -> Array:
    return jnp.where(held, then, otherwise)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
