"""The arithmetic of a round once more, as plainly as NumPy allows, in float64.

It shares no code with `jdiloco.algo` and none of its shortcuts: no stacking, no padding, no trees.
Tests hold the library against it; use it to check a merge of your own, or what a run committed.
All functions take and return one tensor; none changes its arguments.

    for each contribution   d = widen(anchor) - widen(params)
    merged                  = rda([d, ...], [weight(steps, samples), ...])
    master, momentum        = outer_step(master, momentum, merged)
    committed               = narrow(master, dtype)
      or, by updates        = rebuilt(anchor, on_wire(master - anchor, commit_dtype))
    aligned                 = narrow(carried(params, snapshot, committed), dtype)
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes  # Also lets NumPy know bfloat16 by its name.
import numpy as np
from numpy.typing import NDArray

Wide = NDArray[np.float64]
Tensor = Any  # Whatever NumPy makes an array of: a number, a list, a JAX array of any type.


def weight(steps: int, samples: int) -> float:
    """`samples² / steps`, exact until the last rounding."""
    return float(Fraction(samples) ** 2 / Fraction(steps))


def delta(anchor: Tensor, params: Tensor) -> Wide:
    """`anchor - params`: it points against the training, like a gradient."""
    return np.asarray(widen(anchor) - widen(params))


def weighted_mean(
    deltas: Sequence[Tensor] | NDArray[Any], weights: Sequence[Any] | NDArray[Any]
) -> Wide:
    """`Σ wᵢ Δᵢ / W`."""
    total = float(sum(weights))
    merged = np.zeros(np.shape(deltas[0]))
    for d, w in zip(deltas, weights, strict=True):
        merged = merged + (w / total) * widen(d)
    return np.asarray(merged)


def rda(deltas: Sequence[Tensor] | NDArray[Any], weights: Sequence[Any] | NDArray[Any]) -> Wide:
    """`r̄ φ(u)`, with a `u` shorter than 1e-6 taken for zero."""
    total = float(sum(weights))
    length, u = 0.0, np.zeros(np.shape(deltas[0]))
    for d, w in zip(deltas, weights, strict=True):
        length += (w / total) * norm(d)
        u = u + (w / total) * unit(d)
    return np.asarray(np.zeros_like(u) if norm(u) < 1e-6 else length * unit(u))


def mean_direction(
    deltas: Sequence[Tensor] | NDArray[Any], weights: Sequence[Any] | NDArray[Any]
) -> float:
    """`‖u‖`: 1 where all agree, 0 where they cancel; it says how exact an fp32 RDA can be."""
    return norm(weighted_mean([unit(d) for d in deltas], weights))


def norm(x: Tensor) -> float:
    """The Euclidean length over all elements."""
    return float(np.sqrt(np.sum(np.square(widen(x)))))


def unit(x: Tensor) -> Wide:
    """`x / max(‖x‖, 1e-12)`."""
    return np.asarray(widen(x) / max(norm(x), 1e-12))


def outer_step(
    anchor: Tensor,
    momentum: Tensor,
    merged: Tensor,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    momentum_dtype: str = "float64",
) -> tuple[Wide, Wide]:
    """The next anchor and momentum: `m ← β·m + Δ`, `Θ ← Θ − η·(Δ + β·m)`.

    In another `momentum_dtype`, `m` is rounded to that before the step takes it.
    """
    step = widen(merged)
    velocity = np.asarray(outer_momentum * widen(momentum) + step)
    if momentum_dtype != "float64":
        velocity = np.asarray(widen(narrow(velocity, momentum_dtype)))
    return np.asarray(widen(anchor) - outer_lr * (step + outer_momentum * velocity)), velocity


def on_wire(x: Tensor, dtype: str) -> Wide:
    """What arrives of a tensor sent as `float8_e4m3fn` (one power-of-two scale for all of it, the
    largest at 128 or more), as `float4_e2m1fn` (the least scale per 32 elements that cuts off
    nothing), or in one of the wider types."""
    wide = np.asarray(x, np.float32).astype(np.float64)
    if dtype in ("float32", "bfloat16", "float16"):
        end = float(ml_dtypes.finfo(dtype).max)
        return np.asarray(widen(narrow(np.clip(wide, -end, end), dtype)))
    largest = float(np.max(np.abs(wide), initial=0.0))
    if dtype == "float8_e4m3fn":
        scale = 2.0 ** (np.frexp(largest)[1] - 8) if largest else 1.0
        return (wide / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    found = np.zeros(wide.size)
    for start in range(0, wide.size, 32):
        block = wide.reshape(-1)[start : start + 32]
        top = np.max(np.abs(block))
        scale = 2.0 ** np.ceil(np.log2(top / 6)) if top else 1.0
        small = (block / scale).astype(ml_dtypes.float4_e2m1fn)
        found[start : start + 32] = small.astype(np.float64) * scale
    return found.reshape(wide.shape)


def rebuilt(anchor: Tensor, update: Tensor) -> NDArray[Any]:
    """The next anchor of a learner that holds the one before: `narrow(anchor + update)`."""
    held = np.asarray(anchor)
    end = float(ml_dtypes.finfo(held.dtype).max)
    moved = np.float32(widen(held) + widen(update))
    return narrow(np.clip(moved, -end, end), held.dtype)


def narrow(x: Tensor, dtype: Any) -> NDArray[Any]:
    """`x` at a parameter's type, through fp32 as in the library."""
    return np.asarray(x, np.float32).astype(dtype)


def widen(x: Tensor) -> Wide:
    """`x` in float64, whatever it was."""
    return np.asarray(x).astype(np.float64)


def blended(params: Tensor, committed: Tensor, mixing: float) -> Wide:
    """Parameters that move part of the way to a commit: `α·θ + (1 − α)·Θ`."""
    return np.asarray(mixing * widen(params) + (1 - mixing) * widen(committed))


def carried(params: Tensor, since: Tensor, committed: Tensor) -> Wide:
    """What was trained since a moment, on top of a commit: `Θ + (θ − since)`."""
    return np.asarray(widen(committed) + (widen(params) - widen(since)))
