"""Flax NNX modules: trained in place, so the session reads and sets their Variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jdiloco.algo.paths import named_leaves
from jdiloco.runtime.parameters import check_leaf, refuse_unheld
from jdiloco.types import TensorSpec


class ModuleHolder:
    """The Variables of a module of one type, `nnx.Param` unless said otherwise.

    Others (batch statistics, random states) stay the node's own. A Variable that the module shares
    counts once.
    """

    def __init__(self, module: nnx.Module, wrt: type[nnx.Variable] = nnx.Param) -> None:
        named = named_leaves(module)
        owners = _owners(module)
        self._variables: dict[str, nnx.Variable] = {}
        for place, owner in zip(named.places, owners, strict=True):
            leaf = named.leaves[place]
            if isinstance(owner, wrt):
                refuse_unheld([leaf])
            if isinstance(owner, wrt) and leaf.spec is not None:
                self._variables.setdefault(leaf.name, owner)
        self._specs = {spec.name: spec for spec in named.specs if spec.name in self._variables}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self._specs.values())

    def check(self, params: Any) -> None:
        del params  # They are in the module.
        for name, spec in self._specs.items():
            check_leaf(spec, self._variables[name].get_raw_value())

    def get(self, params: Any, names: Sequence[str]) -> tuple[Any, ...]:
        del params
        return tuple(self._variables[name].get_raw_value() for name in names)

    def put(self, params: Any, values: Mapping[str, jax.Array]) -> Any:
        for name, value in values.items():
            self._variables[name].set_raw_value(value)
        return params

    def whole(self, params: Any) -> Any:
        return nnx.state(params)

    def with_whole(self, params: Any, tree: Any) -> Any:
        nnx.update(params, tree)
        return params


def _owners(module: nnx.Module) -> list[Any]:
    """For each leaf of the module, in tree order, the Variable around it, or the leaf itself.

    A Variable may hold nothing, or be a tree of its own.
    """
    boxes = jax.tree.leaves(module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return [box for box in boxes for _ in jax.tree.leaves(box)]
