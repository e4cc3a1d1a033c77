"""Commit updates: from a version's anchor to the next one's, in few bits.

    update    what arrives of (master − anchor), sent in `commit_dtype`     by who closes
    anchor    ← narrow(anchor + update)                                      by everybody

Who closes a round rebuilds the anchor as every learner does, and commits what comes out; what the
update rounded away is the difference to the master, which stays in the outer state and goes out
with later rounds. A tensor that has no more bits than `commit_dtype` is narrowed from the master as
always, and lies in the update as it is.

Everybody has to hold the same bits, on whatever machine. So rebuilding is one fp32 addition that
IEEE 754 rounds in one way, by NumPy, which neither fuses operations nor flushes small numbers;
decoding before it is exact (`jdiloco.algo.wire`), and the rounding to the parameter's type after it
is to nearest even. Encoding need not agree: it is done once, by who closes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jdiloco.algo.wire import SMALL, reach
from jdiloco.runtime import messages, wire
from jdiloco.runtime.precision import Precision
from jdiloco.runtime.wire import Tensors
from jdiloco.types import TensorSpec


def made(
    specs: Sequence[TensorSpec], precision: Precision, anchor: Tensors, master: Tensors
) -> tuple[Tensors, Tensors]:
    """The update that leads from `anchor` towards `master`, and the anchor that it leads to.

    Both are of the tensors that are narrowed alone; `specs` are all of the fragment.
    """
    narrowed, dtype = precision.narrowed(specs), precision.commit_dtype
    assert dtype is not None
    gaps = {s.name: _gap(anchor[s.name], master[s.name], dtype) for s in narrowed}
    sent = wire.outgoing(gaps, dtype)
    return sent, _moved(narrowed, dtype, anchor, sent)


def rebuilt(
    specs: Sequence[TensorSpec], precision: Precision, anchor: Tensors, update: Tensors
) -> Tensors:
    """The next anchor, from the one before and an update as it arrived.

    Raises FormatError unless the update holds what a run of this precision sends.
    """
    narrowed, dtype = precision.narrowed(specs), precision.commit_dtype
    names = {spec.name for spec in narrowed}
    whole = [spec for spec in specs if spec.name not in names]
    kept = {spec.name: update[spec.name] for spec in whole if spec.name in update}
    sent = {name: array for name, array in update.items() if name not in kept}
    messages.check(kept, whole)
    wire.check(sent, narrowed, dtype)
    assert dtype is not None
    moved = {**kept, **_moved(narrowed, dtype, anchor, sent)}
    return {spec.name: moved[spec.name] for spec in specs}


def _gap(anchor: np.ndarray, master: np.ndarray, dtype: str) -> np.ndarray:
    """What is still to be sent, cut to what the format reaches."""
    with np.errstate(over="ignore"):
        gap = np.subtract(master, anchor, dtype=np.float32)
    gap = np.asarray(np.clip(gap, -reach(dtype), reach(dtype)))
    return gap if dtype in SMALL else gap.astype(dtype)


def _moved(
    narrowed: Sequence[TensorSpec], dtype: str, anchor: Tensors, sent: Tensors
) -> dict[str, np.ndarray]:
    """What a learner that holds the anchors arrives at."""
    arrived = wire.incoming(sent, narrowed, dtype)
    return {s.name: _added(anchor[s.name], arrived[s.name], s.dtype) for s in narrowed}


def _added(anchor: np.ndarray, update: np.ndarray, dtype: str) -> np.ndarray:
    """`narrow(anchor + update)`; beyond the type's range it stays at its end."""
    end = float(jnp.finfo(dtype).max)
    with np.errstate(over="ignore"):
        moved = np.asarray(np.add(anchor, update, dtype=np.float32))
    moved = np.clip(moved, -end, end, out=moved).astype(dtype, copy=False)
    moved.setflags(write=False)
    return moved
