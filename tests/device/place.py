"""Where the checks are run, what it means that something holds, and a round there."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from jdiloco import diloco_outer
from jdiloco.runtime.backends import BACKENDS, CPU, Backend

EXACT = 1e-6
"""How far apart two fp32 results may be, per tensor and relative to its length."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the checks are run, and how large."""

    device: Any
    host: Any
    small: bool

    @property
    def backend(self) -> Backend:
        """Anchors in pinned memory everywhere: a CPU has that too."""
        if self.device.platform == "cpu":
            return dataclasses.replace(CPU, anchor_memory="pinned_host", copies_ahead=True)
        return next(b for b in BACKENDS.values() if self.device.platform in b.platforms)

    def put(self, tree: Any) -> Any:
        return jax.device_put(tree, self.device)


class Failed(Exception):
    """Something does not hold."""


def hold(true: Any, what: str) -> None:
    if not true:
        raise Failed(what)


def length(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def distance(a: Any, b: Any) -> float:
    """How far apart two tensors are, measured against the second."""
    wide = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return length(wide) / max(length(b), 1e-300)


def one_round(
    settings: tuple[Any, float, float], deltas: Any, state: Any, params: Any, weights: Any
) -> tuple[Any, Any]:
    """Parameters and state after a round of the transformation."""
    merge, rate, momentum = settings
    tx = diloco_outer(merge, rate, momentum)
    updates, state = tx.update(deltas, state, params, weights=weights)
    return optax.apply_updates(params, updates), state


take_round = jax.jit(one_round, static_argnums=0)
take_round_in_place = jax.jit(one_round, static_argnums=0, donate_argnums=(2, 3))

PLAIN = (1.0, 0.0)  # No outer learning rate, no momentum: parameters − Δ.


def merged(place: Place, merge: Any, rows: Any, weights: Any, name: str = "w") -> np.ndarray:
    """The merge of one tensor on the device, as the first momentum of a round."""
    rows = np.asarray(rows, np.float32)
    params = place.put({name: np.zeros(rows.shape[1:], np.float32)})
    state = diloco_outer(merge, *PLAIN).init(params)
    given = place.put(({name: rows}, np.asarray(weights, np.float32)))
    _, state = take_round((merge, *PLAIN), given[0], state, params, given[1])
    return np.asarray(state[1].momentum[name])
