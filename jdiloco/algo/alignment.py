"""What parameters become when a commit arrives: jitted, for any tree of floating-point leaves.

Everything is computed in fp32 and narrowed once, to the type of the parameters. `committed` is Θ;
which of the functions is called, and from when `since` is, decides `jdiloco.protocol.alignment`.
No function changes or returns an array that it was given.
"""

from __future__ import annotations

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Tree = TypeVar("Tree")


@functools.partial(jax.jit, static_argnames="mixing")
def blended(params: Tree, committed: Tree, *, mixing: float) -> Tree:
    """`α·θ + (1 − α)·Θ` with α the mixing.

    Limit case: parameters that equal what was committed stay as they are, to a rounding.
    """

    def leaf(mine: Float[Array, " *leaf"], theirs: Float[Array, " *leaf"]) -> Array:
        mixed = mixing * mine.astype(jnp.float32) + (1 - mixing) * theirs.astype(jnp.float32)
        return mixed.astype(mine.dtype)

    return jax.tree.map(leaf, params, committed)


@jax.jit
def carried(params: Tree, since: Tree, committed: Tree) -> Tree:
    """`Θ + (θ − since)`: what was trained since then, on top of what was committed.

    Limit case: with nothing trained since then it is Θ.
    """

    def leaf(
        mine: Float[Array, " *leaf"], then: Float[Array, " *leaf"], theirs: Float[Array, " *leaf"]
    ) -> Array:
        rest = mine.astype(jnp.float32) - then.astype(jnp.float32)
        return (theirs.astype(jnp.float32) + rest).astype(mine.dtype)

    return jax.tree.map(leaf, params, since, committed)


@jax.jit
def is_finite(params: Tree, since: Tree) -> Bool[Array, ""]:
    """Whether all of what was trained since then is a number."""

    def leaf(mine: Float[Array, " *leaf"], then: Float[Array, " *leaf"]) -> Array:
        return jnp.all(jnp.isfinite(mine.astype(jnp.float32) - then.astype(jnp.float32)))

    found = jax.tree.leaves(jax.tree.map(leaf, params, since))
    return jnp.all(jnp.stack(found)) if found else jnp.bool_(True)


@jax.jit
def copied(params: Tree) -> Tree:
    """The same values in memory of their own: whoever owns `params` may donate them."""
    return jax.tree.map(jnp.copy, params)
