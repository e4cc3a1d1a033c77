"""Polls, beats, and what a listing shows."""

from __future__ import annotations

from jdiloco import events
from jdiloco.errors import NodeSuperseded, RunReplaced
from jdiloco.protocol import closing as closings
from jdiloco.protocol import effects as fx
from jdiloco.protocol import lease
from jdiloco.protocol.keys import BeatKey, ClaimKey, ContributionKey, RecordKey
from jdiloco.protocol.member.state import CHECK_LEASES, LONGEST_LISTING, MemberState, Turn
from jdiloco.protocol.rules import NO_CLOSER, Life


def poll(turn: Turn) -> None:
    state = turn.state
    if state.polling or turn.now < max(state.next_poll, state.hold):
        return
    turn.set(polling=True, polled=turn.now, next_poll=turn.now + state.poll_seconds)
    turn.add(fx.Poll(state.keys.after(state.chain.round)))


def overdue_at(state: MemberState) -> float:
    """When the listing that is under way should have been answered; never, once that is said."""
    said = any(name == "listing" for name, _ in state.troubles)
    if not state.polling or said:
        return float("inf")
    return state.polled + max(state.rules.small_seconds, LONGEST_LISTING)


def hurry(turn: Turn) -> None:
    """A store that hangs gives no answer that could say so."""
    if turn.now >= overdue_at(turn.state):
        turn.trouble("listing", "a listing is not answered in time")


def beat(turn: Turn) -> None:
    state = turn.state
    if turn.now < state.next_beat:
        return
    beat = BeatKey(
        state.me.node,
        state.me.incarnation,
        state.beat + 1,
        state.phase,
        state.train_step,
        state.next_round,
    )
    turn.set(beat=beat.beat, next_beat=turn.now + state.rules.beat_seconds)
    turn.add(fx.Beat(state.keys.beat(beat)))


def on_tick(turn: Turn, event: fx.Tick) -> None:
    del turn, event  # Time alone; `_advance` looks at it.


def on_beaten(turn: Turn, event: fx.Beaten) -> None:
    if event.ok:
        turn.set(beaten=True)
        turn.over("beat")
    else:
        turn.degrade("beat", "a beat was not written")
        turn.set(next_beat=min(turn.state.next_beat, turn.state.hold))


def on_progress(turn: Turn, event: fx.Progress) -> None:
    """A new phase is told at once when others would wait for this node, else with the next beat."""
    state = turn.state
    told_at_once = ("resting", "closing", "finished", "left")
    urgent = event.phase != state.phase and event.phase in told_at_once
    started = state.phase in ("joining", "resting", "closing") and event.phase == "training"
    turn.set(phase=event.phase, train_step=event.step, next_round=event.next_round)
    if urgent or started:
        turn.set(next_beat=turn.now)


def on_listed(turn: Turn, event: fx.Listed) -> None:
    state = turn.state
    turn.set(polling=False)
    if event.keys is None:
        turn.degrade("listing", "a listing was not answered")
        return
    parsed = [key for name in event.keys if (key := state.keys.parse(name)) is not None]
    beats = tuple(key for key in parsed if isinstance(key, BeatKey))
    contributions = tuple(key for key in parsed if isinstance(key, ContributionKey))
    records = [key.round for key in parsed if isinstance(key, RecordKey)]
    elapsed = 0.0 if state.listed is None else turn.now - state.listed
    leases = lease.observe(
        state.leases,
        beats,
        min(elapsed, 2 * state.poll_seconds),
        named={state.closing.closer, *state.watched} - {NO_CLOSER},
    )
    verdict = lease.judge(leases, state.rules, before=state.verdict)
    turn.set(
        listed=turn.now,
        beats=beats,
        contributions=contributions,
        records_to=max([state.records_to, *records]),
        leases=leases,
        verdict=verdict,
        met_learner=state.met_learner or bool(verdict.learners - {state.me}),
        closing=closings.reported(state.closing, contributions),
    )
    _see_own_life(turn)
    _see_claims(turn, [key for key in parsed if isinstance(key, ClaimKey)])
    _see_followers(turn)
    _recover(turn)


