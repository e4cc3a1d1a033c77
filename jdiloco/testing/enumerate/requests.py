"""What may become of each request of a living process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jdiloco.protocol import effects as fx
from jdiloco.protocol.keys import ClaimKey
from jdiloco.protocol.member import MemberState
from jdiloco.protocol.records import Checkpoint, Incarnation, sha256, unseal
from jdiloco.runtime.contributions import Rejection
from jdiloco.testing.enumerate import values
from jdiloco.testing.enumerate.box import Box, Boxes, committed
from jdiloco.testing.enumerate.inside import NOW
from jdiloco.testing.enumerate.place import Sent
from jdiloco.testing.enumerate.values import Values
from jdiloco.testing.simulate.values import weight


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One thing that may become of a request."""

    what: str  # For whoever reads a trace.
    box: Box
    event: fx.Event
    lost: bool = False  # It is a fault of the store.
    value: Values | None = None  # What a learner is to align with.


Answers = Iterator[Answer]


def answers(boxes: Boxes, box: Box, state: MemberState, effect: fx.Effect) -> Answers:
    """Everything that may become of `effect`, the oldest of its kind, now."""
    yield from _ANSWER[type(effect)](boxes, box, state, effect)


READS = (fx.Poll, fx.ReadRecord, fx.ReadClaim, fx.ReadPlace, fx.Examine, fx.Deliver)
"""Requests that leave the mailbox as it was."""


def _poll(boxes: Boxes, box: Box, state: MemberState, effect: fx.Poll) -> Answers:
    del boxes
    keys = box.list(state.keys.log, effect.after)
    yield Answer("lists the log", box, fx.Listed(NOW, keys))
    yield Answer("gets no listing", box, fx.Listed(NOW, None), lost=True)


def _beat(boxes: Boxes, box: Box, state: MemberState, effect: fx.Beat) -> Answers:
    del state
    _, after = boxes.create(box, effect.key, b"")
    yield Answer("beats", after, fx.Beaten(NOW, True))


def _read_record(boxes: Boxes, box: Box, state: MemberState, effect: fx.ReadRecord) -> Answers:
    del boxes
    round = effect.round
    data = box.get(state.keys.record(round))
    found = "" if data else ": nothing is there"
    yield Answer(f"reads record {round}{found}", box, fx.RecordRead(NOW, round, data))
    missed = fx.RecordRead(NOW, round, None, ok=False)
    yield Answer(f"cannot read record {round}", box, missed, lost=True)


def _write_record(boxes: Boxes, box: Box, state: MemberState, effect: fx.WriteRecord) -> Answers:
    key, round = state.keys.record(effect.round), effect.round
    created, after = boxes.create(box, key, effect.data)
    what = "writes" if created else "is refused to write"
    yield Answer(f"{what} record {round}", after, fx.RecordSent(NOW, round, created))
    late = boxes.send(box, (key, effect.data))
    yield Answer(f"gets no answer for record {round}", late, fx.RecordSent(NOW, round, None), True)
    if created:
        refused = fx.RecordSent(NOW, round, False)
        yield Answer(f"is told that record {round} is there, and it is not", box, refused, True)


def _make_claim(boxes: Boxes, box: Box, state: MemberState, effect: fx.MakeClaim) -> Answers:
    round, number = effect.round, effect.number
    key = state.keys.claim(ClaimKey(round, number))
    created, after = boxes.create(box, key, effect.data)
    what = "makes" if created else "finds somebody else's"
    yield Answer(
        f"{what} claim {number} on round {round}",
        after,
        fx.ClaimRead(NOW, round, number, effect.data if created else box.get(key)),
    )
    late = boxes.send(box, (key, effect.data))
    unclear = fx.ClaimRead(NOW, round, number, None)
    yield Answer(f"gets no answer for claim {number} on round {round}", late, unclear, True)


def _read_claim(boxes: Boxes, box: Box, state: MemberState, effect: fx.ReadClaim) -> Answers:
    del boxes
    round, number = effect.round, effect.number
    data = box.get(state.keys.claim(ClaimKey(round, number)))
    what = f"claim {number} on round {round}"
    yield Answer(f"reads {what}", box, fx.ClaimRead(NOW, round, number, data))
    yield Answer(f"cannot read {what}", box, fx.ClaimRead(NOW, round, number, None), True)


def _read_place(boxes: Boxes, box: Box, state: MemberState, effect: fx.ReadPlace) -> Answers:
    del boxes, effect
    newer = box.get(state.keys.incarnation(state.me.node, state.me.incarnation + 1))
    there = fx.PlaceRead(NOW, state.chain.run, newer is not None)
    yield Answer("looks whether it has a newer life", box, there)
    yield Answer("cannot look whether it has a newer life", box, fx.PlaceRead(NOW, None), True)


