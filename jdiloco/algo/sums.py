"""Where the contributions of a round lie, and what summing over them means there.

A merge is made of two sums. Where one array holds all contributions they are reductions over its
axes, on however many devices it lies: the compiler sees to that. Inside `shard_map`, `pmap` or
`vmap` with an axis name each replica holds its own contribution, perhaps only a shard of each
tensor, and the same sums go on over mapped axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jdiloco.errors import UsageError


class Sums(NamedTuple):
    """The two sums that a merge is made of, so that a kernel need not know where the data lies.

    `learners` sums over the contributions: `(rows, *leaf)` becomes `(*leaf)`. `elements` sums over
    one tensor, for each row by itself: `(rows, *leaf)` becomes `(rows,)`.
    """

    learners: Callable[[Array], Array]
    elements: Callable[[Array], Array]


class Collective(NamedTuple):
    """The mapped axes over which a round lies.

    `learners` spread the contributions, beside the rows of the local stack; `shards` are the other
    manual axes, over which a tensor may be cut. Both are empty where one array holds everything.
    """

    learners: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()

    def over_learners(self, x: Array) -> Array:
        """A sum over the local rows becomes the one over all contributions."""
        return jax.lax.psum(x, self.learners) if self.learners else x

    def over_shards(self, x: Array) -> Array:
        """A sum over the local part of each tensor becomes the one over whole tensors.

        A tensor that is not cut is counted once on every shard: all its norms grow by one factor,
        which no merge notices.
        """
        return jax.lax.psum(x, self.shards) if self.shards else x

    def everywhere(self, flags: Bool[Array, " rows"]) -> Bool[Array, " rows"]:
        """True where the flag is set on every shard."""
        return self.over_shards((~flags).astype(jnp.int32)) == 0


HERE = Collective()


def mapped(axis_name: str | tuple[str, ...] | None) -> Collective:
    """Contributions spread over these mapped axes, in the program that is being traced.

    Every other manual axis of its mesh may cut the tensors; axes left to the compiler need nothing.
    Raises `UsageError` outside a program that maps the axes.
    """
    if axis_name is None:
        return HERE
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"`axis_name` is the name of a mapped axis, or several, not {names!r}.")
    names = tuple(names)
    try:
        jax.lax.axis_size(names)
    except NameError as error:
        raise UsageError(
            f"`axis_name` is {axis_name!r}, and no such axis is mapped where `update` was called. "
            "Call it inside `shard_map`, `pmap` or `vmap` over that axis, or leave `axis_name` out "
            "and pass stacked deltas."
        ) from error
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return Collective(names, tuple(name for name in manual if name not in names))


def _sum_elements(values: Array) -> Array:
    return jnp.sum(values, axis=tuple(range(1, values.ndim)))


@functools.cache
def sums_over(where: Collective) -> Sums:
    """The two sums of a merge. One object for one place, because programs are kept by it."""
    return Sums(
        learners=lambda values: where.over_learners(jnp.sum(values, axis=0)),
        elements=lambda values: where.over_shards(_sum_elements(values)),
    )


STACKED = sums_over(HERE)
"""The sums where all contributions are in one array."""
