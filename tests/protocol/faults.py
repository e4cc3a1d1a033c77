"""Faults that are planted both in simulated runs and where every interleaving is explored."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from jdiloco.protocol import closing, learner, member
from jdiloco.protocol import effects as fx
from jdiloco.protocol.member import close, follow
from jdiloco.protocol.records import RoundRecord, seal, unseal

Patch = pytest.MonkeyPatch


def no_read_back(patch: Patch) -> None:
    """A record write without an answer counts as done."""
    sent = member._HANDLERS[fx.RecordSent]

    def believe(turn, event):
        sent(turn, dataclasses.replace(event, created=event.created is None or event.created))

    patch.setitem(member._HANDLERS, fx.RecordSent, believe)


def taken_counts_as_ours(patch: Patch) -> None:
    """A record write that was refused counts as done."""
    sent = member._HANDLERS[fx.RecordSent]

    def believe(turn, event):
        sent(turn, dataclasses.replace(event, created=event.created is not None))

    patch.setitem(member._HANDLERS, fx.RecordSent, believe)


def learner_aligns_before_the_commit_is_confirmed(patch: Patch) -> None:
    """A closer goes on from its result when it sends the record."""
    write = follow.write

    def act_at_once(turn, data):
        write(turn, data)
        follow.take_record(turn, data)

    patch.setattr(close, "write", act_at_once)


def payloads_of_open_rounds_are_swept(patch: Patch) -> None:
    """In doubt, a closer deletes its first attempt's payloads and computes anew."""
    sent = member._HANDLERS[fx.RecordSent]

    def clean_up(turn, event):
        state = turn.state
        sent(turn, event)
        if event.created is None and state.attempted:
            turn.add(fx.Delete(state.attempted))

    patch.setitem(member._HANDLERS, fx.RecordSent, clean_up)


def a_new_record_is_computed_in_doubt(patch: Patch) -> None:
    """In doubt other bytes are sent under the same write id, and a node goes on from its own."""
    write, take = follow.write, follow.take_record

    def records_of(turn, *data):
        key = turn.state.keys.record(turn.state.closing.round)
        return [unseal(key, item, RoundRecord) for item in data]

    def other_bytes(turn, data):
        (before,) = records_of(turn, data)
        again = msgspec.structs.replace(before, expected=before.expected + 1)
        write(turn, seal(turn.state.keys.record(before.round), again))

    def take_by_write_id(turn, data):
        mine = turn.state.closing.record
        if mine:
            read, held = records_of(turn, data, mine)
            data = mine if read.write_id == held.write_id else data
        take(turn, data)

    patch.setattr(follow, "write", other_bytes)
    patch.setattr(follow, "take_record", take_by_write_id)


def more_in_flight_than_fragments(patch: Patch) -> None:
    """A learner publishes a fragment again before it has aligned it."""
    patch.setattr(learner, "_may_publish", lambda state, held: True)


def nothing_is_ever_void(patch: Patch) -> None:
    """A round in which nothing can be accepted waits for ever."""
    patch.setattr(closing, "is_void", lambda state, verdict: False)


def failed_uploads_are_given_up(patch: Patch) -> None:
    """A contribution that did not go out is forgotten."""
    uploaded = member._HANDLERS[fx.Uploaded]

    def forget(turn, event):
        uploaded(turn, dataclasses.replace(event, ok=True))

    patch.setitem(member._HANDLERS, fx.Uploaded, forget)


def claims_never_come(patch: Patch) -> None:
    """Nobody takes over from a closer that is gone."""
    patch.setattr(close, "_why_take_over", lambda turn: "")
