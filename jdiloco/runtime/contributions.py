"""Contributions as bytes, and the checks that one must pass before it takes part in a round."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from jdiloco.algo.merges import COUNT_MAX
from jdiloco.errors import FormatError
from jdiloco.protocol.keys import ContributionKey, Keys
from jdiloco.protocol.records import ContributionHead, Payload
from jdiloco.runtime import messages, wire
from jdiloco.runtime.pods.parts import Misfit, assembled
from jdiloco.store.base import Buffer, Store
from jdiloco.store.signed import UNSIGNED, Signer, signer_of
from jdiloco.types import Counters, TensorSpec


@dataclasses.dataclass(frozen=True)
class Contribution:
    """A delta that arrived whole, with what its learner says of it."""

    head: ContributionHead
    tensors: Mapping[str, np.ndarray]
    sha256: str  # Of its key, head and tensors.


class Rejection(Exception):
    """A contribution takes no part in its round; `reason` is one of `records.REJECTIONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.parts = 0  # Objects that it had beside its own.


def encode(
    key: str,
    head: ContributionHead,
    tensors: Mapping[str, np.ndarray],
    *,
    compression: str | None = None,
    signer: Signer = UNSIGNED,
) -> Sequence[Buffer]:
    """The object under `key`. Its digest covers key, head and tensors, compressed or not.

    `signer` signs head and digest, so that either can be trusted without reading the tensors.
    """
    text = msgspec.json.encode(head, order="deterministic").decode()
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    metadata = {"head": text, "digest": _digest(key, text, arrays)}
    if signature := signer.sign(key, _said(metadata)):
        metadata["signature"] = signature
    return messages.encode(arrays, metadata, compression=compression)


def _said(metadata: Mapping[str, str]) -> str:
    return f"{metadata['head']}\n{metadata['digest']}"


def _head(metadata: Mapping[str, str], key: str, signer: Signer) -> ContributionHead:
    """Raises FormatError, KeyError or MsgspecError unless whoever may has said it under `key`."""
    if not signer.vouches(key, _said(metadata), metadata.get("signature", "")):
        raise FormatError(f"{key!r} is not signed as it has to be.")
    return msgspec.json.decode(metadata["head"], type=ContributionHead)


def _digest(key: str, head: str, tensors: Mapping[str, np.ndarray]) -> str:
    running = hashlib.sha256(f"{key}\n{head}\n".encode())
    for array in tensors.values():
        running.update(array.reshape(-1).view(np.uint8).data)
    return running.hexdigest()


def decode(key: str, data: bytes | None, *, room: int, signer: Signer = UNSIGNED) -> Contribution:
    """Reads a contribution. Raises Rejection("missing") or Rejection("corrupt").

    Of a compressed one the tensors take at most `room` bytes (`wire.room`), or it is corrupt: then
    it was forged, since what was not compressed would be too long for the run's schema.
    """
    if data is None:
        raise Rejection("missing")
    try:
        message = messages.decode(data, room=room)
        head = _head(message.metadata, key, signer)
        digest = _digest(key, message.metadata["head"], message.tensors)
        if message.metadata["digest"] != digest:
            raise Rejection("corrupt")
    except (FormatError, KeyError, msgspec.MsgspecError) as error:
        raise Rejection("corrupt") from error
    return Contribution(head, message.tensors, digest)


def are_same(
    key: str, sent: Sequence[Buffer], found: bytes | None, *, room: int, signer: Signer = UNSIGNED
) -> bool:
    """Whether what was found under `key` says what was sent there, compressed or not."""
    try:
        mine, theirs = (
            decode(key, data, room=room, signer=signer) for data in (b"".join(sent), found)
        )
    except Rejection:
        return False
    return mine.sha256 == theirs.sha256


def read_head(store: Store, key: str) -> ContributionHead | None:
    """What a contribution says of itself, without its tensors; None for nothing or nonsense.

    Its digest covers the tensors too, so damage shows only where it makes nonsense of the head.
    """
    try:
        metadata = messages.read_metadata(
            lambda start, stop: store.get(key, start=start, stop=stop)
        )
        return _head(metadata, key, signer_of(store))
    except (FormatError, KeyError, msgspec.MsgspecError):
        return None


def check(
    found: Contribution,
    key: ContributionKey,
    keys: Keys,
    specs: Sequence[TensorSpec],
    *,
    fragment: int,
    version: int,
    delta_dtype: str | None,
    part: Callable[[Payload], bytes | None] = lambda part: None,
) -> Contribution:
    """The contribution with its tensors, which of a pod are in parts that `part` reads.

    Raises Rejection unless it belongs into this round; looks at no values.
    """
    head = found.head
    said = (head.run, head.node, head.incarnation, head.final)
    if said != (keys.run, key.node, key.incarnation, key.final):
        raise Rejection("corrupt")
    if (head.round, head.fragment, head.version) != (key.round, fragment, version):
        raise Rejection("stale")
    if head.empty:
        raise Rejection("empty")
    check_counters(head.counters)
    if not head.counters.steps <= head.position <= COUNT_MAX:
        raise Rejection("counters")
    try:
        if head.parts:
            prefix = keys.parts(key.round, key.node, key.incarnation)
            tensors = assembled(head.parts, prefix, specs, delta_dtype, part)
            found = dataclasses.replace(found, tensors={**found.tensors, **tensors})
        wire.check(found.tensors, specs, delta_dtype)
    except Misfit as error:
        raise Rejection(error.reason) from error
    except FormatError as error:
        raise Rejection("schema") from error
    return found


def check_counters(counters: Counters) -> None:
    """Raises Rejection unless both are counts that a learner can have reached."""
    if counters.steps == 0:
        raise Rejection("zero_steps")
    if counters.samples == 0:
        raise Rejection("zero_samples")
    if not (0 < counters.steps <= COUNT_MAX and 0 < counters.samples <= COUNT_MAX):
        raise Rejection("counters")
