"""Boxes of the tensors of a payload, read without reading the payload.

The header of an anchor payload holds the SHA-256 of every stretch of `messages.CHUNK_BYTES` bytes
that follow it, and the round record holds that of the header. So whoever wants a part of a tensor
reads the stretches that it touches, a few at a time, holds each against its hash, and keeps what it
wants. Of a tensor that is cut along its first axis that is little more than the part; of one that
is cut along a later axis it may be all of it, which passes through but is never held.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jdiloco.errors import FormatError
from jdiloco.protocol.records import Payload, sha256
from jdiloco.runtime import messages
from jdiloco.runtime.messages import CHUNK_BYTES, Header
from jdiloco.runtime.pieces import Box
from jdiloco.store.base import Store
from jdiloco.types import TensorSpec

AT_ONCE = 8
"""Stretches that one request reads."""


class Compressed(Exception):
    """The payload is compressed: there are no ranges to read."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Want:
    """One box, and where its bytes lie: in runs of equal length, in ascending order."""

    starts: np.ndarray  # shape=(runs,), int64. In the bytes behind the header.
    length: int  # Of a run.
    into: np.ndarray  # shape=(runs, length), uint8: a view of the box's memory.

    def mark(self, needed: np.ndarray) -> None:
        """Notes the stretches that it touches."""
        first = self.starts // CHUNK_BYTES
        last = (self.starts + self.length - 1) // CHUNK_BYTES
        for offset in range(int((last - first).max(initial=0)) + 1):
            needed[np.minimum(first + offset, last)] = True

    def take(self, data: np.ndarray, low: int) -> None:
        """Copies what it wants of the bytes that begin at `low`."""
        high = low + data.size
        begin = int(np.searchsorted(self.starts + self.length, low, side="right"))
        end = int(np.searchsorted(self.starts, high, side="left"))
        inner = [k for k in (begin, end - 1) if begin <= k < end and not self._within(k, low, high)]
        for k in dict.fromkeys(inner):  # At most the first and the last are cut.
            start = int(self.starts[k])
            a, b = max(low, start), min(high, start + self.length)
            self.into[k, a - start : b - start] = data[a - low : b - low]
        whole = np.arange(begin, end)
        whole = whole[~np.isin(whole, inner)]
        if whole.size:
            self._take_whole(data, low, int(whole[0]), int(whole[-1]) + 1)

    def _within(self, k: int, low: int, high: int) -> bool:
        start = int(self.starts[k])
        return low <= start and start + self.length <= high

    def _take_whole(self, data: np.ndarray, low: int, begin: int, end: int) -> None:
        places = self.starts[begin:end] - low
        gaps = np.diff(places)
        if gaps.size and not (gaps == gaps[0]).all():
            for k, at in enumerate(places.tolist(), begin):
                self.into[k] = data[at : at + self.length]
            return
        stride = int(gaps[0]) if gaps.size else self.length
        shown = np.lib.stride_tricks.as_strided(
            data[int(places[0]) :], (end - begin, self.length), (stride, 1), writeable=False
        )
        self.into[begin:end] = shown


def read(
    store: Store,
    payload: Payload,
    specs: Sequence[TensorSpec],
    boxes: Mapping[str, Sequence[Box]],
) -> dict[str, dict[Box, np.ndarray]] | None:
    """The boxes of each tensor; None when the payload is gone.

    Raises FormatError when what is read is not what the record names, or not what `specs` say, and
    Compressed.
    """
    header = _header(store, payload, specs)
    if header is None:
        return None
    size = payload.size - header.stop
    hashes = header.chunks(size)
    found: dict[str, dict[Box, np.ndarray]] = {}
    wants = []
    for name, wanted in boxes.items():
        tensor = header.tensors[name]
        found[name] = {box: np.empty([b - a for a, b in box], tensor.dtype) for box in wanted}
        full = [(box, into) for box, into in found[name].items() if into.size]
        wants += [_want(tensor.start, tensor.shape, box, into) for box, into in full]
    needed = np.zeros(len(hashes), bool)
    for want in wants:
        want.mark(needed)
    for begin, end in _groups(np.flatnonzero(needed)):
        data = _stretches(store, payload, header.stop, hashes, begin, end)
        if data is None:
            return None
        for want in wants:
            want.take(data, begin * CHUNK_BYTES)
    return found


def _header(store: Store, payload: Payload, specs: Sequence[TensorSpec]) -> Header | None:
    missing = False

    def get(start: int, stop: int) -> bytes | None:
        nonlocal missing
        data = store.get(payload.key, start=start, stop=stop)
        missing = missing or data is None
        return data

    try:
        header = messages.read_header(get)
    except FormatError:
        if missing:
            return None
        raise
    if header.is_compressed:
        raise Compressed
    if not payload.header or sha256(header.data) != payload.header:
        raise FormatError(f"The header of {payload.key!r} is not the one that its record names.")
    stand_ins = {
        name: np.broadcast_to(np.empty((), tensor.dtype), tensor.shape)
        for name, tensor in header.tensors.items()
    }
    messages.check(stand_ins, specs)
    return header


def _want(start: int, shape: Sequence[int], box: Box, into: np.ndarray) -> _Want:
    """Where a box of a tensor that begins at `start` has its bytes."""
    itemsize = into.dtype.itemsize
    axes = len(shape)
    while axes and box[axes - 1] == (0, shape[axes - 1]):
        axes -= 1  # A whole axis makes the runs of the one before it longer.
    run = itemsize * math.prod(shape[axes:])
    outer = max(axes - 1, 0)
    length = run if not axes else run * (box[outer][1] - box[outer][0])
    starts = np.zeros(1, np.int64)
    for axis in range(outer):
        stride = itemsize * math.prod(shape[axis + 1 :])
        steps = np.arange(*box[axis], dtype=np.int64) * stride
        starts = (starts[:, None] + steps).reshape(-1)
    if axes:
        starts = starts + box[outer][0] * run
    runs = into.reshape(-1).view(np.uint8).reshape(len(starts), -1)
    return _Want(starts + start, length, runs)


def _groups(needed: np.ndarray) -> list[tuple[int, int]]:
    """Neighbouring stretches together, as many as are read at once."""
    groups: list[tuple[int, int]] = []
    for index in needed.tolist():
        if groups and groups[-1][1] == index and index - groups[-1][0] < AT_ONCE:
            groups[-1] = (groups[-1][0], index + 1)
        else:
            groups.append((index, index + 1))
    return groups


def _stretches(
    store: Store, payload: Payload, at: int, hashes: Sequence[str], begin: int, end: int
) -> np.ndarray | None:
    stop = min(payload.size, at + end * CHUNK_BYTES)
    data = store.get(payload.key, start=at + begin * CHUNK_BYTES, stop=stop)
    if data is None:
        return None
    view = memoryview(data)
    for number in range(begin, end):
        low = (number - begin) * CHUNK_BYTES
        if sha256(view[low : low + CHUNK_BYTES]) != hashes[number]:
            raise FormatError(
                f"{payload.key!r} holds other bytes from {at + number * CHUNK_BYTES} on than its "
                "header says. It was damaged."
            )
    return np.frombuffer(data, np.uint8)
