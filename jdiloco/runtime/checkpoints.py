"""Run checkpoints: everything a run has committed, as an Orbax checkpoint.

    params      the anchors, a dict nested by the parts of their path names
    momentum    the outer step's momentum, nested likewise
    master      the fp32 copies behind bfloat16 and float16 anchors; absent if there are none
    run         JSON: format, round, versions of the fragments, the manifest, unusual places

In a folder the result is an Orbax checkpoint where it lies; from a bucket it is one once its files
are downloaded. Nobody needs this library to read it:

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(path / "params")

`trees` lays the files out, through the same TensorStore, and Orbax reads them. Its own `save`
cannot be called from a library's thread: it numbers operations for the whole process, so that a
program which saves its state in its own thread meanwhile, or this thread, waits for a signal that
carries another number, for 20 minutes (0.12.8; seen in one of two tries). Nor does it write to
every store, and two writers on one path mix their files.

So each writer works in a scratch directory of its own and uploads the files under a prefix of its
own; whoever names the checkpoint names its files with their hashes, and a reader holds them against
those before Orbax sees them. A writer that dies leaves files that nothing names.

Arrays are NumPy's on both sides. Writing does not touch JAX. Reading does: Orbax asks it which
process this is, and that starts JAX's backend where nothing else has. A program that only reads
checkpoints sets `jax_platforms` to `cpu` first, or it takes an accelerator it has no use for.

Names that find no place in a nested dict (`trees`) are under `elsewhere` in `run`. Tensors without
elements, which are not written, come back from the schema.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp

from jdiloco.algo.outer import MOMENTA
from jdiloco.errors import FormatError, UsageError
from jdiloco.protocol.records import Checkpoint, Payload, seal
from jdiloco.runtime import messages, trees
from jdiloco.runtime.pieces import Box
from jdiloco.runtime.precision import FULL, Precision
from jdiloco.runtime.trees import Place
from jdiloco.store.arguments import is_part
from jdiloco.store.base import Store
from jdiloco.store.settle import create_owned
from jdiloco.types import TensorSpec

FORMAT = 1
"""Of the `run` item and of what lies beside it."""

LISTING = "_FILES"
"""Lies beside the files and names them, sealed, so that a checkpoint which no record names yet can
be held against it. It is written last: a checkpoint without one is not complete."""

_DOWNLOAD_BYTES = 64 * 2**20
_NARROW = {"bfloat16", "float16"}


class RunState(msgspec.Struct, frozen=True, eq=False):
    """What a run has committed up to one round.

    An array that can be written to is copied when the state is saved, and one that cannot is
    taken to stay as it is. Restored arrays cannot.
    """

    values: dict[str, np.ndarray]  # Anchors by path name, each in its parameter's type.
    momentum: dict[str, np.ndarray]  # Of every tensor, in float32 or the run's `momentum_dtype`.
    master: dict[str, np.ndarray]  # In float32, of tensors that are rounded from one.
    versions: tuple[int, ...]  # Of every fragment.
    round: int  # The newest round whose record is covered; -1 before the first.
    manifest: bytes  # As it lies in the mailbox.


def write(
    state: RunState,
    store: Store,
    prefix: str,
    *,
    scratch: Path,
    waits: Sequence[float] = (),
    sleep: Callable[[float], object] = lambda seconds: None,
) -> tuple[Payload, ...]:
    """Uploads a checkpoint and returns its files, with keys that go on from `prefix`.

    `prefix` must hold the incarnation and attempt of its only writer. The checkpoint exists once
    something names the files returned. `waits` and `sleep` say, for each file anew, what
    `create_owned` does with a doubtful answer.
    """
    _check_state(state)
    trees, run = _contents(state)
    files = []
    with private(scratch, "save-") as root:
        _save(root, trees, run)
        for path in _files(root):
            data = path.read_bytes()
            key = path.relative_to(root).as_posix()
            create_owned(store, f"{prefix}/{key}", data, waits=waits, sleep=sleep)
            files.append(Payload(key, len(data), messages.digest([data])))
    listed = Checkpoint(state.round, state.versions, prefix, tuple(files))
    key = f"{prefix}/{LISTING}"
    create_owned(store, key, seal(key, listed), waits=waits, sleep=sleep)
    return listed.files


def read(
    store: Store,
    prefix: str,
    files: Sequence[Payload],
    *,
    scratch: Path,
    specs: Sequence[TensorSpec],
    precision: Precision = FULL,
) -> RunState:
    """Downloads a checkpoint, checks it against `files` and `specs`, and restores it read-only.

    Raises FormatError when a file is missing, damaged or misplaced, or holds something else.
    """
    _check_files(store, prefix, files)
    with private(scratch, "load-") as root:
        for file in files:
            download(store, prefix, file, root)
        return restore(root, specs, precision)


def fetch(store: Store, prefix: str, files: Sequence[Payload], root: Path, within: str) -> None:
    """Downloads the files whose keys begin with `within`, to below `root`. Errors: `read`."""
    _check_files(store, prefix, files)
    for file in files:
        if file.key.startswith(within):
            download(store, prefix, file, root)


def read_boxes(
    root: Path,
    names: Sequence[str],
    specs: Sequence[TensorSpec],
    boxes: Mapping[str, Sequence[Box]],
) -> dict[str, dict[Box, np.ndarray]]:
    """Parts of some parameters of a checkpoint below `root`, read-only; the rest stays on the disk.

    `names` are those of all its tensors. Raises FormatError where it holds something else.
    """
    places = trees.places(names)
    with _format_errors():
        return {
            spec.name: trees.read_boxes(root / "params", places[spec.name], spec, boxes[spec.name])
            for spec in specs
        }


def restore(root: Path, specs: Sequence[TensorSpec], precision: Precision = FULL) -> RunState:
    """Restores a checkpoint whose files lie below `root`. Errors: `read`."""
    with _format_errors():
        return _restore_state(root, specs, precision)


def export(state: RunState, path: Path, *, run: str, outer: bool) -> None:
    """Writes a state as one tree, without the `run` item: see `jdiloco.runtime.export`."""
    items, told = _contents(state)
    params = items.pop("params", {})
    if outer:
        items["params"] = params
        params = {(i, *place): array for i, held in items.items() for place, array in held.items()}
    about = {"round": told.round, "versions": told.versions, "elsewhere": told.elsewhere}
    trees.save(path, params, about={"jdiloco": {"run": run, **about}})
    kind = ocp.PyTreeCheckpointHandler.typestr()
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": kind}))


# What is in a checkpoint.


class _Run(msgspec.Struct, frozen=True):
    """The `run` item."""

    format: int
    round: int
    versions: tuple[int, ...]
    manifest: str
    elsewhere: dict[str, str]  # Where tensors lie that are not under their own name.


def _contents(state: RunState) -> tuple[dict[str, dict[Place, np.ndarray]], _Run]:
    """The items, of arrays that nobody can change any more."""
    places = trees.places(list(state.values))
    items = {"params": state.values, "momentum": state.momentum, "master": state.master}
    held = {i: {places[n]: _held(a) for n, a in t.items() if a.size} for i, t in items.items()}
    run = _Run(
        format=FORMAT,
        round=state.round,
        versions=state.versions,
        manifest=state.manifest.decode(),
        elsewhere={n: p[0] for n, p in places.items() if p[0].startswith("#")},
    )
    return {item: arrays for item, arrays in held.items() if arrays}, run


def _held(array: np.ndarray) -> np.ndarray:
    return array.copy() if array.flags.writeable else array


def _check_state(state: RunState) -> None:
    specs = [TensorSpec(n, a.shape, a.dtype.name) for n, a in state.values.items()]
    try:
        messages.check(state.momentum, specs, dtypes=_momentum_dtypes(state.momentum, specs))
        messages.check(state.master, _mastered(specs, state.master))
    except FormatError as error:
        raise UsageError(f"Momentum and master copies must fit the values. {error}") from error


def _mastered(specs: Sequence[TensorSpec], found: Mapping[str, Any]) -> list[TensorSpec]:
    """bfloat16 and float16 tensors have a master, float32 ones where commits are narrow."""
    held = [s for s in specs if s.dtype in _NARROW or (s.dtype == "float32" and s.name in found)]
    return _in_float32(held)


def _in_float32(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [TensorSpec(spec.name, spec.shape, "float32") for spec in specs]


def _momentum_dtypes(
    found: Mapping[str, Any], specs: Sequence[TensorSpec], dtypes: Sequence[str] = MOMENTA
) -> dict[str, str]:
    """What was found where it will do, so that only other momentum counts as wrong."""
    names = {name: array.dtype.name for name, array in found.items()}
    held = (*dtypes, "float64")
    return {s.name: d if (d := names.get(s.name)) in held else dtypes[0] for s in specs}


# Writing what Orbax reads.


def _save(root: Path, items: Mapping[str, Mapping[Place, np.ndarray]], run: _Run) -> None:
    for item, arrays in items.items():
        trees.save(root / item, arrays)
    (root / "run").mkdir(parents=True)
    (root / "run" / "metadata").write_bytes(msgspec.json.encode(run))
    kinds = dict.fromkeys(items, ocp.PyTreeCheckpointHandler.typestr())
    kinds["run"] = ocp.JsonCheckpointHandler.typestr()
    (root / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": kinds}))


# Reading with Orbax.


def _alone() -> ocp.options.MultiprocessingOptions:
    """For this process by itself: the other processes of a pod know nothing of it."""
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix="jdiloco"
    )


def _checkpointer() -> ocp.Checkpointer:
    alone = _alone()
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        params=ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
        momentum=ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
        master=ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
        run=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def read_tree(root: Path, wanted: Iterable[Place]) -> dict[Place, np.ndarray]:
    """Some arrays of one tree that was written with `trees.save`."""
    alone = _alone()
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with (
        _format_errors(),
        ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer,
    ):
        found = checkpointer.restore(root, args=_restore_args(wanted))
    return dict(trees.leaves(found))


def _restore(root: Path, **items: Any) -> Any:
    with _checkpointer() as checkpointer:
        return checkpointer.restore(root, args=ocp.args.Composite(**items))


def _restore_args(places: Iterable[Place]) -> ocp.args.PyTreeRestore:
    """NumPy whatever the files say: nothing is put on a device."""
    return ocp.args.PyTreeRestore(
        restore_args=trees.nested(
            {place: ocp.RestoreArgs(restore_type=np.ndarray) for place in places}
        )
    )


def _restore_run(root: Path) -> _Run:
    found = _restore(root, run=ocp.args.JsonRestore()).run
    written = found.get("format") if isinstance(found, dict) else None
    if written != FORMAT:
        raise FormatError(
            f"Checkpoint was written in format {written!r}; this build reads {FORMAT}."
        )
    return msgspec.convert(found, _Run)


def _restore_state(root: Path, specs: Sequence[TensorSpec], precision: Precision) -> RunState:
    run = _restore_run(root)
    names = {place: name for name, place in trees.places([spec.name for spec in specs]).items()}
    wanted = {
        "params": list(specs),
        "momentum": precision.momenta(specs),
        "master": _in_float32(precision.masters(specs)),
    }
    _check_stored(root, wanted, names)
    items = _restore_trees(root, wanted, names)
    return RunState(
        values=items["params"],
        momentum=items["momentum"],
        master=items["master"],
        versions=run.versions,
        round=run.round,
        manifest=run.manifest.encode(),
    )


def _check_stored(
    root: Path, wanted: Mapping[str, Sequence[TensorSpec]], names: Mapping[Place, str]
) -> None:
    """Holds what each item says it stores against the schema before an array is made for it."""
    with _checkpointer() as checkpointer:
        items = checkpointer.metadata(root).item_metadata or {}
    for item, specs in wanted.items():
        tree = stored.tree if (stored := items.get(item)) else {}
        found = {names.get(p, "/".join(p)): _stand_in(leaf) for p, leaf in trees.leaves(tree)}
        full = [spec for spec in specs if spec.size]
        kept = [spec.dtype for spec in full[:1]]  # One type for all of them.
        dtypes = _momentum_dtypes(found, full, kept) if item == "momentum" else None
        messages.check(found, full, dtypes=dtypes)


def _restore_trees(
    root: Path, wanted: Mapping[str, Sequence[TensorSpec]], names: Mapping[Place, str]
) -> dict[str, dict[str, np.ndarray]]:
    """Every item by path name, read-only."""
    places = {name: place for place, name in names.items()}
    full = {i: [places[spec.name] for spec in specs if spec.size] for i, specs in wanted.items()}
    items = _restore(
        root, **{item: _restore_args(leaves) for item, leaves in full.items() if leaves}
    )
    restored = {}
    for item, specs in wanted.items():
        arrays = {spec.name: np.empty(spec.shape, spec.dtype) for spec in specs if not spec.size}
        arrays |= {names[place]: a for place, a in trees.leaves(items[item] if full[item] else {})}
        for array in arrays.values():
            array.setflags(write=False)
        restored[item] = {spec.name: arrays[spec.name] for spec in specs}
    return restored


def _stand_in(stored: Any) -> np.ndarray:
    """An array of the shape and type that Orbax found written down, without memory for it."""
    return np.broadcast_to(np.empty((), stored.dtype), stored.shape)


@contextlib.contextmanager
def _format_errors() -> Iterator[None]:
    """Whatever Orbax says of files that are what was uploaded and yet no run checkpoint."""
    kinds = (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError, RecursionError)
    try:
        yield
    except (*kinds, msgspec.ValidationError) as error:
        raise FormatError(f"The files are no run checkpoint: {error}.") from error


# Files.


@contextlib.contextmanager
def private(scratch: Path, kind: str) -> Iterator[Path]:
    """A path for one checkpoint in a new directory below `scratch`, which goes away with it."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=kind, dir=scratch.resolve()) as directory:
        yield Path(directory) / "checkpoint"


