"""The two merges, the weight of a contribution, and the door for a merge of one's own.

A merge turns the deltas of M contributions, stacked on their first axis, into one delta. It sees
them one tensor at a time. `Rda` is the default; `WeightedMean` is the plain average.

A merge of your own is a frozen dataclass with one method:

    @dataclasses.dataclass(frozen=True)
    class SignMean:
        direct_pattern: str = "embed"

        def kernel(self, *names):
            direct = any(self.direct_pattern in name.lower() for name in names)
            return weighted_mean_kernel if direct else sign_mean_kernel

    def sign_mean_kernel(deltas, weights, sums):
        return sums.learners(per_row(weights, deltas) * jnp.sign(deltas))

`kernel` is asked with the path name of a tensor (with all of them, where one NNX Variable sits at
several paths) and answers with a function of module level: one function object for one way of
merging, because compiled programs are kept by it. See `Kernel` for what that function is given.
The fields must be plain JSON values; they go into a run's manifest. There must be no `__call__`:
`optax.inject_hyperparams` takes everything callable for a schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree, Real, Shaped

from jdiloco.algo.paths import leaf_names
from jdiloco.algo.sums import HERE, Collective, Sums, sums_over
from jdiloco.errors import UsageError

FLOOR = 1e-12
"""Vectors shorter than this have no direction: dividing by it keeps a zero vector at zero."""

CUT_OFF = 1e-6
"""A mean direction shorter than this counts as zero.

Where directions cancel exactly, a fused multiply-add leaves up to 3e-8 of rounding in their mean,
and giving that the mean length would return noise of full length.
"""

COUNT_MAX = 2**53
"""Largest number of steps or samples: beyond it a float64 no longer holds every integer."""


Kernel = Callable[[Array, Array, Sums], Array]
"""`(deltas, weights, sums) -> merged`, for one tensor.

`deltas` is `(rows, *leaf)` in fp32 or better, with the rows that take no part set to zero;
`weights` is `(rows,)` and adds up to 1 (to 0 when nobody takes part); `merged` is `(*leaf)`. A
kernel reduces with `sums` alone: indexing or reshaping the first axis is an error when a mesh
shards it.
"""


@runtime_checkable
class Merge(Protocol):
    """What every merge has. The module's docstring shows how to write one."""

    def kernel(self, *names: str) -> Kernel:
        """The function that merges the tensor with these path names (usually one)."""
        ...


@dataclasses.dataclass(frozen=True)
class Rda:
    """Radial-directional averaging; the weighted mean where a name contains `direct_pattern`.

    Made by `rda`, which also warns about a pattern that cannot match.
    """

    direct_pattern: str = "embed"

    def kernel(self, *names: str) -> Kernel:
        """`weighted_mean_kernel` if any of the lowercased names contains the pattern."""
        direct = any(self.direct_pattern in name.lower() for name in names)
        return weighted_mean_kernel if direct else rda_kernel


@dataclasses.dataclass(frozen=True)
class WeightedMean:
    """The weighted mean for every tensor. Made by `weighted_mean`."""

    def kernel(self, *names: str) -> Kernel:
        """Always `weighted_mean_kernel`."""
        del names  # Part of the protocol; every tensor is merged alike.
        return weighted_mean_kernel


def rda(direct_pattern: str | Any = "embed") -> Rda:
    """Averages lengths and directions apart, so that disagreement does not shorten the result.

    For each tensor, with weights `w` that add up to `W` and `φ(x) = x / max(‖x‖, 1e-12)`:

        r = Σ wᵢ ‖Δᵢ‖ / W        u = Σ wᵢ φ(Δᵢ) / W        merged = r · φ(u)

    A tensor whose lowercased path name contains `direct_pattern` is merged with the weighted mean
    instead: the deltas of embeddings do not behave like random directions. `explain_routing` prints
    which tensor goes which way. The pattern itself is not lowercased, so one with capitals matches
    nothing, and `""` matches everything.

    Limit cases: deltas that point the same way give what the weighted mean gives; `(1, 0)` and
    `(0, 1)` with weights 4 and 1 give `(0.970, 0.243)`, which has length 1; directions that cancel
    (`‖u‖ < 1e-6`) give zero.

    Source: Decoupled DiLoCo (arXiv 2604.21428).
    """
    if not isinstance(direct_pattern, str):
        raise UsageError(f"`direct_pattern` must be a string, got {direct_pattern!r}.")
    if direct_pattern != direct_pattern.lower():
        warnings.warn(
            f"`direct_pattern` {direct_pattern!r} has capitals and is looked for in lowercased "
            f"names, so it matches nothing. Write {direct_pattern.lower()!r}.",
            stacklevel=2,
        )
    return Rda(direct_pattern)


