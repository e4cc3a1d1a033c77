"""Closing the round that has no record yet, and taking it over."""

from __future__ import annotations

from dataclasses import replace

from jdiloco import events
from jdiloco.errors import FormatError, StoreIgnoresConditions
from jdiloco.protocol import chain as chains
from jdiloco.protocol import closing as closings
from jdiloco.protocol import effects as fx
from jdiloco.protocol import tally as tallies
from jdiloco.protocol.closing import Closing, Phase, Report
from jdiloco.protocol.keys import ClaimKey, write_id
from jdiloco.protocol.member.elect import next_closer, pass_over
from jdiloco.protocol.member.follow import take_record, write
from jdiloco.protocol.member.state import MemberState, Turn, has_ended, later, mix
from jdiloco.protocol.records import Claim, Timing, seal, unseal
from jdiloco.protocol.rules import NO_CLOSER, TAKEOVER_POLLS, Life

MOST_DOUBLINGS = 10
"""Of the wait before a takeover, whatever number a claim has."""

OVERDUE = "the round is overdue"


def close(turn: Turn) -> None:
    state = turn.state
    if not state.can_close or state.listed is None:
        return
    if not state.closing.mine:
        _take_over(turn)
        return
    closing, keys = closings.unasked(state.closing)
    turn.set(closing=closing)
    fragment = state.chain.fragment
    for key in keys:
        newer = state.verdict.newer(Life(key.node, key.incarnation))
        turn.add(fx.Examine(key, fragment, state.chain.versions[fragment], newer))
    if closing.phase is Phase.OPEN and closings.settled(closing):
        _decide(turn)


def _decide(turn: Turn) -> None:
    state = turn.state
    closing, verdict = state.closing, state.verdict
    if closings.is_void(closing, verdict):
        _write_record(turn, replace(closing, attempt=_next_attempt(turn)))
        return
    limit, accepted = state.rules.round_seconds, state.waits.accepted
    over = limit is not None and accepted is not None and turn.now >= accepted + limit
    if not closings.closable(closing, state.rules, verdict, round_over=over):
        turn.set(waits=replace(state.waits, closable=None))
        return
    if state.waits.closable is None:
        turn.set(waits=replace(state.waits, closable=turn.now))
    since = turn.state.waits.closable
    assert since is not None
    waited = closings.all_in(closing, verdict) or turn.now >= since + grace(state)
    if waited and turn.now >= state.waits.retry:
        _merge(turn)


def decides_at(state: MemberState) -> float:
    """When time alone closes the round that this node collects for: never, unless it can."""
    waits, limit = state.waits, state.rules.round_seconds
    if waits.closable is not None:
        return waits.closable + grace(state)
    if limit is not None and waits.accepted is not None:
        return waits.accepted + limit
    return float("inf")


def grace(state: MemberState) -> float:
    """Seconds to go on collecting once the round could close.

    Half the slack `steps ahead · step − (quorum + commit)`, at most one round of training, and
    nothing while one of the averages is unknown; or what the run fixed.
    """
    if state.rules.grace_seconds is not None:
        return state.rules.grace_seconds
    timing = state.chain.timing
    if timing.step is None or timing.quorum is None or timing.commit is None:
        return 0.0
    slack = state.rules.steps_ahead * timing.step - (timing.quorum + timing.commit)
    training = timing.step * state.rules.sync_every / state.rules.fragments
    return max(0.0, min(0.5 * slack, training))


def _next_attempt(turn: Turn) -> int:
    turn.set(attempts=turn.state.attempts + 1)
    return turn.state.attempts


def _merge(turn: Turn) -> None:
    attempt = _next_attempt(turn)
    state = turn.state
    closing = closings.merging(state.closing, attempt)
    fragment = state.chain.fragment
    name = write_id(state.me.node, state.me.incarnation, attempt)
    parts = ("anchor", "outer", "update") if state.rules.updates else ("anchor", "outer")
    turn.set(
        closing=closing,
        waits=replace(state.waits, merging=turn.now),
        attempted=(
            *state.attempted,
            *(state.keys.payload(closing.round, name, part) for part in parts),
        ),
    )
    turn.add(
        fx.Merge(
            round=closing.round,
            attempt=attempt,
            write_id=name,
            fragment=fragment,
            base=state.chain.records[fragment],
            contributions=tuple(report.key for report in closing.merging),
            weights=tuple(report.weight for report in closing.merging),
            final=all(report.key.final for report in closing.merging),
            compare=_compared(state),
        )
    )


def _compared(state: MemberState) -> str | None:
    """Once a cycle a closer looks whether the store still holds what it goes on from.

    A store that ignores the condition only under a race looks healthy until then.
    """
    round = state.chain.round
    return state.chain.tip if round and round % state.rules.fragments == 0 else None


def on_merged(turn: Turn, event: fx.Merged) -> None:
    state = turn.state
    closing = state.closing
    if (closing.round, closing.attempt) != (event.round, event.attempt):
        keys = tuple(payload.key for payload in event.payloads)
        if keys:  # Somebody else's record was read meanwhile.
            turn.add(fx.Delete(keys))
        return
    if event.replaced:
        turn.stop(
            StoreIgnoresConditions(
                f"The record of round {event.round - 1} in the mailbox is another than this node "
                "has read, and a record never changes: two nodes wrote it, and both were told that "
                "theirs is there. What was trained since is lost to the run. Try the store with "
                "`jdiloco doctor`, and go on with a new run in another."
            )
        )
        return
    if event.culprit is not None:
        refused = closings.merge_failed(closings.refused(closing, event.culprit))
        turn.set(closing=refused)
        return
    if event.anchor is None:
        turn.set(closing=closings.merge_failed(closing), waits=later(turn))
        turn.degrade("merge", f"closing round {event.round} failed: {event.error}")
        return
    turn.over("merge")
    _write_record(turn, closing, event)


