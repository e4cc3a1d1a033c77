"""Where a user's parameters are, and how to reach them by name.

A holder never keeps, donates or views an array of the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from jdiloco.algo.paths import NamedLeaf, named_leaves
from jdiloco.errors import UsageError
from jdiloco.runtime import pieces
from jdiloco.runtime.pieces import Pieces
from jdiloco.types import TensorSpec


@runtime_checkable
class Holder(Protocol):
    """Reads and replaces the tensors of a model by path name."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What a run may hold of this model, in canonical order."""
        ...

    def check(self, params: Any) -> None:
        """Raises UsageError unless every tensor of `params` can be read and is as it was."""
        ...

    def get(self, params: Any, names: Sequence[str]) -> tuple[Any, ...]:
        """The tensors of `params` with these names. They may have been donated."""
        ...

    def put(self, params: Any, values: Mapping[str, jax.Array]) -> Any:
        """`params` with some tensors replaced."""
        ...

    def whole(self, params: Any) -> Any:
        """Everything that `params` holds, as a tree: tensors and what is none."""
        ...

    def with_whole(self, params: Any, tree: Any) -> Any:
        """`params` with all of that replaced."""
        ...


class TreeHolder:
    """Parameters that the user passes in and gets back: any pytree."""

    def __init__(self, tree: Any) -> None:
        named = named_leaves(tree)
        refuse_unheld(named.leaves)
        self._treedef = jax.tree.structure(tree)
        self._specs = {spec.name: spec for spec in named.specs}
        self._indices: dict[str, list[int]] = {}
        for index, place in enumerate(named.places):
            self._indices.setdefault(named.leaves[place].name, []).append(index)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self._specs.values())

    def check(self, params: Any) -> None:
        leaves = self._flatten(params)
        for name, spec in self._specs.items():
            check_leaf(spec, leaves[self._indices[name][0]])

    def get(self, params: Any, names: Sequence[str]) -> tuple[Any, ...]:
        leaves = self._flatten(params)
        return tuple(leaves[self._indices[name][0]] for name in names)

    def put(self, params: Any, values: Mapping[str, jax.Array]) -> Any:
        leaves = self._flatten(params)
        for name, value in values.items():
            for index in self._indices[name]:
                leaves[index] = value
        return jax.tree.unflatten(self._treedef, leaves)

    def whole(self, params: Any) -> Any:
        return params

    def with_whole(self, params: Any, tree: Any) -> Any:
        del params
        return tree

    def _flatten(self, params: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(params)
        if treedef != self._treedef:
            raise UsageError(
                f"The parameters passed to `step` have the structure {treedef}; the session was "
                f"opened with {self._treedef}. Pass the same tree with other values."
            )
        return leaves


def refuse_unheld(leaves: Iterable[NamedLeaf]) -> None:
    """Raises UsageError for parameters of a type that no run holds: nodes would drift apart there.

    What no optimiser moves, integers, flags and keys, is the node's own.
    """
    for leaf in leaves:
        dtype = getattr(leaf.leaf, "dtype", None)
        if leaf.spec is None and dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
            raise UsageError(
                f"{leaf.name!r} is {dtype}; a run holds float32, bfloat16 and float16. Convert it, "
                "or leave it out of what the session is given: then each node has its own."
            )


def check_leaf(spec: TensorSpec, leaf: Any) -> None:
    """Raises UsageError unless `leaf` is an array of this shape and type that can be read."""
    if isinstance(leaf, Tracer):
        raise UsageError(
            f"{spec.name!r} is being traced: `session.step` was called inside jit, grad or scan. "
            "Call it outside; `steps=n` counts several steps at once."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise UsageError(f"{spec.name!r} is a description without values. Pass an array.")
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        raise UsageError(
            f"{spec.name!r} is a {type(leaf).__name__}; the session was opened with "
            f"{spec.dtype}{list(spec.shape)}. Pass an array."
        )
    if (tuple(shape), dtype.name) != (spec.shape, spec.dtype):
        raise UsageError(
            f"{spec.name!r} is {dtype.name}{list(shape)}; the session was opened with "
            f"{spec.dtype}{list(spec.shape)}. Parameters keep shape and type through a run."
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise UsageError(
            f"{spec.name!r} was donated or deleted. Pass what the step returned, and keep what "
            "`session.step` returns."
        )


def placed(value: np.ndarray | Pieces, like: Any) -> jax.Array:
    """A copy of `value` that compiles like `like`: placed where that is, committed if that is.

    `like` may have been donated: it still says where it was.
    """
    if isinstance(value, Pieces):
        return pieces.placed(value, like.sharding)
    if getattr(like, "committed", False):
        return jax.device_put(value, like.sharding)
    return jax.device_put(value)


def moved(array: jax.Array, like: jax.Array) -> jax.Array:
    """`array`, or a copy placed as `like`: a user or his compiler may move parameters any time."""
    if (array.sharding, array.committed) == (like.sharding, like.committed):
        return array
    if not array.is_fully_addressable:
        return pieces.resharded(array, like.sharding)
    if like.committed:
        return jax.device_put(array, like.sharding)
    return placed(jax.device_get(array), like)


def put(array: jax.Array, sharding: Sharding) -> jax.Array:
    """`array` placed otherwise, whether or not this process holds all of it."""
    if not array.is_fully_addressable:
        return pieces.resharded(array, sharding)
    return jax.device_put(array, sharding)


def sendable(arrays: Sequence[jax.Array]) -> list[np.ndarray | Pieces]:
    """Arrays as they are sent: whole, or in a pod what this process holds the first copy of."""
    if arrays and not arrays[0].is_fully_addressable:
        return [pieces.first_copies(array) for array in arrays]
    return jax.device_get(list(arrays))


def in_reach(array: jax.Array) -> jax.Array:
    """`array`, or a copy in the memory that its devices compute in."""
    default = next(iter(array.sharding.device_set)).default_memory().kind
    if array.sharding.memory_kind in (None, default):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(default))


def computable(x: jax.Array) -> jax.Array:
    """Within a program: `x` in the memory that it computes in, whichever it was passed in."""
    here = jax.memory.Space.Device
    return x if jax.typeof(x).memory_space == here else jax.device_put(x, here)
