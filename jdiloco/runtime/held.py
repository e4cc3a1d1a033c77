"""What a learner holds of each fragment, and how it gets to the next version with few bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jdiloco.errors import FormatError
from jdiloco.protocol.records import RoundRecord
from jdiloco.runtime import messages, payloads, updates
from jdiloco.runtime.news import Values
from jdiloco.runtime.payloads import Tensors
from jdiloco.runtime.schema import Schema
from jdiloco.store.base import Store


class Held:
    """The committed values that a node's learner was given last, with their versions.

    They are the learner's own arrays, so holding them costs nothing. Of the pieces that a process
    of a pod is given nothing is held: pods read their ranges of whole anchors. Belongs to one
    thread.
    """

    def __init__(
        self, store: Store, schema: Schema, values: Values, versions: Sequence[int]
    ) -> None:
        self._store = store
        self._schema = schema
        self._versions = list(versions)
        self._values = [_whole(values, names) for names in schema.plan]

    def took(self, record: RoundRecord, values: Values | None) -> None:
        """The learner is given these values of a record; None: they are gone, and it keeps its."""
        if values is not None:
            self._versions[record.fragment] = record.version
            self._values[record.fragment] = _whole(values, values)

    def updated(self, record: RoundRecord) -> Tensors | None:
        """What a record committed, rebuilt from the version before it and its update.

        None where that version is not held here, or there is no update, or it is gone. Raises
        FormatError where it is not what the record says, or leads to other bytes than it committed.
        """
        index = record.fragment
        if record.update is None or self._versions[index] != record.version - 1:
            return None
        found = payloads.read_update(self._store, record)
        if found is None:
            return None
        schema = self._schema
        specs = schema.fragment(index)
        values = updates.rebuilt(specs, schema.precision, self._values[index], found)
        buffers = payloads.encode_anchor(values)
        if record.anchor is None or messages.digest(buffers) != record.anchor.sha256:
            raise FormatError(
                f"The update {record.update.key!r} does not lead from the version before to what "
                f"round {record.round} committed."
            )
        return values


def _whole(values: Values, names: Iterable[str]) -> dict[str, np.ndarray]:
    found = ((name, values.get(name)) for name in names)
    return {name: array for name, array in found if isinstance(array, np.ndarray)}
