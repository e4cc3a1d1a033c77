"""The small objects of a run, as they lie in the mailbox.

Each is one line of JSON and one line that holds the SHA-256 of its own key and that JSON, so an
object that was damaged, or copied to another key, is seen at once. Equal values give equal bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from jdiloco.errors import FormatError
from jdiloco.types import Counters, Spent, TensorSpec

FORMAT = 1
"""Raised when a build can no longer read what an older one wrote."""

REJECTIONS = (
    "zero_steps",
    "zero_samples",
    "counters",
    "stale",
    "schema",
    "corrupt",
    "missing",
    "nonfinite",
    "empty",
    "superseded",
)
"""Why a contribution takes no part in its round."""

DROPS = ("overwritten", "late", "rejected", "superseded", "left", "lost")
"""Why samples that were processed are never merged."""


class Ledger(msgspec.Struct, frozen=True):
    """Where the samples of one incarnation went, for one fragment.

    `processed = merged + sum(dropped) + pending` at all times; `pending` is what was trained since
    the last alignment, published or not. `processed` is counted apart from the others, as steps are
    trained, so that whoever reads a ledger can see whether it adds up.
    """

    merged: int = 0
    dropped: dict[str, int] = {}  # By reason, one of DROPS.
    pending: int = 0
    processed: int = 0

    @property
    def parts(self) -> tuple[int, ...]:
        """What has to add up to `processed`."""
        return (self.merged, *self.dropped.values(), self.pending)

    @property
    def adds_up(self) -> bool:
        """Whether every sample is in one part, and no part is less than nothing."""
        return min(self.parts) >= 0 and self.processed == sum(self.parts)

    def goes_on_from(self, before: Ledger) -> bool:
        """Whether nothing that was counted before has been taken back."""
        dropped = all(self.dropped.get(reason, 0) >= n for reason, n in before.dropped.items())
        return dropped and self.processed >= before.processed and self.merged >= before.merged

    def train(self, samples: int) -> Ledger:
        return msgspec.structs.replace(
            self, pending=self.pending + samples, processed=self.processed + samples
        )

    def merge(self, samples: int) -> Ledger:
        return msgspec.structs.replace(
            self, merged=self.merged + samples, pending=self.pending - samples
        )

    def drop(self, reason: str, samples: int) -> Ledger:
        if not samples:
            return self
        dropped = {**self.dropped, reason: self.dropped.get(reason, 0) + samples}
        return msgspec.structs.replace(self, dropped=dropped, pending=self.pending - samples)


class Covered(msgspec.Struct, frozen=True):
    """How far into a claimed unit of work a node has trained."""

    unit: str
    claim: int  # The number of the claim under which it holds the unit.
    batches: int  # From the unit's start.


class Payload(msgspec.Struct, frozen=True):
    """An object that another one names. Size and digests are those it has without compression."""

    key: str
    size: int  # Bytes.
    sha256: str
    header: str = ""  # SHA-256 of its header, where that holds hashes of what follows.


class ContributionHead(msgspec.Struct, frozen=True):
    """What a contribution says of itself, beside its tensors."""

    run: str
    round: int
    fragment: int
    version: int  # The version its delta was computed against.
    node: str
    incarnation: int
    counters: Counters
    ledger: Ledger
    position: int  # Batches of its own data, a step each, that the node has behind it.
    step_seconds: float | None = None  # The learner's usual step.
    final: bool = False  # The node is leaving.
    empty: bool = False  # The delta could not be made; there are no tensors.
    work: tuple[Covered, ...] = ()  # Claimed units it covers.
    spent: Spent | None = None  # What this life had asked of the store.
    parts: tuple[Payload, ...] = ()  # Of a pod: where its tensors are, a part for each process.


class Checkpoint(msgspec.Struct, frozen=True):
    """A complete run checkpoint: the values after round `round`, -1 for the initial ones."""

    round: int
    versions: tuple[int, ...]  # Of every fragment.
    prefix: str
    files: tuple[Payload, ...]  # Keys relative to the prefix.


class Manifest(msgspec.Struct, frozen=True):
    """What a run is. Written once, after the first checkpoint: from then on the run exists."""

    format: int
    run: str
    algorithm: dict[str, Any]  # Every setting that two nodes must agree on.
    tensors: tuple[TensorSpec, ...]  # In canonical order.
    plan: tuple[tuple[str, ...], ...]  # Names per fragment.
    checkpoint: Checkpoint
    closer: str  # Of round 0; "" when its creator closes none: whoever can may take it.
    write_id: str


class Account(msgspec.Struct, frozen=True):
    """The body of a beat, for whoever pays the bill: what counts for the run is in its key."""

    spent: Spent  # By this life, before this beat.


class Incarnation(msgspec.Struct, frozen=True):
    """One life of a node."""

    node: str
    incarnation: int
    host: str
    process: int
    backend: str
    valid: tuple[str, ...]  # Keys of contributions of earlier incarnations that still count.
    round: int  # The newest that was seen to have a record before this life, -1 for none.
    position: int  # The furthest of any contribution of earlier incarnations seen by then.
    write_id: str
    ended_by: str = ""  # The life of another node that ended the one before and created this.


class Claim(msgspec.Struct, frozen=True):
    """A node will close a round that another was named for."""

    node: str
    incarnation: int
    because: str


class WorkClaim(msgspec.Struct, frozen=True):
    """A node has taken a unit of work."""

    node: str
    incarnation: int
    units: int  # In the pool, as this node knows it.
    begin: int  # Batches of the unit that were behind it when it was taken.
    round: int  # The newest whose record the node had read.
    write_id: str


class WorkMark(msgspec.Struct, frozen=True):
    """A unit was given back, or is complete."""

    node: str
    incarnation: int
    batches: int  # That are behind it, from the unit's start.


class Participant(msgspec.Struct, frozen=True):
    """One contribution that was merged."""

    node: str
    incarnation: int
    counters: Counters
    ledger: Ledger
    position: int
    weight: float
    sha256: str  # Of the contribution's key, head and tensors.
    final: bool = False
    work: tuple[Covered, ...] = ()
    spent: Spent | None = None
    parts: int = 0  # Objects beside the contribution's own that held its tensors.


class Rejected(msgspec.Struct, frozen=True):
    """One contribution that was not."""

    node: str
    incarnation: int
    reason: str  # One of REJECTIONS.
    final: bool = False
    parts: int = 0  # As of a participant, as far as it could be read.


class Timing(msgspec.Struct, frozen=True):
    """Moving averages in seconds, carried from record to record; None while unknown."""

    step: float | None = None  # A step of a learner.
    quorum: float | None = None  # From the record before to a closable round.
    commit: float | None = None  # From closing to the record.


class Build(msgspec.Struct, frozen=True):
    """What equal bytes are promised for."""

    platform: str
    device_kind: str
    jaxlib: str
    machine: str
    cpus: int


class RoundRecord(msgspec.Struct, frozen=True):
    """The result of a round; the round is committed when this object exists.

    A void round names no payloads and leaves the version as it was.
    """

    format: int
    run: str
    round: int
    fragment: int
    version: int  # After this round.
    write_id: str
    closer: str
    incarnation: int
    previous: str  # SHA-256 of the record before this, of the manifest for round 0.
    base: str  # SHA-256 of the record whose version this replaces, of the manifest for none.
    participants: tuple[Participant, ...]
    rejected: tuple[Rejected, ...]
    expected: int  # Learners that could have taken part.
    next_closer: str
    next_incarnation: int
    heads: tuple[int, ...]  # Per fragment the round that made its newest version, -1 for none.
    versions: tuple[int, ...]  # Per fragment, after this round.
    timing: Timing
    checkpoint: Checkpoint  # The newest complete one.
    anchor: Payload | None = None
    outer: Payload | None = None
    update: Payload | None = None  # From the version before; None where it would save nothing.
    cosine: float | None = None  # Mean pairwise cosine of the deltas.
    build: Build | None = None

    @property
    def void(self) -> bool:
        return self.anchor is None

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """Every payload that it names."""
        return tuple(p for p in (self.anchor, self.outer, self.update) if p is not None)


class _Formatted(msgspec.Struct):
    """What every format keeps, so that an older build can name a newer one."""

    format: int = FORMAT


Sealed = TypeVar("Sealed", bound=msgspec.Struct)


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + body).hexdigest().encode()


def seal(key: str, value: msgspec.Struct) -> bytes:
    """The bytes of a small object under `key`."""
    body = msgspec.json.encode(value, order="deterministic")
    return body + b"\n" + _digest(key, body) + b"\n"


def is_sealed(key: str, data: bytes) -> bool:
    """Whether these bytes are what somebody sealed under this key, whatever they say."""
    return _body(key, data) is not None


def _body(key: str, data: bytes) -> bytes | None:
    body = data[: -len(_digest(key, b"")) - 2]
    return body if data == body + b"\n" + _digest(key, body) + b"\n" else None


def unseal(key: str, data: bytes, kind: type[Sealed]) -> Sealed:
    """Reads what `seal` wrote.

    Raises FormatError for bytes that are damaged, were written under another key, or by a format
    that this build does not read.
    """
    body = _body(key, data)
    if body is None:
        raise FormatError(f"{key!r} holds {len(data)} bytes that do not match their digest.")
    try:
        found = msgspec.json.decode(body, type=_Formatted).format
        if found != FORMAT:
            raise FormatError(f"{key!r} was written in format {found}; this build reads {FORMAT}.")
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise FormatError(f"{key!r} is no {kind.__name__} of format {FORMAT}: {error}.") from None


def sha256(data: bytes | memoryview) -> str:
    """SHA-256 of an object's bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
