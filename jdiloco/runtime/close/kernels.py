"""The few programs of a close. Each works on one block of rows; see `layout`.

Everything is widened to float64 in registers: the passes are bound by memory, so it costs little,
and fp32 sums lose the directions that nearly cancel. Outputs are small scratch blocks that stay in
the cache; each is donated to the call that fills it next, because a fresh page costs more to touch
for the first time than the arithmetic that fills it.
"""

from __future__ import annotations

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

LANES = 16
ALIGNMENT = 64


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
    """Memory that a program reads in place. JAX copies NumPy arrays that start anywhere else."""
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
    parts = (
        jnp.square(_wide(x[:, start : start + LANES])) for start in range(0, x.shape[1], LANES)
    )
    return functools.reduce(jnp.add, parts)


def _weighted_sum(coefficients: jax.Array, blocks: tuple[jax.Array, ...]) -> jax.Array:
    terms = (coefficients[k][:, None] * _wide(x) for k, x in enumerate(blocks))
    return functools.reduce(jnp.add, terms)


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def combine(coefficients: jax.Array, scratch: jax.Array, *blocks: jax.Array) -> jax.Array:
    """Σ cᵢ·Δᵢ rounded to fp32 once. `coefficients` is (contributions, rows), float64."""
    del scratch
    return _weighted_sum(coefficients, blocks).astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=1)
def accumulate(coefficients: jax.Array, total: jax.Array, *blocks: jax.Array) -> jax.Array:
    """`combine` onto a float64 total, for more contributions than one program reads well."""
    return total + _weighted_sum(coefficients, blocks)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def narrow(scratch: jax.Array, x: jax.Array) -> jax.Array:
    """`x` rounded to nearest even in the dtype of `scratch`."""
    return x.astype(scratch.dtype)


@functools.partial(jax.jit, donate_argnums=(0, 1), keep_unused=True)
def outer_step(
    scratch_anchor, scratch_momentum, anchor, momentum, u, scale, learning_rate, beta
) -> tuple[jax.Array, jax.Array]:
    """m ← β·m + Δ, Θ ← Θ − η·(Δ + β·m), with Δ = scale·u; `scale` is (rows,), float64."""
    del scratch_anchor, scratch_momentum
    delta = scale[:, None] * _wide(u)
    momentum = (beta * _wide(momentum) + delta).astype(jnp.float32)
    moved = _wide(anchor) - learning_rate * (delta + beta * _wide(momentum))
    return moved.astype(jnp.float32), momentum


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def final_step(scratch_anchor, anchor, u, scale) -> jax.Array:
    """Θ ← Θ − Δ, the step of a round whose participants are all final."""
    del scratch_anchor
    return (_wide(anchor) - scale[:, None] * _wide(u)).astype(jnp.float32)
