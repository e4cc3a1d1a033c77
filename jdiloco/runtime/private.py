"""Private checkpoints: what one node needs to go on, as an Orbax checkpoint in a directory.

    params/{i}          the parameters, leaf by leaf in tree order, whatever they are
    held/{name}         the committed values that the node held: its anchors, by path name
    then/{name}         what a fragment's parameters were at its newest snapshot, where kept
    sent/{round}        contributions that were outstanding, as the bytes that went out
    mine/{key}/{i}      what the user passed, leaf by leaf

What the protocol remembers (`jdiloco.protocol.resuming.Private`) is JSON in Orbax's metadata of the
tree, as `custom_metadata`. The files are written as a run checkpoint's are, without Orbax's own
`save`, so that a program may have a save of its own under way. The directory appears at once and
complete.

What a run has committed, momentum with it, is not here: it is in the mailbox.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jdiloco.errors import FormatError, UsageError
from jdiloco.protocol.records import FORMAT
from jdiloco.protocol.resuming import Private
from jdiloco.runtime import checkpoints, trees
from jdiloco.runtime.export import UNFINISHED, appearing, place_for
from jdiloco.runtime.parameters import placed
from jdiloco.types import TensorSpec

KIND = "private"
METADATA = "_METADATA"

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a learner is, between two steps. Arrays are in host memory and belong to nobody else."""

    private: Private
    held: Arrays  # Committed values, by path name.
    then: Arrays  # At each fragment's newest snapshot, by path name, where they are kept.
    sent: Mapping[int, bytes]  # Outstanding contributions, by round.


@dataclasses.dataclass(frozen=True)
class Saved:
    """A private checkpoint that has been read."""

    path: str
    kept: Kept
    algorithm: Mapping[str, Any]
    tensors: tuple[TensorSpec, ...]
    params: tuple[np.ndarray, ...]
    mine: Mapping[str, tuple[np.ndarray, ...]]


class _About(msgspec.Struct, frozen=True):
    """The JSON beside the arrays."""

    jdiloco: str  # KIND.
    format: int
    private: Private
    algorithm: dict[str, Any]
    tensors: tuple[TensorSpec, ...]
    names: tuple[str, ...]  # Of every array.
    empty: dict[str, tuple[tuple[int, ...], str]]  # Arrays without elements: shape and type.
    mine: tuple[str, ...]


