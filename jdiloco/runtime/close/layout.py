"""Where each tensor of a fragment lies in one flat vector of fixed blocks.

    flat vector   | row | row | row | row | row | row | ...      rows of 1,024 elements
    tensors       | a a a a.. | b.. | c c c c c c c...           each starts on a row of its own
    blocks        |   block 0       |   block 1       | ...      a fixed number of rows

Every program works on one block, so a handful serves any number of tensors of any shape. A row
never holds two tensors: a coefficient per row is a coefficient per tensor. Tensors of one dtype lie
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
BLOCK_ROWS_LARGE = 1024
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
    first_rows: tuple[np.ndarray, ...]  # Per block: the first row of each tensor in it.

    @property
    def blocks(self) -> int:
        """How many blocks the flat vector has; at least one."""
        return len(self.segments)

    @property
    def block_size(self) -> int:
        """Elements of a block."""
        return self.block_rows * ROW

    def part(self, index: int, flat: np.ndarray) -> np.ndarray:
        """The elements of one tensor, flat, in an array of all blocks."""
        start = self.starts[index]
        return flat.reshape(-1)[start : start + self.specs[index].size]

    def tensor(self, index: int, flat: np.ndarray) -> np.ndarray:
        """`part` in the shape of the tensor and read-only."""
        view = self.part(index, flat).reshape(self.specs[index].shape)
        view.flags.writeable = False
        return view

    def per_row(self, block: int, values: np.ndarray) -> np.ndarray:
        """Values per tensor, (n, tensors + 1), as values per row, (n, block_rows).

        The last column is what rows without a tensor get.
        """
        return values[:, self.row_tensor[block]]

    def add_rows(self, sums: np.ndarray, block: int, rows) -> None:
        """Adds values per row, (block_rows, parts), to sums per tensor, (tensors + 1,)."""
        first = self.first_rows[block]
        sums[self.row_tensor[block, first]] += np.add.reduceat(np.asarray(rows).sum(axis=1), first)


def lay_out(specs: Sequence[TensorSpec]) -> Layout:
    """Places the tensors of a fragment. A fragment without tensors has one empty block."""
    for spec in specs:
        if spec.dtype not in HELD_DTYPES:
            raise UsageError(
                f"`{spec.name}` is {spec.dtype}; a mailbox run holds {', '.join(HELD_DTYPES)}. "
                "Cast the parameter before joining."
            )
    rows = [math.ceil(spec.size / ROW) for spec in specs]
    block_rows = BLOCK_ROWS_LARGE if sum(rows) > BLOCK_ROWS_LARGE // 2 else BLOCK_ROWS_SMALL
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
    first_rows = tuple(np.flatnonzero(np.diff(row, prepend=-1)) for row in row_tensor)
    return Layout(tuple(specs), block_rows, tuple(starts), segments, row_tensor, first_rows)


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
