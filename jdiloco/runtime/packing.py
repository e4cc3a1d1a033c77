"""A user's trees as named arrays and a few notes, and back into the structure of an example.

A leaf is an array of JAX or NumPy, a random key, or a plain value: bool, int, float, str or bytes.
It is named by the parts of its key path, joined by `/`; a leaf whose name another one has, or that
has none, is called `#` and its place among the leaves.
"""

from __future__ import annotations

import base64
import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdiloco.algo.paths import path_parts
from jdiloco.errors import SchemaMismatch, UsageError
from jdiloco.runtime.parameters import placed
from jdiloco.runtime.schema import listed

PLAIN = (bool, int, float, str, bytes)
SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Packed:
    """One tree. Its structure is not in it: whoever unpacks it brings an example."""

    arrays: Mapping[str, np.ndarray]
    keys: Mapping[str, str]  # Random keys among them, with their implementation.
    plain: Mapping[str, tuple[str, str]]  # Kind and text of plain values.


def pack(what: str, tree: Any) -> Packed:
    """Copies a tree to the host. `what` is what errors call it."""
    arrays: dict[str, Any] = {}
    keys: dict[str, str] = {}
    plain: dict[str, tuple[str, str]] = {}
    for name, leaf in _named(tree).items():
        if _kind(leaf):
            plain[name] = _to_json(leaf)
            continue
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
            raise UsageError(
                f"`{what}` holds a {type(leaf).__name__} at {name!r}. Save arrays, random keys, "
                "numbers, strings and bytes."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise UsageError(
                f"`{what}` holds an array at {name!r} that was donated or deleted. Save what the "
                "newest step returned."
            )
        if isinstance(leaf, jax.Array) and _is_key(leaf):
            keys[name] = str(jax.random.key_impl(leaf))
            arrays[name] = jax.random.key_data(leaf)
        else:
            arrays[name] = leaf
    host = {name: np.array(array) for name, array in jax.device_get(arrays).items()}
    return Packed(host, keys, plain)


def unpack(what: str, found: Packed, like: Any) -> Any:
    """The tree in the structure of `like`, whose arrays say where the new ones are to be.

    Raises SchemaMismatch unless both have the same leaves, of one shape and type each.
    """
    examples = _named(like)
    _check(what, found, examples)
    leaves = [_unpacked(found, name, example) for name, example in examples.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = ["/".join(path_parts(path)) for path, _ in leaves]
    counts = Counter(names)
    return {
        name if name and counts[name] == 1 else f"#{index}": leaf
        for index, (name, (_, leaf)) in enumerate(zip(names, leaves, strict=True))
    }


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _kind(leaf: Any) -> str:
    """The name of a plain value's type, "" for anything else; NumPy's numbers are arrays."""
    if isinstance(leaf, np.generic):
        return ""
    return next((kind.__name__ for kind in PLAIN if isinstance(leaf, kind)), "")


def _to_json(value: Any) -> tuple[str, str]:
    """As text, since JSON has no bytes and no infinity, and rounds large numbers."""
    if isinstance(value, bytes):
        return "bytes", base64.b64encode(value).decode()
    return _kind(value), value if isinstance(value, str) else repr(value)


def _from_json(kind: str, text: str) -> Any:
    match kind:
        case "bytes":
            return base64.b64decode(text)
        case "bool":
            return text == "True"
        case "int":
            return int(text)
        case "float":
            return float(text)
    return text


def _described(found: Packed, name: str) -> str:
    if name in found.plain:
        return found.plain[name][0]
    if name not in found.arrays:
        return "nothing"
    array = found.arrays[name]
    if name in found.keys:
        return f"key<{found.keys[name]}>{list(array.shape[:-1])}"
    return f"{array.dtype.name}{list(array.shape)}"


def _expected(example: Any) -> str:
    if kind := _kind(example):
        return kind
    if _is_key(example):
        return f"key<{jax.random.key_impl(example)}>{list(example.shape)}"
    shape, dtype = getattr(example, "shape", None), getattr(example, "dtype", None)
    if shape is None or dtype is None:
        return type(example).__name__
    return f"{np.dtype(dtype).name}{list(shape)}"


def _check(what: str, found: Packed, examples: Mapping[str, Any]) -> None:
    wanted = {name: _expected(example) for name, example in examples.items()}
    names = sorted({*wanted, *found.arrays, *found.plain})
    lines = [
        f"  {name or what}: the checkpoint has {_described(found, name)}, "
        f"`like` {wanted.get(name, 'nothing')}"
        for name in names
        if _described(found, name) != wanted.get(name)
    ]
    if lines:
        raise SchemaMismatch(
            f"`{what}` was saved with other leaves than it is to be restored to:\n"
            f"{listed(lines, SHOWN)}\nPass the structure that was saved."
        )


def _unpacked(found: Packed, name: str, example: Any) -> Any:
    if name in found.plain:
        return _from_json(*found.plain[name])
    array = found.arrays[name]
    if name in found.keys:
        data = placed(array, jax.random.key_data(example))
        return jax.random.wrap_key_data(data, impl=found.keys[name])
    if isinstance(example, (np.ndarray, np.generic)):
        return array.copy() if isinstance(example, np.ndarray) else array[()]
    if isinstance(example, jax.ShapeDtypeStruct):
        return jax.device_put(array, example.sharding)  # None is the default place.
    return placed(array, example)
