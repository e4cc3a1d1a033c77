"""How deltas and updates stand in a message, in the precision that the run has agreed on.

A wide format holds each tensor under its own name. A small one (`jdiloco.algo.wire`) holds two for
each, `values/{name}` and `scales/{name}`. Both ways are run on a library thread, on the host's
first CPU device, whatever the user's parameters lie on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from jdiloco.algo import wire
from jdiloco.algo.wire import SMALL, Small
from jdiloco.runtime import messages
from jdiloco.runtime.backends import on_host
from jdiloco.runtime.pieces import Pieces
from jdiloco.types import TensorSpec

Tensors = Mapping[str, np.ndarray]
T = TypeVar("T", bound=np.ndarray | Pieces)

WIDE = ("float32", "bfloat16", "float16")
FORMATS = (None, *WIDE, *SMALL)
"""What `delta_dtype` and `commit_dtype` may be. None is each parameter's own type."""

PARTS = Small._fields
_HELD = {"float8_e4m3fn": "float8_e4m3fn", "float4_e2m1fn": "uint8"}  # As arrays in a message.
_SCALES = "float8_e8m0fnu"


def subtracted_as(dtype: str | None) -> str | None:
    """The type in which a delta leaves the device; small formats are made of fp32."""
    return "float32" if dtype in SMALL else dtype


def outgoing(deltas: Mapping[str, T], dtype: str | None) -> Mapping[str, T | np.ndarray]:
    """The tensors of a message. `deltas` are in the type of `subtracted_as`, and those of a pod,
    which uses no small format, stay as they are.
    """
    if dtype not in SMALL:
        return deltas
    with on_host():
        small = {n: wire.encode(jnp.asarray(array), dtype) for n, array in deltas.items()}
        return {
            **{f"values/{name}": np.asarray(found.values) for name, found in small.items()},
            **{f"scales/{name}": np.asarray(found.scales) for name, found in small.items()},
        }


def check(tensors: Tensors, specs: Sequence[TensorSpec], dtype: str | None) -> None:
    """Raises FormatError naming every tensor of a message that is not as it has to be."""
    messages.check(tensors, _sent(specs, dtype))


def room(specs: Sequence[TensorSpec], dtype: str | None) -> int:
    """Bytes that the tensors of a message take, as long as nobody compresses them."""
    return sum(spec.size * np.dtype(spec.dtype).itemsize for spec in _sent(specs, dtype))


def _sent(specs: Sequence[TensorSpec], dtype: str | None) -> list[TensorSpec]:
    """The tensors of a message."""
    wanted = []
    for spec in specs:
        if dtype not in SMALL:
            wanted.append(TensorSpec(spec.name, spec.shape, dtype or spec.dtype))
            continue
        values, scales = wire.shapes(dtype, spec.shape)
        wanted.append(TensorSpec(f"values/{spec.name}", values, _HELD[dtype]))
        wanted.append(TensorSpec(f"scales/{spec.name}", scales, _SCALES))
    return wanted


def incoming(tensors: Tensors, specs: Sequence[TensorSpec], dtype: str | None) -> Tensors:
    """The deltas by path name, of a message that has passed `check`."""
    if dtype not in SMALL:
        return tensors
    with on_host():
        return {
            spec.name: np.asarray(
                wire.decode(
                    Small(*(jnp.asarray(tensors[f"{part}/{spec.name}"]) for part in PARTS)),
                    dtype,
                    spec.shape,
                )
            )
            for spec in specs
        }
