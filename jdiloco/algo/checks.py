"""What the outer transformations refuse, and in which words.

optax is happy with stacked and unstacked leaves alike, so each mistake here would otherwise end in
silent garbage. Names are looked up only when there is something to say: a model has thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jdiloco.algo.paths import is_held, leaf_names
from jdiloco.errors import UsageError

CHAIN = (
    "optax.chain(merge_deltas(rda()), optax.clip_by_global_norm(1.0), "
    "outer_nesterov(), fp32_master())"
)
"""How the parts go together; every error about a shape shows it."""

_WAY_OUT = (
    "Deltas have one leading axis for the contributions, the merge comes first, and what clips, "
    f"wraps or masks goes after it: {CHAIN}"
)


def as_weights(weights: Any) -> Array:
    """`weights` as an fp32 vector; Python integers of any size are welcome."""
    if isinstance(weights, (list, tuple)):
        traced = any(isinstance(weight, jax.Array) for weight in weights)
        weights = jnp.stack(weights) if traced else np.asarray(weights, np.float32)
    if not hasattr(weights, "dtype") or jnp.ndim(weights) != 1 or weights.shape[0] == 0:
        raise UsageError(
            f"`weights` must hold one number for each contribution, at least one, got {weights!r}. "
            "Pass `update(deltas, state, anchor, weights=weights)`, of `contribution_weight` for "
            "each or of ones; where each replica of a mapped program passes its "
            "own, name the axis: `axis_name=...`."
        )
    _check_not_negative(weights)
    return jnp.asarray(weights).astype(jnp.float32)


def _check_not_negative(weights: Any) -> None:
    """Zeros are padding; less than nothing is a slip. What is traced cannot be looked at."""
    if isinstance(weights, Tracer):
        return
    if isinstance(weights, jax.Array) and not weights.is_fully_addressable:
        return
    found = np.asarray(jax.device_get(weights))
    if (found < 0).any():
        raise UsageError(
            f"`weights` holds {float(found.min())}: a weight is at least 0, and 0 for a row that "
            "takes no part. Use `contribution_weight` for each."
        )


def aligned(deltas: Any, tree: Any, what: str) -> list[Any]:
    """The parts of `tree` at the leaves of `deltas`, in tree order."""
    try:
        return jax.tree.structure(deltas).flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"The deltas have another tree than the {what}: {_difference(deltas, tree)}. {_WAY_OUT}"
        ) from error


def _difference(deltas: Any, tree: Any) -> str:
    """How two trees differ, in a few names."""
    here, there = ({names[0] for names in leaf_names(each)} for each in (deltas, tree))
    only = [
        f"only in the {whose} {', '.join(map(repr, sorted(names)[:3]))}"
        for whose, names in (("deltas", here - there), ("other", there - here))
        if names
    ]
    containers = f"same names in other containers ({type(deltas).__name__} at the top)"
    return "; ".join(only) or containers


def check_stacked(deltas: Any, rows: int, params: Any) -> None:
    if isinstance(deltas, Iterator):
        raise UsageError(f"The deltas are a tree of stacked arrays, not an iterator. {_WAY_OUT}")
    check_floating(deltas, "delta")
    leaves = jax.tree.leaves(deltas)
    like = leaves if params is None else aligned(deltas, params, "parameters")
    for i, (leaf, param) in enumerate(zip(leaves, like, strict=True)):
        shape = jnp.shape(leaf)
        wanted = (rows, *(shape[1:] if params is None else jnp.shape(param)))
        if shape != wanted:
            raise UsageError(
                f"The delta of {leaf_names(deltas)[i][0]!r} has shape {shape}, wanted {wanted}, as "
                f"there are {rows} weights. {_WAY_OUT}"
            )


def check_shapes(tree: Any, like: Sequence[Any], what: str) -> None:
    for i, (leaf, other) in enumerate(zip(jax.tree.leaves(tree), like, strict=True)):
        if jnp.shape(leaf) != jnp.shape(other):
            raise UsageError(
                f"The merged delta of {leaf_names(tree)[i][0]!r} has shape {jnp.shape(leaf)}, its "
                f"{what} has {jnp.shape(other)}. {_WAY_OUT}"
            )


def check_floating(tree: Any, what: str) -> None:
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        try:
            dtype = jnp.result_type(leaf)
        except (TypeError, ValueError):
            dtype = type(leaf).__name__
        if not (isinstance(dtype, np.dtype) and is_held(dtype)):
            raise UsageError(
                f"The {what} {leaf_names(tree)[i][0]!r} is {dtype}, wanted float32, bfloat16, "
                "float16 or float64. Take it out of the tree: only floating point is merged."
            )


def check_number(name: str, value: Any, *, upto: float) -> None:
    if isinstance(value, (int, float)) and not (0 <= value < upto):
        limit = "" if upto == math.inf else f" and below {upto}"
        raise UsageError(f"`{name}` must be at least 0{limit}, got {value}.")


def check_dtype(name: str, value: Any, known: Sequence[str | None]) -> None:
    if value not in known:
        raise UsageError(f"`{name}` {value!r} is not one of {', '.join(map(repr, known))}.")
