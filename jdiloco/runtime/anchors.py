"""What a learner holds of every fragment beside the user's own parameters.

Two rules keep the user's arrays the user's: anchors and aligned leaves are copies, never the same
buffer; and an aligned leaf copies dtype, sharding and committedness of the leaf it replaces in that
same call, so the user's step does not compile again. Anchors lie where the node's backend says.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdiloco.algo.merges import subtracted
from jdiloco.protocol.alignment import Alignment, How, needs_snapshot
from jdiloco.runtime import alignment
from jdiloco.runtime.alignment import Leaves
from jdiloco.runtime.backends import Backend
from jdiloco.runtime.news import Values
from jdiloco.runtime.parameters import Holder, computable, placed


class Anchors:
    """The newest committed values on the host, an anchor of each, and snapshots where kept.

    Arguments:
      plan: the names of each fragment's tensors.
      values: the run's newest values of all of them.
      dtype: what parameters are narrowed to before they are subtracted, or None.
    """

    def __init__(
        self,
        plan: Sequence[tuple[str, ...]],
        holder: Holder,
        backend: Backend,
        setting: Alignment,
        values: Values,
        *,
        dtype: str | None,
    ) -> None:
        self.plan = plan
        self.values = dict(values)  # The newest committed, on the host.
        self.of: list[Leaves] = [()] * len(plan)
        # The parameters at each fragment's newest snapshot, where aligning may ask for them.
        self.snapshots: list[Leaves] = [()] * len(plan)
        self._holder = holder
        self._backend = backend
        self._setting = setting
        self._dtype = dtype

    def prepare(self, params: Any, index: int) -> None:
        """Compiles what publishing and aligning a fragment will need."""
        leaves = alignment.on_device(self._get(params, index))
        jax.block_until_ready(_subtracted(self.of[index], leaves, dtype=self._dtype))
        alignment.prepare(self._setting, leaves, self.of[index])

    def take_up(self, params: Any, index: int, then: Mapping[str, np.ndarray]) -> None:
        """Anchors for parameters that were saved, with the snapshot they were saved with."""
        names, leaves = self.plan[index], self._get(params, index)
        self.of[index] = self._anchored(index, leaves)
        if all(name in then for name in names):
            pairs = zip(names, leaves, strict=True)
            self.snapshots[index] = tuple(placed(then[name], leaf) for name, leaf in pairs)

    def replace(self, params: Any, index: int) -> Any:
        """Puts the newest committed values of a fragment into anchor and parameters."""
        leaves = self._get(params, index)
        self.of[index] = self._anchored(index, leaves)
        return self._put(params, index, self._copies(index, leaves))

    def mix(self, params: Any, index: int, how: How, *, from_snapshot: bool) -> Any:
        """Puts them into the anchor, and with what is kept of the training into the parameters."""
        leaves = self._get(params, index)
        since = self.snapshots[index] if from_snapshot else self.of[index]
        self.of[index] = self._anchored(index, leaves)
        return self._put(params, index, alignment.aligned(how, leaves, since, self.of[index]))

    def committed(self, params: Any) -> Any:
        """`params` with the newest committed values of every fragment, as copies."""
        for index in range(len(self.plan)):
            params = self._put(params, index, self._copies(index, self._get(params, index)))
        return params

    def delta(self, params: Any, index: int) -> Leaves:
        """What a fragment has moved since its anchor, on its way to the host."""
        leaves = alignment.on_device(self._get(params, index))
        delta = _subtracted(self._near(index, leaves), leaves, dtype=self._dtype)
        self._backend.start_for_host(delta)
        if needs_snapshot(self._setting):
            self.snapshots[index] = alignment.snapshot(leaves)
        return delta

    def is_finite(self, params: Any, index: int) -> bool:
        """Whether all of a fragment that was trained since its anchor is a number."""
        return alignment.is_finite(self._get(params, index), self.of[index])

    def kept(self) -> dict[str, np.ndarray]:
        """The snapshots on the host, by name."""
        return {
            name: np.array(jax.device_get(leaf))
            for names, leaves in zip(self.plan, self.snapshots, strict=True)
            for name, leaf in zip(names, leaves, strict=bool(leaves))
        }

    def _get(self, params: Any, index: int) -> Sequence[Any]:
        return self._holder.get(params, self.plan[index])

    def _put(self, params: Any, index: int, leaves: Leaves) -> Any:
        return self._holder.put(params, dict(zip(self.plan[index], leaves, strict=True)))

    def _near(self, index: int, leaves: Leaves) -> Leaves:
        """The anchors, moved when the parameters have been, by the user or by his compiler."""
        if not all(map(self._backend.is_anchor_of, self.of[index], leaves)):
            self.of[index] = self._anchored(index, leaves)
        return self.of[index]

    def _copies(self, index: int, leaves: Sequence[Any]) -> Leaves:
        """The committed values, each where the leaf it stands in for is."""
        pairs = zip(self.plan[index], leaves, strict=True)
        return tuple(placed(self.values[name], leaf) for name, leaf in pairs)

    def _anchored(self, index: int, leaves: Sequence[Any]) -> Leaves:
        """The committed values, each where the backend wants the anchor of its leaf."""
        values = [self.values[name] for name in self.plan[index]]
        return tuple(map(self._backend.anchor, values, leaves))


@functools.partial(jax.jit, static_argnames="dtype")
def _subtracted(anchors: Leaves, leaves: Leaves, *, dtype: str | None) -> Leaves:
    """The deltas of a fragment, on the device, wherever anchors and parameters are kept."""
    pairs = zip(map(computable, anchors), map(computable, leaves), strict=True)
    return tuple(subtracted(anchor, leaf, dtype) for anchor, leaf in pairs)
