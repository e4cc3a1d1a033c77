"""Whole runs under a virtual clock: drawn from seeds, and set up to show one thing each.

`JDILOCO_SEEDS=17 pytest tests/protocol/test_simulation.py -k seed -s` replays a seed and prints its
history; `JDILOCO_SEEDS=3-9` replays several.
"""

from __future__ import annotations

import dataclasses
import os
from itertools import pairwise

import pytest

from jdiloco import events
from jdiloco.protocol import keys, schedule
from jdiloco.protocol.alignment import Overwrite, carry, overwrite
from jdiloco.testing import invariants
from jdiloco.testing import simulate as simulation
from jdiloco.testing.simulate import history as told

Death, Faults, Plan = simulation.Death, simulation.Faults, simulation.Plan
Fate, Held, Snapped, Worked = told.Fate, told.Held, told.Snapped, told.Worked
scenario, simulate = simulation.scenario, simulation.simulate
Facts, broken = invariants.Facts, invariants.broken

POLL = 0.5
LEASE = 6.0
FEW_POLLS = 6 * POLL

ASKED_FOR = os.environ.get("JDILOCO_SEEDS", "")


def seeds() -> range:
    first, _, last = ASKED_FOR.partition("-")
    return range(int(first), int(last or first) + 1) if ASKED_FOR else range(200)


def run(described: simulation.Scenario) -> tuple[told.History, invariants.Facts]:
    """A run that has every property, and what came to lie in its mailbox."""
    history = simulate(described)
    found = broken(history)
    assert not found, "\n".join(map(str, (*found, history)))
    return history, Facts(history)


def names(*nodes: str, **settings) -> tuple[simulation.Plan, ...]:
    return tuple(Plan(node=node, **settings) for node in nodes)


def later(*nodes: str, **settings) -> tuple[simulation.Plan, ...]:
    """Nodes that start once another has created the run, and is the closer of round 0."""
    return names(*nodes, starts=1.0, **settings)


def when(history: told.History, kind: str, who: str) -> float:
    """When something first befell a process."""
    return next(e.at for e in history.of(Fate) if e.kind == kind and e.who == who)


def gaps(facts: invariants.Facts) -> list[float]:
    """Seconds between one record and the next."""
    puts = [facts.record_puts[record.round].at for record in facts.in_order]
    return [later - earlier for earlier, later in pairwise(puts)]


# Seeds


@pytest.mark.parametrize("seed", seeds())
def test_every_property_holds_whatever_goes_wrong(seed):
    history = simulate(seed)
    if ASKED_FOR:
        print(history)
    found = broken(history)
    assert not found, "\n".join(map(str, found))


MANY = range(200, 2000)
BATCH = 50


