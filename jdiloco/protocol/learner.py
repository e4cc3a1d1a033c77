"""The learner as a state machine: what trained steps and committed rounds lead to.

    event      what it may lead to
    trained    Snapshot (a round is due), or nothing
    follow     Snapshot (the others are waiting for this one)
    report     Snapshot (others have to see how far this one is)
    committed  Align, Revert, Drop; then Snapshot when a round was waiting for it
    pause      training is left to others until `resume`
    finish     Snapshot with what is left, when it flushes
    leave      Drop

It runs where the user's loop runs and knows no store. Between two events it costs nothing; the
caller compares two integers to see whether anything can be due (`steps_to_due`).

Rounds are measured by differences: the next round is the one after the newest that was published or
read, and is due once the learner has trained `gap(round)` steps since it last published or joined.
In lock step this is the formula of `schedule.due`; a slow or late learner meets whatever round is
current. A learner that counted from its own first step would never be due again once it had fallen
behind.

A round is published only when fewer than `in_flight` are outstanding (published and not yet
aligned) and its fragment has been aligned with the version that round `r - P` left: a delta against
a version that is about to be replaced could only be rejected as stale.

What a record does to one fragment is decided in `fragment`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from jdiloco.protocol import fragment
from jdiloco.protocol.alignment import Overwrite
from jdiloco.protocol.fragment import Align, Drop, FragmentTraining, News, Outstanding, Revert
from jdiloco.protocol.records import ContributionHead, Covered, Ledger, RoundRecord
from jdiloco.protocol.rules import Life, Rules
from jdiloco.protocol.schedule import fragment_of, gap
from jdiloco.types import Counters, Spent


@dataclasses.dataclass(frozen=True, slots=True)
class LearnerState:
    """Everything a learner has to remember. `read` is the newest round whose record it knows."""

    life: Life
    rules: Rules
    read: int
    next_round: int
    fragments: tuple[FragmentTraining, ...]
    began: int = 0  # Batches of the node's data that were behind it at its birth.
    steps: int = 0
    since: int = 0  # Steps since it last published or joined.
    last_call: int = 0  # Steps that the newest `trained` covered.
    follow: int = -1  # A round to publish as soon as there is anything to publish.
    reporting: bool = False  # The next round is published as soon as it may be.
    paused: bool = False  # This node closes rounds, and leaves training to others.
    finishing: bool = False
    flush: bool = False
    reverted_at: int = -1  # The step after which all fragments last went back to their anchors.

    @property
    def position(self) -> int:
        """Batches of the node's own data, one for each step of any life, that are behind it."""
        return self.began + self.steps


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Subtract the parameters from the anchor, now, and publish the delta."""

    round: int
    fragment: int
    version: int
    counters: Counters
    ledger: Ledger
    position: int
    final: bool
    empty: bool  # Nothing was trained, but the round must be reported to.


Effect = Snapshot | Align | Revert | Drop


def joined(
    life: Life, rules: Rules, *, read: int, versions: tuple[int, ...], position: int = 0
) -> LearnerState:
    """A learner that holds the newest values as of round `read` (-1: the initial ones)."""
    fragments = tuple(FragmentTraining(version) for version in versions)
    return LearnerState(
        life, rules, read=read, next_round=read + 1, fragments=fragments, began=position
    )


def _with_fragment(state: LearnerState, index: int, held: FragmentTraining) -> LearnerState:
    fragments = (*state.fragments[:index], held, *state.fragments[index + 1 :])
    return replace(state, fragments=fragments)


def outstanding(state: LearnerState) -> tuple[Outstanding, ...]:
    """Contributions whose rounds have not been read, oldest first."""
    found = [held.outstanding for held in state.fragments if held.outstanding is not None]
    return tuple(sorted(found, key=lambda item: item.round))


def waiting_for(state: LearnerState) -> int | None:
    """The round that training must wait for under `overlap_steps`, or None."""
    limit = state.rules.overlap_steps
    if limit is None or state.finishing:
        return None
    late = [item.round for item in outstanding(state) if state.steps - item.at_step >= limit]
    return min(late, default=None)


def held_up(state: LearnerState) -> str:
    """The phase in which training stands still; "" while it does not."""
    if state.finishing:
        return ""
    if state.paused:
        return "closing"
    return "" if waiting_for(state) is None else "waiting"


def steps_to_due(state: LearnerState) -> int | None:
    """Steps after which a round is due or training has to wait; None when neither can be."""
    steps = [*_steps_to_publish(state), *_steps_to_wait(state)]
    return max(1, min(steps)) if steps else None


def _steps_to_publish(state: LearnerState) -> tuple[int, ...]:
    index = fragment_of(state.next_round, state.rules.fragments)
    if not _may_publish(state, state.fragments[index]):
        return ()
    return (1 if state.follow == state.next_round else _gap(state) - state.since,)


def _steps_to_wait(state: LearnerState) -> tuple[int, ...]:
    limit = state.rules.overlap_steps
    if limit is None or state.finishing:
        return ()
    return tuple(limit - (state.steps - item.at_step) for item in outstanding(state))


def _gap(state: LearnerState) -> int:
    rules = state.rules
    return gap(state.next_round, sync_every=rules.sync_every, fragments=rules.fragments)


def trained(
    state: LearnerState, *, steps: int, samples: int, last_call: int = 1
) -> tuple[LearnerState, tuple[Effect, ...]]:
    """Counts steps and samples towards every fragment and takes what is due.

    Calls in which nothing can be due may be counted together; `last_call` says how many of the
    steps the newest one covered.
    """
    counted_state = counted(state, steps=steps, samples=samples)
    return _publish(replace(counted_state, last_call=last_call))


def counted(state: LearnerState, *, steps: int, samples: int) -> LearnerState:
    """Counts steps and samples towards every fragment, before anything else is decided."""
    more = Counters(steps, samples)
    fragments = tuple(
        replace(held, counters=held.counters + more, ledger=held.ledger.train(samples))
        for held in state.fragments
    )
    return replace(state, fragments=fragments, steps=state.steps + steps, since=state.since + steps)


def follow(state: LearnerState, round: int) -> tuple[LearnerState, tuple[Effect, ...]]:
    """The others wait for this learner in `round`; it publishes with the steps it has."""
    return replace(state, follow=max(state.follow, round)), ()


def report(state: LearnerState) -> tuple[LearnerState, tuple[Effect, ...]]:
    """Publishes the next round with the steps it has, if any, as soon as it may.

    A learner that stops training for a while would otherwise keep to itself how far it is in its
    work. A round in which it has nothing to say is reported to all the same: what counts is that.
    """
    return _publish(replace(state, reporting=True))


def pause(state: LearnerState) -> LearnerState:
    """No step is trained until `resume`; commits are read and aligned all the same."""
    return replace(state, paused=True)


def resume(state: LearnerState) -> LearnerState:
    """Goes on from the newest values."""
    return replace(state, paused=False)


def finish(state: LearnerState, *, flush: bool) -> tuple[LearnerState, tuple[Effect, ...]]:
    """No more steps will come. With `flush`, what was trained is published first."""
    return _publish(replace(state, finishing=True, flush=flush))


def _may_publish(state: LearnerState, held: FragmentTraining) -> bool:
    read_base = state.read >= state.next_round - state.rules.fragments
    free = len(outstanding(state)) < state.rules.in_flight
    return read_base and free and held.outstanding is None and not held.behind


def _wants_to_publish(state: LearnerState, held: FragmentTraining) -> bool:
    if state.reporting:
        return True
    if state.finishing:
        return state.flush and _unpublished(state)
    wanted = state.follow == state.next_round or state.since >= _gap(state)
    return wanted and held.counters.steps > 0  # Just aligned, it has nothing to say yet.


def _unpublished(state: LearnerState) -> bool:
    return any(h.counters.steps > 0 and h.outstanding is None for h in state.fragments)


def _publish(state: LearnerState) -> tuple[LearnerState, tuple[Effect, ...]]:
    """Takes every round that is wanted and allowed, in order; a long call may owe several."""
    effects = []
    while True:
        index = fragment_of(state.next_round, state.rules.fragments)
        held = state.fragments[index]
        if not (_wants_to_publish(state, held) and _may_publish(state, held)):
            return state, tuple(effects)
        effects.append(
            Snapshot(
                state.next_round,
                index,
                held.version,
                held.counters,
                held.ledger,
                position=state.position,
                final=state.finishing,
                empty=held.counters.steps == 0,
            )
        )
        sent = Outstanding(state.next_round, held.counters, state.steps, final=state.finishing)
        state = _with_fragment(state, index, replace(held, outstanding=sent))
        state = replace(
            state, next_round=state.next_round + 1, since=_carried(state), reporting=False
        )


def _carried(state: LearnerState) -> int:
    """Steps of this call beyond the one at which the round fell due, which count for the next."""
    over = state.since - _gap(state)
    just_due = over >= 0 and over < state.last_call
    return over if just_due else 0


def head_of(
    state: LearnerState,
    snapshot: Snapshot,
    run: str,
    *,
    step_seconds: float | None = None,
    work: tuple[Covered, ...] = (),
    spent: Spent | None = None,
) -> ContributionHead:
    """What the contribution of a snapshot says of itself."""
    return ContributionHead(
        run=run,
        round=snapshot.round,
        fragment=snapshot.fragment,
        version=snapshot.version,
        node=state.life.node,
        incarnation=state.life.incarnation,
        counters=snapshot.counters,
        ledger=snapshot.ledger,
        position=snapshot.position,
        step_seconds=step_seconds,
        final=snapshot.final,
        empty=snapshot.empty,
        work=work,
        spent=spent,
    )


def news_of(state: LearnerState, record: RoundRecord) -> News:
    """What a round record says to this learner."""
    return News.of(record, state.life, state.fragments[record.fragment].outstanding)


def committed(
    state: LearnerState, news: News, *, values: bool, finite: bool = True
) -> tuple[LearnerState, tuple[Effect, ...]]:
    """Reads a round record; `values` says whether the version's values are at hand.

    Records come in order, every one of them; of several versions of a fragment only the newest
    needs values, and the fragment is aligned once. `finite` says whether what was trained since the
    anchor is; it matters when `may_keep` says so.
    """
    state = replace(state, read=news.round, next_round=max(state.next_round, news.round + 1))
    held = state.fragments[news.fragment]
    intact = _since_revert(state, held)
    tainted = news.rejected == "nonfinite" and intact
    if news.void:
        held, effects = fragment.void(held, news, revert=tainted or state.finishing, kept=intact)
    else:
        held, effects = fragment.settle(state.rules, held, news, intact=intact)
        if values:
            how = fragment.choose(state.rules, held, news, finite=finite)
            held, more = fragment.align(held, news, how)
            effects = (*effects, *more)
    state = _with_fragment(state, news.fragment, held)
    if tainted:
        state, back = _go_back(state, news)
        effects = (*effects, *back)
    state, more = _publish(state)
    return state, (*effects, *more)


def may_keep(state: LearnerState, news: News) -> bool:
    """Whether aligning with this record's values keeps any training, provided it is finite."""
    held = state.fragments[news.fragment]
    held, _ = fragment.settle(state.rules, held, news, intact=_since_revert(state, held))
    how = fragment.choose(state.rules, held, news, finite=True)
    return not news.void and not isinstance(how, Overwrite)


