"""The arithmetic of a round once more, as plainly as NumPy allows, in float64.

It shares no code with `jdiloco.algo` and none of its shortcuts: no stacking, no padding, no trees.
Tests hold the library against it; use it to check a merge of your own, or what a run committed.
All functions take and return one tensor; none changes its arguments.

    for each contribution   d = widen(anchor) - widen(params)
    merged                  = rda([d, ...], [weight(steps, samples), ...])
    master, momentum        = outer_step(master, momentum, merged)
    committed               = narrow(master, dtype)
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

Wide = NDArray[np.float64]


def weight(steps: int, samples: int) -> float:
    """`samples² / steps`, exact until the last rounding."""
    return float(Fraction(samples) ** 2 / Fraction(steps))


def delta(anchor: ArrayLike, params: ArrayLike) -> Wide:
    """`anchor - params`: it points against the training, like a gradient."""
    return widen(anchor) - widen(params)


def weighted_mean(deltas: Sequence[ArrayLike], weights: Sequence[float]) -> Wide:
    """`Σ wᵢ Δᵢ / W`."""
    total = float(sum(weights))
    merged = np.zeros(np.shape(deltas[0]))
    for d, w in zip(deltas, weights, strict=True):
        merged = merged + (w / total) * widen(d)
    return merged


def rda(deltas: Sequence[ArrayLike], weights: Sequence[float]) -> Wide:
    """`r̄ φ(u)`, with a `u` shorter than 1e-6 taken for zero."""
    total = float(sum(weights))
    length, u = 0.0, np.zeros(np.shape(deltas[0]))
    for d, w in zip(deltas, weights, strict=True):
        length += (w / total) * norm(d)
        u = u + (w / total) * unit(d)
    return np.zeros_like(u) if norm(u) < 1e-6 else length * unit(u)


def mean_direction(deltas: Sequence[ArrayLike], weights: Sequence[float]) -> float:
    """`‖u‖`: 1 where all agree, 0 where they cancel; it says how exact an fp32 RDA can be."""
    return norm(weighted_mean([unit(d) for d in deltas], weights))


def norm(x: ArrayLike) -> float:
    """The Euclidean length over all elements."""
    return float(np.sqrt(np.sum(np.square(widen(x)))))


def unit(x: ArrayLike) -> Wide:
    """`x / max(‖x‖, 1e-12)`."""
    return widen(x) / max(norm(x), 1e-12)


def outer_step(
    anchor: ArrayLike,
    momentum: ArrayLike,
    merged: ArrayLike,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
) -> tuple[Wide, Wide]:
    """The next anchor and momentum: `m ← β·m + Δ`, `Θ ← Θ − η·(Δ + β·m)`."""
    step = widen(merged)
    velocity = outer_momentum * widen(momentum) + step
    return widen(anchor) - outer_lr * (step + outer_momentum * velocity), velocity


def narrow(x: ArrayLike, dtype: Any) -> NDArray[Any]:
    """`x` at a parameter's type, through fp32 as in the library."""
    return np.asarray(x, np.float32).astype(_dtype(dtype))


def widen(x: ArrayLike) -> Wide:
    """`x` in float64, whatever it was."""
    return np.asarray(x).astype(np.float64)


def _dtype(dtype: Any) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
