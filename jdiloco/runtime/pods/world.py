"""What the processes of a pod say to one another: one small gather, called by all of them at once.

The only collective of this library. It is called by the training threads alone, at the same points
of their programs, since two threads whose programs span devices can deadlock. It takes one device
of each process and waits until that device has done what was dispatched before.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROW_BYTES = 2048
"""What usually has room for everything a process has to say: so a second gather is rare."""

_LENGTH_BYTES = 4


class World:
    """All processes of the `jax.distributed` program that this one belongs to."""

    def __init__(self) -> None:
        self.index = jax.process_index()
        self.count = jax.process_count()
        first = {device.process_index: device for device in reversed(jax.devices())}
        self._device = first[self.index]
        self._mesh = Mesh(np.array([first[i] for i in range(self.count)]), ("process",))
        self._rows = NamedSharding(self._mesh, PartitionSpec("process"))
        self._gather = jax.jit(_same, out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    @property
    def is_head(self) -> bool:
        """Whether this process speaks to the mailbox for all."""
        return self.index == 0

    def gather(self, said: bytes) -> list[bytes]:
        """What every process said, in order. Waits for all of them."""
        length = len(said).to_bytes(_LENGTH_BYTES, "little")
        rows = self._gathered((length + said)[:ROW_BYTES], ROW_BYTES)
        lengths = [int.from_bytes(row[:_LENGTH_BYTES].tobytes(), "little") for row in rows]
        longest = max(lengths)
        if longest <= ROW_BYTES - _LENGTH_BYTES:
            whole = rows[:, _LENGTH_BYTES:]
        else:
            whole = self._gathered(said, 1 << (longest - 1).bit_length())  # Few shapes.
        return [row[:n].tobytes() for row, n in zip(whole, lengths, strict=True)]

    def _gathered(self, said: bytes, width: int) -> np.ndarray:
        row = np.zeros((1, width), np.uint8)
        row[0, : len(said)] = np.frombuffer(said, np.uint8)
        with jax.transfer_guard("allow"), jax.set_mesh(self._mesh):
            mine = jax.device_put(row, self._device)
            shape = (self.count, width)
            rows = jax.make_array_from_single_device_arrays(shape, self._rows, [mine])
            return np.asarray(self._gather(rows).addressable_shards[0].data)


def _same(x: jax.Array) -> jax.Array:
    return x
