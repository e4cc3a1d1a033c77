"""Memory for received contributions that is used round after round.

Touching a fresh page costs several times what reading a warm one does, and memory of NumPy's own
lies in huge pages where `bytes` does not; so what arrives is copied here once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np

from jdiloco.runtime.close.kernels import aligned_zeros

SLAB = 8
"""Blocks that are allocated at once: the kernel gives huge pages to large allocations only."""


class Pool:
    """Blocks that nobody needs at the moment. Safe to use from several threads."""

    def __init__(self) -> None:
        self._free: dict[tuple[tuple[int, ...], np.dtype], list[np.ndarray]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A block with anything in it."""
        free = self._free[shape, dtype]
        while True:
            try:
                return free.pop()
            except IndexError:
                free.extend(aligned_zeros((SLAB, *shape), dtype))

    def give_back_after(self, owner: object, blocks: list[np.ndarray]) -> None:
        """Takes the blocks back when `owner` is no longer referred to."""
        weakref.finalize(owner, self._give_back, blocks).atexit = False

    def _give_back(self, blocks: list[np.ndarray]) -> None:
        for block in blocks:
            self._free[block.shape, block.dtype].append(block)


POOL = Pool()
"""One for all fragments of the process, since they close one after the other."""
