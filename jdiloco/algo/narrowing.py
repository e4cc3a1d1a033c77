"""The last link of the outer step: what the parameters cannot hold yet, or a commit not carry.

fp32_master       bf16 and fp16 parameters, rounded from a master
narrow_updates    commits in `commit_dtype`, which a learner adds to the anchor that it holds
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jdiloco.algo.checks import aligned, check_dtype, check_floating, check_shapes
from jdiloco.algo.wire import BITS, narrows, on_wire
from jdiloco.errors import UsageError

_NO_PARAMS = (  # The sentence of optax, which does not export it, and what it means here.
    "You are using a transformation that requires the current value of parameters, but you are not "
    "passing `params` when calling `update`. bf16 and fp16 parameters are rounded from a master."
)


class Fp32MasterState(NamedTuple):
    """The parameters as they would be without rounding."""

    master: PyTree[Any]  # fp32 where the parameter is bf16 or fp16, None where it is wide enough.


class NarrowUpdatesState(NamedTuple):
    """What the updates so far have rounded away."""

    rest: PyTree[Any]  # In fp32 or better, still to be sent; None where updates pass through.


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

    return transformation(init, update)


def narrow_updates(commit_dtype: str) -> optax.GradientTransformationExtraArgs:
    """Lets through of each update what `commit_dtype` can carry, and the rest with later ones.

    What a run with this `commit_dtype` commits. The last link, in place of `fp32_master`:

        owed   <- rest + update                                        in fp32
        out    <- what arrives of `owed`, sent in `commit_dtype`       (`jdiloco.algo.wire`)
        rest   <- owed - (narrow(params + out) - params)

    so that `optax.apply_updates` arrives at `narrow(params + out)`, which is how a learner rebuilds
    the anchor from the one before, and `params + rest` is where the updates would have led without
    any rounding. Where a sum leaves the type's range, its parameter stays at the largest finite
    value. A parameter that takes no more bits than `commit_dtype` goes out whole: `out` is all of
    `owed` that the parameter can hold. Parameters changed from outside go on from where they are.

    A scale is of a whole tensor or of 32 elements in its order; on manual axes of a mesh, of the
    part at hand.

    Raises `UsageError` for another `commit_dtype`, and where `params` are not given though
    something is narrowed.

    Limit case: "float32" is `fp32_master()`, to the rounding of fp32.
    """
    check_dtype("commit_dtype", commit_dtype, tuple(BITS))

    def init(params: Any) -> NarrowUpdatesState:
        check_floating(params, "parameter")
        return NarrowUpdatesState(jax.tree.map(rest_of, params))

    def rest_of(param: Any) -> Array | None:
        dtype = jnp.result_type(param)
        whole = wide(dtype) == dtype and not narrows(commit_dtype, dtype.name)
        return None if whole else zeros(param)

    def update(
        updates: Any, state: NarrowUpdatesState, params: Any = None, **extra: Any
    ) -> tuple[Any, NarrowUpdatesState]:
        del extra  # Part of the optax signature; unused here.
        leaves, treedef = jax.tree.flatten(updates)
        rests = aligned(updates, state.rest, "rests")
        if all(rest is None for rest in rests):
            return updates, state
        if params is None:
            raise UsageError(_NO_PARAMS)
        params_flat = aligned(updates, params, "parameters")
        check_shapes(updates, params_flat, "parameter")
        pairs = [
            (update, None) if rest is None else _let_out(update, param, rest, dtype=commit_dtype)
            for update, param, rest in zip(leaves, params_flat, rests, strict=True)
        ]
        steps, rests = ([pair[i] for pair in pairs] for i in (0, 1))
        return jax.tree.unflatten(treedef, steps), NarrowUpdatesState(
            jax.tree.unflatten(treedef, rests)
        )

    return transformation(init, update)


def transformation(init: Any, update: Any) -> optax.GradientTransformationExtraArgs:
    """optax's type has no place for a required keyword, and calls what comes in `updates`."""
    return optax.GradientTransformationExtraArgs(init, update)


@functools.partial(jax.jit, static_argnames="dtype")
def zeros(param: Float[Array, " *leaf"], dtype: str | None = None) -> Float[Array, " *leaf"]:
    """Zeros that depend on the parameter: plain ones come out of a jitted `init` replicated."""
    size = jnp.abs(param.astype(wide(param.dtype)))  # 0 · -1 would be -0.
    return jnp.where(jnp.isfinite(size), 0 * size, 0).astype(dtype or size.dtype)


def _master_of(param: Any) -> Array | None:
    dtype = jnp.result_type(param)
    return None if wide(dtype) == dtype else _widen(param)


@jax.jit
def _widen(param: Float[Array, " *leaf"]) -> Float[Array, " *leaf"]:
    return param.astype(jnp.float32)


@jax.jit
def _advance(
    update: Float[Array, " *leaf"], param: Float[Array, " *leaf"], master: Float[Array, " *leaf"]
) -> tuple[Float[Array, " *leaf"], Float[Array, " *leaf"]]:
    shown, update = param.astype(jnp.float32), laid_as(master, update)
    master = jnp.where(_narrow(master, param.dtype) == param, master, shown)
    master = master + update.astype(jnp.float32)
    return _narrow(master, param.dtype).astype(jnp.float32) - shown, master


@functools.partial(jax.jit, static_argnames="dtype")
def _let_out(
    update: Float[Array, " *leaf"],
    param: Float[Array, " *leaf"],
    rest: Float[Array, " *leaf"],
    *,
    dtype: str,
) -> tuple[Float[Array, " *leaf"], Float[Array, " *leaf"]]:
    shown, update = param.astype(rest.dtype), laid_as(rest, update)
    owed = rest + update.astype(rest.dtype)
    out = on_wire(owed, dtype).astype(rest.dtype) if narrows(dtype, param.dtype.name) else owed
    fits = jnp.abs(shown + out) <= float(jnp.finfo(param.dtype).max)
    moved = _narrow(shown + out, param.dtype).astype(rest.dtype) - shown
    return jnp.where(fits, out, moved), owed - moved


def _narrow(master: Float[Array, " *leaf"], dtype: Any) -> Float[Array, " *leaf"]:
    """Rounds, behind a barrier: XLA may leave out a rounding that is widened again at once."""
    largest = float(jnp.finfo(dtype).max)
    return jax.lax.optimization_barrier(jnp.clip(master, -largest, largest).astype(dtype))


def laid_as(like: Array, x: Array) -> Array:
    """On explicit axes, `x` where `like` lies, so that state stays with its parameter."""
    want, have = jax.typeof(like).sharding, jax.typeof(x).sharding
    return jax.sharding.reshard(x, want) if want.mesh == have.mesh and want != have else x


def wide(dtype: Any) -> Any:
    """The type in which a parameter of type `dtype` is worked on: fp32 or better."""
    return jnp.promote_types(dtype, jnp.float32)
