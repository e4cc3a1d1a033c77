"""Flax NNX modules: trained in place, so the session reads and sets their Variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jdiloco.algo.paths import named_leaves
from jdiloco.runtime.parameters import check_leaf
from jdiloco.types import TensorSpec


class ModuleHolder:
    """The Variables of a module of one type, `nnx.Param` unless said otherwise.

    Others (batch statistics, random states) stay the node's own. A Variable that the module shares
    counts once.
    """

    def __init__(self, module: nnx.Module, wrt: type[nnx.Variable] = nnx.Param) -> None:
        named = named_leaves(module)
        boxes = jax.tree.leaves(module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        self._variables: dict[str, nnx.Variable] = {}
        for place, box in zip(named.places, boxes, strict=True):
            leaf = named.leaves[place]
            if isinstance(box, wrt) and leaf.spec is not None:
                self._variables.setdefault(leaf.name, box)
        self._specs = {spec.name: spec for spec in named.specs if spec.name in self._variables}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self._specs.values())

    def get(self, params: Any, names: Sequence[str]) -> tuple[jax.Array, ...]:
        del params  # They are in the module.
        found = tuple(self._variables[name].get_raw_value() for name in names)
        for name, leaf in zip(names, found, strict=True):
            check_leaf(self._specs[name], leaf)
        return found

    def put(self, params: Any, values: Mapping[str, jax.Array]) -> Any:
        for name, value in values.items():
            self._variables[name].set_raw_value(value)
        return params
