"""The properties are worth something if they find faults: each of these is planted and found.

The number beside a fault is how many seeds are tried until one shows it. Where the default draw
would need luck, the runs are of a kind in which the fault matters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jdiloco.protocol import (
    alignment,
    closing,
    desk,
    fragment,
    garbage,
    joining,
    learner,
    lease,
    member,
    resuming,
    schedule,
    sweep,
    tally,
    work,
)
from jdiloco.protocol.keys import ContributionKey as Contribution
from jdiloco.protocol.keys import UnitKey
from jdiloco.protocol.member import close, elect, follow, listen
from jdiloco.testing import invariants, simulate
from jdiloco.testing.simulate import control, mailbox, node, values
from tests.protocol.faults import (
    a_new_record_is_computed_in_doubt,
    claims_never_come,
    failed_uploads_are_given_up,
    learner_aligns_before_the_commit_is_confirmed,
    more_in_flight_than_fragments,
    no_read_back,
    nothing_is_ever_void,
    payloads_of_open_rounds_are_swept,
    taken_counts_as_ours,
)

Death, Plan, Faults = simulate.Death, simulate.Plan, simulate.Faults
Patch = pytest.MonkeyPatch

FAULTY = Faults(fail=0.05, lose=0.08, late=0.08, taken=0.05, stale=0.1, until=25.0)


def drawn() -> Iterator[simulate.Scenario]:
    seed = 0
    while True:
        yield simulate.draw(seed)
        seed += 1


def of_two(**settings) -> Iterator[simulate.Scenario]:
    """Runs of two nodes on a bad store, one of which closes slowly and sleeps now and then."""
    seed = 0
    while True:
        first = Plan(node="a", steps=50, merge_seconds=0.5, pauses=((9.0 + seed % 5, 9.0),))
        plans = (first, Plan(node="b", steps=50, starts=0.5))
        chosen = {"faults": FAULTY, "checkpoint_every": 2, **settings}
        yield simulate.scenario(*plans, seed=seed, **chosen)
        seed += 1


def collected(**settings) -> Iterator[simulate.Scenario]:
    """The same, while somebody calls for garbage all the time."""
    calls = tuple(simulate.Collection(at=0.5 * n) for n in range(60))
    return of_two(collections=calls, **settings)


def late_answers() -> Iterator[simulate.Scenario]:
    """Writes land while somebody asks whether they have."""
    faults = Faults(late=0.3, late_seconds=2.5, until=60.0)
    return of_two(faults=faults, latency_seconds=0.1)


def sleepers_that_blend() -> Iterator[simulate.Scenario]:
    """Several versions are committed while one of three sleeps, more than it may skip or not."""
    for seed in range(1000):
        asleep = Plan(node="c", steps=80, pauses=((8.0 + seed % 3, 6.0 + seed % 5),))
        plans = (Plan(node="a", steps=80), Plan(node="b", steps=80), asleep)
        yield simulate.scenario(*plans, sync_every=4, alignment=alignment.blend(0.5), seed=seed)


def failing_uploads() -> Iterator[simulate.Scenario]:
    """The store is gone for longer than an upload is tried."""
    plans = (Plan(node="a", steps=160), Plan(node="b", steps=160, starts=0.5))
    for seed in range(1000):
        yield simulate.scenario(*plans, quorum_size=2, outages=((10.0, 20.0),), seed=seed)


def a_late_joiner() -> Iterator[simulate.Scenario]:
    """One joins after many rounds, and rounds want both."""
    plans = (Plan(node="a", steps=300), Plan(node="b", steps=150, starts=60.0))
    for seed in range(1000):
        yield simulate.scenario(*plans, quorum_size=2, follow=0, seed=seed)


def sharing(**settings) -> Iterator[simulate.Scenario]:
    """Three nodes share a queue on a bad store; one sleeps for longer than its lease, and one
    leaves in the middle."""
    for seed in range(1000):
        sleeper = Plan(node="a", work="queue", pauses=((6.0 + seed % 4, 8.0 + 2 * (seed % 5)),))
        quitter = Plan(node="b", work="queue", quits=7 + seed % 9)
        plans = (sleeper, quitter, *(Plan(node=n, work="queue") for n in ("c", "d")))
        chosen = {"units": (12,) * 8, "faults": FAULTY, **settings}
        yield simulate.scenario(*plans, seed=seed, horizon=300.0, **chosen)


def sharing_and_sleeping() -> Iterator[simulate.Scenario]:
    """One of two that share a queue sleeps until the other has done all of it and is gone."""
    for seed in range(1000):
        sleeper = Plan(node="a", work="queue", pauses=((5.0 + 0.3 * (seed % 10), 40.0),))
        plans = (sleeper, Plan(node="b", work="queue", starts=0.5))
        yield simulate.scenario(*plans, seed=seed, units=(20, 20), sync_every=4)


def sharing_and_dying() -> Iterator[simulate.Scenario]:
    """One of three that share a queue is killed at a step."""
    for seed in range(1000):
        death = Death(at=6.0 + 0.25 * (seed % 40))
        mortal = Plan(node="a", work="queue", deaths=(death,))
        plans = (Plan(node="b", work="queue"), mortal, Plan(node="c", work="queue"))
        yield simulate.scenario(*plans, seed=seed, units=(7,) * 12, horizon=300.0)


def a_hung_learner() -> Iterator[simulate.Scenario]:
    plans = (Plan(node="a", steps=200), Plan(node="b", starts=0.5, hangs=((12, 80.0),)))
    for seed in range(1000):
        yield simulate.scenario(*plans, quorum_size=2, seed=seed)


def an_outage() -> Iterator[simulate.Scenario]:
    plans = tuple(Plan(node=node, steps=80) for node in "abc")
    for seed in range(1000):
        yield simulate.scenario(*plans, outages=((10.0, 28.0),), seed=seed)


def nobody_is_finite() -> Iterator[simulate.Scenario]:
    """In one round; standard DiLoCo waits for its record."""
    plans = tuple(Plan(node=node, steps=60, nan_steps=(9,)) for node in "ab")
    settings = {"fragments": 1, "in_flight": 1, "overlap_steps": 0, "quorum_size": 2}
    for seed in range(1000):
        yield simulate.scenario(*plans, seed=seed, **settings)


def an_elected_node() -> Iterator[simulate.Scenario]:
    """It is named from the start, and another learner trains for as long."""
    first = Plan(node="a", role="either", steps=60)
    other = Plan(node="b", role="learner", steps=120, starts=1.0)
    for seed in range(1000):
        yield simulate.scenario(first, other, quorum_size=2, seed=seed)


def slow_closers() -> Iterator[simulate.Scenario]:
    """Closing takes longer than the wait before the first takeover of a round."""
    plans = tuple(Plan(node=n, steps=400, merge_seconds=8.0) for n in "abc")
    for seed in range(1000):
        yield simulate.scenario(*plans, quorum_size=3, seed=seed)


def a_hung_syncer() -> Iterator[simulate.Scenario]:
    syncer = Plan(node="s", role="syncer", steps=400, stuck=10.0, leave_with_run=True)
    plans = (Plan(node="a", steps=80), Plan(node="b", steps=80), syncer)
    for seed in range(1000):
        yield simulate.scenario(*plans, quorum_size=2, seed=seed)


def clocks_hours_apart() -> Iterator[simulate.Scenario]:
    plans = (Plan(node="a", clock=3600.0), Plan(node="b", clock=5 * 3600.0, starts=0.5))
    for seed in range(1000):
        yield simulate.scenario(*plans, quorum_size=2, seed=seed)


def killed_before_a_record() -> Iterator[simulate.Scenario]:
    """A node alone, which saves after each step and goes on from its newest save."""
    for seed in range(1000):
        death = Death(before=f"{3 + seed % 5:010}.0", back_after=1.0)
        plan = Plan(node="a", steps=60, deaths=(death,), saves=tuple(range(1, 60)), resumes=0)
        yield simulate.scenario(plan, seed=seed)


def found_by(runs: Iterator[simulate.Scenario], seeds: int) -> set[str]:
    """The properties that the first of these runs with a violation does not have."""
    for scenario, _ in zip(runs, range(seeds), strict=False):
        if names := {broken.name for broken in invariants.broken(simulate.simulate(scenario))}:
            return names
    return set()


# The faults


def store_ignores_the_condition(patch: Patch) -> None:
    """Only for records, and so past the check at the start of a session."""
    put = mailbox.Mailbox.put

    def overwrite(self, who, key, data):
        if key.endswith(".0") and "/log/" in key and key in self.objects:
            self.remove(who, key)
        return put(self, who, key, data)

    patch.setattr(mailbox.Mailbox, "put", overwrite)


def contested_keys_are_deleted(patch: Patch) -> None:
    """Sweeping takes old round records too."""
    swept = sweep.sweep

    def too_much(shelf, keys, rules, *, round, heads):
        shelf, doomed, prefixes = swept(shelf, keys, rules, round=round, heads=heads)
        return shelf, (*doomed, keys.record(round - 4)) if round >= 4 else doomed, prefixes

    patch.setattr(follow.sweep, "sweep", too_much)


def stale_contributions_are_accepted(patch: Patch) -> None:
    """The same, and closers compare neither the version that a contribution was made against nor
    its ledger with the records."""
    more_in_flight_than_fragments(patch)
    patch.setattr(tally, "fault", lambda *arguments: "")
    real = values.check

    def lenient(found, key, keys, specs, *, fragment, version, delta_dtype):
        del version
        now = found.head.version
        real(found, key, keys, specs, fragment=fragment, version=now, delta_dtype=delta_dtype)

    patch.setattr(values, "check", lenient)


def rounds_are_due_by_the_first_step(patch: Patch) -> None:
    """Counted from a node's own start: one that joins late is not due for as long as it missed."""

    def wants(state, held):
        del held
        rules = state.rules
        due = schedule.due(state.next_round, sync_every=rules.sync_every, fragments=rules.fragments)
        return state.steps >= due and not state.finishing

    patch.setattr(learner, "_wants_to_publish", wants)
    patch.setattr(learner, "steps_to_due", lambda state: 1)


