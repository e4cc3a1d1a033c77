"""What a backend is: a frozen description, and where it puts anchors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jdiloco.runtime import pieces
from jdiloco.runtime.parameters import placed
from jdiloco.runtime.pieces import Pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How a node uses the devices that its parameters lie on.

    `GPU`, `TPU` and `CPU` are the usual ones. Another is made of one of them, and a session takes
    it as it takes a name:

        in_device_memory = dataclasses.replace(GPU, anchor_memory=None)
        jdiloco.Session(params, algorithm, mailbox, backend=in_device_memory)

    Only its own node depends on it: nodes of one run may have unlike ones.
    """

    name: str
    """What logs and `status` call it."""

    platforms: tuple[str, ...]
    """The `platform` of a device that it is for, as JAX spells it."""

    anchor_memory: str | None = None
    """The kind of memory that holds anchors. None is that of the parameter. `"pinned_host"` saves
    as much device memory as the parameters take, and costs a copy of a fragment to the device in
    each of its rounds."""

    copies_ahead: bool = False
    """Whether a delta starts for the host when its subtraction is dispatched, and not only when a
    library thread asks for it. For devices with memory of their own."""

    def anchor(self, value: np.ndarray | Pieces, like: Any) -> jax.Array:
        """A copy of a committed value as the anchor of the parameter `like`."""
        if self.anchor_memory is None:
            return placed(value, like)
        if isinstance(value, Pieces):
            return pieces.placed(value, self._place(like))
        return jax.device_put(value, self._place(like))

    def is_anchor_of(self, anchor: jax.Array, leaf: jax.Array) -> bool:
        """Whether an anchor lies where that of this parameter has to."""
        return anchor.sharding == self._place(leaf)

    def start_for_host(self, delta: Iterable[jax.Array]) -> None:
        """Lets arrays that are being computed come to the host as soon as they are."""
        if not self.copies_ahead:
            return
        with jax.transfer_guard_device_to_host("allow"):  # As explicit as `device_get`.
            for array in delta:
                array.copy_to_host_async()

    def _place(self, leaf: Any) -> Sharding:
        sharding = sharding_of(leaf)
        kind = self.anchor_memory
        return sharding if kind is None else sharding.with_memory_kind(kind)


def sharding_of(leaf: Any) -> Sharding:
    """Where a parameter lies, or where JAX would put it."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding
    return jax.device_put(np.zeros((), np.float32)).sharding
