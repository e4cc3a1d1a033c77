"""What a learner keeps of its training when a commit arrives."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

import jdiloco
from jdiloco.errors import RunConfigMismatch, UsageError
from jdiloco.protocol import alignment, learner
from jdiloco.protocol.alignment import adaptive, agrees, blend, carry, kept, overwrite
from jdiloco.protocol.learner import Align, Drop, News, Revert
from jdiloco.types import Counters

from .test_learner import ME, commit, joined, snapshots, train
from .test_records import record

LATE = {"merged": False}


def of(kind: type, effects) -> list:
    return [effect for effect in effects if isinstance(effect, kind)]


def aligned(effects) -> Align:
    (found,) = of(Align, effects)
    return found


# Settings


@pytest.mark.parametrize(
    ("setting", "plain"),
    [
        (overwrite(), {"kind": "overwrite"}),
        (blend(0.5), {"kind": "blend", "mixing": 0.5}),
        (carry(), {"kind": "carry"}),
        (adaptive(), {"kind": "adaptive", "carry_above": 0.6, "overwrite_below": 0.4}),
    ],
)
def test_a_setting_goes_into_the_manifest_as_plain_values(setting, plain):
    made = jdiloco.DiLoCo(sync_every=50, fragments=2, alignment=setting)
    assert made.to_json()["alignment"] == plain
    assert made.rules().alignment == setting
    made.check_against(json.loads(json.dumps(made.to_json())))


def test_the_default_overwrites():
    assert jdiloco.DiLoCo(sync_every=50, fragments=2).alignment == jdiloco.overwrite()


def test_nodes_of_one_run_align_alike():
    there = jdiloco.DiLoCo(sync_every=50, fragments=2, alignment=jdiloco.blend(0.5))
    here = jdiloco.DiLoCo(sync_every=50, fragments=2, alignment=jdiloco.blend(0.25))
    with pytest.raises(RunConfigMismatch, match=r"mixing=0.5., this node blend.mixing=0.25"):
        here.check_against(there.to_json())


@pytest.mark.parametrize("mixing", [0, 1, 1.5, -0.5, float("nan"), "half", None, True])
def test_a_mixing_that_is_no_share_is_refused(mixing):
    with pytest.raises(UsageError, match="`mixing` must be"):
        blend(mixing)


@pytest.mark.parametrize(
    ("above", "below"), [(0.4, 0.6), (1.1, 0.4), (0.6, -1.1), (float("nan"), 0.0), ("x", 0.0)]
)
def test_thresholds_that_are_no_cosines_in_order_are_refused(above, below):
    with pytest.raises(UsageError, match="carry_above"):
        adaptive(above, below)


def test_numpys_numbers_become_plain_ones():
    assert alignment.to_json(blend(np.float64(0.5))) == {"kind": "blend", "mixing": 0.5}
    assert type(blend(np.float64(0.5)).mixing) is float


@pytest.mark.parametrize("value", ["carry", None, carry, jdiloco.rda()])
def test_what_is_no_alignment_is_refused(value):
    with pytest.raises(UsageError, match=r"`alignment` must be `overwrite\(\)`"):
        alignment.check_alignment(value)


# Shares


@pytest.mark.parametrize(
    ("mixing", "rest", "left"),
    [
        (0.5, (4, 32), (2, 16)),
        (0.5, (5, 33), (2, 16)),
        (0.3, (10, 100), (3, 30)),  # As floating point 0.3 is a little less.
        (0.9, (1, 8), (0, 0)),  # No whole step: samples without steps would weigh too much.
        (0.5, (4, 1), (0, 0)),  # No whole sample: steps without samples weigh nothing.
        (0.5, (0, 0), (0, 0)),
        (0.1, (10 * 2**53, 10 * 2**53), (2**53, 2**53)),
    ],
)
def test_blending_keeps_a_share_rounded_down_of_steps_and_samples(mixing, rest, left):
    assert kept(blend(mixing), Counters(*rest)) == Counters(*left)


# Carrying


def test_carrying_keeps_what_was_trained_since_the_snapshot():
    state, _ = train(joined(alignment=carry()), 6)
    state, effects = commit(state, 0, 1, merged=True)
    assert effects == (Align(0, 0, 1, carry(), True, Counters(2, 16)),)
    held = state.fragments[0]
    assert held.counters == Counters(2, 16)
    assert (held.ledger.merged, held.ledger.dropped, held.ledger.pending) == (32, {}, 16)


@pytest.mark.parametrize("rejected", ["", "zero_samples", "schema"])
def test_carrying_keeps_what_came_too_late_or_was_rejected(rejected):
    """Nothing was merged, so the rest counts from the old anchor and goes out again."""
    state, _ = train(joined(alignment=carry()), 6)
    state, effects = commit(state, 0, 1, rejected=rejected)
    assert effects == (Align(0, 0, 1, carry(), False, Counters(6, 48)),)
    assert state.fragments[0].ledger.pending == 48
    state, _ = commit(state, 1, 1)
    state, effects = train(state, 4)
    assert [(s.round, s.version, s.counters) for s in snapshots(effects)] == [
        (2, 1, Counters(8, 64))
    ]


def test_a_learner_that_sent_nothing_carries_from_its_anchor():
    state, _ = train(joined(alignment=carry()), 2)
    _, effects = commit(state, 0, 1)
    assert effects == (Align(0, 0, 1, carry(), False, Counters(2, 16)),)


def test_with_nothing_trained_since_carrying_overwrites():
    state, _ = train(joined(alignment=carry()), 4)
    _, effects = commit(state, 0, 1, merged=True)
    assert aligned(effects).how == overwrite()


def test_of_skipped_versions_the_one_that_merged_decides_what_the_rest_is():
    """A record is read though its values are skipped."""
    state, _ = train(joined(alignment=carry()), 6)
    state, first = commit(state, 0, 1, merged=True, values=False)
    state, _ = train(state, 1)
    state, _ = commit(state, 1, 1)
    state, last = commit(state, 2, 2)
    assert first == ()
    assert aligned(last) == Align(2, 0, 2, carry(), True, Counters(3, 24))
    assert state.fragments[0].ledger.dropped == {}


def test_a_late_contribution_is_pending_until_its_fragment_is_aligned():
    for setting, lost in (
        (carry(), []),
        (overwrite(), [Drop(0, 0, "late", Counters(4, 32)), Drop(2, 0, "overwritten", rest(3))]),
        (blend(0.5), [Drop(2, 0, "overwritten", Counters(4, 28))]),
    ):
        state, _ = train(joined(alignment=setting), 6)
        state, effects = commit(state, 0, 1, values=False)
        assert effects == ()
        assert state.fragments[0].ledger.pending == 48
        state, _ = train(state, 1)
        state, _ = commit(state, 1, 1)
        state, effects = commit(state, 2, 2)
        assert of(Drop, effects) == lost
        assert state.fragments[0].ledger.processed == 56


def rest(steps: int) -> Counters:
    return Counters(steps, 8 * steps)


def test_a_learner_that_leaves_before_it_aligns_tells_what_was_late_from_what_is_left():
    state, _ = train(joined(alignment=carry()), 6)
    state, _ = commit(state, 0, 1, values=False)
    _, effects = learner.leave(state)
    assert [e for e in effects if e.fragment == 0] == [
        Drop(0, 0, "late", rest(4)),
        Drop(1, 0, "left", rest(2)),
    ]


def test_a_learner_that_finishes_sends_again_what_was_late_and_gives_up_what_was_rejected():
    """Or it would send that again after every round, for as long as the others train."""
    state, _ = train(joined(fragments=1, in_flight=1, alignment=carry()), 8)
    state, _ = learner.finish(state, flush=True)
    state, effects = commit(state, 0, 1)
    assert [(s.round, s.final, s.counters) for s in snapshots(effects)] == [(1, True, rest(8))]
    state, effects = commit(state, 1, 2)
    assert [(s.round, s.final, s.counters) for s in snapshots(effects)] == [(2, True, rest(8))]
    state, effects = commit(state, 2, 3, rejected="zero_samples")
    assert effects == (
        Drop(2, 0, "rejected", rest(8)),
        Align(2, 0, 3, overwrite(), False, Counters()),
    )
    assert learner.done(state)


# Overwriting whatever the setting


@pytest.mark.parametrize("setting", [blend(0.5), carry(), adaptive()])
@pytest.mark.parametrize("kind", ["stranger", "skipped", "nonfinite", "not finite"])
def test_what_is_unsound_is_overwritten_whatever_the_setting(setting, kind):
    state, _ = train(joined(alignment=setting, in_flight=1), 6)
    told = {"merged": kind != "nonfinite"}
    if kind == "nonfinite":
        told["rejected"] = "nonfinite"
    version = 3 if kind == "skipped" else 1
    found = News(0, 0, version, False, stranger=kind == "stranger", **told)
    assert learner.may_keep(state, found) == (kind == "not finite")
    state, effects = learner.committed(state, found, values=True, finite=kind != "not finite")
    assert aligned(effects).how == overwrite()
    assert state.fragments[0].counters == Counters()
    assert state.fragments[0].ledger.pending == 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_versions_are_skipped_up_to_in_flight(in_flight):
    """More of them and what would be carried is too old."""
    for skipped, how in ((in_flight, carry()), (in_flight + 1, overwrite())):
        state, _ = train(joined(in_flight=in_flight, alignment=carry()), 3)
        found = News(0, 0, 1 + skipped, False)
        assert learner.may_keep(state, found) == (how == carry())
        _, effects = learner.committed(state, found, values=True)
        assert aligned(effects).how == how


def test_a_stranger_in_a_skipped_record_counts_too():
    state, _ = train(joined(alignment=carry()), 3)
    state, _ = commit(state, 0, 1, stranger=True, values=False)
    state, _ = commit(state, 1, 1)
    _, effects = commit(state, 2, 2)
    assert aligned(effects).how == overwrite()


def test_after_going_back_the_rest_counts_from_the_anchor_though_the_snapshot_was_merged():
    """The parameters no longer hold what was sent."""
    state, _ = train(joined(alignment=carry()), 8)  # Rounds 0 and 1 are out.
    state, _ = commit(state, 0, 0, void=True, rejected="nonfinite")
    state, _ = train(state, 2)
    state, effects = commit(state, 1, 1, merged=True)
    assert effects[:1] == (Align(1, 1, 1, carry(), False, rest(2)),)
    assert state.fragments[1].ledger.merged == 64


def test_after_going_back_what_was_late_is_not_carried():
    state, _ = train(joined(alignment=carry()), 8)
    state, _ = commit(state, 0, 0, void=True, rejected="nonfinite")
    state, _ = train(state, 2)
    _, effects = commit(state, 1, 1)
    assert effects[:2] == (Drop(1, 1, "late", rest(8)), Align(1, 1, 1, carry(), False, rest(2)))


def test_who_was_not_finite_goes_back_though_the_rounds_values_are_to_come():
    state, _ = train(joined(alignment=carry()), 6)
    state, effects = commit(state, 0, 1, rejected="nonfinite", values=False)
    assert effects == (
        Drop(0, 0, "rejected", rest(4)),
        Drop(0, 0, "rejected", rest(2)),
        Revert(0, 0),
        Drop(0, 1, "rejected", rest(6)),
        Revert(0, 1),
    )
    assert state.fragments[0].ledger.pending == 0


# Blending


def test_blending_is_applied_once_however_many_versions_were_skipped():
    state, _ = train(joined(alignment=blend(0.5)), 8)
    for round in (0, 1):
        state, _ = commit(state, round, 1, merged=True, values=False)
    state, _ = train(state, 2)
    state, effects = commit(state, 2, 2)
    assert effects == (
        Drop(2, 0, "overwritten", rest(3)),
        Align(2, 0, 2, blend(0.5), True, rest(3)),
    )
    assert state.fragments[0].counters == rest(3)


# Adapting


@pytest.mark.parametrize(
    ("cosines", "carries"),
    [
        ([0.7, 0.5, 0.41, 0.3, 0.5, 0.6, 0.61, 0.4], [1, 1, 1, 0, 0, 0, 1, 1]),
        ([None, 0.5, None, 0.1, None, 0.9], [1, 1, 1, 0, 0, 1]),
    ],
)
def test_adapting_does_not_flicker_between_the_thresholds(cosines, carries):
    """A round of one participant has no pair and says nothing."""
    before, found = True, []
    for cosine in cosines:
        before = agrees(adaptive(), cosine, before=before)
        found.append(int(before))
    assert found == carries


def test_each_fragment_adapts_by_its_own_rounds_skipped_ones_included():
    state, _ = train(joined(alignment=adaptive()), 3)
    state, _ = commit(state, 0, 1, cosine=0.1, values=False)
    state, other = commit(state, 1, 1, cosine=0.5)
    state, effects = commit(state, 2, 2, cosine=0.5)
    assert aligned(other).how == carry()
    assert aligned(effects).how == overwrite()
    state, _ = train(state, 1)
    state, _ = commit(state, 3, 2, cosine=0.5)
    state, effects = commit(state, 4, 3, cosine=0.7)
    assert aligned(effects).how == carry()


def test_a_record_of_one_participant_has_no_cosine_to_go_by():
    one = record(cosine=1.0)
    other = msgspec.structs.replace(one.participants[0], node="b")
    assert News.of(one, ME).cosine is None
    assert News.of(record(participants=(*one.participants, other), cosine=0.2), ME).cosine == 0.2