def weighted_mean() -> WeightedMean:
    """`Σ wᵢ Δᵢ / Σ wᵢ` for every tensor: DiLoCo's own merge, and Local SGD's.

    Limit case: a single contribution comes back bit for bit.
    """
    return WeightedMean()


def is_direct(merge: Merge, name: str, *aliases: str) -> bool:
    """Whether the tensor with these path names is merged with the weighted mean."""
    return merge.kernel(name, *aliases) is weighted_mean_kernel


def contribution_weight(*, steps: int | Any, samples: int | Any) -> float:
    """The weight of a contribution: `samples² / steps`, or samples times samples per step.

    The square and the quotient are taken on exact integers (samples reach 10¹⁰, and the integers of
    JAX have 32 bits), so the result is the float64 nearest to the true weight.

    Raises `UsageError` unless both are positive integers up to 2⁵³.

    Limit cases: with a fixed batch of `b` samples a step the weight is `b² · steps`; a learner that
    took twice the steps for the same samples weighs half as much.

    Source: Decoupled DiLoCo (arXiv 2604.21428).
    """
    k, s = _count("steps", steps), _count("samples", samples)
    return s**2 / k


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if isinstance(value, (bool, np.bool_)) or not 0 < count <= COUNT_MAX:
        raise UsageError(
            f"`{name}` must be an integer from 1 to 2**53, got {value!r}. A contribution without "
            "steps or samples has no weight: leave it out of the merge."
        )
    return count


def to_json(merge: Merge | Any) -> dict[str, Any]:
    """The merge as it stands in a manifest, e.g. `{"kind": "rda", "direct_pattern": "embed"}`."""
    check_merge(merge)
    settings: Any = merge  # A dataclass, which the protocol cannot say.
    return {"kind": _kind(type(merge)), **dataclasses.asdict(settings)}


def from_json(value: Mapping[str, Any], *, known: Sequence[type] = ()) -> Merge:
    """The merge that `to_json` wrote. `known` lists merge classes of your own.

    Nothing is imported by a name found in a manifest. Raises `UsageError` for an unknown kind or
    field.
    """
    fields = dict(value)
    kind = fields.pop("kind", None)
    classes = {_kind(each): each for each in (Rda, WeightedMean, *known)}
    if kind not in classes:
        raise UsageError(
            f"Merge kind {kind!r} is not one of {', '.join(sorted(classes))}. "
            "Pass your own merge class in `known`."
        )
    names = {field.name for field in dataclasses.fields(classes[kind])}
    if not fields.keys() <= names:
        raise UsageError(
            f"Merge {kind!r} has no field {', '.join(sorted(fields.keys() - names))}; it has "
            f"{', '.join(sorted(names)) or 'none'}. It was written by another version."
        )
    return classes[kind](**fields)


def _kind(merge_type: type) -> str:
    ours = {Rda: "rda", WeightedMean: "weighted_mean"}
    return ours.get(merge_type, f"{merge_type.__module__}:{merge_type.__qualname__}")


def check_merge(merge: Any) -> None:
    """Raises `UsageError` unless `merge` is a frozen dataclass with `kernel` and no `__call__`."""
    settings = getattr(merge, "__dataclass_params__", None)
    frozen = settings is not None and settings.frozen and not isinstance(merge, type)
    if not (frozen and hasattr(merge, "kernel")):
        raise UsageError(
            f"A merge is a frozen dataclass with a method `kernel`, got {merge!r}. Use `rda()`, "
            "`weighted_mean()`, or see `jdiloco.algo.merges` for one of your own."
        )
    if callable(merge):
        raise UsageError(
            f"The merge {type(merge).__name__!r} has `__call__`, and `optax.inject_hyperparams` "
            "would take it for a schedule. Give it another name."
        )


def per_row(values: Shaped[Array, " rows"], like: Real[Array, " rows *leaf"]) -> Array:
    """Gives `values` as many axes as `like`, so that they multiply row by row."""
    return jax.lax.expand_dims(values, range(1, like.ndim))


def weighted_mean_kernel(
    deltas: Float[Array, " rows *leaf"], weights: Float[Array, " rows"], sums: Sums
) -> Float[Array, " *leaf"]:
    """`Σ wᵢ Δᵢ`."""
    return sums.learners(per_row(weights, deltas) * deltas)


