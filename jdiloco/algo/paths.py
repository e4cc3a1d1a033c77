"""Names of tensors: the same for one model in whatever container it comes.

A path name is the parts of the key path joined by `/`: dictionary keys, attribute names, indices.
A tuple key gives its parts. Boxes (`nnx.Variable`, Linen's metadata) are leaves, so their `value`
is no part. A top level that holds nothing but `params` is skipped. So a model has the same names as
Linen variables, dict, FrozenDict, `TrainState.params`, NNX module, `nnx.State` or pure dict, and
two nodes of a run may hold it differently.

The canonical order is by name, numbers in it compared as numbers (`layers/2` before `layers/10`):
tree order differs between containers.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, keystr, tree_flatten_with_path

from jdiloco.errors import UsageError
from jdiloco.types import DTYPE_BYTES, TensorSpec


@dataclasses.dataclass(frozen=True)
class NamedLeaf:
    """One tensor of a tree, out of its box."""

    name: str
    leaf: Any
    aliases: tuple[str, ...] = ()  # Further names of a shared NNX Variable.

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it goes by; the first is the one it is known under."""
        return (self.name, *self.aliases)

    @property
    def spec(self) -> TensorSpec | None:
        """Its shape and type, or None if it is not an array of a floating type a run can hold."""
        dtype = getattr(self.leaf, "dtype", None)
        if dtype is None or dtype.name not in DTYPE_BYTES:
            return None
        shape = tuple(int(n) for n in self.leaf.shape)
        return TensorSpec(self.name, shape, dtype.name, self.aliases)


@dataclasses.dataclass(frozen=True)
class NamedTree:
    """A tree taken apart: its leaves in canonical order, and the way back."""

    leaves: tuple[NamedLeaf, ...]
    places: tuple[int, ...]  # For each leaf in tree order, its index in `leaves`.
    treedef: Any

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The same tree with other leaves, given in canonical order.

        Boxes are made anew around the values. So a module with a shared Variable comes back with
        two Variables of equal value; to change a module in place, set its Variables.
        """
        if len(values) != len(self.leaves):
            raise UsageError(f"Got {len(values)} values for a tree of {len(self.leaves)} leaves.")
        return jax.tree.unflatten(self.treedef, [values[place] for place in self.places])

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Shape and type of every tensor a run can hold, in canonical order."""
        return tuple(spec for leaf in self.leaves if (spec := leaf.spec) is not None)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of the other leaves: integers, flags, random keys. A run leaves them alone."""
        return tuple(leaf.name for leaf in self.leaves if leaf.spec is None)


def path_names(tree: Any) -> list[str]:
    """The names of a tree's leaves, in canonical order.

    A shared NNX Variable counts once, under its first path. An array that sits twice in a dict is
    two tensors, as it is for an optimiser.

    Raises `UsageError` for two leaves with one name, for a leaf without one (a bare array), and for
    a whole train state.

    Limit case: `{"layers": [{"w": x}]}`, `{"layers": {"0": {"w": x}}}` and
    `{("layers", 0, "w"): x}` all give `["layers/0/w"]`.
    """
    return [leaf.name for leaf in named_leaves(tree).leaves]


def named_leaves(tree: Any) -> NamedTree:
    """Takes a tree apart. Leaves may be arrays or `jax.ShapeDtypeStruct`. Errors: `path_names`."""
    found = _found(tree)
    for at in found:
        if not at.name:
            raise UsageError(
                f"The leaf at {keystr(at.path) or 'the root'!r} has an empty name, and a run knows "
                'tensors by name. Put it into a dict: {"w": array}.'
            )
        if any("\ud800" <= character <= "\udfff" for character in at.name):
            raise UsageError(
                f"The name {at.name!a} holds half of a character (a lone surrogate), which no "
                "text in a mailbox can. Give the leaf another name."
            )
    groups = _by_variable(found)
    order = sorted(groups, key=lambda group: natural_order(group[0].name))
    leaves = [NamedLeaf(g[0].name, g[0].leaf, tuple(at.name for at in g[1:])) for g in order]
    places = {at.index: place for place, group in enumerate(order) for at in group}
    in_tree_order = tuple(places[i] for i in range(len(found)))
    return NamedTree(tuple(leaves), in_tree_order, jax.tree.structure(tree))


def specs(tree: Any) -> tuple[TensorSpec, ...]:
    """Shape and type of every tensor a run can hold, in canonical order. Errors: `path_names`."""
    return named_leaves(tree).specs


def leaf_names(tree: Any) -> list[tuple[str, ...]]:
    """For each leaf, in *tree* order, every name it goes by.

    A bare array has the empty name here: a transformation has no need to tell it from others.
    """
    found = _found(tree)
    names: dict[int, tuple[str, ...]] = {}
    for group in _by_variable(found):
        names |= {at.index: tuple(other.name for other in group) for at in group}
    return [names[i] for i in range(len(found))]


def natural_order(name: str) -> tuple[Any, ...]:
    """A sort key that compares the numbers in a name as numbers; equal only for equal names."""
    pieces = re.split(r"([0-9]+)", name)  # Text at even places, digits at odd ones.
    return tuple(_number(piece) if i % 2 else piece for i, piece in enumerate(pieces)), name


def _number(digits: str) -> tuple[int, str]:
    """Orders as the number does, however many digits: Python reads no more than some thousands."""
    significant = digits.lstrip("0")
    return len(significant), significant


def is_held(dtype: Any) -> bool:
    """Whether parameters may have this type: float32, bfloat16, float16 or float64."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).name in DTYPE_BYTES


