"""Shared work in whole runs: queues and ranks, and what becomes of them when nodes die."""

from __future__ import annotations

import pytest

from jdiloco.protocol.keys import Keys, Pool, UnitKey
from jdiloco.protocol.records import Incarnation, WorkClaim, WorkMark, unseal
from jdiloco.testing import invariants, simulate
from jdiloco.testing.invariants import Facts
from jdiloco.testing.simulate import Death, History, Plan, Scenario, scenario
from jdiloco.testing.simulate.history import Fate, Worked

POOL = Pool.queue("work", 6)
UNITS = (8,) * POOL.count
LEASE = 6.0


def run(described: Scenario) -> tuple[History, Facts]:
    """A run that has every property, and what came to lie in its mailbox."""
    history = simulate.simulate(described)
    found = invariants.broken(history)
    assert not found, "\n".join(map(str, (*found, history)))
    return history, Facts(history)


def sharer(node: str, **settings) -> Plan:
    return Plan(node=node, work="queue", **settings)


def claims(facts: Facts, pool: Pool = POOL) -> list[tuple[UnitKey, WorkClaim]]:
    """Every claim that was made, in order."""
    parsed = [(facts.keys.parse_unit(pool, name), name) for name in facts.puts]
    made = [(key, name) for key, name in parsed if key is not None and not key.mark]
    return [(key, unseal(name, facts.puts[name].data, WorkClaim)) for key, name in made]


def ended_by_others(facts: Facts) -> set[str]:
    """Nodes whose life somebody else has ended."""
    nodes = [name for name in facts.puts if name.startswith(f"{facts.keys.run}/node/")]
    lives = [unseal(name, facts.puts[name].data, Incarnation) for name in nodes]
    return {life.node for life in lives if life.ended_by}


def test_where_nothing_goes_wrong_nodes_take_what_is_free_and_nobody_is_ended():
    for seed in range(10):
        plans = (sharer("a"), sharer("b", step_seconds=0.9), sharer("c", starts=3.0))
        history, facts = run(scenario(*plans, seed=seed, units=UNITS))
        rows = [span for worked in history.of(Worked) for span in worked.rows]
        assert sum(span.stop - span.start for span in rows) == sum(UNITS)
        assert {key.claim for key, _ in claims(facts)} == {1}
        assert not ended_by_others(facts)


@pytest.mark.parametrize("skip", range(6))
def test_a_node_may_die_before_any_claim_or_mark(skip):
    mortal = sharer("a", deaths=(Death(before="/unit/", skip=skip),))
    history, facts = run(scenario(mortal, sharer("b", starts=1.0), units=UNITS))
    killed = [entry for entry in history.of(Fate) if entry.kind == "killed"]
    assert killed
    last = max(worked.at for worked in history.of(Worked))
    assert last - killed[0].at <= sum(UNITS) * 0.5 + 2 * LEASE
    assert {key.unit for key, _ in claims(facts)} == set(range(POOL.count))


def test_the_unit_of_a_dead_node_goes_on_after_what_it_published():
    mortal = sharer("a", deaths=(Death(at=7.2),))
    _, facts = run(scenario(mortal, sharer("b", starts=1.0), units=UNITS))
    taken = [(key, claim) for key, claim in claims(facts) if key.claim == 2]
    assert [claim.node for _, claim in taken] == ["b"]
    assert 0 < taken[0][1].begin < UNITS[0]
    assert ended_by_others(facts) == {"a"}


def test_a_node_that_is_started_again_takes_up_its_own_units():
    death = Death(at=5.2, back_after=0.5)
    _, facts = run(scenario(sharer("a", deaths=(death,)), sharer("b", starts=1.0), units=UNITS))
    again = [claim for key, claim in claims(facts) if key.claim == 2]
    assert {(claim.node, claim.incarnation) for claim in again} == {("a", 2)}
    assert not ended_by_others(facts)


def test_a_node_that_wakes_up_after_its_work_was_taken_over_stops():
    sleeper = sharer("a", pauses=((5.0, 2 * LEASE),))
    history, facts = run(scenario(sleeper, sharer("b", starts=1.0), units=(30, 30)))
    ends = {entry.who: entry.detail for entry in history.of(Fate) if entry.kind == "ended"}
    assert ends["a#1"].startswith("NodeSuperseded: There is an incarnation 2 of node 'a'")
    assert ends["b#1"] == "finished"
    assert ended_by_others(facts) == {"a"}


