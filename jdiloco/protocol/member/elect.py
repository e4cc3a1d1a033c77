"""Who closes next, who trains meanwhile, and when a node that only closes may go.

A dedicated syncer is exclusive while its lease lives: whoever commits names it as the next closer.
An `either` node trains until it is the named closer; then it leaves training to the others, as long
as there are any.
"""

from __future__ import annotations

from jdiloco import events
from jdiloco.protocol import effects as fx
from jdiloco.protocol.member.state import MemberState, Turn
from jdiloco.protocol.rules import Life

SIT_OUT_ROUNDS = 20
"""A syncer that was passed over is not named for so many rounds. Its lease may live while its
closing hangs, and each round that it is named for waits until somebody takes over."""


def next_closer(state: MemberState) -> Life:
    """A dedicated syncer that is live, or this node, which is about to commit."""
    if state.role == "syncer":
        return state.me
    return min(_syncers(state), default=state.me)


def _syncers(state: MemberState) -> frozenset[Life]:
    """Dedicated syncers that are live, without those that sit out."""
    sitting = {
        life for life, when in state.passed_over if state.chain.round < when + SIT_OUT_ROUNDS
    }
    return state.verdict.syncers - sitting


def pass_over(state: MemberState, life: Life, round: int) -> tuple[tuple[Life, int], ...]:
    """Notes that somebody took over from `life` because its round was overdue."""
    others = tuple(item for item in state.passed_over if item[0] != life)
    return (*others, (life, round)) if life in state.verdict.syncers else others


def elect(turn: Turn) -> None:
    """Tells the learner of an `either` node to stop training, or to go on."""
    state = turn.state
    if state.role != "either" or state.listed is None:
        return
    because = _why_train(state)
    if state.paused == (not because):
        return
    me, round = state.me.node, state.chain.round
    turn.set(paused=not because)
    if because:
        turn.add(fx.Resume())
        turn.emit(events.Resumed(node=me, round=round, because=because))
    else:
        turn.add(fx.Pause())
        turn.emit(events.Paused(node=me, round=round))


def _why_train(state: MemberState) -> str:
    """What an `either` node trains for; "" when it leaves training to others."""
    if state.phase not in ("training", "waiting", "closing"):
        return "it has nothing to leave to others"
    if state.closing.closer != state.me:
        return "another node closes the rounds"
    if _syncers(state):
        return "a dedicated syncer is live"
    if not state.verdict.expected - {state.me}:
        return "no other learner trains"
    return ""


def is_over(state: MemberState) -> bool:
    """Whether a dedicated syncer that leaves with its run may go.

    It has met a learner, nobody trains or is about to, and no contribution waits for its round.
    """
    waiting = [key for key in state.contributions if key.round >= state.chain.round]
    return state.met_learner and not state.verdict.learners and not waiting
