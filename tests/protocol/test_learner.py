"""The learner between steps and commits."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.protocol import learner
from jdiloco.protocol.alignment import adaptive, blend, carry, overwrite
from jdiloco.protocol.learner import Align, Drop, LearnerState, News, Revert, Snapshot
from jdiloco.protocol.rules import Life, Rules
from jdiloco.protocol.schedule import due
from jdiloco.types import Counters

ME = Life("a", 1)
RULES = Rules(sync_every=8, fragments=2, in_flight=2)


def joined(*, read: int = -1, versions: tuple[int, ...] = (0, 0), **rules) -> LearnerState:
    changed = dataclasses.replace(RULES, **rules)
    return learner.joined(ME, changed, read=read, versions=versions[: changed.fragments])


def snapshots(effects) -> list[Snapshot]:
    return [effect for effect in effects if isinstance(effect, Snapshot)]


def train(state: LearnerState, steps: int) -> tuple[LearnerState, list]:
    """One step at a time, eight samples each."""
    found = []
    for _ in range(steps):
        state, effects = learner.trained(state, steps=1, samples=8)
        found += effects
    return state, found


def news(round: int, version: int, *, fragments: int = 2, **kind) -> News:
    return News(round, round % fragments, version, kind.pop("void", False), **kind)


def commit(state: LearnerState, round: int, version: int, **kind) -> tuple[LearnerState, tuple]:
    values = kind.pop("values", not kind.get("void", False))
    fragments = state.rules.fragments
    found = news(round, version, fragments=fragments, **kind)
    return learner.committed(state, found, values=values)


def test_rounds_are_published_at_the_steps_of_the_formula_in_lock_step():
    state, published = joined(sync_every=10, fragments=4, in_flight=4, versions=(0,) * 4), []
    for step in range(1, 41):
        state, effects = train(state, 1)
        for snapshot in effects:
            published.append((snapshot.round, step))
            version = snapshot.version + 1
            state, _ = commit(state, snapshot.round, version, merged=True)
    assert published == [(r, due(r, sync_every=10, fragments=4)) for r in range(16)]


def test_a_learner_that_joined_late_is_due_a_gap_after_it_joined():
    """Counted from its own first step it would be due after eight thousand."""
    _, published = train(joined(read=1999, versions=(1000, 1000)), 4)
    assert [(snapshot.round, snapshot.version) for snapshot in published] == [(2000, 1000)]


def test_no_more_than_in_flight_rounds_are_outstanding():
    state, published = train(joined(in_flight=1), 30)
    assert [snapshot.round for snapshot in published] == [0]
    assert learner.steps_to_due(state) is None
    state, effects = commit(state, 0, 1, merged=True)
    assert [type(effect) for effect in effects] == [Drop, Align, Snapshot]
    assert [item.round for item in learner.outstanding(state)] == [1]


def test_a_fragment_is_published_again_only_after_it_was_aligned():
    state, _ = train(joined(), 8)
    state, _ = commit(state, 0, 1, merged=True, values=False)  # Read, but its values are to come.
    state, published = train(state, 20)
    assert published == []
    state, effects = commit(state, 1, 1, merged=True)
    assert not snapshots(effects)  # Round 2 is fragment 0's.
    state, effects = commit(state, 2, 2)
    assert not snapshots(effects)  # Just aligned, fragment 1 has nothing to send yet.
    assert learner.steps_to_due(state) == 1
    assert [e.round for e in train(state, 1)[1]] == [3]


def test_an_alignment_begins_the_counters_anew_and_accounts_for_the_rest():
    state, _ = train(joined(), 6)
    state, effects = commit(state, 0, 1, merged=True)
    assert effects == (
        Drop(0, 0, "overwritten", Counters(2, 16)),
        Align(0, 0, 1, overwrite(), True, Counters()),
    )
    held = state.fragments[0]
    assert held.counters == Counters()
    assert (held.ledger.merged, held.ledger.dropped, held.ledger.pending) == (
        32,
        {"overwritten": 16},
        0,
    )
    assert state.fragments[1].counters == Counters(6, 48)


@pytest.mark.parametrize(
    ("rejected", "reason"),
    [("", "late"), ("stale", "rejected"), ("zero_steps", "rejected"), ("superseded", "superseded")],
)
def test_what_was_published_and_not_merged_is_dropped_with_its_reason(rejected, reason):
    state, _ = train(joined(), 4)
    _, effects = commit(state, 0, 1, rejected=rejected)
    assert effects[0] == Drop(0, 0, reason, Counters(4, 32))


def test_a_void_round_keeps_what_was_trained_for_the_next_one():
    state, _ = train(joined(fragments=1, in_flight=1), 8)
    state, effects = commit(state, 0, 0, void=True, rejected="empty")
    assert effects == ()
    state, effects = train(state, 8)
    assert [(s.round, s.version, s.counters) for s in snapshots(effects)] == [
        (1, 0, Counters(16, 128))
    ]


def test_a_learner_that_was_not_finite_goes_back_to_its_anchor_in_every_fragment():
    """One step spreads what is not finite over all of them."""
    state, _ = train(joined(), 6)
    state, effects = commit(state, 0, 0, void=True, rejected="nonfinite")
    assert effects == (
        Drop(0, 0, "rejected", Counters(6, 48)),
        Revert(0, 0),
        Drop(0, 1, "rejected", Counters(6, 48)),
        Revert(0, 1),
    )
    assert [held.counters for held in state.fragments] == [Counters(), Counters()]


def test_what_was_sent_before_going_back_is_not_counted_when_a_void_round_does_not_list_it():
    """The parameters no longer hold it, so the next contribution must not claim it."""
    state, _ = train(joined(), 8)
    state, _ = commit(state, 0, 0, void=True, rejected="nonfinite")
    state, _ = train(state, 2)
    state, effects = commit(state, 1, 0, void=True)
    assert effects == (Drop(1, 1, "late", Counters(8, 64)),)
    assert state.fragments[1].counters == Counters(2, 16)


def test_of_skipped_versions_the_newest_is_taken_once():
    state, _ = train(joined(), 4)
    state, first = commit(state, 0, 1, merged=True, values=False)
    state, void = commit(state, 1, 0, void=True)
    state, last = commit(state, 2, 2)
    assert (first, void) == ((), ())
    assert [e for e in last if isinstance(e, Align)] == [
        Align(2, 0, 2, overwrite(), True, Counters())
    ]
    assert state.fragments[0].ledger.merged == 32


def test_a_learner_publishes_early_when_the_others_wait_for_it():
    state, _ = train(joined(), 1)
    state, _ = learner.follow(state, 0)
    assert learner.steps_to_due(state) == 1
    state, effects = train(state, 1)
    assert [(s.round, s.counters.steps) for s in snapshots(effects)] == [(0, 2)]
    state, _ = learner.follow(state, 0)  # Once more: nothing comes of it.
    assert train(state, 2)[1] == []


def test_a_call_that_covers_many_steps_publishes_every_round_it_owes():
    state, effects = learner.trained(joined(), steps=8, samples=64, last_call=8)
    assert [snapshot.round for snapshot in snapshots(effects)] == [0, 1]
    assert state.since == 0
    state, effects = learner.trained(joined(), steps=5, samples=40, last_call=5)
    assert [snapshot.round for snapshot in snapshots(effects)] == [0]
    assert state.since == 1  # One step counts for the next round.


def test_training_waits_only_under_overlap_steps():
    barrier, _ = train(joined(overlap_steps=0), 4)
    assert learner.waiting_for(barrier) == 0
    loose, _ = train(joined(overlap_steps=3), 6)
    assert learner.waiting_for(loose) is None
    assert learner.waiting_for(train(loose, 1)[0]) == 0
    free, _ = train(joined(), 500)
    assert learner.waiting_for(free) is None


def test_a_caller_that_counts_steps_is_told_when_training_has_to_wait():
    """With nothing to publish, the next thing that can happen is the end of the overlap."""
    full, _ = train(joined(overlap_steps=3, in_flight=1), 4)
    assert learner.outstanding(full)
    assert learner.steps_to_due(full) == 3
    assert learner.steps_to_due(train(full, 2)[0]) == 1
    assert learner.steps_to_due(train(joined(in_flight=1), 4)[0]) is None


@pytest.mark.parametrize("reason", ["zero_samples", "schema", "counters", "nonfinite", "empty"])
def test_a_learner_that_flushes_gives_up_what_is_rejected(reason):
    """Or it would send it again after every void round, for ever."""
    state, _ = train(joined(fragments=1, in_flight=1), 3)
    state, effects = learner.finish(state, flush=True)
    assert [(s.round, s.final) for s in snapshots(effects)] == [(0, True)]
    state, effects = commit(state, 0, 0, void=True, rejected=reason)
    assert effects == (Drop(0, 0, "rejected", Counters(3, 24)), Revert(0, 0))
    assert learner.done(state)


def test_flushing_publishes_every_fragment_that_has_anything():
    state, _ = train(joined(), 5)  # Round 0 went out at step 4.
    state, effects = learner.finish(state, flush=True)
    assert [(s.round, s.fragment, s.counters.steps) for s in snapshots(effects)] == [(1, 1, 5)]
    assert not learner.done(state)
    state, _ = commit(state, 0, 1, merged=True)
    state, _ = commit(state, 1, 1, merged=True)
    assert learner.done(state)


def test_without_flushing_the_last_steps_are_dropped_as_left():
    state, _ = train(joined(), 3)
    state, effects = learner.finish(state, flush=False)
    assert effects == ()
    assert learner.done(state)
    _, effects = learner.leave(state)
    assert effects == (
        Drop(0, 0, "left", Counters(3, 24)),
        Drop(0, 1, "left", Counters(3, 24)),
    )


def test_what_is_outstanding_when_a_learner_leaves_stays_pending():
    state, _ = train(joined(), 6)
    state, effects = learner.leave(state)
    assert Drop(1, 0, "left", Counters(2, 16)) in effects
    assert state.fragments[0].ledger.pending == 32


SCRIPT = ["train", "merged", "late", "void", "nonfinite", "sick", "stranger", "apart"]
SCRIPT += ["skip", "skip merged"]


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([overwrite(), blend(0.5), blend(0.3), carry(), adaptive()]),
    st.lists(st.sampled_from(SCRIPT)),
)
def test_ledgers_and_counters_agree_whatever_happens(fragments, in_flight, setting, script):
    """Processed is what was trained; pending is what the counters say."""
    rules = {"sync_every": 4, "fragments": fragments, "in_flight": min(in_flight, fragments)}
    rules["alignment"] = setting
    state, versions = joined(**rules, versions=(0, 0, 0)), [0] * fragments
    for act in script:
        if act == "train":
            state, _ = train(state, 2)
            continue
        round = state.read + 1
        published = round in {item.round for item in learner.outstanding(state)}
        void = act in ("void", "nonfinite")
        versions[round % fragments] += not void
        state, _ = commit(
            state,
            round,
            versions[round % fragments],
            void=void,
            merged=act in ("merged", "skip merged") and published,
            rejected="nonfinite" if act in ("nonfinite", "sick") and published else "",
            stranger=act == "stranger",
            cosine=0.1 if act == "apart" else 0.9,
            values=not void and act not in ("skip", "skip merged"),
        )
        for held in state.fragments:
            assert held.ledger.processed == state.steps * 8
            assert held.ledger.pending == held.counters.samples >= 0
            assert held.counters.steps >= 0
            assert (held.counters.steps > 0) == (held.counters.samples > 0)
        assert len(learner.outstanding(state)) <= state.rules.in_flight


@given(st.lists(st.booleans(), max_size=60))
def test_counting_calls_together_changes_nothing(commits):
    """The caller skips the machine until something can be due (`steps_to_due`)."""
    eager = lazy = joined()
    held_back, published = 0, []
    for arrived in commits:
        eager, effects = train(eager, 1)
        held_back += 1
        early = learner.steps_to_due(lazy)
        if arrived or (early is not None and held_back >= early):
            lazy = learner.counted(lazy, steps=held_back, samples=8 * held_back)
            lazy, more = learner.trained(lazy, steps=0, samples=0)
            assert tuple(more) == tuple(effects)
            held_back = 0
        else:
            assert not effects
        published += effects
        if arrived and learner.outstanding(eager):
            round = eager.read + 1
            version = eager.fragments[round % 2].version + 1
            eager, _ = commit(eager, round, version, merged=True)
            lazy, _ = commit(lazy, round, version, merged=True)
