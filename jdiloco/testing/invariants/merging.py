"""What may be merged, and what a node may go on from: S3, S5, S8."""

from __future__ import annotations

import collections

from jdiloco.protocol.records import REJECTIONS, RoundRecord, seal
from jdiloco.testing.invariants.facts import Facts, Violations
from jdiloco.testing.simulate.history import Held, Took
from jdiloco.testing.simulate.values import Span


def s3_nothing_is_merged_twice(facts: Facts) -> Violations:
    """S3: a contribution is merged into the version it was subtracted from, and no row is merged
    twice into one fragment, whichever node or life trained on it."""
    merged: dict[int, list[Span]] = collections.defaultdict(list)
    for record in facts.in_order:
        base = facts.before(record)
        for who in record.participants:
            found = facts.delta(record, who)
            if found is None:
                yield f"round {record.round} merged a contribution of {who.node} that never was"
                continue
            put, delta = found
            if put.index > facts.record_puts[record.round].index:
                yield f"round {record.round} merged a contribution that came later"
            if delta.base != facts.value(base, record.fragment):
                yield f"round {record.round} merged what {who.node} subtracted from something else"
            for span in delta.rows:
                if any(map(span.overlaps, merged[record.fragment])):
                    yield f"round {record.round} merged rows of {who.node} a second time: {span}"
                merged[record.fragment].append(span)


def s5_nodes_act_on_committed_records_alone(facts: Facts) -> Violations:
    """S5: a node acts on a round only once its record is there, and on that record."""
    newest: dict[str, int] = {}
    for index, entry in enumerate(facts.history.entries):
        if isinstance(entry, Took):
            round = entry.record.round
            if not _is_there(facts, index, round, entry.record):
                yield f"{entry.who} acted on a record of round {round} that is not the one there"
            if round != newest.get(entry.who, round - 1) + 1:
                yield f"{entry.who} took round {round} after round {newest[entry.who]}"
            newest[entry.who] = round
        elif isinstance(entry, Held):
            record = facts.records.get(entry.round)
            there = entry.round < 0 or _is_there(facts, index, entry.round, record)
            if not there or facts.value(record, entry.fragment) != entry.value:
                yield f"{entry.who} holds a value of round {entry.round} that it did not commit"


def _is_there(facts: Facts, index: int, round: int, record: RoundRecord | None) -> bool:
    put = facts.record_puts.get(round)
    if put is None or record is None or put.index > index:
        return False
    return put.data == seal(facts.keys.record(round), record)


def s8_bad_contributions_are_rejected(facts: Facts) -> Violations:
    """S8: what is not finite, empty or of another version is rejected with its reason."""
    for record in facts.in_order:
        base = facts.before(record)
        version = base.version if base else 0
        for who in record.participants:
            found = facts.delta(record, who)
            if found is None:
                continue
            head = found[1].head
            if not found[1].finite or head.empty or head.version != version:
                yield f"round {record.round} merged a bad contribution of {who.node}"
        for who in record.rejected:
            if who.reason not in REJECTIONS:
                yield f"round {record.round} rejected {who.node} for {who.reason!r}"
