"""Where a node stands in its run, as far as it knows: `session.status`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jdiloco import events
from jdiloco.protocol import tally
from jdiloco.protocol.learner import LearnerState
from jdiloco.protocol.member import MemberState
from jdiloco.protocol.records import Ledger, RoundRecord
from jdiloco.protocol.tally import Totals
from jdiloco.protocol.waste import Waste
from jdiloco.types import Spent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """One look at a node and its run. Samples are means over the fragments.

    Three numbers that are easily taken for one another: `alive` counts nodes, `participating`
    learners whose work is in the model, `aligned` fragments of this node.
    """

    node: str
    run: str
    role: str
    phase: str  # What it said in its newest beat.
    alive: int  # Nodes whose lease lives, this one with them.
    learners: int  # Of them, those that train, are about to, or leave it to others for a while.
    expected: int  # Of them, those that rounds wait for.
    participating: int  # Learners merged into the newest version of any fragment.
    participants: tuple[str, ...]  # Their ids.
    aligned: int  # Fragments of this node at their newest version, of `fragments`.
    fragments: int
    round: int  # The newest whose record it has read, -1 for none.
    versions: tuple[int, ...]  # Per fragment, the newest it knows of.
    merged_round: int | None  # The newest that merged this node's work, of those in `versions`.
    merged_with: tuple[str, ...]  # Other nodes in that round.
    degraded: tuple[str, ...]  # What fails, one sentence each; empty while nothing does.
    unsent: int  # Contributions that are not in the mailbox yet.
    processed: float
    merged: float
    dropped: Mapping[str, float]  # By reason.
    pending: float
    totals: Totals  # Of all learners, by the records that this node has read.
    spent: Spent  # What this node has asked of the store, in this life.

    @property
    def together(self) -> bool:
        """Whether this node's work lately became part of a model that others train too."""
        return bool(self.merged_with)


def standing(state: MemberState, learner: LearnerState | None, spent: Spent) -> Standing:
    """What a member, and its learner if there is one, know at this moment."""
    chain, me, verdict = state.chain, state.me, state.verdict
    heads = [record for record in chain.records if record is not None]
    participants = sorted({who.node for record in heads for who in record.participants})
    newest = max((r for r in heads if _has(r, state)), key=lambda r: r.round, default=None)
    with_me = [] if newest is None else [who.node for who in newest.participants]
    held = learner.fragments if learner is not None else ()
    ledger = _mean([fragment.ledger for fragment in held])
    return Standing(
        node=me.node,
        run=chain.run,
        role=state.role,
        phase=state.phase,
        alive=len(verdict.live | {me}),
        learners=len(verdict.learners),
        expected=len(verdict.expected),
        participating=len(participants),
        participants=tuple(participants),
        aligned=sum(f.version == v for f, v in zip(held, chain.versions, strict=False)),
        fragments=len(chain.versions),
        round=chain.read,
        versions=chain.versions,
        merged_round=None if newest is None else newest.round,
        merged_with=tuple(node for node in with_me if node != me.node),
        degraded=tuple(because for _, because in state.troubles),
        unsent=sum(not item.landed for item in state.sending),
        processed=ledger.processed,
        merged=ledger.merged,
        dropped=ledger.dropped,
        pending=ledger.pending,
        totals=tally.totals(state.tally, len(chain.versions)),
        spent=spent,
    )


AGAINST = {
    "late": "Rounds closed before this node had reported: a larger `quorum_size`, up to the number "
    "of nodes, or more steps a round (`sync_every`).",
    "overwritten": "Steps trained while a round was under way: `alignment=carry()` keeps them, "
    "`overlap_steps=0` waits for the commit instead.",
}
"""What helps against the reasons for which an honest node loses most."""


def much_dropped(
    node: str, round: int, waste: Waste, ledgers: Sequence[Ledger]
) -> events.MuchDropped:
    """The event, with the reasons."""
    dropped = _mean(ledgers).dropped
    return events.MuchDropped(
        node=node,
        round=round,
        share=waste.share or 0.0,
        reasons=tuple(f"{reason}:{samples:.0f}" for reason, samples in dropped.items()),
        advice=AGAINST.get(max(dropped, key=lambda reason: dropped[reason], default=""), ""),
    )


def _has(record: RoundRecord, state: MemberState) -> bool:
    mine = (state.me.node, state.me.incarnation)
    return mine in {(who.node, who.incarnation) for who in record.participants}


def _mean(ledgers: Sequence[Ledger]) -> Totals:
    reasons = sorted({reason for ledger in ledgers for reason in ledger.dropped})
    count = max(1, len(ledgers))
    return Totals(
        processed=sum(ledger.processed for ledger in ledgers) / count,
        merged=sum(ledger.merged for ledger in ledgers) / count,
        pending=sum(ledger.pending for ledger in ledgers) / count,
        dropped={r: sum(ledger.dropped.get(r, 0) for ledger in ledgers) / count for r in reasons},
    )
