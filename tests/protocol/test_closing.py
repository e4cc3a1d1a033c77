"""The closing of one round, without time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.protocol import closing as closings
from jdiloco.protocol.closing import Closing, Phase, Report
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.lease import Verdict
from jdiloco.protocol.records import ContributionHead, Ledger
from jdiloco.protocol.rules import Life, Rules
from jdiloco.types import Counters

ME = Life("a", 1)
RULES = Rules(sync_every=8, fragments=2, quorum_size=2)
EVERYBODY = Verdict(expected=frozenset({Life("a", 1), Life("b", 1), Life("c", 1)}))
NOBODY = Verdict()


def key(node: str, *, round: int = 4, life: int = 1) -> ContributionKey:
    return ContributionKey(round, node, life, False)


def accepted(node: str) -> Report:
    head = ContributionHead("run", 4, 0, 2, node, 1, Counters(4, 32), Ledger().train(32), 4)
    return Report(key(node), asked=True, head=head, weight=1.0, sha256="s")


def rejected(node: str, reason: str = "nonfinite") -> Report:
    return Report(key(node), asked=True, rejected=reason)


def with_reports(*verdicts: Report) -> Closing:
    state = closings.reported(fresh(), [verdict.key for verdict in verdicts])
    state, _ = closings.unasked(state)
    for verdict in verdicts:
        state = closings.examined(state, verdict)
    return state


def fresh(*, can_close: bool = True, named: Life = ME) -> Closing:
    return closings.opened(4, named, ME, can_close=can_close)


def closable(state: Closing, verdict: Verdict = EVERYBODY, *, over: bool = False, **rules) -> bool:
    return closings.closable(state, dataclasses.replace(RULES, **rules), verdict, round_over=over)


def test_a_node_closes_when_it_is_named_and_able():
    assert fresh().mine
    assert not fresh(can_close=False).mine
    assert not fresh(named=Life("a", 2)).mine  # Another life of this node.


def test_contributions_are_asked_for_once_and_only_by_a_closer():
    state = closings.reported(fresh(), [key("b"), key("c")])
    state, first = closings.unasked(state)
    assert first == (key("b"), key("c"))
    assert closings.unasked(state)[1] == ()
    other = closings.reported(fresh(named=Life("b", 1)), [key("b")])
    assert closings.unasked(other)[1] == ()
    assert closings.unasked(closings.ask_again(state, key("b")))[1] == (key("b"),)


@given(st.permutations([key("a"), key("b"), key("b", life=2), key("c"), key("b", round=5)]))
def test_arrival_order_does_not_change_what_is_merged(arrivals):
    state = fresh()
    for arrival in arrivals:
        state = closings.reported(state, [arrival, arrival])
    assert [(r.key.node, r.key.incarnation) for r in state.reports] == [
        ("a", 1),
        ("b", 1),
        ("b", 2),
        ("c", 1),
    ]


def test_a_round_closes_at_its_quorum():
    assert not closable(with_reports(accepted("a")))
    assert closable(with_reports(accepted("a"), accepted("b")))
    assert not closable(with_reports(accepted("a"), rejected("b")))


def test_a_round_closes_when_nobody_else_is_to_be_waited_for():
    assert closable(with_reports(accepted("a"), rejected("b"), rejected("c")))
    assert closable(with_reports(accepted("a")), NOBODY)
    assert not closable(with_reports(accepted("a"), rejected("b")))


def test_a_round_closes_when_its_time_is_over_if_anything_was_accepted():
    assert closable(with_reports(accepted("a")), over=True)
    assert not closable(with_reports(rejected("a")), over=True)
    assert not closable(fresh(), NOBODY, over=True)


@pytest.mark.parametrize(
    ("reports", "verdict", "void"),
    [
        ([rejected("a"), rejected("b"), rejected("c")], EVERYBODY, True),
        ([rejected("a"), rejected("b")], EVERYBODY, False),  # c may still bring something.
        ([rejected("a")], NOBODY, True),
        ([rejected("a"), accepted("b")], NOBODY, False),
        ([], NOBODY, False),  # Or a lone closer would write void records for ever.
    ],
)
def test_a_round_is_void_when_all_have_reported_and_nothing_is_usable(reports, verdict, void):
    assert closings.is_void(with_reports(*reports), verdict) == void


def test_what_is_merged_is_fixed_when_merging_begins():
    state = closings.merging(with_reports(accepted("a"), accepted("b")), 7)
    state = closings.reported(state, [key("c")])
    assert closings.unasked(state)[1] == ()
    assert [report.key.node for report in state.merging] == ["a", "b"]
    assert (state.phase, state.attempt) == (Phase.MERGING, 7)


def test_a_verdict_is_given_once_and_late_ones_change_nothing():
    state = with_reports(accepted("a"))
    assert closings.examined(state, rejected("a")) == state
    assert closings.examined(state, Report(key("z"), rejected="stale")) == state
    assert closings.ask_again(state, key("a")) == state


def test_the_bytes_of_a_record_stay_the_same_through_every_doubt():
    state = closings.writing(closings.merging(with_reports(accepted("a")), 1), b"record")
    for after in (closings.doubted(state), closings.written(state)):
        assert after.record == b"record"


def test_a_closer_that_is_passed_over_goes_on():
    """Claims only save work."""
    other = Life("b", 1)
    state = closings.claimed(fresh(), 1, other, ME)
    assert (state.closer, state.mine, state.claims) == (other, True, 1)
    late = closings.claimed(state, 1, other, ME)
    assert late == state


def test_the_highest_claim_counts_in_whatever_order_claims_are_read():
    first, second = Life("b", 1), Life("c", 1)
    state = fresh(named=Life("z", 1))
    forth = closings.claimed(closings.claimed(state, 1, first, ME), 2, second, ME)
    back = closings.claimed(closings.claimed(state, 2, second, ME), 1, first, ME)
    assert forth == back
    assert forth.closer == second
