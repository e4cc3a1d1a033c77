"""Closing rounds in a simulated run: `jdiloco.runtime.rounds` with names in place of tensors."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from jdiloco.errors import FormatError, StoreUnavailable
from jdiloco.protocol import effects as fx
from jdiloco.protocol.keys import ContributionKey, Keys
from jdiloco.protocol.records import (
    Checkpoint,
    Incarnation,
    Payload,
    RoundRecord,
    sha256,
    unseal,
)
from jdiloco.runtime.contributions import Rejection
from jdiloco.testing.simulate import values
from jdiloco.testing.simulate.mailbox import Mailbox
from jdiloco.testing.simulate.scenario import Plan
from jdiloco.testing.simulate.values import Delta, Values
from jdiloco.testing.simulate.world import Operation, Process, Sleep

Asking = Generator[Operation, Any, Any]

SETTLE_WAITS = (0.1, 0.3)
NEVER = 1e6
"""Seconds, longer than any run."""


def create_owned(mailbox: Mailbox, key: str, data: bytes) -> Asking:
    """`jdiloco.store.settle.create_owned` as a task."""
    for wait in (*SETTLE_WAITS, None):
        try:
            if (yield mailbox.create(key, data)):
                return
            found = yield mailbox.get(key)
        except StoreUnavailable:
            found = None
        if found == data:
            return
        if found is not None:
            raise FormatError(f"{key!r} holds other bytes than its only writer sent there.")
        if wait is not None:
            yield Sleep(wait)
    raise StoreUnavailable(f"{key!r} may or may not have been created.")


def read_value(
    mailbox: Mailbox, fragment: int, record: RoundRecord | None, newest: Checkpoint
) -> Asking:
    """A fragment's value, from its payload or from the checkpoint that covers it."""
    if record is not None and record.anchor is not None:
        data = yield mailbox.get(record.anchor.key)
        if data is not None:
            return decoded(data, record.anchor)
    wanted = 0 if record is None else record.version
    if newest.versions[fragment] != wanted:
        raise FormatError(f"Version {wanted} of fragment {fragment} is gone.")
    payload = newest.files[fragment]
    data = yield mailbox.get(f"{newest.prefix}/{payload.key}")
    if data is None:
        raise FormatError(f"The checkpoint {newest.prefix!r} is not complete.")
    return decoded(data, payload)


def decoded(data: bytes, payload: Payload) -> Values:
    if sha256(data) != payload.sha256:
        raise FormatError(f"{payload.key!r} was damaged.")
    return values.decode(data)


def write_checkpoint(mailbox: Mailbox, prefix: str, state: list[Values], round: int) -> Asking:
    """One file per fragment; complete once it is returned."""
    files = []
    for index, value in enumerate(state):
        data = values.encode(value)
        yield from create_owned(mailbox, f"{prefix}/{index}", data)
        files.append(Payload(str(index), len(data), sha256(data)))
    versions = tuple(value.version for value in state)
    return Checkpoint(round, versions, prefix, tuple(files))


class Replaced(Exception):
    """The store holds another record than this node goes on from."""


class Closer:
    """What one node holds of the versions it closes."""

    def __init__(
        self, mailbox: Mailbox, keys: Keys, process: Process, plan: Plan, *, updates: bool
    ) -> None:
        self._mailbox = mailbox
        self._keys = keys
        self._process = process
        self._plan = plan
        self._updates = updates
        self._held: dict[int, tuple[int, Values]] = {}  # Per fragment: whose round, and its value.
        self._measured: dict[ContributionKey, tuple[Delta, str]] = {}
        self._made: dict[int, Values] = {}

    def examine(self, request: fx.Examine) -> Asking:
        """Returns head, weight and hash. Raises Rejection."""
        name = self._keys.contribution(request.key)
        if request.newer is not None:
            key = self._keys.incarnation(request.key.node, request.newer)
            data = yield self._mailbox.get(key)
            if data is None or name not in unseal(key, data, Incarnation).valid:
                raise Rejection("superseded")
        data = yield self._mailbox.get(name)
        delta = values.examined(
            name, data, request.key, self._keys, request.fragment, request.version
        )
        digest = sha256(data)
        self._measured[request.key] = (delta, digest)
        return delta.head, values.weight(delta.head), digest

    def merge(self, request: fx.Merge, checkpoint: Checkpoint) -> Asking:
        """Returns the payloads, uploaded, and the cosine. Raises Replaced."""
        if request.compare is not None:
            key = self._keys.record(request.round - 1)
            if (found := (yield self._mailbox.get(key))) is None:
                raise KeyError(key)
            if sha256(found) != request.compare:
                raise Replaced
        stuck = self._process.world.now >= self._plan.stuck
        yield Sleep(NEVER if stuck else self._plan.merge_seconds)
        base = yield from self._load(request.fragment, request.base, checkpoint)
        self._held.pop(request.fragment)
        found = [self._measured[key][1] for key in request.contributions]
        inputs = list(zip(found, request.weights, strict=True))
        value = values.merged(base.value, inputs, final=request.final)
        made = Values(request.fragment, base.version + 1, value)
        payloads = []
        parts = ("anchor", "outer", "update") if self._updates else ("anchor", "outer")
        for part in parts:
            key = self._keys.payload(request.round, request.write_id, part)
            data = values.encode(made)
            yield from create_owned(self._mailbox, key, data)
            payloads.append(Payload(key, len(data), sha256(data)))
        self._made[request.round] = made
        anchor, outer, *update = payloads
        return anchor, outer, update[0] if update else None, values.cosine(value)

    def take_value(self, round: int) -> Values | None:
        """What this node's own attempt made, handed over once."""
        return self._made.pop(round, None)

    def took(self, record: RoundRecord, made: Values | None) -> None:
        """A record has been read; `made` is what it committed when it is this node's own."""
        for key in [key for key in self._measured if key.round <= record.round]:
            del self._measured[key]
        if made is not None:
            self._held[record.fragment] = (record.round, made)

    def snapshot(self, request: fx.Save, checkpoint: Checkpoint) -> Asking:
        """Every fragment's value, for a checkpoint."""
        state = []
        for index, record in enumerate(request.records):
            state.append((yield from self._load(index, record, checkpoint)))
        return state

    def _load(self, index: int, base: RoundRecord | None, checkpoint: Checkpoint) -> Asking:
        round = -1 if base is None else base.round
        held = self._held.get(index)
        if held is not None and held[0] == round:
            return held[1]
        value = yield from read_value(self._mailbox, index, base, checkpoint)
        self._held[index] = (round, value)
        return value
