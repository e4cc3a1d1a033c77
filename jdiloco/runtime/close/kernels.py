"""The few programs of a close. Each works on one block of rows; see `layout`.

Everything is widened to float64 in registers: the passes are bound by memory, so it costs little,
and fp32 sums lose the directions that nearly cancel.

What lasts (anchor, momentum, u) is one array per fragment, donated to the program that replaces a
block of it, which XLA does in place: a fresh page costs more to touch for the first time than the
arithmetic that fills it, and one array gives whole tensors to write out without gathering them.

A program has one result. XLA on CPU computes two results in two passes, and in place it copies
first what the other pass has yet to read. Nor may a value inside have two uses that are not read
element by element alike: XLA then writes it to memory. That is why each slice reads its input anew.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jdiloco.runtime.close.layout import ROW

LANES = 16
ALIGNMENT = 64
"""JAX reads a NumPy array in place if its address is a multiple of this, and else copies it."""


def aligned_zeros(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Memory that a program reads in place.

    The zeros are written: reading pages that were never written can fault again and again.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    memory.fill(0)
    skip = -memory.ctypes.data % ALIGNMENT
    return memory[skip : skip + size].view(dtype).reshape(shape)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64)


def _block(state: jax.Array, row: jax.Array, rows: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(state, row, rows)


def _replaced(state: jax.Array, row: jax.Array, block: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(state, block.astype(state.dtype), row, axis=0)


def _read(memory: jax.Array, starts: jax.Array, valid: jax.Array, first=0, size=ROW) -> jax.Array:
    """Elements `first` to `first + size` of each row of a window, zero beyond the valid ones."""
    rows = jax.vmap(lambda start: jax.lax.dynamic_slice(memory, (start,), (size,)))(starts + first)
    column = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1) + first
    return jnp.where(column < valid[:, None], rows, jnp.zeros((), rows.dtype))


def _sum_of_squares(slices: list[jax.Array]) -> jax.Array:
    parts = [jnp.square(_wide(x)) for x in slices]
    while len(parts) > 1:  # As a tree: one long chain of sums waits for itself.
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@jax.jit
def squares(memory: jax.Array, starts: jax.Array, valid: jax.Array) -> jax.Array:
    """Sums of squares of each row of a window, in float64 and LANES parts: (rows, LANES).

    An explicit sum of slices, because XLA's own reduction over the last axis is scalar code.
    """
    return _sum_of_squares(
        [_read(memory, starts, valid, first, LANES) for first in range(0, ROW, LANES)]
    )


@jax.jit
def squares_of_state(state: jax.Array, row: jax.Array, valid: jax.Array) -> jax.Array:
    """`squares` of a block of the state, whose padding is zero."""
    rows = valid.shape[0]
    return _sum_of_squares(
        [
            jax.lax.dynamic_slice(state, (row, jnp.int32(first)), (rows, LANES))
            for first in range(0, ROW, LANES)
        ]
    )


def _weighted_sum(coefficients, valid, windows) -> jax.Array:
    terms = (
        coefficients[k][:, None] * _wide(_read(memory, starts, valid))
        for k, (memory, starts) in enumerate(windows)
    )
    return functools.reduce(jnp.add, terms)


@functools.partial(jax.jit, donate_argnums=0)
def combine(u: jax.Array, row, coefficients: jax.Array, valid: jax.Array, *windows) -> jax.Array:
    """Replaces a block of u by Σ cᵢ·Δᵢ. `coefficients` is (contributions, rows), float64."""
    return _replaced(u, row, _weighted_sum(coefficients, valid, windows))


@functools.partial(jax.jit, donate_argnums=0)
def accumulate(total: jax.Array, coefficients: jax.Array, valid: jax.Array, *windows) -> jax.Array:
    """The sum of `combine` onto a block in float64, for more than one program reads well."""
    return total + _weighted_sum(coefficients, valid, windows)


@functools.partial(jax.jit, donate_argnums=0)
def replace(state: jax.Array, row, block: jax.Array) -> jax.Array:
    """Replaces a block, rounded to the dtype of the state."""
    return _replaced(state, row, block)


@functools.partial(jax.jit, donate_argnums=0)
def step_momentum(momentum: jax.Array, row, u, scale: jax.Array, beta) -> jax.Array:
    """m ← β·m + Δ for a block, with Δ = scale·u; `scale` is (rows,), float64."""
    rows = scale.shape[0]
    delta = scale[:, None] * _wide(_block(u, row, rows))
    return _replaced(momentum, row, beta * _wide(_block(momentum, row, rows)) + delta)


@functools.partial(jax.jit, donate_argnums=0)
def step_anchor(
    anchor: jax.Array, row, momentum, u, scale: jax.Array, learning_rate, beta
) -> jax.Array:
    """Θ ← Θ − η·(Δ + β·m) for a block, with the new m."""
    rows = scale.shape[0]
    delta = scale[:, None] * _wide(_block(u, row, rows))
    step = delta + beta * _wide(_block(momentum, row, rows))
    return _replaced(anchor, row, _wide(_block(anchor, row, rows)) - learning_rate * step)


@functools.partial(jax.jit, donate_argnums=0)
def narrow(narrowed: jax.Array, row, master: jax.Array, like: jax.Array) -> jax.Array:
    """Replaces a block by that of the master, rounded to nearest even. `like` is (rows,)."""
    return _replaced(narrowed, row, _block(master, row, like.shape[0]))


owned = jax.jit(jnp.copy)
"""A copy in memory that can be donated; JAX only lends what NumPy holds."""