def _write_record(turn: Turn, closing: Closing, merged: fx.Merged | None = None) -> None:
    state = turn.state
    record = chains.compose(
        state.chain,
        closing,
        state.me,
        expected=len(state.verdict.expected | {report.life for report in closing.reports}),
        next_closer=next_closer(state),
        timing=_timing(state, closing),
        anchor=merged.anchor if merged else None,
        outer=merged.outer if merged else None,
        update=merged.update if merged else None,
        cosine=merged.cosine if merged else None,
        build=state.build if merged else None,
    )
    data = seal(state.keys.record(closing.round), record)
    turn.set(closing=closing)
    write(turn, data)


def on_record_sent(turn: Turn, event: fx.RecordSent) -> None:
    closing = turn.state.closing
    if closing.round != event.round or closing.phase is not Phase.WRITING:
        return
    if event.created:
        turn.set(closing=closings.written(closing))
        take_record(turn, closing.record)
        return
    turn.set(closing=closings.doubted(closing))
    if event.created is None:
        turn.degrade("commit", "writing a round record got no clear answer")


def _timing(state: MemberState, closing: Closing) -> Timing:
    timing = state.chain.timing
    heads = [report.head for report in closing.merging if report.head is not None]
    paces = [head.step_seconds for head in heads if head.step_seconds is not None]
    step = timing.step
    if paces:
        step = mix(step, sum(paces) / len(paces), count=closing.round + 1)
    waits = state.waits
    quorum = timing.quorum
    # A round that somebody took over waited for its closer, not for its learners.
    if waits.closable is not None and not closing.claims:
        quorum = mix(quorum, waits.closable - waits.opened, count=closing.round)
    return Timing(step=step, quorum=quorum, commit=timing.commit)


def on_examined(turn: Turn, event: fx.Examined) -> None:
    state = turn.state
    if event.head is None and not event.rejected:
        turn.set(closing=closings.ask_again(state.closing, event.key))
        turn.degrade("contribution", f"a contribution to round {event.key.round} could not be read")
        return
    turn.over("contribution")
    event = _audited(state, event)
    verdict = Report(
        event.key,
        asked=True,
        head=event.head,
        weight=event.weight,
        sha256=event.sha256,
        rejected=event.rejected,
        parts=event.parts,
    )
    turn.set(closing=closings.examined(state.closing, verdict))
    if event.head is not None and state.waits.accepted is None:
        turn.set(waits=replace(state.waits, accepted=turn.now))


def _audited(state: MemberState, event: fx.Examined) -> fx.Examined:
    """The same, or rejected when the learner's ledger does not agree with the records."""
    if event.head is None:
        return event
    life = Life(event.key.node, event.key.incarnation)
    head = event.head
    wrong = tallies.fault(state.tally, life, head.fragment, head.counters, head.ledger)
    return replace(event, head=None, rejected="counters") if wrong else event


def _take_over(turn: Turn) -> None:
    state = turn.state
    closing = state.closing
    if state.claiming or state.reading_claim or state.records_to > state.chain.read:
        return
    because = _why_take_over(turn)
    if not because:
        return
    number = closing.claims + 1
    claim = Claim(state.me.node, state.me.incarnation, because)
    key = state.keys.claim(ClaimKey(closing.round, number))
    turn.set(claiming=True)
    turn.add(fx.MakeClaim(closing.round, number, seal(key, claim)))


def _why_take_over(turn: Turn) -> str:
    state = turn.state
    closing = state.closing
    if closing.closer == NO_CLOSER:
        return "the run names no closer"
    if has_ended(state, closing.closer):
        return "its lease has ended"
    if not closings.seems_closable(closing, state.rules, state.verdict):
        turn.set(waits=replace(state.waits, seemed_closable=None))
        return ""
    since = state.waits.seemed_closable
    if since is None:
        turn.set(waits=replace(state.waits, seemed_closable=turn.now))
        return ""
    usual = max(3 * (state.chain.timing.commit or 0.0), TAKEOVER_POLLS * state.poll_seconds)
    patience = usual * 2 ** min(closing.claims, MOST_DOUBLINGS) + grace(state)
    return OVERDUE if turn.now >= since + patience else ""


def on_claim_read(turn: Turn, event: fx.ClaimRead) -> None:
    state = turn.state
    turn.set(claiming=False, reading_claim=False)
    if event.data is None:
        turn.degrade("claim", f"a claim on round {event.round} got no clear answer")
    else:
        turn.over("claim")
    if event.data is None or event.round != state.closing.round:
        return
    try:
        key = state.keys.claim(ClaimKey(event.round, event.number))
        claim = unseal(key, event.data, Claim)
    except FormatError as error:
        turn.degrade("claim", str(error))
        taken = max(state.closing.claims, event.number)  # By nobody: the next one is free.
        turn.set(closing=replace(state.closing, claims=taken))
        return
    named = state.closing.closer
    claimant = Life(claim.node, claim.incarnation)
    if claimant == state.me and not state.closing.mine:
        turn.emit(
            events.TookOver(
                node=state.me.node,
                round=event.round,
                claim=event.number,
                closer=str(named),
                because=claim.because,
            )
        )
    if claim.because == OVERDUE:
        turn.set(passed_over=pass_over(state, named, event.round))
    turn.set(
        closing=closings.claimed(state.closing, event.number, claimant, state.me),
        waits=replace(state.waits, seemed_closable=None),
    )
