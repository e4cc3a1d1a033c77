"""The protocol's properties, as functions over one state of an enumeration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jdiloco.protocol.keys import MANIFEST, ClaimKey, ContributionKey
from jdiloco.protocol.records import Checkpoint, Manifest, Payload, RoundRecord, sha256, unseal
from jdiloco.protocol.rules import Life
from jdiloco.testing.enumerate import values
from jdiloco.testing.enumerate.box import KEYS, RUN, Box
from jdiloco.testing.enumerate.inside import Inside
from jdiloco.testing.enumerate.place import Held, Living

Violations = Iterator[str]


def records(box: Box) -> list[tuple[RoundRecord, bytes]]:
    """Round records from round 0 on, as far as there is one after the other."""
    found = []
    while (data := box.get(KEYS.record(len(found)))) is not None:
        found.append((values.read_record(KEYS.record(len(found)), data), data))
    return found


def of_mailbox(box: Box) -> Violations:
    """S1, S2 and S3, which the mailbox alone tells."""
    yield from (f"S1: {flaw}" for flaw in box.flaws)
    found = records(box)
    yield from _s1_one_chain(box, found)
    yield from _s2_newest_versions_are_complete(box, [record for record, _ in found])
    yield from _s3_nothing_is_merged_twice(box, [record for record, _ in found])


def _manifest(box: Box) -> Manifest:
    return unseal(MANIFEST, box.objects[MANIFEST][0], Manifest)


def calm(box: Box) -> Violations:
    """When nothing goes wrong one node closes every round, and every round has a result."""
    for record, _ in records(box):
        if record.void:
            yield f"calm: round {record.round} is void"
    if any(isinstance(KEYS.parse(key), ClaimKey) for key in box.list(KEYS.log)):
        yield "calm: a node takes over"
    attempts = {key.rpartition(".")[0] for key in box.list(f"{RUN}/data/")}
    if len(attempts) > len({attempt.partition(".")[0] for attempt in attempts}):
        yield "calm: two attempts at one round"


def _s1_one_chain(box: Box, found: list[tuple[RoundRecord, bytes]]) -> Violations:
    """S1: records close in order, linked by hash."""
    digest = sha256(box.objects[MANIFEST][0])
    for record, data in found:
        if record.previous != digest:
            yield f"S1: the record of round {record.round} does not continue the chain"
        digest = sha256(data)
    late = [key for key in box.list(KEYS.log) if key.endswith(".0")]
    if len([key for key in late if "/live/" not in key]) != len(found):
        yield "S1: a round has a record and the one before it has none"


def _s2_newest_versions_are_complete(box: Box, found: list[RoundRecord]) -> Violations:
    """S2: the newest version of every fragment is there, as payloads or in a named checkpoint."""
    manifest = _manifest(box)
    newest = found[-1].checkpoint if found else manifest.checkpoint
    yield from _named_is_complete(box, newest)
    heads: dict[int, RoundRecord] = {r.fragment: r for r in found if not r.void}
    for fragment in range(len(manifest.plan)):
        head = heads.get(fragment)
        payloads = [p for p in (head.anchor, head.outer) if p] if head else []
        if payloads and all(_whole(box, payload.key, payload) for payload in payloads):
            continue
        if not _covered(box, newest, fragment, head.version if head else 0):
            yield f"S2: the newest version of fragment {fragment} cannot be read"


def _covered(box: Box, checkpoint: Checkpoint, fragment: int, version: int) -> bool:
    file = checkpoint.files[fragment]
    there = _whole(box, f"{checkpoint.prefix}/{file.key}", file)
    return there and checkpoint.versions[fragment] == version


def _named_is_complete(box: Box, newest: Checkpoint) -> Violations:
    for file in newest.files:
        if not _whole(box, f"{newest.prefix}/{file.key}", file):
            yield f"S2: the checkpoint {newest.prefix} is named and not complete"


def _whole(box: Box, key: str, payload: Payload) -> bool:
    data = box.get(key)
    return data is not None and sha256(data) == payload.sha256


def _s3_nothing_is_merged_twice(box: Box, found: list[RoundRecord]) -> Violations:
    """S3: a contribution is merged once, into the version it was subtracted from; a step too."""
    bases = [values.initial(i).value for i in range(len(_manifest(box).plan))]
    merged: set[tuple[str, int, int]] = set()
    for record in found:
        for who in record.participants:
            key = ContributionKey(record.round, who.node, who.incarnation, who.final)
            data = box.ever(KEYS.contribution(key))
            if data is None:
                yield f"S3: round {record.round} merged what {who.node} never sent"
                continue
            delta = values.read_delta(KEYS.contribution(key), data)
            if delta.base != bases[record.fragment]:
                yield f"S3: round {record.round} merged what {who.node} subtracted from another"
            for first, last in delta.rows:
                for place in range(first, last):
                    row = (who.node, record.fragment, place)
                    if row in merged:
                        yield f"S3: round {record.round} merged row {place} of {who.node} again"
                    merged.add(row)
        if record.anchor is not None:
            data = box.ever(record.anchor.key)
            bases[record.fragment] = values.decode(data).value if data else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Belief:
    """What one life takes for committed."""

    me: Life
    read: int
    tip: str
    held: tuple[Held, ...]

    @classmethod
    def of(cls, inside: Inside, place: Living) -> Belief:
        state = inside.members[place.member]
        held = inside.trainings[place.training].held
        return cls(state.me, state.chain.read, state.chain.tip, held)


@dataclasses.dataclass(frozen=True, slots=True)
class Truth:
    """What a mailbox says that was committed."""

    records: tuple[RoundRecord, ...]
    tips: tuple[str, ...]
    values: tuple[str, ...]  # Per round, "" of a void one.
    broken: str  # The first property that it breaks.

    @classmethod
    def of(cls, box: Box, *, is_calm: bool) -> Truth:
        found = records(box)
        broken = next(of_mailbox(box), "")
        if is_calm and not broken:
            broken = next(calm(box), "")
        return cls(
            records=tuple(record for record, _ in found),
            tips=tuple(sha256(data) for _, data in found),
            values=tuple(_value(box, record) for record, _ in found),
            broken=broken,
        )


def _value(box: Box, record: RoundRecord) -> str:
    data = box.ever(record.anchor.key) if record.anchor else None
    return values.decode(data).value if data else ""


def of_process(belief: Belief, truth: Truth) -> str:
    """S5: "" when what a life goes on from is what the mailbox holds."""
    read = belief.read
    if read >= 0 and (read >= len(truth.tips) or belief.tip != truth.tips[read]):
        return f"S5: {belief.me} goes on from a record of round {read} that is not there"
    for held in belief.held:
        there = held.round < 0 or (
            held.round < len(truth.values) and truth.values[held.round] == held.value
        )
        if not there:
            return f"S5: {belief.me} trains on a value of round {held.round} that is not committed"
    return ""