def _since_revert(state: LearnerState, held: FragmentTraining) -> bool:
    """Its contribution was taken from parameters that have not gone back since."""
    return held.outstanding is None or held.outstanding.at_step > state.reverted_at


def _go_back(state: LearnerState, news: News) -> tuple[LearnerState, tuple[Effect, ...]]:
    """Every other fragment goes back to its anchor too: one step spreads what is not finite.

    What was trained since, and not published, is lost with it; what was published is settled by
    its own record. A fragment whose newest values have not come goes back to the older ones.
    """
    effects: list[Effect] = []
    for index, held in enumerate(state.fragments):
        if index == news.fragment and not held.behind:
            continue
        held, lost = fragment.lose_all(held, reason="rejected", round=news.round, fragment=index)
        effects += [*lost, Revert(news.round, index)]
        state = _with_fragment(state, index, held)
    return replace(state, reverted_at=state.steps), tuple(effects)


def done(state: LearnerState) -> bool:
    """A finishing learner has nothing outstanding and nothing left to publish."""
    return state.finishing and not outstanding(state) and not (state.flush and _unpublished(state))


def leave(state: LearnerState) -> tuple[LearnerState, tuple[Effect, ...]]:
    """Drops what was trained and not published; what is outstanding may still be merged."""
    effects: list[Effect] = []
    for index, held in enumerate(state.fragments):
        held, lost = fragment.lose_all(held, reason="left", round=state.next_round, fragment=index)
        effects += lost
        state = _with_fragment(state, index, held)
    return state, tuple(effects)