@pytest.mark.long
@pytest.mark.parametrize("first", MANY[::BATCH])
def test_every_property_holds_in_many_more_runs(first):
    """`JDILOCO_SEEDS=<seed>` replays one that does not."""
    wrong = [
        f"seed {seed}: {violation}"
        for seed in range(first, first + BATCH)
        for violation in broken(simulate(seed))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_seed_gives_one_history():
    assert str(simulate(3)) == str(simulate(3))
    assert str(simulate(3)) != str(simulate(4))


def test_drawn_runs_meet_what_they_are_for():
    """Otherwise the seeds would prove nothing about it."""
    met: set[str] = set()
    for seed in range(60):
        history = simulate(seed)
        facts = Facts(history)
        met |= {f"fate {entry.kind}" for entry in history.of(Fate)}
        met |= {f"ended {e.detail.split(':')[0]}" for e in history.of(Fate) if e.kind == "ended"}
        met |= {f"dropped {event.reason}" for event in history.events(events.Dropped)}
        met |= {f"took over: {event.because}" for event in history.events(events.TookOver)}
        met |= {f"rejected {r.reason}" for record in facts.in_order for r in record.rejected}
        met |= {f"void {record.void}" for record in facts.in_order}
        alignment = type(history.scenario.rules.alignment).__name__
        met |= {f"{alignment} {event.how}" for event in history.events(events.Aligned)}
        met |= {f"all final {all(p.final for p in r.participants)}" for r in facts.in_order}
    assert met >= {
        "fate killed",
        "fate paused",
        "ended NodeSuperseded",
        "ended NodeIdInUse",
        "dropped late",
        "dropped left",
        "dropped overwritten",
        "dropped rejected",
        "took over: its lease has ended",
        "took over: the round is overdue",
        "rejected nonfinite",
        "void True",
        "Overwrite overwrite",
        "Blend blend",
        "Blend overwrite",
        "Carry carry",
        "Carry overwrite",
        "Adaptive carry",
        "Adaptive overwrite",
        "all final True",
    }


# Closing


def test_a_closer_that_dies_between_payload_and_record_is_replaced_and_the_round_commits_once():
    """B56: within a lease timeout and a few polls."""
    death = Death(before="0000000003.0")
    history, facts = run(scenario(Plan(node="a", deaths=(death,)), *later("b", "c"), quorum_size=2))
    died = when(history, "killed", "a#1")
    record = facts.records[3]
    assert record.closer in ("b", "c")
    assert facts.record_puts[3].at - died <= LEASE + FEW_POLLS
    assert any("0000000003.a." in key and key.endswith("anchor") for key in facts.puts)


def test_a_closer_that_is_passed_over_goes_on_and_one_record_wins():
    """B40: two nodes believe that they close, with different payloads, in every order."""
    for seed in range(20):
        slow = Plan(node="a", merge_seconds=6.0 + 0.05 * seed)
        history, facts = run(scenario(slow, *later("b"), quorum_size=2, seed=seed))
        assert history.events(events.TookOver)
        both = {key.split(".")[1] for key in facts.puts if "/data/0000000000." in key}
        assert both == {"a", "b"}


@pytest.mark.parametrize("seed", range(5))
def test_updates_are_written_and_removed_with_the_other_payloads_of_their_attempt(seed):
    """Of attempts that lost to another, and of versions that newer ones have replaced."""
    slow = Plan(node="a", merge_seconds=6.0 + 0.05 * seed, steps=60)
    settings = {"updates": True, "checkpoint_every": 1, "quorum_size": 2, "seed": seed}
    history, facts = run(scenario(slow, *later("b", steps=60), **settings))
    assert history.events(events.TookOver)
    for written in (facts.puts, history.objects):
        found = [parsed for key in written if (parsed := facts.keys.parse_payload(key))]
        attempts = {attempt for _, attempt, _ in found}
        for part in ("anchor", "outer", "update"):
            assert {attempt for _, attempt, its in found if its == part} == attempts
        assert attempts
    assert all(record.update is not None for record in facts.in_order if not record.void)


def test_clocks_that_are_hours_apart_change_nothing():
    """B57."""
    here = names("a", "b", "c")
    there = tuple(Plan(node=n, clock=c * 3600.0) for n, c in (("a", 5), ("b", 1), ("c", 999)))
    faults = Faults(fail=0.03, lose=0.03, stale=0.05, until=15.0)
    settings = {"grace_seconds": 0.5, "faults": faults, "seed": 4}
    same = run(scenario(*here, **settings))[0]
    assert str(same) == str(run(scenario(*there, **settings))[0])


def test_an_outage_longer_than_the_lease_ends_nobodys_lease_and_training_goes_on():
    plans = (Plan(node="a", steps=80), *later("b", "c", steps=80))
    history, facts = run(scenario(*plans, outages=((10.0, 10.0 + 3 * LEASE),), quorum_size=3))
    over = min(worked.at for worked in history.of(Worked))
    before = [r for r in facts.in_order if facts.record_puts[r.round].at < over]
    assert {record.closer for record in before} == {"a"}
    for worked in history.of(Worked):
        assert worked.seconds - worked.asleep == pytest.approx(80 * 0.5, abs=0.1)
    for node in ("a", "b", "c"):
        assert history.events(events.Degraded, node)
        assert history.events(events.Recovered, node)
    after = [r for r in before if facts.record_puts[r.round].at > 10.0 + 3 * LEASE + 4]
    assert after
    assert all(len(record.participants) == 3 for record in after)


def test_a_learner_that_hangs_delays_the_others_by_one_lease_timeout():
    """L2, after which rounds go on without it; it takes part again when it wakes up."""
    hung = Plan(node="b", steps=60, hangs=((10, 20.0),))
    _, facts = run(scenario(*names("a", "c", steps=100), hung, quorum_size=3, follow=0))
    assert max(gaps(facts)) <= 2.0 + LEASE + 2 * 2.0 + FEW_POLLS  # A gap, a lease, two beats.
    without = [r for r in facts.in_order if {p.node for p in r.participants} == {"a", "c"}]
    assert len(without) >= 4
    last_of_b = max(r.round for r in facts.in_order if "b" in {p.node for p in r.participants})
    assert last_of_b > max(r.round for r in without if r.round < last_of_b)


def test_a_round_of_contributions_that_are_not_finite_is_void_and_the_next_one_works():
    """B63: the version stays, and what the learners held before is what they go on from."""
    plans = names("a", "b", nan_steps=(9,))
    _, facts = run(scenario(*plans, fragments=1, in_flight=1, overlap_steps=0, quorum_size=2))
    void = [record for record in facts.in_order if record.void]
    assert [record.round for record in void] == [1]
    assert [r.reason for r in void[0].rejected] == ["nonfinite", "nonfinite"]
    assert [r.versions[0] for r in facts.in_order[:4]] == [1, 1, 2, 3]
    assert len(facts.records[2].participants) == 2


def test_a_learner_that_is_not_finite_alone_is_rejected_and_changes_nothing_for_the_others():
    """B08, S8."""
    sick = Plan(node="b", nan_steps=(9,))
    plans = (*names("a", "c"), sick)
    _, facts = run(scenario(*plans, fragments=1, in_flight=1, overlap_steps=0, quorum_size=3))
    record = facts.records[1]
    assert [p.node for p in record.participants] == ["a", "c"]
    assert [(r.node, r.reason) for r in record.rejected] == [("b", "nonfinite")]
    assert [p.node for p in facts.records[2].participants] == ["a", "b", "c"]


# Taking part


@pytest.mark.parametrize("step", range(0, 21, 2))
def test_a_node_that_joins_at_any_step_meets_the_current_round(step):
    """B27."""
    late = Plan(node="b", starts=3.0 + 0.5 * step)
    history, facts = run(
        scenario(Plan(node="a", steps=60), late, sync_every=4, quorum_size=2, follow=0)
    )
    joined = when(history, "joined", "b#1")
    first = min(entry.key.round for entry in history.of(Snapped) if entry.key.node == "b")
    open_then = max([r for r, put in facts.record_puts.items() if put.at < joined], default=-1) + 1
    assert open_then <= first <= open_then + 2
    met = [r.round for r in facts.in_order if {"a", "b"} == {p.node for p in r.participants}]
    assert len(met) >= 10


@pytest.mark.parametrize(("quorum_size", "share"), [(1, 0.2), (2, 0.9)])
def test_a_node_of_half_the_speed_takes_part_until_the_end(quorum_size, share):
    """Counted from its own first step its rounds would fall due later and later, then never."""
    slow = Plan(node="b", steps=66, step_seconds=0.91)
    plans = (Plan(node="a", steps=120), slow)
    history, facts = run(scenario(*plans, quorum_size=quorum_size, follow=0))
    over = min(worked.at for worked in history.of(Worked))
    before = [r for r in facts.in_order if facts.record_puts[r.round].at < over]
    with_b = [r for r in before if "b" in {p.node for p in r.participants}]
    assert len(with_b) >= share * len(before)
    assert with_b[-1].round >= before[-1].round - 4


@pytest.mark.parametrize(("setting", "least"), [(carry(), 0.95), (overwrite(), 0.0)], ids=str)
def test_nodes_of_unlike_speed_account_for_every_sample_and_carrying_loses_next_to_none(
    setting, least
):
    """B60: speeds 1.0 and 1.9. Overwriting merges about two thirds here."""
    plans = (
        Plan(node="slow", steps=120, step_seconds=1.0, leave_with_run=True),
        Plan(node="fast", steps=228, step_seconds=1 / 1.9, leave_with_run=True),
    )
    history, _ = run(scenario(*plans, alignment=setting))
    ends = {event.node: event for event in history.events(events.Left)}
    for plan in plans:
        end = ends[plan.node]
        assert end.processed == plan.steps * 8 == end.merged + end.dropped + end.pending
        assert end.merged >= least * end.processed
    if isinstance(setting, Overwrite):
        assert max(end.merged / end.processed for end in ends.values()) < 0.8


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.7, 1.1])
def test_a_learner_exactly_half_as_fast_is_in_nearly_every_round_by_default(offset):
    """It keeps step with the others, and would always come a moment late but for the grace."""
    slow = Plan(node="b", steps=60, step_seconds=1.0, starts=1.0 + offset)
    _, facts = run(scenario(*names("a", "c", steps=120), slow))
    during = [r for r in facts.in_order if 10.0 < facts.record_puts[r.round].at < 55.0]
    with_b = [r for r in during if "b" in {p.node for p in r.participants}]
    assert len(with_b) >= 0.75 * len(during)


