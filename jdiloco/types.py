"""Small values that every layer speaks of. Standard library and msgspec only."""

from __future__ import annotations

import math

import msgspec

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
}
"""The parameter types a run can hold, by NumPy's name, with the bytes of one element."""


class TensorSpec(msgspec.Struct, frozen=True, order=True):
    """What a tensor is, without its values. `name` is a path name (`jdiloco.path_names`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # A key of DTYPE_BYTES.
    aliases: tuple[str, ...] = ()  # Its further names, where a module shares it. A merge tries all.

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it goes by; the first is the one it is known under."""
        return (self.name, *self.aliases)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes at the tensor's own precision."""
        return self.size * DTYPE_BYTES[self.dtype]


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """What somebody has asked of a store: requests by verb, and bytes."""

    creates: int = 0
    gets: int = 0
    lists: int = 0
    deletes: int = 0
    sent: int = 0  # Bytes of objects.
    received: int = 0  # Bytes of objects, and of the keys in listings.

    @property
    def requests(self) -> int:
        """Of all verbs."""
        return self.creates + self.gets + self.lists + self.deletes

    def __add__(self, other: Spent) -> Spent:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Spent(*(mine + theirs for mine, theirs in pairs))


class Counters(msgspec.Struct, frozen=True):
    """Steps and samples trained; of one fragment since its last alignment unless said otherwise."""

    steps: int = 0
    samples: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(self.steps + other.steps, self.samples + other.samples)

    def __sub__(self, other: Counters) -> Counters:
        return Counters(self.steps - other.steps, self.samples - other.samples)
