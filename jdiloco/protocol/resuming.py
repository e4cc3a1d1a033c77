"""What a node has to remember to go on after a restart, and how it goes on.

A private checkpoint is taken between two steps. Whoever starts from it is a new incarnation of the
node: others cannot know whether the process before is dead. It inherits

* the training since each fragment's anchor that has not been sent: the new life's ledger begins
  with it as pending;
* the contributions that were sent and not read of: its incarnation names them as valid, they are
  sent again under their own keys and with their own bytes, which is harmless where they had
  landed, and a record that merges one merges this node's own work. They stay in the ledger of the
  life that sent them. One whose round's record does not list it is training of the new life from
  then on: its ledger counts it as processed when that record is read, and it stays pending or is
  dropped like anything else.

So in every life `processed = merged + dropped + pending`, and `merged` is what records merged under
its incarnation. What the life before had pending when it ended is thus the next one's, or, where
nobody resumes, lost.

When no round was committed meanwhile the node goes on bit for bit as if it had not stopped. Else
those records are read in order from the saved round on, as if they arrived at its first step.

When the mailbox holds a contribution of this node that the checkpoint does not know of, the life
before went on after it was taken, and what the checkpoint has pending may have been merged already.
Then it is dropped as `lost`, all fragments take the run's newest values, and the data goes on
behind the furthest contribution (`overtaken`).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from jdiloco.protocol import fragment as fragments
from jdiloco.protocol.fragment import Drop, FragmentTraining, Outstanding
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.learner import LearnerState
from jdiloco.protocol.records import FORMAT, ContributionHead, Ledger
from jdiloco.protocol.rules import Life, Rules


class Private(msgspec.Struct, frozen=True):
    """What a node remembers beside its arrays, as of a step boundary."""

    format: int
    run: str
    life: Life
    fragments: tuple[FragmentTraining, ...]
    read: int
    next_round: int
    began: int
    steps: int
    since: int
    last_call: int
    follow: int
    reporting: bool
    reverted_at: int
    sent: tuple[ContributionHead, ...]  # Outstanding ones whose bytes were kept too.
    claimed: bool  # Some of the training may be of claimed work, which others may go on with.
    step_seconds: float | None  # The usual step.

    @property
    def position(self) -> int:
        """Batches of the node's own data that are behind it."""
        return self.began + self.steps

    @property
    def keys(self) -> tuple[ContributionKey, ...]:
        """The contributions it has outstanding."""
        return tuple(contribution_key(head) for head in self.sent)

    def knows(self, round: int, incarnation: int) -> bool:
        """Whether a contribution of this node had been made when this was saved."""
        life = self.life.incarnation
        return incarnation < life or (incarnation == life and round < self.next_round)


def contribution_key(head: ContributionHead) -> ContributionKey:
    """Where a contribution lies."""
    return ContributionKey(head.round, head.node, head.incarnation, head.final)


def private(
    state: LearnerState,
    run: str,
    *,
    sent: tuple[ContributionHead, ...],
    claimed: bool,
    step_seconds: float | None,
) -> Private:
    """What to save of a learner between two steps."""
    return Private(
        format=FORMAT,
        run=run,
        life=state.life,
        fragments=state.fragments,
        read=state.read,
        next_round=state.next_round,
        began=state.began,
        steps=state.steps,
        since=state.since,
        last_call=state.last_call,
        follow=state.follow,
        reporting=state.reporting,
        reverted_at=state.reverted_at,
        sent=sent,
        claimed=claimed,
        step_seconds=step_seconds,
    )


def resumed(saved: Private, life: Life, rules: Rules) -> LearnerState:
    """The learner as it was, in its next life; steps count on."""
    return LearnerState(
        life=life,
        rules=rules,
        read=saved.read,
        next_round=saved.next_round,
        fragments=tuple(_inherited(held, saved.life) for held in saved.fragments),
        began=saved.began,
        steps=saved.steps,
        since=saved.since,
        last_call=saved.last_call,
        follow=saved.follow,
        reporting=saved.reporting,
        reverted_at=saved.reverted_at,
    )


def _inherited(held: FragmentTraining, before: Life) -> FragmentTraining:
    sent = held.outstanding
    if sent is None:
        return replace(held, ledger=_begun(held.counters.samples))
    rest = held.counters - sent.counters
    sent = replace(sent, inherited=sent.inherited or before.incarnation)
    return replace(held, outstanding=sent, ledger=_begun(rest.samples))


def _begun(samples: int) -> Ledger:
    return Ledger(pending=samples, processed=samples)


def overtaken(
    state: LearnerState, *, read: int, versions: tuple[int, ...], position: int
) -> tuple[LearnerState, tuple[Drop, ...]]:
    """Drops what a resumed learner has pending; it goes on from the newest values like any other.

    `read` and `versions` say which those are, `position` where the data goes on.
    """
    drops: list[Drop] = []
    held_now = []
    for index, (held, version) in enumerate(zip(state.fragments, versions, strict=True)):
        rest = held.counters - (held.outstanding or Outstanding(-1, fragments.NOTHING, 0)).counters
        if rest.steps:
            drops.append(Drop(read, index, "lost", rest))
        ledger = held.ledger.drop("lost", rest.samples)
        held_now.append(FragmentTraining(version, ledger=ledger, agreed=held.agreed))
    begun = LearnerState(
        life=state.life,
        rules=state.rules,
        read=read,
        next_round=read + 1,
        fragments=tuple(held_now),
        began=position,
    )
    return begun, tuple(drops)