def a_hung_learner_is_waited_for(patch: Patch) -> None:
    """Whoever beats is expected, though its step stands still."""
    patch.setattr(lease.Lease, "expected", lambda self, rules: self.live(rules))


def counters_go_on_over_an_alignment(patch: Patch) -> None:
    """What was trained before it is counted, and weighed, once more."""
    align = fragment.align

    def keep(held, news, how):
        aligned, effects = align(held, news, how)
        return dataclasses.replace(aligned, counters=held.counters), effects

    patch.setattr(fragment, "align", keep)


def what_was_late_is_dropped_and_carried(patch: Patch) -> None:
    """It is written off when its round is read, though the parameters go on holding it."""
    settle = fragment.settle

    def write_off(rules, held, news, *, intact):
        held, effects = settle(rules, held, news, intact=intact)
        late = held.meanwhile.unmerged
        if late is None:
            return held, effects
        held = dataclasses.replace(held, meanwhile=fragment.NO_NEWS)
        where = {"reason": late.reason, "round": late.round, "fragment": news.fragment}
        held, more = fragment._lose(held, late.counters, **where)
        return held, (*effects, *more)

    patch.setattr(fragment, "settle", write_off)


def what_was_merged_is_carried_too(patch: Patch) -> None:
    """The rest counts from the old anchor, whatever was merged meanwhile."""
    align = node.Learner._align

    def from_the_anchor(self, aligned):
        align(self, dataclasses.replace(aligned, from_snapshot=False))

    patch.setattr(node.Learner, "_align", from_the_anchor)