def _files(root: Path) -> list[Path]:
    """What to upload: the files at the top last, since they tell Orbax that the rest is there."""
    files = (path for path in root.rglob("*") if path.is_file())
    return sorted(files, key=lambda path: (path.parent == root, path))


def _check_files(store: Store, prefix: str, files: Sequence[Payload]) -> None:
    """Every file lies below the prefix, once, and has the size that was named: one listing."""
    there = {entry.key: entry.size for entry in store.list(f"{prefix}/")}
    for file in files:
        if not all(map(is_part, file.key.split("/"))):
            raise FormatError(f"Checkpoint {prefix} names a file {file.key!r}, which is no key.")
        size = there.pop(f"{prefix}/{file.key}", None)
        if size != file.size:
            found = "absent or named twice" if size is None else f"{size} bytes long"
            raise FormatError(f"{prefix}/{file.key} is {found}, wanted {file.size} bytes.")


def download(store: Store, prefix: str, file: Payload, root: Path) -> None:
    """One file of a checkpoint, to its place below `root`. Raises FormatError if it is damaged.

    Piece by piece, since a file may be larger than is good to hold.
    """
    key, path = f"{prefix}/{file.key}", root / file.key
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with path.open("xb") as out:
        for start in range(0, file.size, _DOWNLOAD_BYTES):
            piece = store.get(key, start=start, stop=min(start + _DOWNLOAD_BYTES, file.size)) or b""
            digest.update(piece)
            out.write(piece)
    if digest.hexdigest() != file.sha256:
        raise FormatError(f"{key} has sha256 {digest.hexdigest()}, wanted {file.sha256}.")
