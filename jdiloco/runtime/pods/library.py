"""What a run has committed, as far as one process of a pod holds it.

Payloads are read by ranges (`ranges`). Of a run checkpoint the files with the parameters come to
the process's scratch directory, one after another, and the boxes are read from there: its disk
holds them all, its memory never. A closer that compresses its payloads leaves nothing to read by
ranges: then a fragment comes as a whole, and is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Sharding

from jdiloco.errors import FormatError
from jdiloco.protocol.records import Checkpoint, RoundRecord
from jdiloco.runtime import checkpoints
from jdiloco.runtime.payloads import Patient, read_anchor
from jdiloco.runtime.pieces import Box, Pieces, boxes_here, cut
from jdiloco.runtime.pods import ranges
from jdiloco.runtime.pods.ranges import Compressed
from jdiloco.runtime.schema import Schema
from jdiloco.store.base import Store

Share = dict[str, Pieces]


class ShareLibrary:
    """Reads versions as `payloads.Library` does, and of each only this process's boxes.

    `shardings` say by name how the parameters are cut. `waits` are the seconds between the tries of
    each request.
    """

    def __init__(
        self,
        store: Store,
        schema: Schema,
        shardings: Mapping[str, Sharding],
        scratch: Path,
        *,
        waits: Sequence[float],
        sleep: Callable[[float], object],
    ) -> None:
        self._store = Patient(store, waits, sleep)
        self._schema = schema
        self._shardings = shardings
        self._scratch = scratch
        self._open = contextlib.ExitStack()
        self._restored: tuple[str, Path] | None = None

    def forget(self) -> None:
        """Removes the files of the newest restored checkpoint."""
        self._open.close()
        self._restored = None

    def cut(self, values: Mapping[str, np.ndarray]) -> Share:
        """This process's boxes of whole tensors, as copies."""
        return {name: cut(array, self._shardings[name]) for name, array in values.items()}

    def anchor(self, record: RoundRecord) -> Share | None:
        """What a record committed; None when its payload is gone. Raises FormatError."""
        if record.anchor is None:
            return None
        specs = self._schema.fragment(record.fragment)
        try:
            found = ranges.read(self._store, record.anchor, specs, self._boxes(record.fragment))
        except Compressed:
            values = read_anchor(self._store, record, specs)
            return None if values is None else self.cut(values)
        return None if found is None else self._share(found)

    def values(self, fragment: int, record: RoundRecord | None, newest: Checkpoint) -> Share:
        """The same, or from the checkpoint that covers it. Errors: `payloads.Library.values`."""
        if record is not None and (found := self.anchor(record)) is not None:
            return found
        wanted = 0 if record is None else record.version
        if newest.versions[fragment] != wanted:
            raise FormatError(
                f"Version {wanted} of fragment {fragment} is gone, and the newest checkpoint holds "
                f"version {newest.versions[fragment]}."
            )
        return self._share(
            checkpoints.read_boxes(
                self._files(newest),
                [spec.name for spec in self._schema.tensors],
                self._schema.fragment(fragment),
                self._boxes(fragment),
            )
        )

    def _files(self, checkpoint: Checkpoint) -> Path:
        if self._restored is None or self._restored[0] != checkpoint.prefix:
            self.forget()
            root = self._open.enter_context(checkpoints.private(self._scratch, "load-"))
            checkpoints.fetch(self._store, checkpoint.prefix, checkpoint.files, root, "params/")
            self._restored = (checkpoint.prefix, root)
        return self._restored[1]

    def _boxes(self, fragment: int) -> dict[str, tuple[Box, ...]]:
        specs = self._schema.fragment(fragment)
        return {spec.name: boxes_here(self._shardings[spec.name], spec.shape) for spec in specs}

    def _share(self, found: Mapping[str, Mapping[Box, Any]]) -> Share:
        shapes = {spec.name: spec.shape for spec in self._schema.tensors}
        return {n: Pieces(shapes[n], self._shardings[n], held) for n, held in found.items()}