def counters_keep_what_was_merged(patch: Patch) -> None:
    """Parameters and counters agree, and both go on from the old anchor."""
    settle = fragment.settle

    def forget(rules, held, news, *, intact):
        before = held.counters
        held, effects = settle(rules, held, news, intact=intact)
        if not held.meanwhile.merged:
            return held, effects
        ledger = msgspec.structs.replace(held.ledger, pending=before.samples)
        return dataclasses.replace(
            held, counters=before, ledger=ledger, meanwhile=fragment.NO_NEWS
        ), effects

    patch.setattr(fragment, "settle", forget)


def the_snapshot_of_a_round_before_is_subtracted(patch: Patch) -> None:
    """The newest one is not noted down."""
    publish = node.Learner._publish

    def keep_the_old(self, snapshot):
        old = self._snapshots[snapshot.fragment]
        publish(self, snapshot)
        self._snapshots[snapshot.fragment] = old

    patch.setattr(node.Learner, "_publish", keep_the_old)


def blending_shrinks_once_for_each_version(patch: Patch) -> None:
    """Counters lose a share at every record, also of versions whose values were skipped."""
    settle = fragment.settle

    def shrink(rules, held, news, *, intact):
        again = held.behind
        held, effects = settle(rules, held, news, intact=intact)
        if not again or not isinstance(rules.alignment, alignment.Blend):
            return held, effects
        lost = held.counters - alignment.kept(rules.alignment, held.counters)
        where = {"reason": "overwritten", "round": news.round, "fragment": news.fragment}
        held, more = fragment._lose(held, lost, **where)
        return held, (*effects, *more)

    patch.setattr(fragment, "settle", shrink)


