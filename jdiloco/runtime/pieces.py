"""What one process of a pod holds of a tensor: the boxes that its own devices hold, on the host.

A box says from where to where along each axis. Two devices that hold the same box hold the same
values, so a process keeps one copy of it; and of the copies in the whole pod JAX calls one the
first (`replica_id == 0`), whose process is the one that sends it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jdiloco.errors import UsageError

Box = tuple[tuple[int, int], ...]
"""Start and stop along each axis."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """The boxes of one tensor that a process holds."""

    shape: tuple[int, ...]  # Of the whole tensor.
    sharding: Sharding  # By which the boxes are cut.
    held: Mapping[Box, np.ndarray]
    senders: frozenset[int] = frozenset()  # Of a delta: who holds the first copy of anything.

    @property
    def nbytes(self) -> int:
        """Of all boxes together."""
        return sum(piece.nbytes for piece in self.held.values())

    def any(self) -> bool:
        """Whether anything may differ from zero: of what others hold nothing is known here."""
        return True


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """What JAX calls an index, as a box."""
    pairs = zip(index, shape, strict=True)
    return tuple((part.start or 0, n if part.stop is None else part.stop) for part, n in pairs)


def slices_of(box: Box) -> tuple[slice, ...]:
    """A box as NumPy wants it."""
    return tuple(slice(start, stop) for start, stop in box)


def boxes_here(sharding: Sharding, shape: Sequence[int]) -> tuple[Box, ...]:
    """Every box that a device of this process holds, once, in order."""
    indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return tuple(sorted({box_of(index, shape) for index in indices if index is not None}))


def cut(value: np.ndarray, sharding: Sharding) -> Pieces:
    """This process's boxes of a tensor that is here as a whole, as copies."""
    boxes = boxes_here(sharding, value.shape)
    held = {box: np.array(value[slices_of(box)], order="C") for box in boxes}
    return Pieces(value.shape, sharding, held)


def first_copies(array: jax.Array) -> Pieces:
    """What this process sends of an array: the boxes whose first copy it holds."""
    first: dict[Box, int] = {}  # The process that holds it.
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        first.setdefault(box_of(index or (), array.shape), device.process_index)
    here = [box for box, process in first.items() if process == jax.process_index()]
    if array.is_fully_replicated:
        # Of a JAX array put to one device in each process JAX 0.12 cannot make shards.
        held = {box: np.asarray(array) for box in here}
    else:
        shards = {box_of(shard.index, array.shape): shard for shard in array.addressable_shards}
        held = {box: np.asarray(shards[box].data) for box in here}
    return Pieces(array.shape, array.sharding, held, frozenset(first.values()))


def placed(pieces: Pieces, sharding: Sharding) -> jax.Array:
    """A new array of these values.

    Where it is to be cut otherwise than the boxes were, a program of all processes moves the
    values: then every one of them has to call this.
    """
    shape, cut_by = pieces.shape, pieces.sharding
    same = sharding.devices_indices_map(shape) == cut_by.devices_indices_map(shape)
    made = _made(pieces, sharding if same else cut_by)
    return made if same else resharded(made, sharding)


def _made(pieces: Pieces, sharding: Sharding) -> jax.Array:
    kind = sharding.memory_kind
    arrays = [
        jax.device_put(
            pieces.held[box_of(index or (), pieces.shape)],
            SingleDeviceSharding(device, memory_kind=kind),
        )
        for device, index in sharding.addressable_devices_indices_map(pieces.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(pieces.shape, sharding, arrays)


def resharded(array: jax.Array, sharding: Sharding) -> jax.Array:
    """A copy placed otherwise; every process has to call it."""
    return jax.jit(_same, out_shardings=sharding)(array)


def _same(x: jax.Array) -> jax.Array:
    return x


def check_spread(name: str, leaf: Any) -> None:
    """Raises UsageError unless a leaf is an array over the devices of every process."""
    if isinstance(leaf, jax.Array):
        processes = {device.process_index for device in leaf.sharding.device_set}
        if processes == set(range(jax.process_count())):
            return
        found = f"lies on devices of processes {sorted(processes)}"
    else:
        found = f"is a {type(leaf).__name__}"
    raise UsageError(
        f"{name!r} {found}; this node is a pod of {jax.process_count()} processes. Put every "
        "parameter on a mesh of all their devices, `jax.device_put(x, NamedSharding(mesh, P()))` "
        "for one that all of them hold whole."
    )
