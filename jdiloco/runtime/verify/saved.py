"""Run checkpoints: their files, and whether they hold what the records committed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jdiloco.errors import FormatError
from jdiloco.protocol.records import Checkpoint, Payload
from jdiloco.runtime import checkpoints, messages, payloads
from jdiloco.runtime.checkpoints import LISTING, RunState
from jdiloco.runtime.payloads import Version
from jdiloco.runtime.schema import Schema
from jdiloco.runtime.verify.chain import Made, Walk
from jdiloco.runtime.verify.reading import Reader, Rule, never, unsealed


class Saved:
    """Checks one run checkpoint at a time."""

    def __init__(self, reader: Reader, schema: Schema, manifest: bytes, scratch: Path) -> None:
        self._reader = reader
        self._schema = schema
        self._manifest = manifest
        self._scratch = scratch

    def check(
        self, checkpoint: Checkpoint, made: Mapping[int, tuple[int, Made | None]], walk: Walk
    ) -> dict[int, Version]:
        """Every fragment's version in a checkpoint; empty when it cannot be restored."""
        self._check_listing(checkpoint, walk)
        with checkpoints.private(self._scratch, "verify-") as root:
            if not self._fetch(checkpoint, root, walk):
                return {}
            try:
                state = checkpoints.restore(root, self._schema.tensors, self._schema.precision)
            except FormatError as error:
                self._wrong(checkpoint, walk, f"cannot be restored: {error}")
                return {}
        versions = {index: self._version(state, index) for index in range(len(self._schema.plan))}
        for what in self._differences(checkpoint, state, versions, made):
            self._wrong(checkpoint, walk, what)
        return versions

    def unnamed(self, prefix: str) -> Checkpoint | None:
        """A checkpoint that no record names; None, with a remark, when it is not complete."""
        key = f"{prefix}/{LISTING}"
        if self._reader.listed(key):
            return self._listing(prefix, never, "No record names this checkpoint.")
        what = "is named by no record and not complete: being written, or left behind"
        self._reader.remark(f"{prefix}/", what)
        return None

    def _listing(self, prefix: str, rule: Rule, means: str) -> Checkpoint | None:
        """What a checkpoint says of itself, beside its files."""
        key = f"{prefix}/{LISTING}"
        data = self._reader.get(key, rule, means)
        return None if data is None else unsealed(self._reader, key, data, Checkpoint, means)

    def _check_listing(self, checkpoint: Checkpoint, walk: Walk) -> None:
        means = "Nobody reads it but who verifies; the checkpoint is as good as its files."
        if checkpoint.round > walk.named[-1].round:
            return  # It is where this checkpoint is known from.
        found = self._listing(checkpoint.prefix, _rule(checkpoint), means)
        if found is not None and found != checkpoint:
            key = f"{checkpoint.prefix}/{LISTING}"
            self._reader.wrong(key, "names other files than the records do", means)

    def _fetch(self, checkpoint: Checkpoint, root: Path, walk: Walk) -> bool:
        """Downloads every file that is there; whether all of them are, and are whole."""
        means, files = _means(checkpoint, walk), checkpoint.files
        listed = self._reader.store.list(f"{checkpoint.prefix}/")
        there = {entry.key: entry.size for entry in listed}
        whole = [self._fetch_file(checkpoint, file, root, there, means) for file in files]
        keys = (LISTING, *(file.key for file in files))
        for key in sorted(there.keys() - {f"{checkpoint.prefix}/{key}" for key in keys}):
            self._reader.remark(key, "lies in a run checkpoint that does not name it")
        return all(whole)

    def _fetch_file(
        self,
        checkpoint: Checkpoint,
        file: Payload,
        root: Path,
        there: Mapping[str, int],
        means: str,
    ) -> bool:
        key = f"{checkpoint.prefix}/{file.key}"
        self._reader.tell(key)
        if key not in there:
            self._absent(checkpoint, key, means)
            return False
        self._reader.took(there[key])
        if there[key] != file.size:
            what = f"holds {there[key]} bytes, its checkpoint names {file.size}"
            self._reader.wrong(key, what, means)
            return False
        try:
            checkpoints.download(self._reader.store, checkpoint.prefix, file, root)
        except FormatError:
            if self._reader.store.get(key, stop=0) is None:
                self._absent(checkpoint, key, means)
            else:
                what = f"holds other {file.size} bytes than its checkpoint names"
                self._reader.wrong(key, what, means)
            return False
        return True

    def _absent(self, checkpoint: Checkpoint, key: str, means: str) -> None:
        self._reader.absent(key, _rule(checkpoint), means)

    def _wrong(self, checkpoint: Checkpoint, walk: Walk, what: str) -> None:
        self._reader.wrong(f"{checkpoint.prefix}/", what, _means(checkpoint, walk))

    def _version(self, state: RunState, index: int) -> Version:
        names = [spec.name for spec in self._schema.fragment(index)]
        return Version(
            {name: state.values[name] for name in names},
            {name: state.momentum[name] for name in names},
            {name: state.master[name] for name in names if name in state.master},
        )

    def _differences(
        self,
        checkpoint: Checkpoint,
        state: RunState,
        versions: Mapping[int, Version],
        made: Mapping[int, tuple[int, Made | None]],
    ) -> Iterator[str]:
        said, wanted = (state.round, state.versions), (checkpoint.round, checkpoint.versions)
        if said != wanted:
            yield f"says that it holds (round, versions) {said}, its record says {wanted}"
        if state.manifest != (self._manifest if checkpoint.round >= 0 else b""):
            yield "holds another manifest than the mailbox"
        for index, version in versions.items():
            head, hashes = made.get(index, (None, None))
            if head == -1:
                yield from _not_initial(index, version)
            elif hashes is not None:
                found = Made(
                    messages.digest(payloads.encode_anchor(version.values)),
                    messages.digest(payloads.encode_outer(version.momentum, version.master)),
                )
                if found != hashes:
                    yield f"holds other values of fragment {index} than round {head} committed"


def _rule(checkpoint: Checkpoint) -> Rule:
    """The two newest checkpoints that records name must be there; others may be swept."""
    return lambda walk: checkpoint.prefix in walk.checkpoints


def _not_initial(index: int, version: Version) -> Iterator[str]:
    if any(np.any(array) for array in version.momentum.values()):
        yield f"holds a momentum of fragment {index} before any round"
    for name, master in version.master.items():
        if not np.array_equal(master, version.values[name].astype(np.float32), equal_nan=True):
            yield f"holds a master copy of `{name}` that is not its value"


def _means(checkpoint: Checkpoint, walk: Walk) -> str:
    if checkpoint.round > walk.named[-1].round:
        return "No record names it yet: nodes start from older ones."
    if checkpoint.prefix != walk.named[-1].prefix:
        return "A newer checkpoint has replaced it; only nodes that still read it need it."
    return (
        "It is the newest: nodes that join or take over cannot start from it. Payloads that are "
        "there serve them instead; the next checkpoint replaces it."
    )