def host(leaf: Any) -> np.ndarray:
    """A leaf as it is saved; a typed random key as its data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.array(jax.device_get(leaf))
    if array.dtype.hasobject or array.dtype.kind in "US":
        raise UsageError(
            f"A {type(leaf).__name__} cannot be saved: {leaf!r:.60}. Arrays, numbers and random "
            "keys can; keep the rest in a file of your own."
        )
    return array


def save(
    path: str | os.PathLike[str],
    kept: Kept,
    *,
    algorithm: Mapping[str, Any],
    params: Sequence[np.ndarray],
    tensors: Sequence[TensorSpec],
    mine: Mapping[str, Sequence[np.ndarray]],
    fresh: str,
) -> None:
    """Writes a private checkpoint to a directory that is not there yet, or empty."""
    arrays = {
        **{f"params/{i}": array for i, array in enumerate(params)},
        **{f"held/{name}": array for name, array in kept.held.items()},
        **{f"then/{name}": array for name, array in kept.then.items()},
        **{f"sent/{round}": np.frombuffer(data, np.uint8) for round, data in kept.sent.items()},
        **{f"mine/{key}/{i}": a for key, leaves in mine.items() for i, a in enumerate(leaves)},
    }
    about = _About(
        jdiloco=KIND,
        format=FORMAT,
        private=kept.private,
        algorithm=dict(algorithm),
        tensors=tuple(tensors),
        names=tuple(arrays),
        empty={name: (a.shape, a.dtype.name) for name, a in arrays.items() if not a.size},
        mine=tuple(mine),
    )
    places = trees.places(list(arrays))
    held = {places[name]: array for name, array in arrays.items() if array.size}
    with appearing(place_for(path), fresh) as directory:
        trees.save(directory, held, json.loads(msgspec.json.encode(about)))


def read(path: str | os.PathLike[str]) -> Saved:
    """Reads what `save` wrote. Raises UsageError where there is nothing of the kind."""
    directory = Path(os.path.realpath(os.path.expanduser(path)))
    about = _about(directory)
    places = trees.places(list(about.names))
    wanted = {places[name]: name for name in about.names if name not in about.empty}
    arrays = {n: np.empty(shape, dtype) for n, (shape, dtype) in about.empty.items()}
    arrays |= {wanted[place]: a for place, a in checkpoints.read_tree(directory, wanted).items()}

    def part(prefix: str) -> dict[str, np.ndarray]:
        found = (name for name in about.names if name.startswith(f"{prefix}/"))
        return {name.removeprefix(f"{prefix}/"): arrays[name] for name in found}

    sent = {int(round): array.tobytes() for round, array in part("sent").items()}
    return Saved(
        path=str(path),
        kept=Kept(about.private, part("held"), part("then"), sent),
        algorithm=about.algorithm,
        tensors=about.tensors,
        params=tuple(part("params").values()),
        mine={key: tuple(part(f"mine/{key}").values()) for key in about.mine},
    )


def _about(directory: Path) -> _About:
    try:
        found = json.loads((directory / METADATA).read_bytes())["custom_metadata"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(_nothing(directory)) from None
    if not isinstance(found, dict) or found.get("jdiloco") != KIND:
        raise UsageError(_foreign(directory))
    if found.get("format") != FORMAT:
        raise FormatError(
            f"`{directory}` was written in format {found.get('format')!r}; this build reads "
            f"{FORMAT}."
        )
    try:
        return msgspec.convert(found, _About)
    except msgspec.ValidationError as error:
        raise FormatError(f"`{directory}` is no private checkpoint: {error}.") from error


def _foreign(directory: Path) -> str:
    return (
        f"`{directory}` was not written by `session.save`. To start a node from parameters of "
        "another checkpoint, restore them yourself and pass them: `Session(params, …)`. The "
        "first node of a run creates it from them; others take the run's values."
    )


def _nothing(directory: Path) -> str:
    """Says what is there, and which checkpoints beside it are complete."""
    if UNFINISHED in directory.name or any(UNFINISHED in p.name for p in _beside(directory)):
        what = "is not complete: saving it was interrupted"
    elif not directory.exists():
        what = "is not there"
    elif (directory / "_CHECKPOINT_METADATA").exists():
        return _foreign(directory)
    else:
        what = "holds no complete checkpoint"
    complete = sorted(p.name for p in _beside(directory) if (p / METADATA).exists())
    others = f" Complete beside it: {', '.join(complete)}." if complete else ""
    return f"`{directory}` {what}.{others}"


def _beside(directory: Path) -> list[Path]:
    parent = directory.parent
    return [p for p in parent.iterdir() if p != directory] if parent.is_dir() else []


def restored(leaves: Sequence[np.ndarray], like: Any, key: str) -> Any:
    """Saved leaves in the structure of `like`, each of its kind and where that is."""
    wanted, treedef = jax.tree.flatten(like)
    if len(wanted) != len(leaves):
        raise UsageError(
            f"`{key}` was saved with {len(leaves)} leaves, and `like` has {len(wanted)} there. "
            "Build it as the program that saved did."
        )
    pairs = zip(leaves, wanted, strict=True)
    return jax.tree.unflatten(treedef, [as_leaf(array, leaf) for array, leaf in pairs])


def as_leaf(array: np.ndarray, like: Any) -> Any:
    """A saved leaf as one like this: a key, an array where it is, or a plain number."""
    if isinstance(like, jax.Array) and jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    if isinstance(like, jax.Array):
        return placed(array, like)
    if isinstance(like, np.ndarray):
        return array
    return type(like)(array.item())