def test_a_node_that_comes_a_hundred_seconds_later_finds_the_first_still_training():
    """B46: nobody waits for one that has not come, and every sample is accounted for (S7)."""
    plans = (Plan(node="a", steps=280), Plan(node="b", steps=60, starts=100.0))
    history, facts = run(scenario(*plans, quorum_size=2, round_seconds=60.0))
    assert not [e for e in history.of(Fate) if e.kind == "ended" and e.detail != "finished"]
    came = when(history, "joined", "b#1")
    before = [r for r in facts.in_order if facts.record_puts[r.round].at < came]
    assert {p.node for r in before for p in r.participants} == {"a"}
    assert any({p.node for p in r.participants} == {"a", "b"} for r in facts.in_order)


def test_of_two_that_would_take_over_at_the_same_moment_one_does():
    """B48: the claim that lies there decides, the same for everybody."""
    first = Plan(node="a", steps=200, deaths=(Death(at=9.0),))
    for seed in range(8):
        twins = later("b", "c", steps=60)
        history, facts = run(scenario(first, *twins, quorum_size=3, seed=seed))
        claims = [(event.round, event.claim) for event in history.events(events.TookOver)]
        assert claims
        assert len(claims) == len(set(claims))
        assert facts.in_order[-1].closer in ("b", "c")