def not_finite_is_merged(patch: Patch) -> None:
    """A weight of zero is thought to make it harmless."""
    real = values.unseal

    def calm(name, data, kind):
        delta = real(name, data, kind)
        return msgspec.structs.replace(delta, finite=True) if kind is values.Delta else delta

    patch.setattr(values, "unseal", calm)


def drops_are_silent(patch: Patch) -> None:
    """Late contributions are written off without an event."""
    perform = node.Learner._perform

    def silent(self, effects, values):
        late = [e for e in effects if isinstance(e, learner.Drop) and e.reason == "late"]
        perform(self, tuple(e for e in effects if e not in late), values)

    patch.setattr(node.Learner, "_perform", silent)


def an_outage_counts_as_age(patch: Patch) -> None:
    """The first listing after an outage ends everybody's lease."""
    observe = lease.observe
    patch.setattr(
        lease,
        "observe",
        lambda leases, beats, elapsed, *, named: observe(
            leases, beats, 100.0 if elapsed >= 1.0 else elapsed, named=named
        ),
    )


def a_restarted_node_begins_its_data_again(patch: Patch) -> None:
    """From the start, whatever its earlier lives have sent."""
    take_up = node.lives.take_up_life

    def forgetful(*arguments):
        return dataclasses.replace((yield from take_up(*arguments)), position=0)

    patch.setattr(node.lives, "take_up_life", forgetful)


def an_elected_node_goes_on_training(patch: Patch) -> None:
    """It closes for everybody, and everybody waits for its steps."""
    patch.setattr(elect, "_why_train", lambda state: "it likes to")


def an_elected_node_never_trains_again(patch: Patch) -> None:
    """The others finish, and its own data stays where it is."""
    patch.setattr(learner, "resume", lambda state: state)


def a_closer_that_is_passed_over_stops(patch: Patch) -> None:
    """And the wait before a takeover stays the same: where closing takes longer, nobody ends it."""
    claimed = closing.claimed

    def give_up(state, number, claimant, me):
        after = claimed(state, number, claimant, me)
        if claimant == me or after.phase not in (closing.Phase.OPEN, closing.Phase.MERGING):
            return after
        return dataclasses.replace(closing.merge_failed(after), mine=False, attempt=0)

    patch.setattr(closing, "claimed", give_up)
    patch.setattr(close, "MOST_DOUBLINGS", 0)


def a_syncer_is_never_taken_over_from(patch: Patch) -> None:
    """As long as its lease lives, which is for ever though its closing hangs."""
    why = close._why_take_over

    def patient(turn):
        because = why(turn)
        exclusive = turn.state.closing.closer in turn.state.verdict.syncers
        return "" if exclusive and because == close.OVERDUE else because

    patch.setattr(close, "_why_take_over", patient)


def leases_compare_wall_clocks(patch: Patch) -> None:
    """Beats carry their sender's time, and each node judges it by its own clock."""
    beat, listed = listen.beat, member._HANDLERS[close.fx.Listed]

    def stamped(turn):
        if turn.now >= turn.state.next_beat:
            turn.set(beat=int(turn.now * 8))
        beat(turn)

    def by_the_clock(turn, event):
        listed(turn, event)
        leases = {
            life: dataclasses.replace(held, unchanged=turn.now - held.beat.beat / 8)
            for life, held in turn.state.leases.items()
            if held.beat is not None
        }
        turn.set(leases=leases, verdict=lease.judge(leases, turn.state.rules))

    patch.setattr(listen, "beat", stamped)
    patch.setitem(member._HANDLERS, close.fx.Listed, by_the_clock)


def claims_are_deleted_when_given_back(patch: Patch) -> None:
    """A unit that is given back is free because its claim is gone."""

    def give_back(self, held, batches):
        del batches
        key = self._keys.unit(self.pool, UnitKey(held.unit, held.claim))
        yield joining.Delete((key,))

    patch.setattr(work.Claims, "give_back", give_back)


