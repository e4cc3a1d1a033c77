"""Where each tensor of a fragment lies in one flat vector of fixed blocks.

    flat vector   | row | row | row | row | row | row | ...      rows of 1,024 elements
    tensors       | a a a a.. | b.. | c c c c c c c...           each starts on a row of its own
    blocks        |   block 0       |   block 1       | ...      a fixed number of rows

Every program works on one block, so a handful serves any number of tensors of any shape: a row never
holds two tensors, hence a coefficient per row is a coefficient per tensor. Tensors of one dtype lie
side by side, so that few blocks mix two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdiloco.errors import UsageError
from jdiloco.types import TensorSpec

ROW = 1024
BLOCK_ROWS_SMALL = 32
BLOCK_ROWS_LARGE = 256
HELD_DTYPES = ("float32", "bfloat16", "float16")


class Segment(NamedTuple):
    """The part of one tensor that lies in one block."""

    tensor: int  # Index into the specs.
    source: slice  # Elements of the flattened tensor.
    target: slice  # Elements of the flattened block.
    padding: slice  # From the end of `target` to the end of its row.


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of all tensors; see the drawing above. Depends on the specs alone."""

    specs: tuple[TensorSpec, ...]
    block_rows: int
    starts: tuple[int, ...]  # Per tensor: its first element in the flat vector.
    segments: tuple[tuple[Segment, ...], ...]  # Per block.
    row_tensor: np.ndarray  # shape=(blocks, block_rows). `len(specs)` where no tensor lies.

    @property
    def blocks(self) -> int:
        """How many blocks the flat vector has; at least one."""
        return len(self.segments)

    def blocks_of(self, dtype: str) -> range:
        """The blocks in which a parameter of this dtype lies."""
        found = [
            block
            for block, segments in enumerate(self.segments)
            if any(self.specs[segment.tensor].dtype == dtype for segment in segments)
        ]
        return range(found[0], found[-1] + 1) if found else range(0)

    def tensor(self, index: int, flat: np.ndarray) -> np.ndarray:
        """A read-only view of one tensor in its own shape. `flat` is a whole flat vector."""
        spec, start = self.specs[index], self.starts[index]
        view = flat[start : start + spec.size].reshape(spec.shape)
        view.flags.writeable = False
        return view


def lay_out(specs: Sequence[TensorSpec]) -> Layout:
    """Places the tensors of a fragment. A fragment without tensors has one empty block."""
    for spec in specs:
        if spec.dtype not in HELD_DTYPES:
            raise UsageError(
                f"`{spec.name}` is {spec.dtype}; a mailbox run holds {', '.join(HELD_DTYPES)}. "
                "Cast the parameter before joining."
            )
    rows = [math.ceil(spec.size / ROW) for spec in specs]
    block_rows = BLOCK_ROWS_LARGE if sum(rows) > BLOCK_ROWS_LARGE else BLOCK_ROWS_SMALL
    blocks = max(1, math.ceil(sum(rows) / block_rows))
    row_tensor = np.full(blocks * block_rows, len(specs), np.int32)
    starts = [0] * len(specs)
    row = 0
    for index in sorted(range(len(specs)), key=lambda i: HELD_DTYPES.index(specs[i].dtype)):
        starts[index] = row * ROW
        row_tensor[row : row + rows[index]] = index
        row += rows[index]
    row_tensor = row_tensor.reshape(blocks, block_rows)
    segments = tuple(
        tuple(_segments(block, row_tensor[block], specs, starts)) for block in range(blocks)
    )
    return Layout(tuple(specs), block_rows, tuple(starts), segments, row_tensor)


def _segments(block: int, tensors: np.ndarray, specs, starts):
    first = block * len(tensors) * ROW
    for tensor in dict.fromkeys(tensors.tolist()):
        if tensor == len(specs):
            continue
        begin = max(starts[tensor], first)
        end = min(starts[tensor] + specs[tensor].size, first + len(tensors) * ROW)
        source = slice(begin - starts[tensor], end - starts[tensor])
        target = slice(begin - first, end - first)
        yield Segment(tensor, source, target, slice(target.stop, -(-target.stop // ROW) * ROW))
