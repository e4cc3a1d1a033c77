"""A member of a run as a state machine: events in, effects out, no clock and no store.

    step(state, event) -> (state, effects)

What it decides, poll by poll: which records to read, in order; whether the round that has no record
yet is this node's to close, when it closes, what its record says; whether to take over from a
closer that is gone or stuck; which contributions to send again; what to hand to the learner; when
to beat; what may be swept. The same code runs under the real runtime and under a simulator's clock.

Time enters as `event.now`, here and in `lease` alone: grace windows, the wait before a takeover,
beats. `closing` holds the part that sees no time.

    state    what a member remembers
    listen   polls, beats, and what a listing shows
    follow   round records in order, deliveries to the learner, this node's contributions
    close    closing a round, taking one over
    elect    who closes next, who trains meanwhile
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jdiloco.protocol import closing as closings
from jdiloco.protocol import effects as fx
from jdiloco.protocol.closing import Phase
from jdiloco.protocol.member import close, elect, follow, listen
from jdiloco.protocol.member.elect import is_over
from jdiloco.protocol.member.follow import is_up_to
from jdiloco.protocol.member.state import MemberState, Turn, start

__all__ = ["MemberState", "is_over", "is_up_to", "start", "step", "wake_at"]


def step(state: MemberState, event: fx.Event) -> tuple[MemberState, tuple[fx.Effect, ...]]:
    """Advances by one event. Total: every event has an answer in every state."""
    if state.stopped:
        return state, ()
    turn = Turn(state, event.now)
    _HANDLERS[type(event)](turn, event)
    if not turn.state.stopped:
        _advance(turn)
    return turn.state, tuple(turn.effects)


def _advance(turn: Turn) -> None:
    """What follows from any change. Nothing is asked of a store that has just failed."""
    listen.hurry(turn)
    elect.elect(turn)
    listen.beat(turn)
    if turn.now < turn.state.hold:
        return
    listen.poll(turn)
    follow.read_next_record(turn)
    follow.send(turn)
    follow.deliver(turn)
    close.close(turn)


def wake_at(state: MemberState) -> float:
    """When a Tick is due at the latest."""
    times = [state.next_beat, listen.overdue_at(state)]
    if not state.polling:
        times.append(max(state.next_poll, state.hold))
    collecting = state.closing.mine and state.closing.phase is Phase.OPEN
    if collecting and closings.settled(state.closing):
        times.append(max(close.decides_at(state), state.hold, state.waits.retry))
    return min(times)


_HANDLERS: dict[type, Callable[[Turn, Any], None]] = {
    fx.Tick: listen.on_tick,
    fx.Beaten: listen.on_beaten,
    fx.Progress: listen.on_progress,
    fx.Listed: listen.on_listed,
    fx.PlaceRead: listen.on_place_read,
    fx.Watched: listen.on_watched,
    fx.RecordRead: follow.on_record_read,
    fx.Delivered: follow.on_delivered,
    fx.Contributed: follow.on_contributed,
    fx.Uploaded: follow.on_uploaded,
    fx.Saved: follow.on_saved,
    fx.RecordSent: close.on_record_sent,
    fx.Merged: close.on_merged,
    fx.Examined: close.on_examined,
    fx.ClaimRead: close.on_claim_read,
}