def _upload(boxes: Boxes, box: Box, state: MemberState, effect: Sent) -> Answers:
    del state
    what = f"contribution to round {effect.key.round}"
    _, after = boxes.create(box, effect.name, effect.data)
    yield Answer(f"sends its {what}", after, fx.Uploaded(NOW, effect.key, True))
    late = boxes.send(box, (effect.name, effect.data))
    yield Answer(f"gets no answer for its {what}", late, fx.Uploaded(NOW, effect.key, False), True)


def _examine(boxes: Boxes, box: Box, state: MemberState, effect: fx.Examine) -> Answers:
    del boxes
    what = f"contribution of {effect.key.node}.{effect.key.incarnation}"
    try:
        event = _verdict(box, state, effect)
        yield Answer(f"accepts the {what}", box, event)
    except Rejection as rejection:
        event = fx.Examined(NOW, effect.key, rejected=rejection.reason)
        yield Answer(f"rejects the {what}: {rejection.reason}", box, event)
    yield Answer(f"cannot read the {what}", box, fx.Examined(NOW, effect.key), lost=True)


def _verdict(box: Box, state: MemberState, effect: fx.Examine) -> fx.Examined:
    keys = state.keys
    name = keys.contribution(effect.key)
    if effect.newer is not None:
        key = keys.incarnation(effect.key.node, effect.newer)
        data = box.get(key)
        if data is None or name not in unseal(key, data, Incarnation).valid:
            raise Rejection("superseded")
    data = box.get(name)
    delta = values.examined(name, data, effect.key, keys, effect.fragment, effect.version)
    digest = sha256(data or b"")
    return fx.Examined(NOW, effect.key, delta.head, weight(delta.head), digest)


def _merge(boxes: Boxes, box: Box, state: MemberState, effect: fx.Merge) -> Answers:
    round, attempt = effect.round, effect.attempt
    keys, newest = state.keys, state.chain.checkpoint
    base = committed(box, effect.fragment, effect.base, newest)
    failed = fx.Merged(NOW, round, attempt, error="no answer")
    if base is not None:
        inputs = tuple(
            (sha256(box.ever(keys.contribution(key)) or b""), weight)
            for key, weight in zip(effect.contributions, effect.weights, strict=True)
        )
        value = values.merged(base.value, inputs, final=effect.final)
        data = values.encode(Values(effect.fragment, base.version + 1, value))
        made, after = [], box
        for part in ("anchor", "outer"):
            key = keys.payload(round, effect.write_id, part)
            after = boxes.create(after, key, data)[1]
            made.append(values.named(key, data))
        who = " and ".join(f"{key.node}.{key.incarnation}" for key in effect.contributions)
        merged = fx.Merged(NOW, round, attempt, *made)
        yield Answer(f"merges {who} for round {round}, attempt {attempt}", after, merged)
    what = f"cannot merge for round {round}, attempt {attempt}"
    yield Answer(what, box, failed, lost=base is not None)


def _deliver(boxes: Boxes, box: Box, state: MemberState, effect: fx.Deliver) -> Answers:
    """A learner is only ever given values that are still the newest it may align with."""
    del boxes
    record, chain = effect.record, state.chain
    given = fx.Delivered(NOW, record.round, True)
    missed = fx.Delivered(NOW, record.round, False)
    what = f"version {record.version} of fragment {record.fragment}"
    if not effect.values:
        yield Answer(f"hears of round {record.round}", box, given)
        return
    value = committed(box, record.fragment, record, chain.checkpoint)
    passed = chain.records[record.fragment] != record
    if value is not None or passed:
        did = "aligns with" if value is not None else "hears of"
        yield Answer(f"{did} {what}", box, given, value=value)
    yield Answer(f"cannot read {what}", box, missed, lost=value is not None or passed)


def _save(boxes: Boxes, box: Box, state: MemberState, effect: fx.Save) -> Answers:
    made = [
        committed(box, index, record, state.chain.checkpoint)
        for index, record in enumerate(effect.records)
    ]
    found = [value for value in made if value is not None]
    if len(found) == len(made):
        files, after = [], box
        for index, value in enumerate(found):
            data = values.encode(value)
            after = boxes.create(after, f"{effect.prefix}/{index}", data)[1]
            files.append(values.named(str(index), data))
        checkpoint = Checkpoint(effect.round, effect.versions, effect.prefix, tuple(files))
        what = f"saves a checkpoint of round {effect.round}"
        yield Answer(what, after, fx.Saved(NOW, checkpoint))
    lost = len(found) == len(made)
    yield Answer("cannot save a checkpoint", box, fx.Saved(NOW, None), lost=lost)


_ANSWER: dict[type, Callable[[Boxes, Box, MemberState, Any], Answers]] = {
    fx.Poll: _poll,
    fx.Beat: _beat,
    fx.ReadRecord: _read_record,
    fx.WriteRecord: _write_record,
    fx.MakeClaim: _make_claim,
    fx.ReadClaim: _read_claim,
    fx.ReadPlace: _read_place,
    Sent: _upload,
    fx.Examine: _examine,
    fx.Merge: _merge,
    fx.Deliver: _deliver,
    fx.Save: _save,
}
