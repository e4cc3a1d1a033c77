"""Where a user's parameters are, and how to reach them by name.

A holder never keeps, donates or views an array of the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.core import Tracer

from jdiloco.algo.paths import named_leaves
from jdiloco.errors import UsageError
from jdiloco.types import TensorSpec


@runtime_checkable
class Holder(Protocol):
    """Reads and replaces the tensors of a model by path name."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What a run may hold of this model, in canonical order."""
        ...

    def get(self, params: Any, names: Sequence[str]) -> tuple[jax.Array, ...]:
        """The tensors of `params` with these names."""
        ...

    def put(self, params: Any, values: Mapping[str, jax.Array]) -> Any:
        """`params` with some tensors replaced."""
        ...


class TreeHolder:
    """Parameters that the user passes in and gets back: any pytree."""

    def __init__(self, tree: Any) -> None:
        named = named_leaves(tree)
        self._treedef = jax.tree.structure(tree)
        self._specs = {spec.name: spec for spec in named.specs}
        self._indices: dict[str, list[int]] = {}
        for index, place in enumerate(named.places):
            self._indices.setdefault(named.leaves[place].name, []).append(index)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self._specs.values())

    def get(self, params: Any, names: Sequence[str]) -> tuple[jax.Array, ...]:
        leaves = self._flatten(params)
        found = tuple(leaves[self._indices[name][0]] for name in names)
        for name, leaf in zip(names, found, strict=True):
            check_leaf(self._specs[name], leaf)
        return found

    def put(self, params: Any, values: Mapping[str, jax.Array]) -> Any:
        leaves = self._flatten(params)
        for name, value in values.items():
            for index in self._indices[name]:
                leaves[index] = value
        return jax.tree.unflatten(self._treedef, leaves)

    def _flatten(self, params: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(params)
        if treedef != self._treedef:
            raise UsageError(
                f"The parameters passed to `step` have the structure {treedef}; the session was "
                f"opened with {self._treedef}. Pass the same tree with other values."
            )
        return leaves


def check_leaf(spec: TensorSpec, leaf: Any) -> None:
    """Raises UsageError unless `leaf` is an array of this shape and type."""
    if isinstance(leaf, Tracer):
        raise UsageError(
            f"{spec.name!r} is being traced: `session.step` was called inside jit, grad or scan. "
            "Call it outside; `steps=n` counts several steps at once."
        )
    found = (getattr(leaf, "shape", None), getattr(getattr(leaf, "dtype", None), "name", None))
    if found != (spec.shape, spec.dtype):
        raise UsageError(
            f"{spec.name!r} is {found[1]}{list(found[0] or ())}; the session was opened with "
            f"{spec.dtype}{list(spec.shape)}. Parameters keep shape and type through a run."
        )
    if leaf.is_deleted():
        raise UsageError(
            f"{spec.name!r} was donated or deleted. Pass what the step returned, and keep what "
            "`session.step` returns."
        )
