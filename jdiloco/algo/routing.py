"""Which tensor is merged how: to be read before training, since names decide it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jdiloco.algo.merges import Merge, Rda, check_merge, is_direct
from jdiloco.algo.paths import NamedLeaf, named_leaves

_HEAD = ("name", "shape", "dtype", "route")


@dataclasses.dataclass(frozen=True)
class Route:
    """How one tensor is merged."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    route: str  # `rda`, `weighted_mean`, the name of your own kernel, or `left alone`.
    aliases: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Routing:
    """Every tensor's route, in canonical order. `str()` gives a table, `print` shows it."""

    merge: Merge
    routes: tuple[Route, ...]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __str__(self) -> str:
        rows = [_HEAD, *((_with_aliases(r), str(r.shape), r.dtype, r.route) for r in self.routes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        ]
        return "\n".join([*(line.rstrip() for line in lines), "", self._summary()])

    def _summary(self) -> str:
        merged = [route for route in self.routes if route.route != "left alone"]
        direct = sum(route.route == "weighted_mean" for route in merged)
        counts = f"{self.merge}: {direct} of {len(merged)} tensors by weighted mean."
        if isinstance(self.merge, Rda) and not direct:
            return f"{counts} No name contains {self.merge.direct_pattern!r}."
        return counts


def explain_routing(params: Any, merge: Merge | Any) -> Routing:
    """Lists how `merge` would treat each tensor of `params` (arrays or `jax.ShapeDtypeStruct`).

        >>> print(explain_routing({"mlp": {"w": x}, "tok_embed": {"w": y}}, rda()))
        name         shape   dtype    route
        mlp/w        (4, 4)  float32  rda
        tok_embed/w  (8, 4)  float32  weighted_mean

        Rda(direct_pattern='embed'): 1 of 2 tensors by weighted mean.

    Raises `UsageError` as `path_names` does, and for what is not a merge.
    """
    check_merge(merge)
    return Routing(merge, tuple(_route(leaf, merge) for leaf in named_leaves(params).leaves))


def _route(leaf: NamedLeaf, merge: Merge) -> Route:
    spec = leaf.spec
    if spec is None:
        shape = tuple(getattr(leaf.leaf, "shape", ()))
        dtype = str(getattr(leaf.leaf, "dtype", type(leaf.leaf).__name__))
        return Route(leaf.name, shape, dtype, "left alone", leaf.aliases)
    direct = is_direct(merge, *leaf.names)
    route = "weighted_mean" if direct else _kernel_name(merge, leaf)
    return Route(leaf.name, spec.shape, spec.dtype, route, leaf.aliases)


def _kernel_name(merge: Merge, leaf: NamedLeaf) -> str:
    return getattr(merge.kernel(*leaf.names), "__name__", "own").removesuffix("_kernel")


def _with_aliases(route: Route) -> str:
    return " = ".join((route.name, *route.aliases))