def on_watched(turn: Turn, event: fx.Watched) -> None:
    turn.set(watched=event.lives)


def _see_own_life(turn: Turn) -> None:
    state = turn.state
    newer = state.verdict.newer(state.me)
    if newer is not None:
        _stop_superseded(turn, newer)
    unsure = state.unsure or _may_have_been_ended(state)
    turn.set(unsure=unsure)
    if (state.lost or unsure or turn.now >= state.next_check) and not state.checking:
        turn.set(checking=True, next_check=turn.now + CHECK_LEASES * state.rules.lease_seconds)
        turn.add(fx.ReadPlace())


def _may_have_been_ended(state: MemberState) -> bool:
    """Whether beats of a newer life may have come and been swept without being seen from here.

    They stay for more rounds than this node can have in flight, so either it has seen them, or more
    rounds than that were committed since it last looked; a pause shows by that and not by a clock.
    """
    unread = state.records_to - state.chain.read
    return (state.beaten and not _is_shown(state)) or unread > state.rules.in_flight


def _stop_superseded(turn: Turn, newer: int) -> None:
    me = turn.state.me
    turn.stop(
        NodeSuperseded(
            f"There is an incarnation {newer} of node {me.node!r}; this is incarnation "
            f"{me.incarnation} and stops. Either the node was started again, or this process was "
            "silent for longer than its lease and another node has taken over its work. Give each "
            "node its own id."
        ),
    )


def _is_shown(state: MemberState) -> bool:
    """Whether the newest listing holds a beat of this life."""
    return any(Life(beat.node, beat.incarnation) == state.me for beat in state.beats)


def on_place_read(turn: Turn, event: fx.PlaceRead) -> None:
    turn.set(checking=False)
    run = turn.state.chain.run
    if event.superseded:
        _stop_superseded(turn, turn.state.me.incarnation + 1)
    elif event.run is None:
        turn.degrade("manifest", "the manifest could not be read")
        turn.set(next_check=turn.now)  # With the next listing.
    elif event.run == run:
        turn.set(unsure=False)
        turn.over("manifest")
        if not _is_shown(turn.state):
            turn.set(next_beat=turn.now)
        turn.set(lost=False)
    elif not event.run:  # A folder that is not mounted looks like this, and comes back.
        turn.set(lost=True)
        turn.degrade("manifest", "the mailbox holds no manifest: it was emptied, or is not mounted")
    else:
        turn.stop(
            RunReplaced(
                f"The mailbox now holds run {event.run!r}; this node joined run {run!r}. "
                "Start it again to join what is there."
            ),
        )


def _see_followers(turn: Turn) -> None:
    """Tells the learner when the others are one short of what the round needs."""
    state = turn.state
    published = [sending.key.round for sending in state.sending]
    round = max([state.chain.read, *published]) + 1
    wanted = state.rules.follow
    if wanted is None:
        needed = min(state.rules.quorum_size, len(state.verdict.expected))
        wanted = max(1, needed - 1)
    others = {
        key.node
        for key in state.contributions
        if key.round == round and key.node != state.me.node and not key.final
    }
    if wanted and len(others) >= wanted and state.followed < round:
        turn.set(followed=round)
        turn.add(fx.Follow(round))


def _recover(turn: Turn) -> None:
    turn.set(failures=0)
    turn.over("listing")
    if turn.state.degraded and not turn.state.troubles:
        turn.set(degraded=False)
        turn.emit(events.Recovered(node=turn.state.me.node))


def _see_claims(turn: Turn, claims: list[ClaimKey]) -> None:
    state = turn.state
    numbers = [key.number for key in claims if key.round == state.closing.round]
    newest = max(numbers, default=0)
    if newest > state.closing.claims and not state.reading_claim:
        turn.set(reading_claim=True)
        turn.add(fx.ReadClaim(state.closing.round, newest))