def rda_kernel(
    deltas: Float[Array, " rows *leaf"], weights: Float[Array, " rows"], sums: Sums
) -> Float[Array, " *leaf"]:
    """`r̄ φ(u)`; see `rda`."""
    lengths = jnp.sqrt(sums.elements(deltas * deltas))
    shares = per_row(weights / jnp.maximum(lengths, FLOOR), deltas)
    direction = sums.learners(shares * deltas)
    mean_length = sums.learners(weights * lengths)
    square = sums.elements(jax.lax.expand_dims(direction * direction, (0,)))
    norm = jax.lax.squeeze(jnp.sqrt(square), (0,))
    return jnp.where(norm < CUT_OFF, 0, mean_length / jnp.maximum(norm, CUT_OFF)) * direction


def subtracted(
    anchor: Real[Array, " *leaf"], params: Real[Array, " *more"], dtype: str | None = None
) -> Real[Array, " *more"]:
    """`anchor − params`, taken in fp32 before it is narrowed to `dtype` or the parameters' type.

    `params` may be a stack. The other way round a bf16 delta of 1e-3 on a parameter of 1 is zero.
    """
    delta = anchor.astype(jnp.float32) - params.astype(jnp.float32)
    return delta.astype(dtype or params.dtype)


SMALLEST = float(np.finfo(np.float32).tiny)
"""Weights below it are none: XLA takes a subnormal number for zero in some places, not in all."""


class Turnout(NamedTuple):
    """How many rows of a stack took part in a merge. Padding counts as neither."""

    merged: Array  # shape=(), int32
    nonfinite: (
        Array  # shape=(), int32. Rows with a weight, left out for a value that is not finite.
    )


def merge_tree(
    merge: Merge, deltas: PyTree[Any], weights: Real[Array, " rows"], where: Collective = HERE
) -> tuple[PyTree[Any], Turnout]:
    """Merges a tree of stacked deltas, `(rows, *leaf)` each, into a tree of `(*leaf)` in fp32.

    A row takes part if its weight is positive and finite and all its values, in every leaf, are
    finite. Others are selected out, not multiplied by zero, so that a caller can pad to a fixed
    number of rows. When no row takes part, the result is zero. With axes in `where` the rows are
    those of this device, and every device gets the merge of all.
    """
    leaves, treedef = jax.tree.flatten(deltas)
    finite = jnp.ones(weights.shape, bool)
    for leaf in leaves:
        finite = finite_rows(leaf, finite)
    shares, turnout = _shares(weights, finite, where=where)
    kernels = [merge.kernel(*names) for names in leaf_names(deltas)]
    merged = [
        merge_tensor(leaf, shares, kernel=kernel, sums=sums_over(where))
        for leaf, kernel in zip(leaves, kernels, strict=True)
    ]
    return jax.tree.unflatten(treedef, merged), turnout


@jax.jit
def finite_rows(
    deltas: Real[Array, " rows *leaf"], so_far: Bool[Array, " rows"]
) -> Bool[Array, " rows"]:
    """Which rows are finite in this tensor, too."""
    return so_far & jnp.all(jnp.isfinite(deltas), axis=tuple(range(1, deltas.ndim)))


@functools.partial(jax.jit, static_argnames="where")
def _shares(
    weights: Real[Array, " rows"], finite: Bool[Array, " rows"], *, where: Collective
) -> tuple[Float[Array, " rows"], Turnout]:
    """Each row's part of the whole; 0 for rows that take no part."""
    wide = weights.astype(jnp.float32)
    finite = where.everywhere(finite)
    weighs = (wide >= SMALLEST) & jnp.isfinite(wide)
    kept = jnp.where(weighs & finite, wide, 0)
    total = where.over_learners(jnp.sum(kept))
    weighs &= jnp.isfinite(total)  # Where the sum leaves float32 nobody takes part: no merge is 0.
    shares = kept / jnp.where(total > 0, total, 1)
    counts = (jnp.sum(x, dtype=jnp.int32) for x in (weighs & finite, weighs & ~finite))
    return shares, Turnout(*map(where.over_learners, counts))


@functools.partial(jax.jit, static_argnames=("kernel", "sums"))
def merge_tensor(
    deltas: Real[Array, " rows *leaf"],
    shares: Float[Array, " rows"],
    *,
    kernel: Kernel,
    sums: Sums,
) -> Float[Array, " *leaf"]:
    """One tensor by one kernel. Rows whose share is 0 are selected out, whatever they hold."""
    wide = deltas.astype(jnp.promote_types(deltas.dtype, jnp.float32))
    kept = jnp.where(per_row(shares > 0, wide), wide, 0)
    return kernel(kept, shares.astype(wide.dtype), sums)
