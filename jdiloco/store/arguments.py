"""What callers hand to a store: checked in one place, so that every store refuses the same."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jdiloco.errors import UsageError
from jdiloco.store.base import Buffer

KEY_CHARACTERS_MAX = 800
"""Buckets allow 1,024 bytes, of which the prefix in the URL takes some."""

PART_CHARACTERS_MAX = 200
"""Folders allow 255 bytes in one name, encrypted ones about 140 to 230."""

# `.nfs…` are leftovers of NFS clients; some stores drop dots at the end, or walk up at them.
_PART = re.compile(r"(?!\.nfs)[A-Za-z0-9._-]*[A-Za-z0-9_-]")
_PREFIX_TAIL = re.compile(r"[A-Za-z0-9._-]*")
_RULE = (
    "A key is parts of [A-Za-z0-9._-] joined by `/`; a part is not empty, neither ends in `.` nor "
    f"begins with `.nfs`, and has at most {PART_CHARACTERS_MAX} characters, the key at most "
    f"{KEY_CHARACTERS_MAX}."
)


def is_part(name: str) -> bool:
    """Whether `name` can stand between two `/` of a key."""
    return len(name) <= PART_CHARACTERS_MAX and _PART.fullmatch(name) is not None


def check_key(key: str) -> None:
    """Raises UsageError unless every store could hold an object under `key`."""
    if len(key) > KEY_CHARACTERS_MAX or not all(map(is_part, key.split("/"))):
        raise UsageError(f"{_shown(key)} is no key. {_RULE}")


def check_prefix(prefix: str) -> None:
    """Raises UsageError unless some key could begin with `prefix`; it may end within a part."""
    *whole, tail = prefix.split("/")
    well_formed = all(map(is_part, whole)) and _PREFIX_TAIL.fullmatch(tail)
    if len(prefix) > KEY_CHARACTERS_MAX or not well_formed:
        raise UsageError(f"{_shown(prefix)} is the beginning of no key. {_RULE}")


def check_range(start: int, stop: int | None) -> None:
    """Raises UsageError for positions counted from the end, which buckets do not know."""
    if start < 0 or (stop is not None and stop < 0):
        raise UsageError(f"A range counts from the first byte: got start={start}, stop={stop}.")


class KeysNested(UsageError):
    """Two keys of which one would have to be a file and a directory at once."""

    def __init__(self, above: str, below: str) -> None:
        super().__init__(
            f"`{above}` and `{below}` cannot both be objects: no key may go on after another key "
            "and a `/`. Choose another key for one of them."
        )
        self.above = above
        self.below = below


def as_views(data: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """The buffers of an object as plain runs of bytes, without copying any."""
    buffers = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    return [_flat(memoryview(buffer)) for buffer in buffers]


def _flat(view: memoryview) -> memoryview:
    if not view.c_contiguous:
        raise UsageError(
            f"A buffer of shape {view.shape} and strides {view.strides} does not lie in one piece. "
            "Pass it through `numpy.ascontiguousarray`."
        )
    return view.cast("B") if view.nbytes else memoryview(b"")  # Zeros in a shape cannot be cast.


def _shown(key: str) -> str:
    return repr(key) if len(key) <= 120 else f"{key[:100]!r}… ({len(key)} characters)"
