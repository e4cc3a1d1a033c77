"""Tensors as zstandard frames, without loss.

Elements of a delta are alike in their signs and exponents and in nothing else. So their bytes are
shuffled before they are compressed: the first byte of every element, then the second of every one,
and so on. Elements of one byte, or of half a one, stay as they are.

A frame says how long it is once it is expanded, and is believed only where that is what its reader
expects: then it can cost no more memory than the tensor it stands for.
"""

from __future__ import annotations

import numpy as np
import zstandard

from jdiloco.errors import FormatError, UsageError
from jdiloco.store.base import Buffer

CHOICES = (None, "zstd")
"""What `compression` may be."""

LEVEL = 1
"""Higher ones take twice the time and gain nothing: what is left to find are exponents."""

BYTES_MIN = 256
"""Smaller tensors stay as they are: a frame and its row in the header would cost more."""


def check_compression(compression: str | None) -> str | None:
    """Returns what can be used, and raises UsageError for anything else."""
    if compression not in CHOICES:
        raise UsageError(
            f"`compression` must be None or 'zstd', got {compression!r}. It is this node's own "
            "choice: nodes read each other's messages whatever they chose."
        )
    return compression


def compressed(array: np.ndarray) -> bytes | None:
    """A contiguous array as one frame; None where that would be no shorter."""
    if array.nbytes < BYTES_MIN:
        return None
    raw, width = array.reshape(-1).view(np.uint8), array.itemsize
    shuffled = raw
    if width > 1:
        shuffled = np.empty(raw.size, np.uint8)
        for index, plane in enumerate(shuffled.reshape(width, -1)):
            plane[...] = raw[index::width]
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(shuffled.data)
    return frame if len(frame) < array.nbytes else None


def expand(frame: Buffer, into: np.ndarray, width: int) -> None:
    """Fills `into`, bytes, with elements of `width` bytes. Raises FormatError unless they fit."""
    try:
        found = zstandard.frame_content_size(frame)
        if found != into.size:
            raise FormatError(f"A frame of {found} bytes once expanded, wanted {into.size}.")
        data = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=into.size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise FormatError(
            f"What should be a zstandard frame cannot be expanded: {error}."
        ) from None
    if len(data) != into.size:
        raise FormatError(f"A frame held {len(data)} bytes and promised {into.size}.")
    for index, plane in enumerate(np.frombuffer(data, np.uint8).reshape(width, -1)):
        into[index::width] = plane
