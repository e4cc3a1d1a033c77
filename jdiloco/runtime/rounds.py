"""Closing rounds for real: contributions are read, checked and measured, payloads made and sent.

Belongs to one library thread. What is closed, and when, is the protocol's decision.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jdiloco.algo.merges import contribution_weight
from jdiloco.errors import FormatError, StoreUnavailable
from jdiloco.protocol import effects as fx
from jdiloco.protocol.keys import ContributionKey, Keys
from jdiloco.protocol.records import (
    Checkpoint,
    ContributionHead,
    Incarnation,
    Payload,
    RoundRecord,
    sha256,
    unseal,
)
from jdiloco.runtime import contributions, messages, payloads, wire
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.checkpoints import RunState
from jdiloco.runtime.close import Closed, FragmentCloser, Measured
from jdiloco.runtime.contributions import Contribution, Rejection
from jdiloco.runtime.payloads import Library, Tensors
from jdiloco.runtime.schema import Schema
from jdiloco.store.base import Buffer, Store, small_requests
from jdiloco.store.signed import signer_of

logger = logging.getLogger("jdiloco")


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A contribution that will be merged."""

    head: ContributionHead
    weight: float
    sha256: str


class Replaced(Exception):
    """The mailbox holds another record than the one that this node goes on from."""


