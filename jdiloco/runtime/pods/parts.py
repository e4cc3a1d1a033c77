"""A pod's contribution as objects: a small head, and before it one part for each process.

A part is a message that holds boxes of tensors, each under where it begins and the tensor's name:
`0,512/w` begins at row 0 and column 512 of `w`. Its key holds its SHA-256, so one listing tells the
process that writes the head everything it has to say of the parts: key, size and hash.

A reader takes parts one at a time and puts the boxes into whole tensors, so it holds no more than
the contribution and one part. Nothing in a part is believed: tensors are allocated as the run's
schema has them, and the boxes have to fill each of them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from jdiloco.errors import FormatError
from jdiloco.protocol.keys import Keys, PartKey
from jdiloco.protocol.records import Payload, sha256
from jdiloco.runtime import messages
from jdiloco.runtime.messages import HEADER_BYTES_MAX
from jdiloco.runtime.pieces import Box, Pieces, slices_of
from jdiloco.store.base import Buffer
from jdiloco.types import TensorSpec

FAILED = messages.encode({}, {"failed": "1"})
"""The part of a process that could not bring its share to the host."""
FAILED_SHA256 = messages.digest(FAILED)


class Misfit(Exception):
    """Parts that make no contribution; `reason` is one of `records.REJECTIONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def encode(share: Mapping[str, Pieces], *, compression: str | None = None) -> Sequence[Buffer]:
    """The part of a process. Its hash and size are those of the object as it lies there."""
    boxes = {
        f"{_spelled(box)}/{name}": np.asarray(array, order="C")
        for name, pieces in share.items()
        for box, array in sorted(pieces.held.items())
    }
    return messages.encode(boxes, {}, compression=compression)


def part_key(
    keys: Keys, round: int, node: str, incarnation: int, process: int, data: Sequence[Buffer]
) -> str:
    """Where a part lies."""
    digest = messages.digest(data)
    return keys.part(PartKey(round, node, incarnation, process, digest))


def assembled(
    parts: Sequence[Payload],
    prefix: str,
    specs: Sequence[TensorSpec],
    dtype: str | None,
    read: Callable[[Payload], bytes | None],
) -> dict[str, np.ndarray]:
    """The tensors of a contribution whose parts lie under `prefix`. `dtype` is that of the wire.

    Raises Misfit("missing") or Misfit("corrupt").
    """
    whole = {spec.name: _allocated(spec, dtype) for spec in specs}
    filled = {name: _Filled(array.shape) for name, array in whole.items()}
    most = sum(array.nbytes for array in whole.values()) + HEADER_BYTES_MAX
    for part in parts:
        if not part.key.startswith(prefix) or not 0 <= part.size <= most:
            raise Misfit("corrupt")
        data = read(part)
        if data is None:
            raise Misfit("missing")
        if (len(data), sha256(data)) != (part.size, part.sha256):
            raise Misfit("corrupt")
        try:
            _fill(whole, filled, data, most)
        except (FormatError, ValueError) as error:
            raise Misfit("corrupt") from error
    if not all(one.complete for one in filled.values()):
        raise Misfit("corrupt")
    return whole


def _allocated(spec: TensorSpec, dtype: str | None) -> np.ndarray:
    return np.empty(spec.shape, np.dtype(dtype or spec.dtype))


def _fill(
    whole: Mapping[str, np.ndarray], filled: Mapping[str, _Filled], data: bytes, room: int
) -> None:
    for key, piece in messages.decode(data, room=room).tensors.items():
        begins, _, name = key.partition("/")
        tensor = whole.get(name)
        if tensor is None or piece.dtype != tensor.dtype:
            raise FormatError(f"A part holds {key!r} as {piece.dtype}, which is no delta.")
        starts = [int(text) for text in begins.split(",")] if begins else []
        box = tuple((a, a + n) for a, n in zip(starts, piece.shape, strict=True))
        filled[name].add(box)
        tensor[slices_of(box)] = piece


class _Filled:
    """Which boxes of a tensor are there. They have to be the cells of a grid, as shards are."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._boxes: set[Box] = set()

    def add(self, box: Box) -> None:
        inside = all(0 <= a <= b <= n for (a, b), n in zip(box, self._shape, strict=True))
        if not inside or box in self._boxes:
            raise FormatError(f"A part holds the box {box} of a tensor of shape {self._shape}.")
        self._boxes.add(box)

    @property
    def complete(self) -> bool:
        """Distinct cells of one grid do not overlap; so they fill it if their sizes add up."""
        size = sum(math.prod(b - a for a, b in box) for box in self._boxes)
        if not self._boxes or size != math.prod(self._shape):
            return False
        stops = [_next_edges(axis) for axis in zip(*self._boxes, strict=True)]
        return all(
            edges.get(a) == b
            for box in self._boxes
            for edges, (a, b) in zip(stops, box, strict=True)
        )


def _next_edges(spans: Sequence[tuple[int, int]]) -> dict[int, int]:
    """For each place where a box begins along an axis, where the next begins or the last ends."""
    starts = sorted({a for a, _ in spans})
    return dict(zip(starts, [*starts[1:], max(b for _, b in spans)], strict=True))


def _spelled(box: Box) -> str:
    return ",".join(str(start) for start, _ in box)
