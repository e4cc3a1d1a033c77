"""Where every sample went: S7."""

from __future__ import annotations

import collections

from jdiloco import events
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.records import DROPS
from jdiloco.protocol.rules import Life
from jdiloco.testing.invariants.facts import Facts, Violations
from jdiloco.testing.simulate.history import Happened, Resumed, Snapped


def s7_every_ledger_adds_up(facts: Facts) -> Violations:
    """S7: of what a participant processed, records and events tell where it went."""
    merged: collections.Counter[tuple[Life, int]] = collections.Counter()
    dropped = _drops_before_snapshots(facts)
    trained = _samples_before_snapshots(facts)
    for record in facts.in_order:
        for who in record.rejected:
            if who.reason == "counters":  # Nobody here sends wrong ones.
                yield f"round {record.round}: the ledger of {who.node} does not agree with records"
        for who in record.participants:
            found = facts.delta(record, who)
            if found is None:
                continue
            delta = found[1]
            life, ledger = Life(who.node, who.incarnation), who.ledger
            place = f"round {record.round}, {life}"
            if (who.counters.steps, who.counters.samples) != (delta.steps, delta.samples):
                yield f"{place}: counters are {who.counters} for {delta.steps}, {delta.samples}"
            key = ContributionKey(record.round, who.node, who.incarnation, who.final)
            if key not in trained:
                yield f"{place}: nobody took the snapshot that was merged"
            elif ledger.processed != trained[key]:
                yield f"{place}: the ledger has {ledger.processed} of {trained[key]} samples"
            parts = (ledger.merged, *ledger.dropped.values(), ledger.pending)
            if ledger.processed != sum(parts):
                yield f"{place}: the ledger has {ledger.processed} samples, its parts are {parts}"
            if ledger.pending != who.counters.samples:
                yield f"{place}: {ledger.pending} samples are pending, {who.counters} were sent"
            if ledger.merged != merged[life, record.fragment]:
                yield f"{place}: records before merged {merged[life, record.fragment]} samples"
            if ledger.dropped != dropped.get(key):
                yield f"{place}: dropped {ledger.dropped}, events say {dropped.get(key)}"
            if not ledger.dropped.keys() <= set(DROPS):
                yield f"{place}: dropped for {ledger.dropped}"
            merged[life, record.fragment] += who.counters.samples


def _samples_before_snapshots(facts: Facts) -> dict[ContributionKey, int]:
    """Per contribution: samples of its life and fragment by then, those it went on with included.

    Of what an earlier life sent those count that no record merged: a fragment is not reported on
    again before that is known.
    """
    scenario = facts.history.scenario
    samples = {plan.node: plan.samples for plan in scenario.nodes}
    resumed = {entry.who: entry for entry in facts.history.of(Resumed)}
    found = {}
    for entry in facts.history.of(Snapped):
        node, fragment = entry.key.node, entry.key.round % scenario.rules.fragments
        found[entry.key] = entry.steps * (samples.get(node) or samples[node.rstrip("b")])
        if (before := resumed.get(entry.who)) is not None:
            found[entry.key] += before.rest[fragment] + sum(
                inherited
                for key, inherited in before.sent
                if key.round % scenario.rules.fragments == fragment and not _is_merged(facts, key)
            )
    return found


def _is_merged(facts: Facts, key: ContributionKey) -> bool:
    record = facts.records.get(key.round)
    if record is None:
        return False
    return any((w.node, w.incarnation) == (key.node, key.incarnation) for w in record.participants)


def _drops_before_snapshots(facts: Facts) -> dict[ContributionKey, dict[str, int]]:
    """Per contribution: samples of its life and fragment that events said were dropped before."""
    sums: dict[tuple[str, int], dict[str, int]] = collections.defaultdict(dict)
    found = {}
    fragments = facts.history.scenario.rules.fragments
    for entry in facts.history.entries:
        if isinstance(entry, Happened) and isinstance(entry.event, events.Dropped):
            drop = entry.event
            reasons = sums[entry.who, drop.fragment]
            reasons[drop.reason] = reasons.get(drop.reason, 0) + drop.samples
        elif isinstance(entry, Snapped):
            found[entry.key] = dict(sums[entry.who, entry.key.round % fragments])
    return found