def claims_are_made_without_a_number(patch: Patch) -> None:
    """Whoever sees a unit free in a listing takes it, whoever else has by then."""
    real = work.settle

    def believe(key, data, waiting):
        yield from real(key, data, waiting)
        return data

    patch.setattr(work, "settle", believe)


def work_is_taken_over_from_a_life_that_goes_on(patch: Patch) -> None:
    """The lease has ended, which is thought to be enough."""

    def nothing(*args, **more):
        del args, more
        yield from ()

    patch.setattr(work, "end_life", nothing)


def a_unit_is_taken_over_from_its_first_batch(patch: Patch) -> None:
    """As if the dead node had published nothing of it."""

    def nothing(*args, **more):
        del args, more
        yield from ()
        return {}

    patch.setattr(work, "read_work", nothing)


def a_unit_is_complete_once_it_is_trained(patch: Patch) -> None:
    """Though its last batches have not been published, and may never be."""
    patch.setattr(desk.Piece, "mark", property(lambda self: "done" if self.ended else ""))
    patch.setattr(desk.Desk, "recall", lambda self: self.pieces.clear())


def a_life_that_wakes_up_does_not_ask_whether_it_was_ended(patch: Patch) -> None:
    """The beats of its successor have been swept by then."""
    patch.setattr(member.listen, "_may_have_been_ended", lambda state: False)


def nobody_reports_what_it_has_trained(patch: Patch) -> None:
    """A node with nothing left to train publishes when a round is due, which is never."""
    patch.setattr(desk.Desk, "owes", lambda self, *, outstanding: False)


def a_resumed_node_trusts_its_checkpoint(patch: Patch) -> None:
    """Though the life that took it went on afterwards, and what it has pending may be merged."""
    take_up = node.lives.take_up_life

    def trusting(*arguments):
        return dataclasses.replace((yield from take_up(*arguments)), overtaken=False)

    patch.setattr(node.lives, "take_up_life", trusting)


def what_a_resumed_node_inherits_is_a_strangers(patch: Patch) -> None:
    """Work of its own that is merged counts as overwritten."""
    of = fragment.News.of
    patch.setattr(fragment.News, "of", lambda record, life, sent: of(record, life))


def a_resumed_node_goes_on_in_the_old_ledger(patch: Patch) -> None:
    """Each life has its own, or what one life sent is counted by two."""
    patch.setattr(resuming, "_inherited", lambda held, before: held)


def what_a_resumed_node_inherits_is_sent_as_its_own(patch: Patch) -> None:
    """Under a new key it may be merged a second time."""
    contribute = control.Control.contribute

    def renamed(self, delta):
        head = msgspec.structs.replace(delta.head, incarnation=self.state.me.incarnation)
        contribute(self, msgspec.structs.replace(delta, head=head))

    patch.setattr(control.Control, "contribute", renamed)


def collecting_takes_what_no_record_names(patch: Patch) -> None:
    """Payloads of rounds without a record count as lost."""
    lost = garbage._lost_attempts

    def too_much(seen, keys):
        open_rounds = [key for r, key in garbage._payloads(seen, keys) if r > seen.chain.read]
        return [*lost(seen, keys), *open_rounds]

    patch.setattr(garbage, "_lost_attempts", too_much)


def collecting_takes_covered_records(patch: Patch) -> None:
    """Those of rounds that a checkpoint covers."""
    real = garbage.garbage

    def too_much(seen, keys, rules):
        covered = range(max(0, seen.chain.checkpoint.round))
        records = tuple(keys.record(round) for round in covered)
        return {**real(seen, keys, rules), "record": records}

    patch.setattr(garbage, "garbage", too_much)


def collecting_takes_open_contributions(patch: Patch) -> None:
    """Of nodes that are gone, whether their round has a record or not."""
    real = garbage.garbage

    def too_much(seen, keys, rules):
        parsed = [key for name in seen.listed if isinstance(key := keys.parse(name), Contribution)]
        waiting = tuple(keys.spell(key) for key in parsed if key.round > seen.chain.read)
        return {**real(seen, keys, rules), "contribution": waiting}

    patch.setattr(garbage, "garbage", too_much)


