"""The newest committed model as an Orbax checkpoint, for programs that have never heard of this
library:

    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(directory)             # NumPy or JAX arrays, nested dicts
        params = checkpointer.restore(directory, like)       # in the shapes and shardings of `like`

The tree is what `jdiloco.path_names` says: `Dense_0/kernel` is `params["Dense_0"]["kernel"]`, and
indices are keys that are strings. Orbax's own metadata of the tree tells where it is from, as
`jdiloco` in `custom_metadata`: run, round, versions, and the tensors that lie elsewhere than their
names say (`jdiloco.runtime.trees`).

What is written are the anchors that records name, held against their hashes: never a node's own
copy, which may be a mixture. While the run goes on a payload may be swept between the record and
its bytes; then the newer record is read. Nothing is written to the mailbox.

The directory appears at once and complete: it is written beside its place, under a name that Orbax
takes for an unfinished checkpoint, brought to the disk and renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jdiloco.errors import UsageError
from jdiloco.runtime import checkpoints
from jdiloco.runtime.checkpoints import RunState
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.inspect import find_run
from jdiloco.runtime.joining import BULK_WAITS, Performer, newest_state
from jdiloco.runtime.payloads import patient
from jdiloco.runtime.run_key import open_mailbox
from jdiloco.runtime.schema import Schema
from jdiloco.store.base import Store

UNFINISHED = ".orbax-checkpoint-tmp-"
"""In the name of a directory that is being written. Orbax restores from none that is called so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export has written."""

    directory: str
    run: str
    round: int  # The newest round that is in it; -1 for the initial values.
    versions: tuple[int, ...]  # Of every fragment.
    tensors: int  # Parameters alone.
    bytes: int  # Of the parameters.


def export(
    mailbox: str | os.PathLike[str] | Store,
    directory: str | os.PathLike[str],
    *,
    outer: bool = False,
    key_file: str | os.PathLike[str] | None = None,
    clock: Clock | None = None,
) -> Exported:
    """Writes the newest committed model of a mailbox as one Orbax checkpoint.

    Arguments:
      mailbox: folder, URL or store. Nothing is written there, and nobody there takes notice.
      directory: where the checkpoint is to be; there may be nothing yet, or an empty directory.
      outer: False: the tree is the parameters. True: it has them under `params`, beside `momentum`
        (float32) and `master`, the float32 copies behind bfloat16 and float16 parameters.
      key_file: the file that holds the run's key; None looks in the environment
        (`jdiloco.runtime.run_key`).

    `jdiloco.runtime.export` shows how to restore it. Before the first commit the values are those
    that the run was created with. Holds the whole model in memory. Tensors without elements are
    left out, since Orbax refuses them.

    Raises UsageError when there is no run, or the directory cannot be written; FormatError when the
    mailbox has lost or damaged what its newest records name.
    """
    clock = clock or Clock()
    store = open_mailbox(mailbox, key_file)
    target = _outside(place_for(directory), store)
    manifest, data = find_run(patient(store, BULK_WAITS, clock.sleep))
    schema = Schema.of_manifest(manifest)
    with tempfile.TemporaryDirectory(prefix="jdiloco-") as scratch:
        performer = Performer(store, clock, scratch=Path(scratch))
        state = newest_state(performer, performer.library(schema), manifest, data)
    with appearing(target, clock.fresh()) as path:
        checkpoints.export(state, path, run=manifest.run, outer=outer)
    return Exported(
        directory=str(target),
        run=manifest.run,
        round=state.round,
        versions=state.versions,
        tensors=len(state.values),
        bytes=_size(state),
    )


def _size(state: RunState) -> int:
    return sum(array.nbytes for array in state.values.values())


def _outside(target: Path, store: Store) -> Path:
    if "://" not in store.url and target.is_relative_to(os.path.realpath(store.url)):
        raise UsageError(
            f"`{target}` lies in the mailbox, where only its run writes. Name another directory."
        )
    return target


def place_for(directory: str | os.PathLike[str]) -> Path:
    """The place for a checkpoint. Raises UsageError unless one can be put there."""
    target = Path(os.path.realpath(os.path.expanduser(directory)))
    with _os_errors(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise _taken(target)
        target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _taken(target: Path) -> UsageError:
    what = "is a directory with something in it" if target.is_dir() else "is no directory"
    return UsageError(
        f"`{target}` {what}, and nothing is replaced. Name one that is empty or not there."
    )


@contextlib.contextmanager
def appearing(target: Path, fresh: str) -> Iterator[Path]:
    """A directory to be written, which appears at `target` once the block has ended well."""
    path = target.with_name(f"{target.name}{UNFINISHED}{fresh}")
    try:
        with _os_errors(target):
            yield path
            _bring_to_disk(path)
            path.rename(target)  # Refused by a directory that has something in it by now.
            _sync(target.parent)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _bring_to_disk(root: Path) -> None:
    for path in (*root.rglob("*"), root):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _os_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and target.exists():
            raise _taken(target) from error
        raise UsageError(
            f"`{target}` cannot be written: {error.strerror or error}. "
            "Put that right, or name another directory."
        ) from error
