"""Where each tensor of a fragment lies in the rows of a fragment's state.

    rows      | row | row | row | row | row | row | ...      1,024 elements each
    tensors   | a a a a.. | b.. | c c c c c c c...           each starts on a row of its own
    blocks    |   block 0       |   block 1       | ...      a fixed number of rows

Every program works on one block, so a handful serves any number of tensors of any shape. A row
never holds two tensors: a coefficient per row is a coefficient per tensor. Tensors of one dtype lie
side by side, so that few blocks mix two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jdiloco.errors import UsageError
from jdiloco.types import TensorSpec

ROW = 1024
BLOCK_ROWS_SMALL = 32
BLOCK_ROWS_LARGE = 1024
HELD_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Block:
    """The rows of one block. Depends on the specs alone."""

    row: np.int32  # The first one, among those of the fragment.
    tensor: np.ndarray  # shape=(rows,): index into the specs; their number where none lies.
    offset: np.ndarray  # shape=(rows,), int64: where the row starts in its tensor, flattened.
    valid: np.ndarray  # shape=(rows,), int32: how many of its elements are the tensor's.
    tensors: tuple[int, ...]  # Those that have a row here, in order.

    def per_row(self, values: np.ndarray) -> np.ndarray:
        """Values per tensor, (n, tensors + 1), as values per row, (n, rows).

        The last column is what rows without a tensor get.
        """
        return values[:, self.tensor]

    def add_rows(self, sums: np.ndarray, rows) -> None:
        """Adds values per row, (rows, parts), to sums per tensor, (tensors + 1,)."""
        np.add.at(sums, self.tensor, np.asarray(rows).sum(axis=1))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of all tensors; see the drawing above."""

    specs: tuple[TensorSpec, ...]
    block_rows: int
    rows: int  # Of the state: at least those of all blocks, and one of few sizes.
    starts: tuple[int, ...]  # Per tensor: its first element in the state, flattened.
    blocks: tuple[Block, ...]  # At least one.

    def tensor(self, index: int, state: np.ndarray) -> np.ndarray:
        """A view of one tensor in its own shape, in an array of all rows."""
        spec, start = self.specs[index], self.starts[index]
        return state.reshape(-1)[start : start + spec.size].reshape(spec.shape)


def lay_out(specs: Sequence[TensorSpec]) -> Layout:
    """Places the tensors of a fragment. A fragment without tensors has one empty block."""
    for spec in specs:
        if spec.dtype not in HELD_DTYPES:
            raise UsageError(
                f"`{spec.name}` is {spec.dtype}; a mailbox run holds {', '.join(HELD_DTYPES)}. "
                "Cast the parameter before joining."
            )
    rows = np.array([math.ceil(spec.size / ROW) for spec in specs], np.int64)
    order = sorted(range(len(specs)), key=lambda index: HELD_DTYPES.index(specs[index].dtype))
    starts = np.zeros(len(specs), np.int64)
    starts[order] = np.cumsum(rows[order]) - rows[order]
    used = int(rows.sum())
    block_rows = BLOCK_ROWS_LARGE if used > BLOCK_ROWS_LARGE // 2 else BLOCK_ROWS_SMALL
    count = max(1, math.ceil(used / block_rows))
    return Layout(
        tuple(specs),
        block_rows,
        _size_class(count) * block_rows,
        tuple((starts * ROW).tolist()),
        tuple(_blocks(specs, np.repeat(order, rows[order]), starts, block_rows, count)),
    )


def _blocks(specs, tensor: np.ndarray, starts: np.ndarray, block_rows: int, count: int):
    none = len(specs)
    tensor = np.pad(tensor.astype(np.int64), (0, count * block_rows - len(tensor)))
    row = np.arange(len(tensor))
    held = row < sum(math.ceil(spec.size / ROW) for spec in specs)
    sizes = np.array([*(spec.size for spec in specs), 0], np.int64)
    tensor = np.where(held, tensor, none)
    offset = np.where(held, (row - np.append(starts, 0)[tensor]) * ROW, 0)
    valid = np.clip(sizes[tensor] - offset, 0, ROW).astype(np.int32)
    for first in range(0, len(tensor), block_rows):
        part = slice(first, first + block_rows)
        tensors = tuple(t for t in dict.fromkeys(tensor[part].tolist()) if t != none)
        yield Block(np.int32(first), tensor[part], offset[part], valid[part], tensors)


def _size_class(blocks: int) -> int:
    """The next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ... blocks.

    Programs are compiled per size of the state, so there must not be one for every fragment.
    """
    step = 1 << max(0, blocks.bit_length() - 3)
    return math.ceil(blocks / step) * step
