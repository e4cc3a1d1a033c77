"""Private checkpoints: what one node needs to go on, as an Orbax checkpoint in a directory.

    params/{name}       the parameters, whatever they are; of a module all of its state
    held/{name}         the committed values that the node held: its anchors, by path name
    then/{name}         what a fragment's parameters were at its newest snapshot, where kept
    sent/{round}        contributions that were outstanding, as the bytes that went out
    mine/{key}/{name}   what the user passed, each leaf under its own name (`packing`)

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
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from jdiloco.errors import FormatError, UsageError
from jdiloco.protocol.records import FORMAT
from jdiloco.protocol.resuming import Private
from jdiloco.runtime import checkpoints, trees
from jdiloco.runtime.export import UNFINISHED, appearing, place_for
from jdiloco.runtime.packing import Packed
from jdiloco.types import TensorSpec

KIND = "private"
NUMBERED = re.compile(r".*?([0-9]+)")
LEFT_OVER = re.compile(r"d|params|manifest\.ocdbt|ocdbt\.process_[0-9]+|array_metadatas|_sharding")
"""What may lie in an Orbax checkpoint before it is complete."""
METADATA = "_METADATA"

Arrays = Mapping[str, np.ndarray]
T = TypeVar("T")


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
    params: Packed
    mine: Mapping[str, Packed]


class _About(msgspec.Struct, frozen=True):
    """The JSON beside the arrays."""

    jdiloco: str  # KIND.
    format: int
    private: Private
    algorithm: dict[str, Any]
    tensors: tuple[TensorSpec, ...]
    names: tuple[str, ...]  # Of every array.
    empty: dict[str, tuple[tuple[int, ...], str]]  # Arrays without elements: shape and type.
    keys: dict[str, str]  # Random keys among the arrays, with their implementation.
    plain: dict[str, tuple[str, str]]  # What is no array: kind and text.
    mine: tuple[str, ...]


def save(
    path: str | os.PathLike[str],
    kept: Kept,
    *,
    algorithm: Mapping[str, Any],
    params: Packed,
    tensors: Sequence[TensorSpec],
    mine: Mapping[str, Packed],
    fresh: str,
) -> None:
    """Writes a private checkpoint to a directory that is not there yet, or empty."""
    packed = {"params": params, **{f"mine/{key}": tree for key, tree in mine.items()}}
    arrays = {
        **_under(packed, lambda tree: tree.arrays),
        **{f"held/{name}": array for name, array in kept.held.items()},
        **{f"then/{name}": array for name, array in kept.then.items()},
        **{f"sent/{round}": np.frombuffer(data, np.uint8) for round, data in kept.sent.items()},
    }
    about = _About(
        jdiloco=KIND,
        format=FORMAT,
        private=kept.private,
        algorithm=dict(algorithm),
        tensors=tuple(tensors),
        names=tuple(arrays),
        empty={name: (a.shape, a.dtype.name) for name, a in arrays.items() if not a.size},
        keys=_under(packed, lambda tree: tree.keys),
        plain=_under(packed, lambda tree: tree.plain),
        mine=tuple(mine),
    )
    places = trees.places(list(arrays))
    held = {places[name]: array for name, array in arrays.items() if array.size}
    _clear(Path(path).expanduser(), fresh)
    with appearing(place_for(path), fresh) as directory:
        trees.save(directory, held, json.loads(msgspec.json.encode(about)))


def _clear(target: Path, fresh: str) -> None:
    """Moves aside what some program left of a checkpoint that it never completed."""
    left = [child.name for child in target.iterdir()] if target.is_dir() else []
    if not left or METADATA in left or not all(map(LEFT_OVER.fullmatch, left)):
        return
    aside = target.with_name(f"{target.name}{UNFINISHED}{fresh}-old")
    warnings.warn(
        f"`{target}` held a checkpoint that is not complete; it is `{aside.name}` now.",
        stacklevel=4,
    )
    target.rename(aside)


def _under(packed: Mapping[str, Packed], of: Callable[[Packed], Mapping[str, T]]) -> dict[str, T]:
    return {f"{at}/{name}": x for at, tree in packed.items() for name, x in of(tree).items()}


def read(path: str | os.PathLike[str]) -> Saved:
    """Reads what `save` wrote, or the newest complete one of several in a directory.

    Raises UsageError where there is nothing of the kind.
    """
    directory = _newest(Path(os.path.realpath(os.path.expanduser(path))))
    about = _about(directory)
    places = trees.places(list(about.names))
    wanted = {places[name]: name for name in about.names if name not in about.empty}
    arrays = {n: np.empty(shape, dtype) for n, (shape, dtype) in about.empty.items()}
    arrays |= {wanted[place]: a for place, a in checkpoints.read_tree(directory, wanted).items()}

    def packed(prefix: str) -> Packed:
        keys, plain = _part(prefix, about.keys), _part(prefix, about.plain)
        return Packed(_part(prefix, arrays), keys, plain)

    held, then = _part("held", arrays), _part("then", arrays)
    sent = {int(round): array.tobytes() for round, array in _part("sent", arrays).items()}
    return Saved(
        path=str(directory),
        kept=Kept(about.private, held, then, sent),
        algorithm=about.algorithm,
        tensors=about.tensors,
        params=packed("params"),
        mine={key: packed(f"mine/{key}") for key in about.mine},
    )


def _part(prefix: str, of: Mapping[str, T]) -> dict[str, T]:
    found = (name for name in of if name.startswith(f"{prefix}/"))
    return {name.removeprefix(f"{prefix}/"): of[name] for name in found}


def _newest(place: Path) -> Path:
    """Of the directories in `place` the complete one whose name ends with the highest number.

    `place` itself where it is one. A higher number that is not complete is warned about.
    """
    if (place / METADATA).exists() or not place.is_dir():
        return place
    numbered = [(int(m[1]), p) for p in place.iterdir() if (m := NUMBERED.fullmatch(p.name))]
    found = sorted(((n, p) for n, p in numbered if p.is_dir()), reverse=True)
    for index, (_, directory) in enumerate(found):
        if (directory / METADATA).exists():
            if passed := ", ".join(skipped.name for _, skipped in found[:index]):
                warnings.warn(
                    f"Going on from `{directory}`: {passed} beside it is not complete.",
                    stacklevel=4,
                )
            return directory
    return place


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
