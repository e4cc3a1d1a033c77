"""What stands for tensors in a simulated run: where a value came from, spelled out.

A delta is a range of one life's steps. A committed value is the hash of the value it replaced and
of everything that was merged into it, so whether a step was merged twice, or into a value that it
was not subtracted from, can be read off exactly; no rounding hides it.
"""

from __future__ import annotations

import hashlib

import msgspec

from jdiloco.errors import FormatError
from jdiloco.protocol.keys import ContributionKey, Keys
from jdiloco.protocol.records import ContributionHead, seal, unseal
from jdiloco.runtime.contributions import Contribution, Rejection, check


class Delta(msgspec.Struct, frozen=True):
    """A contribution: the steps from `start` (exclusive) to `stop` of a life, and from where."""

    head: ContributionHead
    base: str  # The anchor's value.
    start: int
    stop: int
    finite: bool


class Values(msgspec.Struct, frozen=True):
    """A payload or a file of a checkpoint: one fragment's value."""

    fragment: int
    version: int
    value: str


def initial(run: str, fragment: int) -> str:
    """The value that a run begins from."""
    return _digest(f"{run} {fragment}")


def merged(base: str, deltas: list[tuple[str, float]], *, final: bool) -> str:
    """The outer step: a function of the base and of every merged delta with its weight, in order.

    Anybody with the same inputs gets the same value.
    """
    return _digest(f"{base} {deltas} {final}")


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
    found = Contribution(delta.head, {}, "")
    check(found, key, keys, (), fragment=fragment, version=version, delta_dtype=None)
    if not delta.finite:
        raise Rejection("nonfinite")
    return delta


__all__ = ["Delta", "Values", "decode", "encode", "examined", "initial", "merged", "seal", "weight"]
