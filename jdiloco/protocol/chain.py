"""What a node knows of a run from its round records, and the record that comes next.

Records form one chain: each names the one before it by hash, and the one whose version it replaces.
A node acts on a round only after it has read that round's record or had its own write confirmed, so
everything here moves with `follow` alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from jdiloco.errors import FormatError
from jdiloco.protocol.closing import Closing
from jdiloco.protocol.keys import write_id
from jdiloco.protocol.records import (
    FORMAT,
    Build,
    Checkpoint,
    Manifest,
    Participant,
    Payload,
    Rejected,
    RoundRecord,
    Timing,
    sha256,
)
from jdiloco.protocol.rules import NO_CLOSER, Life
from jdiloco.protocol.schedule import fragment_of


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """The newest record, and per fragment the newest version."""

    run: str
    read: int  # The newest round whose record has been read, -1 for none.
    tip: str  # SHA-256 of that record, of the manifest for none.
    bases: tuple[str, ...]  # SHA-256 of the record that made each fragment's version.
    records: tuple[RoundRecord | None, ...]  # That record, None for the initial values.
    versions: tuple[int, ...]
    named: Life  # Who closes the next round.
    timing: Timing
    checkpoint: Checkpoint

    @property
    def heads(self) -> tuple[int, ...]:
        """Per fragment the round that made its version, -1 for the initial values."""
        return tuple(-1 if record is None else record.round for record in self.records)

    @property
    def round(self) -> int:
        """The round that has no record yet."""
        return self.read + 1

    @property
    def fragment(self) -> int:
        """The fragment of that round."""
        return fragment_of(self.round, len(self.versions))


def begin(manifest: Manifest, data: bytes) -> Chain:
    """The chain before round 0; `data` are the manifest's bytes."""
    count = len(manifest.plan)
    digest = sha256(data)
    return Chain(
        run=manifest.run,
        read=-1,
        tip=digest,
        bases=(digest,) * count,
        records=(None,) * count,
        versions=(0,) * count,
        named=Life(manifest.closer, 1) if manifest.closer else NO_CLOSER,
        timing=Timing(),
        checkpoint=manifest.checkpoint,
    )


def resume(
    chain: Chain,
    newest: RoundRecord,
    data: bytes,
    records: tuple[RoundRecord | None, ...],
    bases: tuple[str, ...],
) -> Chain:
    """Jumps to the newest record, for a node that joins; `records` are its heads'."""
    return replace(
        chain,
        read=newest.round,
        tip=sha256(data),
        bases=bases,
        records=records,
        versions=newest.versions,
        named=Life(newest.next_closer, newest.next_incarnation),
        timing=newest.timing,
        checkpoint=newest.checkpoint,
    )


def follow(chain: Chain, record: RoundRecord, data: bytes) -> Chain:
    """Reads the next record. Raises FormatError when it does not continue this chain."""
    found = (record.run, record.round, record.previous)
    wanted = (chain.run, chain.round, chain.tip)
    if found != wanted:
        raise FormatError(
            f"The record of round {chain.round} continues (run, round, record before) {found}; "
            f"this node has read {wanted}. The mailbox holds records of two runs: use another one."
        )
    digest = sha256(data)
    index = record.fragment
    bases = chain.bases if record.void else _put(chain.bases, index, digest)
    records = chain.records if record.void else _put(chain.records, index, record)
    newer = record.checkpoint.round > chain.checkpoint.round
    return replace(
        chain,
        read=record.round,
        tip=digest,
        bases=bases,
        records=records,
        versions=record.versions,
        named=Life(record.next_closer, record.next_incarnation),
        timing=record.timing,
        checkpoint=record.checkpoint if newer else chain.checkpoint,
    )


def _put(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def compose(
    chain: Chain,
    closing: Closing,
    me: Life,
    *,
    expected: int,
    next_closer: Life,
    timing: Timing,
    anchor: Payload | None = None,
    outer: Payload | None = None,
    update: Payload | None = None,
    cosine: float | None = None,
    build: Build | None = None,
) -> RoundRecord:
    """The record of the chain's next round; void when there is no anchor."""
    index = chain.fragment
    step = 0 if anchor is None else 1
    heads = _put(chain.heads, index, chain.round) if step else chain.heads
    versions = _put(chain.versions, index, chain.versions[index] + step)
    return RoundRecord(
        format=FORMAT,
        run=chain.run,
        round=chain.round,
        fragment=index,
        version=versions[index],
        write_id=write_id(me.node, me.incarnation, closing.attempt),
        closer=me.node,
        incarnation=me.incarnation,
        previous=chain.tip,
        base=chain.bases[index],
        participants=_participants(closing),
        rejected=tuple(
            Rejected(r.key.node, r.key.incarnation, r.rejected, r.key.final, r.parts)
            for r in closing.rejected
        ),
        expected=expected,
        next_closer=next_closer.node,
        next_incarnation=next_closer.incarnation,
        heads=heads,
        versions=versions,
        timing=timing,
        checkpoint=chain.checkpoint,
        anchor=anchor,
        outer=outer,
        update=update,
        cosine=cosine,
        build=build,
    )


def _participants(closing: Closing) -> tuple[Participant, ...]:
    return tuple(
        Participant(
            node=report.key.node,
            incarnation=report.key.incarnation,
            counters=report.head.counters,
            ledger=report.head.ledger,
            position=report.head.position,
            weight=report.weight,
            sha256=report.sha256,
            final=report.key.final,
            work=report.head.work,
            spent=report.head.spent,
            parts=report.parts,
        )
        for report in closing.merging
        if report.head is not None
    )
