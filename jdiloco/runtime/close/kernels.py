"""The few programs of a close. Each works on one block of rows; see `layout`.

Everything is widened to float64 in registers: the passes are bound by memory, so it costs little,
and fp32 sums lose the directions that nearly cancel. Outputs reuse the buffers of the call before
(donation), because a fresh page costs more to touch for the first time than the arithmetic that
fills it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LANES = 16
ALIGNMENT = 64
"""JAX reads a NumPy array in place if its address is a multiple of this, and else copies it."""


@contextlib.contextmanager
def on_host():
    """The settings under which every program here is traced and called.

    They hold for the calling thread alone and end with the block: whatever the user configured,
    float64 exists, arrays live on the first CPU device, and NaN is a value to look at.
    """
    with (
        jax.enable_x64(True),
        jax.default_device(jax.devices("cpu")[0]),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
    ):
        yield


def aligned_zeros(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Memory that a program reads in place."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    return memory[skip : skip + size].view(dtype).reshape(shape)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64)


@jax.jit
def squares(x: jax.Array) -> jax.Array:
    """Sums of squares per row, in float64 and LANES parts: (rows, ROW) to (rows, LANES).

    An explicit sum of slices, because XLA's own reduction over the last axis is scalar code.
    """
    parts = [
        jnp.square(_wide(x[:, start : start + LANES])) for start in range(0, x.shape[1], LANES)
    ]
    while len(parts) > 1:  # As a tree: one long chain of sums waits for itself.
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _weighted_sum(coefficients: jax.Array, blocks: tuple[jax.Array, ...]) -> jax.Array:
    terms = (coefficients[k][:, None] * _wide(x) for k, x in enumerate(blocks))
    return functools.reduce(jnp.add, terms)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def combine(u: jax.Array, coefficients: jax.Array, *blocks: jax.Array) -> jax.Array:
    """u = Σ cᵢ·Δᵢ, rounded to fp32 once. `coefficients` is (contributions, rows), float64.

    `u` is a block to write over.
    """
    del u
    return _weighted_sum(coefficients, blocks).astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def accumulate(total: jax.Array, coefficients: jax.Array, *blocks: jax.Array) -> jax.Array:
    """`combine` onto a float64 total, for more contributions than one program reads well."""
    return total + _weighted_sum(coefficients, blocks)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def narrow(scratch: jax.Array, x: jax.Array) -> jax.Array:
    """`x` rounded to nearest even in the dtype of `scratch`."""
    return x.astype(scratch.dtype)


class Stepped(NamedTuple):
    """A block of the state after a step, to be copied to its place; then a scratch to donate."""

    anchor: jax.Array
    momentum: jax.Array


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def outer_step(scratch: Stepped, anchor, momentum, u, scale, learning_rate, beta) -> Stepped:
    """m ← β·m + Δ, Θ ← Θ − η·(Δ + β·m), with Δ = scale·u; `scale` is (rows,), float64."""
    del scratch
    delta = scale[:, None] * _wide(u)
    momentum = (beta * _wide(momentum) + delta).astype(jnp.float32)
    moved = _wide(anchor) - learning_rate * (delta + beta * _wide(momentum))
    return Stepped(moved.astype(jnp.float32), momentum)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def final_step(scratch: Stepped, anchor, momentum, u, scale) -> Stepped:
    """Θ ← Θ − Δ, the step of a round whose participants are all final; the momentum stays."""
    del scratch
    return Stepped((_wide(anchor) - scale[:, None] * _wide(u)).astype(jnp.float32), momentum)