def test_a_node_that_leaves_in_the_middle_gives_back_what_it_has_published():
    """Nothing is trained a second time, for it publishes first; nobody has to end its life."""
    quitter = sharer("a", quits=11)
    history, facts = run(scenario(quitter, sharer("b", starts=1.0), units=UNITS))
    backs = [name for name in facts.puts if name.endswith(".back")]
    mark = unseal(backs[0], facts.puts[backs[0]].data, WorkMark)
    assert len(backs) == 1
    assert (mark.node, mark.batches) == ("a", 3)
    assert [claim.begin for key, claim in claims(facts) if key.claim == 2] == [3]
    assert not ended_by_others(facts)
    rows = [span for worked in history.of(Worked) for span in worked.rows]
    assert sum(span.stop - span.start for span in rows) == sum(UNITS)


def test_an_outage_longer_than_the_lease_makes_nobody_take_anything_over():
    plans = (sharer("a"), sharer("b", starts=0.5), sharer("c", starts=1.0))
    settings = {"outages": ((4.0, 4.0 + 3 * LEASE),), "units": (20, 20, 20)}
    _, facts = run(scenario(*plans, **settings))
    assert not ended_by_others(facts)
    assert {key.claim for key, _ in claims(facts)} == {1}


def test_rounds_do_not_wait_for_a_node_that_has_nothing_to_train():
    """With `overlap_steps=0` and a quorum of all, whoever trains would stand still for ever."""
    fast, slow = sharer("a", step_seconds=0.2), sharer("b", step_seconds=2.0)
    settings = {"overlap_steps": 0, "quorum_size": 2, "fragments": 1, "in_flight": 1}
    history, _ = run(scenario(fast, slow, units=(4, 24), **settings))
    trained = {worked.who: worked for worked in history.of(Worked)}
    assert trained["b#1"].seconds <= 24 * 2.0 + 2 * LEASE


def test_what_is_trained_last_is_published_though_no_round_is_due():
    """Each would wait for the other to say that its last unit is complete."""
    plans = (sharer("a"), sharer("b", starts=0.5))
    history, _ = run(scenario(*plans, units=(3, 3), sync_every=40))
    assert history.ended
    assert history.entries[-1].at < 20.0


def test_ranks_are_disjoint_and_a_spare_node_goes_on_with_that_of_a_dead_one():
    plans = tuple(Plan(node=node, work="rank", starts=0.2 * i) for i, node in enumerate("abc"))
    mortal = Plan(node="d", work="rank", starts=1.0, deaths=(Death(at=9.0),))
    spare = Plan(node="e", work="rank", starts=3.0)
    history, facts = run(scenario(*plans, mortal, spare, ranks=(40,) * 4))
    made = claims(facts, Pool.ranks(4))
    taken = {claim.node: key.unit for key, claim in made if key.claim == 1}
    assert sorted(taken.values()) == [0, 1, 2, 3]
    (key, claim) = next((key, claim) for key, claim in made if key.claim == 2)
    assert (key.unit, claim.node) == (taken["d"], "e")
    assert claim.begin > 0
    streams = {worked.who: {span.stream for span in worked.rows} for worked in history.of(Worked)}
    assert streams["e#1"] == {Pool.ranks(4).unit(key.unit)}


def test_drawn_runs_meet_what_shared_work_is_for():
    """Otherwise the seeds would prove nothing about it."""
    met: set[str] = set()
    for seed in range(90):
        drawn = simulate.draw(seed)
        if not drawn.units and not drawn.ranks:
            continue
        history = simulate.simulate(drawn)
        facts = Facts(history)
        met |= {plan.work for plan in drawn.nodes}
        met |= {"ended by others"} if ended_by_others(facts) else set()
        met |= {name.rpartition(".")[2] for name in facts.puts if "/unit/" in name}
        met |= {f"zombie {e.detail[:14]}" for e in history.of(Fate) if e.kind == "ended"}
    wanted = {"queue", "rank", "", "ended by others", "001", "002", "back", "done"}
    assert met >= wanted | {"zombie NodeSuperseded"}


def test_keys_of_another_pool_or_unit_mean_nothing():
    keys = Keys("run1")
    assert keys.parse_unit(POOL, keys.unit(POOL, UnitKey(6, 1))) is None
    assert keys.parse_unit(POOL, "run1/unit/other/0000000000.001") is None
    first = keys.unit(POOL, UnitKey(0, 1))
    assert first.endswith("/0000000000.001")
    assert keys.parse_unit(POOL, f"{first}.gone") is None
    assert keys.parse_unit(POOL, first.replace("/0000000000.", "/000000000.")) is None
    key = UnitKey(5, 1000, "back")
    assert keys.parse_unit(POOL, keys.unit(POOL, key)) == key