def test_standard_diloco_follows_the_formula_in_lock_step():
    settings = {"fragments": 1, "in_flight": 1, "overlap_steps": 0, "quorum_size": 3}
    history, facts = run(scenario(*names("a", "b", "c"), **settings))
    assert len(facts.in_order) == 40 // 8
    for record in facts.in_order:
        assert [p.node for p in record.participants] == ["a", "b", "c"]
        for who in record.participants:
            found = facts.delta(record, who)
            assert found is not None
            assert found[1].head.position == schedule.due(record.round, sync_every=8, fragments=1)
    assert not history.events(events.Dropped)


def test_the_steps_since_the_last_round_are_merged_when_the_run_flushes_and_dropped_when_not():
    """B30."""
    plans = names("a", "b", steps=10, leave_with_run=True)
    settings = {"sync_every": 4, "fragments": 1, "in_flight": 1, "overlap_steps": 0}
    history, facts = run(scenario(*plans, **settings, quorum_size=2, flush=True))
    assert [p.counters.steps for p in facts.in_order[-1].participants] == [2, 2]
    assert all(p.final for p in facts.in_order[-1].participants)
    held = {entry.who: entry.value for entry in history.of(Held)}
    assert held["a#1"] == held["b#1"] == facts.value(facts.in_order[-1], 0)

    history, facts = run(scenario(*plans, **settings, quorum_size=2, flush=False))
    assert len(facts.in_order) == 2
    drops = history.events(events.Dropped)
    assert {(drop.node, drop.reason, drop.steps) for drop in drops} == {
        ("a", "left", 2),
        ("b", "left", 2),
    }


def test_a_last_round_with_fewer_learners_says_so_in_its_record():
    """B36."""
    plans = (*names("a", "b", "c", steps=16), Plan(node="d", steps=48))
    _, facts = run(scenario(*plans, fragments=1, in_flight=1, quorum_size=4))
    first, last = facts.in_order[0], facts.in_order[-1]
    assert (len(first.participants), first.expected) == (4, 4)
    assert (len(last.participants), last.expected) == (1, 1)
    assert last.closer == "d"


