"""What stands for tensors in a simulated run: where a value came from, spelled out.

A delta is the rows that were trained on. A committed value is the hash of the value it replaced and
of everything that was merged into it, so whether a row was merged twice, or into a value that it
was not subtracted from, can be read off exactly; no rounding hides it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable

import msgspec

from jdiloco.errors import FormatError
from jdiloco.protocol.keys import ContributionKey, Keys
from jdiloco.protocol.records import ContributionHead, seal, unseal
from jdiloco.runtime.contributions import Contribution, Rejection, check

Row = tuple[str, int]
"""A stream of data, and which of its rows. One row is one step; a node's own stream has its id."""


class Span(msgspec.Struct, frozen=True):
    """Rows `start` to `stop` (exclusive) of a stream."""

    stream: str
    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        """Whether some row is in both."""
        same = self.stream == other.stream
        return same and self.start < other.stop and other.start < self.stop


class Delta(msgspec.Struct, frozen=True):
    """A contribution: the rows that were trained on, in order, and from where."""

    head: ContributionHead
    base: str  # The anchor's value.
    rows: tuple[Span, ...]
    samples: int  # On all rows; a blend may keep some of a row it does not keep.
    finite: bool

    @property
    def steps(self) -> int:
        return sum(span.stop - span.start for span in self.rows)


def spans(rows: Iterable[Row]) -> tuple[Span, ...]:
    """Rows, as they were trained on, with those that follow one another put together."""
    found: list[Span] = []
    for stream, row in rows:
        if found and (found[-1].stream, found[-1].stop) == (stream, row):
            found[-1] = Span(stream, found[-1].start, row + 1)
        else:
            found.append(Span(stream, row, row + 1))
    return tuple(found)


class Values(msgspec.Struct, frozen=True):
    """A payload or a file of a checkpoint: one fragment's value."""

    fragment: int
    version: int
    value: str


@dataclasses.dataclass(frozen=True)
class Trained:
    """The rows, oldest first, that a fragment's parameters hold beyond its anchor."""

    rows: tuple[Row, ...] = ()
    samples: int = 0

    def more(self, row: Row, samples: int) -> Trained:
        return Trained((*self.rows, row), self.samples + samples)

    def without(self, since: Trained) -> Trained:
        """What was trained after `since`."""
        return Trained(self.rows[len(since.rows) :], self.samples - since.samples)

    def share(self, mixing: float) -> Trained:
        """The newest rows, as many as blending counts; none if it counts no sample of them."""
        steps, samples = (int(mixing * n + 1e-9) for n in (len(self.rows), self.samples))
        return Trained(self.rows[-steps:], samples) if steps and samples else Trained()


def initial(run: str, fragment: int) -> str:
    """The value that a run begins from."""
    return _digest(f"{run} {fragment}")


def merged(base: str, deltas: list[tuple[str, float]], *, final: bool) -> str:
    """The outer step: a function of the base and of every merged delta with its weight, in order.

    Anybody with the same inputs gets the same value.
    """
    return _digest(f"{base} {deltas} {final}")


def cosine(value: str) -> float:
    """How well the deltas of a round agreed, from 0 to 1; chance, but the same for everybody."""
    return int(value[:4], 16) / 0xFFFF


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weight(head: ContributionHead) -> float:
    return head.counters.samples**2 / head.counters.steps


def encode(value: msgspec.Struct) -> bytes:
    """A payload's bytes."""
    return msgspec.json.encode(value, order="deterministic")


def decode(data: bytes) -> Values:
    """Reads a payload."""
    return msgspec.json.decode(data, type=Values)


def read_head(name: str, data: bytes | None) -> ContributionHead | None:
    """What a contribution says of itself; None for nothing or nonsense."""
    try:
        return None if data is None else unseal(name, data, Delta).head
    except FormatError:
        return None


def examined(
    name: str, data: bytes | None, key: ContributionKey, keys: Keys, fragment: int, version: int
) -> Delta:
    """Reads a contribution and checks it with the runtime's own checks. Raises Rejection."""
    if data is None:
        raise Rejection("missing")
    try:
        delta = unseal(name, data, Delta)
    except FormatError as error:
        raise Rejection("corrupt") from error
    check_fit(delta.head, key, keys, fragment, version, finite=delta.finite)
    return delta


def check_fit(
    head: ContributionHead,
    key: ContributionKey,
    keys: Keys,
    fragment: int,
    version: int,
    *,
    finite: bool,
) -> None:
    """The runtime's own checks of what was read under `key`. Raises Rejection."""
    found = Contribution(head, {}, "")
    check(found, key, keys, (), fragment=fragment, version=version, delta_dtype=None)
    if not finite:
        raise Rejection("nonfinite")


__all__ = [
    "Delta",
    "Row",
    "Span",
    "Trained",
    "Values",
    "check_fit",
    "cosine",
    "decode",
    "encode",
    "examined",
    "initial",
    "merged",
    "read_head",
    "seal",
    "spans",
    "weight",
]
