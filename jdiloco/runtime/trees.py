"""Trees of arrays in files that Orbax restores, laid out through TensorStore and without Orbax.

A tensor lies at the parts of its path name, in a nested dict. Three kinds of names find no place
there, or none that Orbax keeps apart: `a` beside `a/b`, `a.b` beside `a/b`, and names that begin
with `#`. Such a tensor lies at the top, under `#` and its position among the sorted names. Tensors
without elements are not written, since Orbax refuses them.

Why Orbax's own `save` is not called is told in `jdiloco.runtime.checkpoints`.
"""

from __future__ import annotations

import collections
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jdiloco.runtime.pieces import Box
from jdiloco.types import TensorSpec

FILE_BYTES = 256 * 2**20
"""About the largest file, so that an upload that fails is not begun again from far behind."""

CHUNK_BYTES = 64 * 2**20
"""About the largest piece of a tensor: what restoring onto another sharding reads at once."""

Place = tuple[str, ...]


# Where tensors lie.


def places(names: Sequence[str]) -> dict[str, Place]:
    """For each path name the keys that lead to it in a nested dict. See the module."""
    inner = {name[:at] for name in names for at, char in enumerate(name) if char == "/"}
    spelled = collections.Counter(name.replace("/", ".") for name in names)  # As Orbax joins keys.

    def place(position: int, name: str) -> Place:
        alone = name not in inner and spelled[name.replace("/", ".")] == 1
        nests = alone and not name.startswith("#")
        return tuple(name.split("/")) if nests else (f"#{position}",)

    return {name: place(position, name) for position, name in enumerate(sorted(names))}


def nested(leaves: Mapping[Place, Any]) -> dict[str, Any]:
    """The tree that has these leaves."""
    tree: dict[str, Any] = {}
    for (*parents, last), leaf in leaves.items():
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = leaf
    return tree


def leaves(tree: Mapping[str, Any], above: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The leaves of a nested dict, each with the keys that lead to it."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


# Reading parts of them.


def read_boxes(
    path: Path, place: Place, spec: TensorSpec, boxes: Sequence[Box]
) -> dict[Box, np.ndarray]:
    """Parts of one leaf, read-only. Raises ValueError unless it is stored as `spec` says."""
    if not spec.size:
        return {box: np.empty([b - a for a, b in box], spec.dtype) for box in boxes}
    stored = ts.open(_location(path, place), open=True, read=True).result()
    if (stored.shape, stored.dtype.name) != (spec.shape, spec.dtype):
        raise ValueError(
            f"`{spec.name}` is {stored.dtype.name}{list(stored.shape)}, "
            f"wanted {spec.dtype}{list(spec.shape)}"
        )
    found = {}
    for box in boxes:
        found[box] = np.asarray(stored[tuple(slice(a, b) for a, b in box)].read().result())
        found[box].setflags(write=False)
    return found


# Writing them.


def save(
    path: Path, arrays: Mapping[Place, np.ndarray], about: Mapping[str, Any] | None = None
) -> None:
    """One Zarr 3 array for each leaf, all in one OCDBT database, and the shape of the tree.

    `about` is for its readers: Orbax gives it back as `custom_metadata`.
    """
    path.mkdir(parents=True)
    context = ts.Context()  # Shared, or each array opens a database of its own and adds files.
    for batch in _batches(arrays):
        with ts.Transaction() as transaction:
            opened = [
                ts.open(_zarr(path, *leaf), create=True, context=context, transaction=transaction)
                for leaf in batch
            ]
            writes = [o.result().write(a) for o, (_, a) in zip(opened, batch, strict=True)]
            for write in writes:
                write.copy.result()
    (path / "_METADATA").write_text(json.dumps(_tree_metadata(arrays, about)))


def _batches(arrays: Mapping[Place, np.ndarray]) -> Iterator[list[tuple[Place, np.ndarray]]]:
    """Cut where a file would be full: a transaction holds what it writes in memory."""
    batch, size = [], 0
    for place, array in arrays.items():
        batch.append((place, array))
        size += array.nbytes
        if size >= FILE_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _location(path: Path, place: Place) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{path}/"}
    held = {"driver": "ocdbt", "base": base, "path": ".".join(place) + "/"}
    return {"driver": "zarr3", "kvstore": held}


def _zarr(path: Path, place: Place, array: np.ndarray) -> dict[str, Any]:
    """Where Orbax looks for an array, and how it is stored."""
    grid = {"name": "regular", "configuration": {"chunk_shape": _chunk(array)}}
    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "zstd", "configuration": {"level": 1}},
    ]
    found = _location(path, place)
    found["kvstore"] |= {
        "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000},
        "target_data_file_size": FILE_BYTES,
    }
    return found | {
        "metadata": {
            "shape": array.shape,
            "data_type": array.dtype.name,
            "chunk_grid": grid,
            "codecs": codecs,
        },
        "store_data_equal_to_fill_value": True,  # Orbax takes zeros that are not there for a loss.
    }


def _chunk(array: np.ndarray) -> list[int]:
    """The array's shape, its longest axis halved until it is small enough."""
    shape = list(array.shape)
    while math.prod(shape) * array.dtype.itemsize > CHUNK_BYTES:
        longest = shape.index(max(shape))
        shape[longest] = -(-shape[longest] // 2)
    return shape


def _tree_metadata(places: Iterable[Place], about: Mapping[str, Any] | None) -> dict[str, Any]:
    dict_key = 2  # Orbax's number for one.
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        str(place): {
            "key_metadata": [{"key": key, "key_type": dict_key} for key in place],
            "value_metadata": value,
        }
        for place in places
    }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": about,
    }