# Leaving


def test_when_everybody_has_finished_and_the_quorum_is_out_of_reach_all_end_within_a_few_polls():
    """B34."""
    for with_run in (False, True):
        plans = names("a", "b", steps=20, leave_with_run=with_run)
        history, _ = run(scenario(*plans, quorum_size=9, round_seconds=3600.0))
        finished = max(worked.at for worked in history.of(Worked))
        assert history.entries[-1].at - finished <= 2 * FEW_POLLS


def test_closers_that_leave_one_after_another_do_not_stop_the_others():
    plans = (Plan(node="a", steps=14), *later("b", steps=24), *later("c", steps=60))
    history, facts = run(scenario(*plans, quorum_size=3))
    assert {record.closer for record in facts.in_order} >= {"a", "c"}
    assert max(gaps(facts)) < 2.0 + LEASE  # They say that they leave: nobody waits for their lease.
    assert not [e for e in history.of(Fate) if e.kind == "ended" and e.detail != "finished"]


def test_a_node_that_cannot_close_leaves_the_closing_to_others():
    plans = (Plan(node="a"), Plan(node="b", role="learner", starts=1.0))
    _, facts = run(scenario(*plans, quorum_size=2))
    assert {record.closer for record in facts.in_order} == {"a"}


# Roles


def test_a_syncer_closes_alone_from_the_round_after_it_came():
    plans = (*names("a", "b", steps=60), Plan(node="s", role="syncer", starts=8.0, steps=999))
    plans = (*plans[:2], dataclasses.replace(plans[2], leave_with_run=True))
    history, facts = run(scenario(*plans, quorum_size=2))
    came = when(history, "joined", "s#1")
    closed = [(facts.record_puts[r.round].at, r.closer) for r in facts.in_order]
    assert {closer for at, closer in closed if at > came + 2 * 2.0 + FEW_POLLS} == {"s"}
    assert not history.events(events.TookOver)
    assert not history.events(events.Dropped, "s")


def test_a_syncer_that_dies_delays_one_round_by_one_lease_timeout():
    """B56 for a node that only closes."""
    syncer = Plan(node="s", role="syncer", steps=999, deaths=(Death(at=15.0),))
    history, facts = run(scenario(*names("a", "b", steps=80), syncer, quorum_size=2))
    assert max(gaps(facts)) <= 2.0 + LEASE + 2.0 + FEW_POLLS
    assert {r.closer for r in facts.in_order[-4:]} <= {"a", "b"}
    assert history.events(events.TookOver)[0].because == "its lease has ended"


def test_a_syncer_whose_closing_hangs_is_passed_over_and_not_named_for_a_while():
    """It beats, so its lease lives; each round that it was named for would wait anew."""
    syncer = Plan(node="s", role="syncer", steps=999, stuck=12.0, leave_with_run=True)
    history, facts = run(scenario(*names("a", "b", steps=120), syncer, quorum_size=2))
    assert history.events(events.TookOver)[0].closer.startswith("s.")
    over = min(worked.at for worked in history.of(Worked))
    late = [r for r in facts.in_order if 20.0 < facts.record_puts[r.round].at < over]
    assert len(late) >= 15
    named = [r.round for r in late if r.next_closer == "s"]
    assert len(named) <= 2


def test_of_two_syncers_one_closes_and_the_other_follows_when_it_dies():
    first = Plan(node="s", role="syncer", steps=999, deaths=(Death(at=15.0),))
    second = Plan(node="t", role="syncer", starts=5.0, steps=999, leave_with_run=True)
    learners = names("a", "b", steps=80, role="learner")
    _, facts = run(scenario(first, second, *learners, quorum_size=2))
    order = [r.closer for r in facts.in_order]
    assert set(order) == {"s", "t"}
    assert order == sorted(order)
    assert max(gaps(facts)) <= 2.0 + LEASE + 2.0 + FEW_POLLS


def test_learners_that_created_a_run_get_their_records_as_soon_as_a_closer_comes():
    learners = names("a", "b", steps=60, role="learner")
    syncer = Plan(node="s", role="syncer", starts=14.0, steps=999, leave_with_run=True)
    history, facts = run(scenario(*learners, syncer, quorum_size=2))
    first = facts.record_puts[0].at
    assert when(history, "joined", "s#1") < first < when(history, "joined", "s#1") + FEW_POLLS
    assert {r.closer for r in facts.in_order} == {"s"}


