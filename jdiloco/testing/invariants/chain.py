"""The chain of records, and what its versions need: S1, S2, S4."""

from __future__ import annotations

from jdiloco.protocol.keys import MANIFEST, ContributionKey, RecordKey
from jdiloco.protocol.records import Checkpoint, Payload, RoundRecord, sha256
from jdiloco.testing.invariants.facts import Facts, Violations
from jdiloco.testing.simulate import values
from jdiloco.testing.simulate.history import Deleted, Entry, Stored


def s1_one_record_per_round_in_one_chain(facts: Facts) -> Violations:
    """S1: a round has at most one record, which stays; records close in order, linked by hash."""
    contested = (facts.keys.incarnations(""), "manifest", "/log/")
    for key in facts.again:
        if _contested(facts, key, contested):
            yield f"{key} was stored twice"
    for _, key in facts.deleted:
        if _contested(facts, key, contested):
            yield f"{key} was deleted"
    if facts.manifest is None:
        return
    digest = sha256(facts.puts[MANIFEST].data)
    bases = [digest] * len(facts.manifest.plan)
    versions = [0] * len(bases)
    for expected, record in enumerate(facts.in_order):
        if record.round != expected:
            yield f"round {record.round} has a record, round {expected} has none"
            return
        index = record.round % len(bases)
        versions[index] += not record.void
        if record.previous != digest or record.base != bases[index]:
            yield f"the record of round {record.round} does not continue the chain"
        if record.fragment != index or list(record.versions) != versions:
            yield f"the record of round {record.round} has versions {record.versions}"
        digest = sha256(facts.record_puts[record.round].data)
        if not record.void:
            bases[index] = digest


def _contested(facts: Facts, key: str, kinds: tuple[str, str, str]) -> bool:
    nodes, manifest, log = kinds
    if key == manifest or key.startswith(nodes.removesuffix(".")):
        return True
    parsed = facts.keys.parse(key) if log in key else None
    return parsed is not None and type(parsed).__name__ in ("RecordKey", "ClaimKey")


def s2_newest_versions_are_complete(facts: Facts) -> Violations:
    """S2: the newest version of every fragment is in the mailbox at all times, whole."""
    if facts.manifest is None:
        return
    present: dict[str, bytes] = {}
    heads: dict[int, RoundRecord] = {}
    newest, checkpoint = -1, facts.manifest.checkpoint
    created = facts.puts[MANIFEST].index
    for index, entry in enumerate(facts.history.entries):
        if isinstance(entry, Stored):
            present[entry.key] = entry.data
            record = _record_of(facts, entry)
            if record is None:
                continue
            newest, checkpoint = record.round, _newer(checkpoint, record.checkpoint)
            if not record.void:
                heads[record.fragment] = record
        elif isinstance(entry, Deleted):
            present.pop(entry.key, None)
            if (round := _round_of(facts, entry.key)) is not None and round > newest:
                yield f"{entry.key} was deleted before its round had a record"
        else:
            continue
        if index >= created:
            yield from _incomplete(facts, present, heads, checkpoint, entry)


def _record_of(facts: Facts, entry: Stored) -> RoundRecord | None:
    if not entry.key.startswith(facts.keys.log):
        return None
    key = facts.keys.parse(entry.key)
    return facts.records[key.round] if isinstance(key, RecordKey) else None


def _newer(held: Checkpoint, found: Checkpoint) -> Checkpoint:
    return found if found.round > held.round else held


def _round_of(facts: Facts, key: str) -> int | None:
    """The round that an object belongs to."""
    data = f"{facts.keys.run}/data/"
    if key.startswith(data):
        return int(key.removeprefix(data)[:10])
    parsed = facts.keys.parse(key)
    return parsed.round if isinstance(parsed, ContributionKey) else None


def _incomplete(
    facts: Facts,
    present: dict[str, bytes],
    heads: dict[int, RoundRecord],
    checkpoint: Checkpoint,
    entry: Entry,
) -> Violations:
    assert facts.manifest is not None
    for fragment in range(len(facts.manifest.plan)):
        head = heads.get(fragment)
        payloads = (head.anchor, head.outer) if head else (None,)
        if all(payload and _whole(present, payload.key, payload) for payload in payloads):
            continue
        file = checkpoint.files[fragment]
        covered = checkpoint.versions[fragment] == (head.version if head else 0)
        if not (covered and _whole(present, f"{checkpoint.prefix}/{file.key}", file)):
            yield f"fragment {fragment} cannot be read after: {entry}"


def _whole(present: dict[str, bytes], key: str, payload: Payload) -> bool:
    data = present.get(key)
    return data is not None and sha256(data) == payload.sha256


def s4_records_can_be_recomputed(facts: Facts) -> Violations:
    """S4: with what a record names by hash anybody gets the same bytes; recent inputs are kept."""
    for record in facts.in_order:
        if record.anchor is None:
            continue
        for who in record.participants:
            found = facts.delta(record, who)
            if found is None:
                continue  # S3 says so.
            put, delta = found
            if who.sha256 != sha256(put.data) or who.weight != values.weight(delta.head):
                yield f"round {record.round} names other bytes of {who.node} than it merged"
        base = facts.value(facts.before(record), record.fragment)
        inputs = [(who.sha256, who.weight) for who in record.participants]
        final = all(who.final for who in record.participants)
        if facts.value(record, record.fragment) != values.merged(str(base), inputs, final=final):
            yield f"round {record.round} committed a value that its inputs do not give"
    yield from _lost_inputs(facts)


def _lost_inputs(facts: Facts) -> Violations:
    for record in facts.in_order[-facts.history.scenario.rules.keep_rounds :]:
        for who in record.participants:
            key = ContributionKey(record.round, who.node, who.incarnation, who.final)
            if facts.keys.contribution(key) not in facts.history.objects:
                yield f"the contribution of {who.node} to round {record.round} is gone already"