class RoundCloser:
    """Outer state of every fragment, loaded when a round of it is first closed here."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        schema: Schema,
        algorithm: DiLoCo,
        library: Library,
        send: Callable[[str, Sequence[Buffer]], None],
        *,
        compression: str | None,
    ) -> None:
        self._store = store
        self._small = small_requests(store, algorithm.rules().small_seconds)
        self._keys = keys
        self._schema = schema
        self._algorithm = algorithm
        self._library = library
        self._send = send
        self._compression = compression
        self._closers: dict[int, FragmentCloser] = {}
        self._loaded: dict[int, int] = {}  # The round whose version a fragment's closer holds.
        self._measured: dict[ContributionKey, Measured] = {}
        self._values: dict[int, Tensors] = {}  # What this node's own attempt committed, by round.

    def examine(self, request: fx.Examine) -> Accepted:
        """Reads and measures a contribution. Raises Rejection.

        Bytes that break the reader in a way nobody foresaw are rejected too: one node's must not
        keep everybody's round from closing.
        """
        try:
            return self._examine(request)
        except (Rejection, StoreUnavailable, MemoryError):
            raise
        except Exception as error:
            logger.exception("%s could not be read", self._keys.contribution(request.key))
            raise Rejection("corrupt") from error

    def _examine(self, request: fx.Examine) -> Accepted:
        name = self._keys.contribution(request.key)
        if request.newer is not None and not self._still_valid(name, request):
            raise Rejection("superseded")
        specs = self._schema.fragment(request.fragment)
        room = wire.room(specs, self._algorithm.delta_dtype)
        found = contributions.decode(
            name, self._store.get(name), room=room, signer=signer_of(self._store)
        )
        try:
            found, measured = self._measure(request, found)
        except Rejection as rejection:
            rejection.parts = len(found.head.parts)
            raise
        self._measured[request.key] = measured
        counters = found.head.counters
        weight = contribution_weight(steps=counters.steps, samples=counters.samples)
        return Accepted(found.head, weight, found.sha256)

    def _measure(self, request: fx.Examine, found: Contribution) -> tuple[Contribution, Measured]:
        specs, dtype = self._schema.fragment(request.fragment), self._algorithm.delta_dtype
        found = contributions.check(
            found,
            request.key,
            self._keys,
            specs,
            fragment=request.fragment,
            version=request.version,
            delta_dtype=dtype,
            part=lambda part: self._store.get(part.key, stop=part.size + 1),
        )
        deltas = wire.incoming(found.tensors, specs, dtype)
        measured = self._closer(request.fragment).measure(deltas)
        if not measured.finite:
            raise Rejection("nonfinite")
        return found, measured

    def _still_valid(self, name: str, request: fx.Examine) -> bool:
        """Whether the newest life of the node vouches for what an earlier one published."""
        key = self._keys.incarnation(request.key.node, request.newer or 0)
        data = self._small.get(key)
        try:
            return data is not None and name in unseal(key, data, Incarnation).valid
        except FormatError:
            return False

    def merge(
        self, request: fx.Merge, checkpoint: Checkpoint
    ) -> tuple[Payload, Payload, Payload | None, float]:
        """Takes the outer step and uploads anchor, outer state and, where there is one, update.

        Raises Replaced.
        """
        if request.compare is not None:
            self._check_record(request.round - 1, request.compare)
        index = request.fragment
        self._load(index, request.base, checkpoint)
        self._loaded.pop(index)  # Until it is known whose record this round has.
        closed = self._closer(index).close(
            [self._measured[key] for key in request.contributions],
            request.weights,
            final=request.final,
        )
        made = {}
        parts = ("anchor", "outer", "update") if closed.update else ("anchor", "outer")
        for part in parts:
            key = self._keys.payload(request.round, request.write_id, part)
            plain = self._encoded(part, closed, None)
            size = sum(memoryview(buffer).nbytes for buffer in plain)
            header = messages.digest(plain[:1]) if part == "anchor" else ""
            made[part] = Payload(key, size, messages.digest(plain), header)
            packed = self._compression and self._encoded(part, closed, self._compression)
            self._send(key, packed or plain)
        self._values[request.round] = _copies(closed.anchor)
        return made["anchor"], made["outer"], made.get("update"), closed.mean_cosine

    def _encoded(self, part: str, closed: Closed, compression: str | None) -> Sequence[Buffer]:
        if part == "anchor":
            return payloads.encode_anchor(closed.anchor, compression=compression)
        if part == "update":
            return payloads.encode_update(closed.update, compression=compression)
        return payloads.encode_outer(closed.momentum, closed.master, compression=compression)

    def _check_record(self, round: int, digest: str) -> None:
        key = self._keys.record(round)
        if (data := self._small.get(key)) is None:
            raise FormatError(f"{key!r} is not in {self._store.url} any more. It was removed.")
        if sha256(data) != digest:
            raise Replaced

    def furthest(self, request: fx.Merge) -> ContributionKey:
        """The longest of the contributions, of equals the first."""
        lengths = [float(np.linalg.norm(self._measured[k].norms)) for k in request.contributions]
        return request.contributions[lengths.index(max(lengths))]

    def take_values(self, round: int) -> Tensors | None:
        """What this node's own attempt at a round made; any thread may ask, once."""
        return self._values.pop(round, None)

    def committed(self, record: RoundRecord, *, own: bool) -> None:
        """A record has been read: what was held for its round goes."""
        if own and not record.void:
            self._loaded[record.fragment] = record.round
        for key in [key for key in self._measured if key.round <= record.round]:
            del self._measured[key]
        for round in list(self._values):  # Another thread may be taking from it.
            if round <= record.round:
                self._values.pop(round, None)  # Of an attempt that came second.

    def snapshot(self, request: fx.Save, checkpoint: Checkpoint, manifest: bytes) -> RunState:
        """A copy of every fragment's state, for a run checkpoint."""
        values, momentum, master = {}, {}, {}
        for index, record in enumerate(request.records):
            self._load(index, record, checkpoint)
            held = self._closer(index).state()
            values |= _copies(held.anchor)
            momentum |= _copies(held.momentum)
            master |= _copies(held.master)
        return RunState(values, momentum, master, request.versions, request.round, manifest)

    def _closer(self, index: int) -> FragmentCloser:
        if index not in self._closers:
            self._closers[index] = FragmentCloser(
                self._schema.fragment(index),
                self._algorithm.merge,
                outer_lr=self._algorithm.outer_lr,
                outer_momentum=self._algorithm.outer_momentum,
                precision=self._schema.precision,
            )
        return self._closers[index]

    def _load(self, index: int, base: RoundRecord | None, checkpoint: Checkpoint) -> None:
        """Makes the closer hold the version that `base` committed."""
        round = -1 if base is None else base.round
        if self._loaded.get(index) == round:
            return
        self._loaded.pop(index, None)
        found = self._library.version(index, base, checkpoint)
        self._closer(index).load(found.values, found.momentum, found.master)
        self._loaded[index] = round
        if len(self._loaded) == len(self._schema.plan):
            self._library.forget()  # Everything is held here; a restored checkpoint is a model.


def _copies(tensors: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """The closer's own memory changes with its next round; who is given a copy may keep it."""
    copies = {name: array.copy() for name, array in tensors.items() if array is not None}
    for array in copies.values():
        array.setflags(write=False)
    return copies