def test_an_either_node_trains_only_while_nobody_else_would():
    """It stops when another learner trains, and goes on when that one has finished."""
    plans = (Plan(node="a", role="either", steps=60), *later("b", steps=40, role="learner"))
    history, facts = run(scenario(*plans, quorum_size=2))
    paused, resumed = history.events(events.Paused, "a"), history.events(events.Resumed, "a")
    assert len(paused) == len(resumed) == 1
    assert resumed[0].because == "no other learner trains"
    between = [r for r in facts.in_order if paused[0].round + 2 < r.round < resumed[0].round - 1]
    assert len(between) >= 5
    assert {p.node for r in between for p in r.participants} == {"b"}
    assert {r.closer for r in between} == {"a"}
    assert facts.in_order[-1].participants[0].node == "a"


def test_an_either_node_goes_on_when_a_syncer_comes():
    plans = (Plan(node="a", role="either", steps=60), *later("b", steps=60, role="learner"))
    syncer = Plan(node="s", role="syncer", starts=12.0, steps=999, leave_with_run=True)
    history, _ = run(scenario(*plans, syncer, quorum_size=2))
    because = [event.because for event in history.events(events.Resumed, "a")]
    assert because[0] in ("a dedicated syncer is live", "another node closes the rounds")
    assert len(history.events(events.Paused, "a")) == 1


def test_an_either_node_goes_on_when_the_other_learner_dies():
    other = Plan(node="b", starts=1.0, role="learner", deaths=(Death(at=12.0),))
    history, facts = run(scenario(Plan(node="a", role="either", steps=60), other, quorum_size=2))
    assert [event.because for event in history.events(events.Resumed)] == [
        "no other learner trains"
    ]
    assert max(gaps(facts)) <= 2.0 + LEASE + 2 * 2.0 + FEW_POLLS + 2.0


# Creating


def test_two_nodes_that_start_at_once_train_one_run():
    for seed in range(20):
        history, facts = run(scenario(*names("a", "b", "c"), seed=seed, latency_seconds=0.1))
        assert len(history.events(events.RunCreated)) == 1
        assert {p.node for r in facts.in_order for p in r.participants} == {"a", "b", "c"}


def test_a_creator_that_dies_half_way_is_followed_by_the_next_after_its_lease():
    death = Death(before=keys.MANIFEST)
    plans = (Plan(node="a", deaths=(death,)), Plan(node="b", starts=0.1))
    history, facts = run(scenario(*plans))
    died = when(history, "killed", "a#1")
    assert [event.node for event in history.events(events.RunCreated)] == ["b"]
    assert LEASE <= facts.puts[keys.MANIFEST].at - died + 0.5 <= LEASE + FEW_POLLS


def test_a_node_that_sleeps_for_longer_than_its_lease_takes_part_again():
    """Nothing it was about to do when it fell asleep does harm, closing included."""
    for at in (5.0, 6.3, 7.1, 8.0, 9.9):
        sleeper = Plan(node="a", steps=80, pauses=((at, 3 * LEASE),))
        history, facts = run(scenario(sleeper, *names("b", steps=80), quorum_size=2))
        assert any(event.node == "b" for event in history.events(events.TookOver))
        newest = [r for r in facts.in_order if facts.record_puts[r.round].at > at + 3 * LEASE + 4]
        assert any("a" in {p.node for p in record.participants} for record in newest)


def test_the_older_of_two_lives_stops_and_nothing_is_merged_twice():
    twin = Plan(node="b", steps=80, pauses=((6.0, 14.0),), again=(7.0,))
    history, facts = run(scenario(Plan(node="a", steps=80), twin))
    ends = {entry.who: entry.detail for entry in history.of(Fate) if entry.kind == "ended"}
    assert ends["b#1"].startswith("NodeSuperseded")
    assert ends["b#2"] == "finished"
    lives = {p.incarnation for r in facts.in_order for p in r.participants if p.node == "b"}
    assert 2 in lives
