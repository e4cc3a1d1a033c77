"""How a program reads tensors where they were received.

Messages put tensors anywhere, and JAX copies what is not aligned; copying costs as much as the
arithmetic. So a program is given an aligned stretch of the message and where in it each row starts.
Only blocks that no stretch covers (tensors scattered in memory, or of two dtypes, at odd addresses
or in a message shorter than a block) are gathered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdiloco.runtime.close.kernels import ALIGNMENT, aligned_zeros
from jdiloco.runtime.close.layout import ROW, Block

Tensors = Sequence[np.ndarray]
"""The tensors of one contribution, each flat, in the order of the specs."""


class Window(NamedTuple):
    """A block of one contribution, as programs take it."""

    memory: np.ndarray  # shape=(window_size(rows),)
    starts: np.ndarray  # shape=(rows,), int32. Of each row in the memory; ROW elements follow.


def window_size(rows: int) -> int:
    """Elements of a window: the block, and some to spare for its alignment."""
    return (rows + 1) * ROW


def address(array: np.ndarray) -> int:
    """Of the first element."""
    return array.__array_interface__["data"][0]


def memory_of(array: np.ndarray) -> np.ndarray:
    """All bytes of the object whose memory the array shows, such as a whole message."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    exporter = owner.base.obj if isinstance(owner.base, memoryview) else owner.base
    if exporter is not None:
        try:
            return np.frombuffer(exporter, np.uint8)
        except (TypeError, ValueError, BufferError):
            pass  # Not contiguous or no buffer: what the array shows is known to be there.
    return owner.reshape(-1).view(np.uint8) if owner.flags.c_contiguous else np.empty(0, np.uint8)


def window(block: Block, tensors: Tensors, dtype: np.dtype) -> Window | None:
    """A window on memory as it was received, if one covers the block."""
    if not block.tensors or any(tensors[index].dtype != dtype for index in block.tensors):
        return None
    memory = memory_of(tensors[block.tensors[0]])
    low, high = address(memory), address(memory) + memory.size
    addresses = np.zeros(len(tensors) + 1, np.int64)
    for index in block.tensors:
        addresses[index] = address(tensors[index])
    rows = addresses[block.tensor] + block.offset * dtype.itemsize
    held = rows[: np.count_nonzero(block.valid)]
    size = window_size(len(rows)) * dtype.itemsize
    base = min(int(held.min()), high - size) // ALIGNMENT * ALIGNMENT
    last = int(held.max()) + ROW * dtype.itemsize
    if base < low or last > base + size or held.min() < base:
        return None
    if np.any((held - base) % dtype.itemsize):
        return None
    shown = memory[base - low : base - low + size].view(dtype)
    starts = np.zeros(len(rows), np.int32)
    starts[: len(held)] = (held - base) // dtype.itemsize
    return Window(shown, starts)


class Staging:
    """Small buffers for what has to be gathered, one per slot and dtype."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._starts = np.arange(rows, dtype=np.int32) * ROW
        self._buffers: dict[tuple[int, np.dtype], np.ndarray] = {}

    def gather(self, block: Block, tensors: Tensors, dtype: np.dtype, slot: int) -> Window:
        """The block, copied. It is there until the slot is used again."""
        if (slot, dtype) not in self._buffers:
            self._buffers[slot, dtype] = aligned_zeros((window_size(self._rows),), dtype)
        memory = self._buffers[slot, dtype]
        for index in block.tensors:
            rows = np.flatnonzero(block.tensor == index)
            start, size = int(block.offset[rows[0]]), int(block.valid[rows].sum())
            memory[rows[0] * ROW :][:size] = tensors[index][start : start + size]
        # Rows without a tensor are read and masked. Where nobody wrote or read before, a masked
        # read is many times slower than a plain one, so they all look at the first row.
        return Window(memory, np.where(block.valid > 0, self._starts, np.int32(0)))


def common_dtype(block: Block, contributions: Sequence[Tensors]) -> np.dtype:
    """The dtype in which a block of all contributions can lie: their own if it is one."""
    dtypes = {tensors[index].dtype for tensors in contributions for index in block.tensors}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