FAULTS: list[Any] = [
    # fault, runs, seeds, properties of which one must say so
    (no_read_back, of_two, 5, {"S5"}),
    (taken_counts_as_ours, of_two, 5, {"S5"}),
    (store_ignores_the_condition, of_two, 10, {"S1"}),
    (learner_aligns_before_the_commit_is_confirmed, of_two, 3, {"S5"}),
    (contested_keys_are_deleted, of_two, 1, {"S1"}),
    (payloads_of_open_rounds_are_swept, of_two, 5, {"S2"}),
    (a_new_record_is_computed_in_doubt, late_answers, 30, {"S5"}),
    (stale_contributions_are_accepted, drawn, 10, {"S3"}),
    (more_in_flight_than_fragments, drawn, 10, {"S7"}),
    (counters_go_on_over_an_alignment, drawn, 1, {"S7"}),
    (what_was_late_is_dropped_and_carried, drawn, 20, {"S7"}),
    (what_was_merged_is_carried_too, drawn, 10, {"S3", "S7"}),
    (counters_keep_what_was_merged, drawn, 10, {"S3", "S7"}),
    (the_snapshot_of_a_round_before_is_subtracted, drawn, 10, {"S3", "S7"}),
    (blending_shrinks_once_for_each_version, sleepers_that_blend, 5, {"S7"}),
    (not_finite_is_merged, drawn, 10, {"S8"}),
    (drops_are_silent, drawn, 10, {"S7"}),
    (an_outage_counts_as_age, an_outage, 6, {"L2"}),
    (a_hung_learner_is_waited_for, a_hung_learner, 1, {"L1"}),
    (rounds_are_due_by_the_first_step, a_late_joiner, 1, {"L1"}),
    (claims_never_come, drawn, 10, {"L1"}),
    (nothing_is_ever_void, nobody_is_finite, 1, {"L1"}),
    (a_restarted_node_begins_its_data_again, drawn, 10, {"S3"}),
    (a_resumed_node_trusts_its_checkpoint, drawn, 40, {"S3"}),
    (what_a_resumed_node_inherits_is_a_strangers, drawn, 60, {"S7"}),
    (a_resumed_node_goes_on_in_the_old_ledger, drawn, 10, {"S7"}),
    (what_a_resumed_node_inherits_is_sent_as_its_own, killed_before_a_record, 1, {"S3"}),
    (failed_uploads_are_given_up, failing_uploads, 1, {"L1"}),
    (an_elected_node_goes_on_training, an_elected_node, 1, {"roles"}),
    (an_elected_node_never_trains_again, an_elected_node, 1, {"L1"}),
    (a_closer_that_is_passed_over_stops, slow_closers, 1, {"L1"}),
    (a_syncer_is_never_taken_over_from, a_hung_syncer, 1, {"L1"}),
    (leases_compare_wall_clocks, clocks_hours_apart, 1, {"L2"}),
    (claims_are_deleted_when_given_back, sharing, 5, {"S3", "W1"}),
    (claims_are_made_without_a_number, sharing, 5, {"S3", "W1"}),
    (work_is_taken_over_from_a_life_that_goes_on, sharing, 15, {"S3"}),
    (a_unit_is_taken_over_from_its_first_batch, sharing, 10, {"S3"}),
    (a_unit_is_complete_once_it_is_trained, sharing_and_dying, 3, {"W2"}),
    (a_life_that_wakes_up_does_not_ask_whether_it_was_ended, sharing_and_sleeping, 5, {"S3"}),
    (nobody_reports_what_it_has_trained, sharing, 3, {"L1", "W2"}),
    (collecting_takes_what_no_record_names, collected, 3, {"S2"}),
    (collecting_takes_covered_records, collected, 1, {"S1"}),
    (collecting_takes_open_contributions, collected, 1, {"S2"}),
]


MANY_SEEDS = 40
"""From so many on a fault is looked for in the long set."""

ROWS = [
    pytest.param(*row, marks=[pytest.mark.long] if row[2] >= MANY_SEEDS else []) for row in FAULTS
]


@pytest.mark.parametrize(
    ("fault", "runs", "seeds", "names"), ROWS, ids=lambda v: getattr(v, "__name__", None)
)
def test_a_planted_fault_is_found(fault, runs, seeds, names, monkeypatch):
    fault(monkeypatch)
    assert found_by(runs(), seeds) & names


FAULTY_RUNS = {runs for _, runs, _, _ in FAULTS} - {drawn}


@pytest.mark.parametrize("runs", sorted(FAULTY_RUNS, key=str))
def test_the_runs_that_find_them_are_sound_without_a_fault(runs):
    assert not found_by(runs(), 5)