@dataclasses.dataclass(frozen=True)
class _At:
    """A leaf as it was found."""

    index: int  # In tree order.
    path: KeyPath
    parts: tuple[str, ...]
    leaf: Any
    variable: Any = None  # The outermost nnx.Variable around it.

    @property
    def name(self) -> str:
        return "/".join(self.parts)


def _found(tree: Any) -> list[_At]:
    """Every leaf in tree order, named; or an error."""
    if hasattr(tree, "params") and hasattr(tree, "opt_state"):
        raise UsageError(
            f"Got a whole `{type(tree).__name__}`, wanted its parameters. Pass `state.params`."
        )
    walked = list(_walk(tree))
    all_parts = [path_parts(shown) for _, shown, _, _ in walked]
    flat_state = _flax("flax.nnx", "FlatState")
    if flat_state is not None and isinstance(tree, flat_state):
        all_parts = [
            path_parts([path]) for path in tree.paths
        ]  # Its key path holds positions only.
    if all(parts[:1] == ("params",) and len(parts) > 1 for parts in all_parts):
        all_parts = [parts[1:] for parts in all_parts]
    found = [
        _At(i, path, parts, leaf, variable)
        for i, ((path, _, leaf, variable), parts) in enumerate(zip(walked, all_parts, strict=True))
    ]
    _refuse_collisions(found)
    return found


def _walk(tree: Any, path: KeyPath = (), shown: KeyPath = (), variable: Any = None) -> Iterator:
    """Yields `(path, shown, leaf, variable)`; `shown` is the path without the way into boxes."""
    boxes, variables = _boxes()
    for below, node in tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, boxes))[0]:
        here, name = (*path, *below), (*shown, *below)
        if not isinstance(node, boxes):
            yield here, name, node, variable
            continue
        owner = node if variable is None and isinstance(node, variables) else variable
        inside = tree_flatten_with_path(node, is_leaf=lambda x, box=node: x is not box)[0]
        for key, child in inside:
            into = name if len(inside) == 1 else (*name, *key)
            yield from _walk(child, (*here, *key), into, owner)


def _boxes() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """The types that wrap one array, and those among them that can be shared."""
    variable, metadata = _flax("flax.nnx", "Variable"), _flax("flax.core.meta", "AxisMetadata")
    variables = () if variable is None else (variable,)
    return variables if metadata is None else (*variables, metadata), variables


def _flax(module: str, name: str) -> Any:
    """A type of flax if the program uses flax; this package must not import it."""
    return getattr(sys.modules.get(module), name, None)


def path_parts(path: Sequence[Any]) -> tuple[str, ...]:
    """The parts of a key path: keys, names and indices; a tuple key gives its own."""
    parts: list[str] = []
    for key in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                key = getattr(key, attribute)
                break
        parts.extend(map(str, key) if isinstance(key, tuple) else [str(key)])
    return tuple(parts)


def _by_variable(found: list[_At]) -> list[list[_At]]:
    """Leaves that are one tensor, together: those that lie in the same place of one Variable."""
    groups: dict[Any, list[_At]] = {}
    for at in found:
        key = at.index if at.variable is None else (id(at.variable), id(at.leaf))
        groups.setdefault(key, []).append(at)
    return list(groups.values())


def _refuse_collisions(found: list[_At]) -> None:
    seen: dict[str, _At] = {}
    for at in found:
        other = seen.setdefault(at.name, at)
        if other is not at:
            raise UsageError(
                f"Two leaves have the name {at.name!r}: {keystr(other.path)} and "
                f"{keystr(at.path)}. A run knows tensors by name: rename one of them."
            )
