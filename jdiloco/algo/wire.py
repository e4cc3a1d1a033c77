"""Eight and four bits on the wire: a value per element, and scales that are powers of two.

    float8_e4m3fn   one scale per tensor, which brings the largest element to 128 or more and below
                    256. The type ends at 448, and 465 would become NaN.
    float4_e2m1fn   one scale per 32 elements, in the order of the flattened tensor, the smallest
                    with which none is above 6, the end of the type. Two values a byte, the earlier
                    one in the low half; the last byte may be half empty.

Scales are stored as float8_e8m0fnu, whose values are the powers of two from 2^-127 to 2^127 and
NaN. A scale is NaN where an element that it stands for is not finite, since four bits know no NaN:
such a tensor decodes to NaN, and whoever checks what it received sees it. Rounding is to the
nearest, ties to even. Elements below 2^-126 count as zero, and zeros decode to exact zeros.

Scales come from `frexp` and `ldexp`: `exp2` is not exact in XLA. What is decoded is exact in fp32
or, below 2^-126, zero, so every machine decodes the same bytes to the same bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Real, UInt8

from jdiloco.errors import UsageError

BLOCK = 32
"""Elements that share a scale in four bits."""

LARGEST = 6.0
"""Of the four-bit type; the others are 0, 0.5, 1, 1.5, 2, 3 and 4."""

_SMALLEST_NORMAL = 2.0**-126
_END = float(jnp.finfo(jnp.float32).max)
_EXPONENT_MAX, _EXPONENT_MIN = 127, -127
_TOP = 8  # An eight-bit tensor's largest element lies in [2^7, 2^8).

SMALL = ("float8_e4m3fn", "float4_e2m1fn")
"""The formats that need scales."""

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float4_e2m1fn": 4}
"""Of an element; scales come on top."""


def narrows(commit_dtype: str | None, dtype: str) -> bool:
    """Whether commits of a parameter of type `dtype` are narrowed to `commit_dtype`."""
    return commit_dtype is not None and BITS[commit_dtype] < BITS.get(dtype, 64)


def reach(dtype: str) -> float:
    """How far from zero an update may be before it is cut off on its way into a format."""
    return 2.0**127 if dtype in SMALL else float(jnp.finfo(dtype).max)


class Small(NamedTuple):
    """A tensor in a small format, as it goes out."""

    values: Array  # float8_e4m3fn in the tensor's shape; or uint8, two elements each, flat.
    scales: Array  # float8_e8m0fnu: shape=() for a tensor, or one per block.


def shapes(dtype: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of values and scales of a tensor of `shape`."""
    if dtype == "float8_e4m3fn":
        return shape, ()
    size = math.prod(shape)
    return (-(-size // 2),), (-(-size // BLOCK),)


def encode(x: Real[Array, " *leaf"], dtype: str) -> Small:
    """A tensor in one of the `SMALL` formats.

    Limit cases: a tensor of powers of two within 2^7 of each other comes back exact in eight bits;
    a block of -6 to 6 in the type's own steps in four.
    """
    _check(dtype)
    return _encode8(x) if dtype == "float8_e4m3fn" else _encode4(x)


def decode(small: Small, dtype: str, shape: tuple[int, ...]) -> Float[Array, " *leaf"]:
    """What `encode` was given, in fp32, to half a step of the format at its scale."""
    _check(dtype)
    return _decode8(small) if dtype == "float8_e4m3fn" else _decode4(small, shape=shape)


def on_wire(x: Float[Array, " *leaf"], dtype: str) -> Float[Array, " *leaf"]:
    """What arrives, in fp32, of a tensor that is sent in any of the formats (`BITS`).

    What is beyond the `reach` of the format arrives as its end. Limit case: "float32" is the
    identity.
    """
    cut = jnp.clip(x.astype(jnp.float32), -reach(dtype), reach(dtype))
    if dtype in SMALL:
        return decode(encode(cut, dtype), dtype, cut.shape)
    # Behind a barrier: XLA may leave out a rounding that is widened again at once.
    return jax.lax.optimization_barrier(cut.astype(dtype)).astype(jnp.float32)


def _check(dtype: str) -> None:
    if dtype not in SMALL:
        raise UsageError(f"{dtype!r} needs no scales; those that do are {', '.join(SMALL)}.")


def _exponent(largest: Float[Array, " *blocks"]) -> Array:
    """`e` with `2^(e-1) <= largest < 2^e`."""
    return jnp.frexp(largest)[1]


def _power(exponent: Array) -> Float[Array, " *blocks"]:
    """2^exponent in fp32, exactly, from 2^-126 on."""
    return jnp.ldexp(jnp.ones_like(exponent, jnp.float32), exponent)


def _scale(exponent: Array, finite: Array) -> Array:
    """2^exponent as it is stored: its exponent's byte, and the byte of NaN."""
    held = jnp.clip(exponent, _EXPONENT_MIN, _EXPONENT_MAX) - _EXPONENT_MIN
    code = jnp.where(finite, held, 255).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(code, jnp.float8_e8m0fnu)


def _read_scale(scales: Any) -> tuple[Array, Array]:
    """The exponents, and where they are one."""
    code = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
    return code + _EXPONENT_MIN, code != 255


def _times(x: Float[Array, " *leaf"], exponent: Array) -> Float[Array, " *leaf"]:
    """`x · 2^exponent` in two steps, since 2^-133 is no number of fp32 that XLA would keep."""
    half = exponent // 2
    return x * _power(half) * _power(exponent - half)


def _settled(x: Float[Array, " *leaf"]) -> Float[Array, " *leaf"]:
    """Zero where XLA may or may not have made it zero."""
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, 0, x)


def _sound(x: Real[Array, " *leaf"]) -> Float[Array, " *leaf"]:
    """Widened, with what is too small to have a scale made zero."""
    return _settled(x.astype(jnp.float32))


@jax.jit
def _encode8(x: Real[Array, " *leaf"]) -> Small:
    wide = _sound(x)
    largest = jnp.max(jnp.abs(wide), initial=0.0)
    finite = jnp.isfinite(largest)
    exponent = jnp.maximum(_exponent(jnp.where(finite, largest, 1)) - _TOP, _EXPONENT_MIN + 1)
    values = jnp.where(finite, _times(wide, -exponent), 0)
    return Small(values.astype(jnp.float8_e4m3fn), _scale(exponent, finite))


@jax.jit
def _decode8(small: Small) -> Float[Array, " *leaf"]:
    exponent, sound = _read_scale(small.scales)
    values = _settled(_times(small.values.astype(jnp.float32), exponent))
    return jnp.where(sound, values, jnp.nan)


@jax.jit
def _encode4(x: Real[Array, " *leaf"]) -> Small:
    flat = _sound(x).reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=1, initial=0.0)
    finite = jnp.isfinite(largest)
    exponent = jnp.maximum(_least_exponent(jnp.where(finite, largest, 1)), _EXPONENT_MIN + 1)
    scaled = jnp.where(finite[:, None], _times(blocks, -exponent[:, None]), 0)
    codes = _codes(scaled).reshape(-1)
    packed = codes[0::2] | (codes[1::2] << 4)
    return Small(packed[: -(-flat.size // 2)], _scale(exponent, finite))


def _least_exponent(largest: Float[Array, " blocks"]) -> Array:
    """The least `k` with `largest <= 6 · 2^k`: none is cut off, as it would be by its exponent
    alone."""
    exponent = _exponent(largest)  # largest / 2^(e-3) lies in [4, 8).
    return jnp.where(_times(largest, 3 - exponent) <= LARGEST, exponent - 3, exponent - 2)


_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway from one magnitude to the next. At the 1st, 3rd, 5th and 7th a tie goes down, to even."""


def _codes(scaled: Float[Array, " blocks 32"]) -> UInt8[Array, " blocks 32"]:
    """Sign and magnitude in four bits.

    By comparisons, which are the same on every device; a conversion to the type need not be there.
    """
    size = jnp.abs(scaled)
    passed = [size > b if i % 2 == 0 else size >= b for i, b in enumerate(_BOUNDS)]
    magnitude = functools.reduce(jnp.add, (p.astype(jnp.uint8) for p in passed))
    negative = (scaled < 0) & (magnitude > 0)  # Zero has one code.
    return magnitude | (negative.astype(jnp.uint8) << 3)


_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.partial(jax.jit, static_argnames="shape")
def _decode4(small: Small, *, shape: tuple[int, ...]) -> Float[Array, " *leaf"]:
    size = math.prod(shape)
    codes = jnp.stack([small.values & 15, small.values >> 4], axis=-1).reshape(-1)
    table = jnp.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], jnp.float32)
    blocks = jnp.pad(table[codes], (0, -codes.size % BLOCK)).reshape(-1, BLOCK)
    exponent, sound = _read_scale(small.scales)
    held = jnp.clip(_times(blocks, exponent[:, None]), -_END, _END)  # 2^128 is out of reach.
    values = jnp.where(sound[:, None], _settled(held), jnp.nan)
    return values.reshape(-1)[:size].reshape(shape)
