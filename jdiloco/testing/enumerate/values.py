"""What stands for tensors in an enumeration: where a value came from, in a few bytes."""

from __future__ import annotations

import functools

import msgspec

from jdiloco.errors import FormatError
from jdiloco.protocol.keys import ContributionKey, Keys
from jdiloco.protocol.records import (
    ContributionHead,
    Payload,
    RoundRecord,
    seal,
    sha256,
    unseal,
)
from jdiloco.runtime.contributions import Rejection
from jdiloco.testing.simulate.values import check_fit


class Delta(msgspec.Struct, frozen=True):
    """A contribution: the rows of its node's data that it holds, and what it was taken from."""

    head: ContributionHead
    base: str  # The anchor's value.
    rows: tuple[tuple[int, int], ...]  # First, and the one after the last.
    finite: bool = True


class Values(msgspec.Struct, frozen=True):
    """One fragment's committed value."""

    fragment: int
    version: int
    value: str


def initial(fragment: int) -> Values:
    return Values(fragment, 0, f"initial {fragment}")


@functools.cache
def merged(base: str, deltas: tuple[tuple[str, float], ...], *, final: bool) -> str:
    """The outer step: anybody with the same inputs gets the same value."""
    return sha256(f"{base} {deltas} {final}".encode())[:12]


@functools.cache
def seal_delta(key: str, delta_bytes: bytes) -> bytes:
    """A contribution's object."""
    return seal(key, msgspec.json.decode(delta_bytes, type=Delta))


@functools.cache
def read_delta(key: str, data: bytes) -> Delta:
    return unseal(key, data, Delta)


@functools.cache
def read_record(key: str, data: bytes) -> RoundRecord:
    return unseal(key, data, RoundRecord)


@functools.cache
def decode(data: bytes) -> Values:
    return msgspec.json.decode(data, type=Values)


def encode(value: Values) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def named(key: str, data: bytes) -> Payload:
    """How a record or a checkpoint names an object."""
    return Payload(key, len(data), sha256(data))


def examined(
    name: str, data: bytes | None, key: ContributionKey, keys: Keys, fragment: int, version: int
) -> Delta:
    """Reads a contribution and checks it with the runtime's own checks. Raises Rejection."""
    if data is None:
        raise Rejection("missing")
    try:
        delta = read_delta(name, data)
    except FormatError as error:
        raise Rejection("corrupt") from error
    check_fit(delta.head, key, keys, fragment, version, finite=delta.finite)
    return delta
