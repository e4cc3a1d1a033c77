"""Shared work, and who trains: W1, W2, roles."""

from __future__ import annotations

import collections

from jdiloco import events
from jdiloco.protocol.keys import ContributionKey, Pool, UnitKey
from jdiloco.protocol.records import unseal
from jdiloco.protocol.rules import closes
from jdiloco.testing.invariants.facts import Facts, Violations
from jdiloco.testing.invariants.progress import calm_after
from jdiloco.testing.simulate.history import Fate, Worked
from jdiloco.testing.simulate.values import Delta, Span


def w1_every_row_is_trained_once(facts: Facts) -> Violations:
    """W1: without a death, a pause or a restart no row of shared work is trained twice."""
    fates = {entry.kind for entry in facts.history.of(Fate)}
    starts = [entry.who for entry in facts.history.of(Fate) if entry.kind == "started"]
    if fates & {"killed", "paused"} or len(set(starts)) > len(facts.history.scenario.nodes):
        return
    trained: list[Span] = []
    for worked in facts.history.of(Worked):
        for span in worked.rows:
            if any(map(span.overlaps, trained)):
                yield f"{worked.who} trained rows a second time: {span}"
            trained.append(span)


def w2_shared_work_is_completed(facts: Facts) -> Violations:
    """W2: once a node of a queue has ended by itself, every unit is complete, and a contribution
    covers its last batch. Not so in a run in which nobody is left to close rounds."""
    scenario = facts.history.scenario
    deserted = any(not closes(plan.role) for plan in scenario.nodes)
    if deserted and facts.history.events(events.Warned):
        return
    ended = {entry.who for entry in facts.history.of(Fate) if entry.detail == "finished"}
    sharers = {plan.node for plan in scenario.nodes if plan.work == "queue" and not plan.quits}
    if not any(who.partition("#")[0].rstrip("b") in sharers for who in ended):
        return
    pool = Pool.queue("work", len(scenario.units))
    marks = _marks(facts, pool)
    covered = _covered(facts)
    for unit, size in enumerate(scenario.units):
        name = pool.unit(unit)
        if marks.get(unit) != "done":
            yield f"{name} is not complete: {marks.get(unit)!r}"
        elif covered[name] != size:
            yield f"{name} has {size} batches and counts as complete after {covered[name]}"


def _marks(facts: Facts, pool: Pool) -> dict[int, str]:
    """The mark of the highest claim on each unit."""
    found: dict[int, UnitKey] = {}
    for name in facts.puts:
        key = facts.keys.parse_unit(pool, name)
        if key is not None:
            found[key.unit] = max(found.get(key.unit, key), key)
    return {unit: key.mark for unit, key in found.items()}


def _covered(facts: Facts) -> collections.Counter[str]:
    """How far any contribution covers each unit."""
    found: collections.Counter[str] = collections.Counter()
    for name, put in facts.puts.items():
        key = facts.keys.parse(name) if name.startswith(facts.keys.log) else None
        if isinstance(key, ContributionKey):
            for item in unseal(name, put.data, Delta).head.work:
                found[item.unit] = max(found[item.unit], item.batches)
    return found


def elected_nodes_leave_training_to_others(facts: Facts) -> Violations:
    """An `either` node that stays the named closer, while others take part in every
    round, takes part in none before long.

    Not in runs with shared work: there learners rest between units, and while all others do, an
    elected node has nobody to leave the training to.
    """
    plans = facts.history.scenario.nodes
    if any(plan.work for plan in plans):
        return
    either = {plan.node for plan in plans if plan.role == "either"}
    many = 2 * facts.history.scenario.rules.fragments + 6
    calm = calm_after(facts.history) + facts.history.scenario.rules.lease_seconds
    elected, node = 0, ""
    for record in facts.in_order:
        others = {who.node for who in record.participants} - {record.next_closer}
        alone = facts.record_puts[record.round].at <= calm or not others
        elected = 0 if alone or record.next_closer != node else elected + 1
        node = record.next_closer
        itself = node in {who.node for who in record.participants}
        if node in either and itself and elected >= many:
            yield f"round {record.round}: {node} was elected {elected} rounds ago and still trains"
