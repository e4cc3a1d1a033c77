"""The closing of one round as a state machine that sees no time.

    phase      event                      next       effects
    OPEN       reported                   OPEN       Examine (this node closes the round)
    OPEN       examined                   OPEN       -
    OPEN       decide: not closable       OPEN       -
    OPEN       decide: closable, waited   MERGING    Merge
    OPEN       decide: all in, none good  WRITING    WriteRecord (void)
    MERGING    merged                     WRITING    WriteRecord
    MERGING    merge failed               OPEN       -            (the next decide tries again)
    MERGING    out of range               OPEN       -            (without the one furthest out)
    WRITING    created                    WRITTEN    -            (the commit)
    WRITING    taken, or no clear answer  DOUBT      ReadRecord
    DOUBT      nothing there              WRITING    WriteRecord  (the same bytes)
    any        some record of it is read  gone       the next round opens

A node closes a round when the record before names it, or when it has claimed it. Claims only save
work: the record is the commit, created once, and a closer that is passed over goes on and tries all
the same. From the moment a record has been sent its outcome is open until some record of the round
has been read: until then the same bytes are sent again, ever later, as some stores refuse a key
that is written too often, and nothing of the attempt is deleted.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import replace

from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.lease import Verdict
from jdiloco.protocol.records import ContributionHead
from jdiloco.protocol.rules import Life, Rules


class Phase(enum.Enum):
    """Where the closing of a round stands at this node."""

    OPEN = "open"
    MERGING = "merging"
    WRITING = "writing"
    DOUBT = "doubt"
    WRITTEN = "written"


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A contribution that a listing has shown."""

    key: ContributionKey
    asked: bool = False  # It is being examined.
    head: ContributionHead | None = None  # Set once accepted.
    weight: float = 0.0
    sha256: str = ""
    rejected: str = ""  # One of `records.REJECTIONS`, once rejected.
    parts: int = 0  # Objects that hold its tensors, beside its own.

    @property
    def life(self) -> Life:
        return Life(self.key.node, self.key.incarnation)

    @property
    def examined(self) -> bool:
        return self.head is not None or bool(self.rejected)


@dataclasses.dataclass(frozen=True, slots=True)
class Closing:
    """The round that has no record yet, as one node sees it."""

    round: int
    closer: Life  # Who was named, or claimed it last.
    mine: bool  # This node was named or has claimed it; it never gives up before the record.
    claims: int = 0  # The highest claim seen.
    claimant: Life | None = None  # Who made it.
    reports: tuple[Report, ...] = ()  # In canonical order: by node, then incarnation.
    phase: Phase = Phase.OPEN
    attempt: int = 0  # Of the merge that runs or was written.
    merging: tuple[Report, ...] = ()  # What that attempt merges.
    record: bytes = b""  # What has been sent.

    @property
    def accepted(self) -> tuple[Report, ...]:
        return tuple(report for report in self.reports if report.head is not None)

    @property
    def rejected(self) -> tuple[Report, ...]:
        return tuple(report for report in self.reports if report.rejected)


def opened(round: int, named: Life, me: Life, *, can_close: bool) -> Closing:
    """The round after one whose record has been read; `named` closes it."""
    return Closing(round, closer=named, mine=can_close and named == me)


def reported(closing: Closing, keys: Iterable[ContributionKey]) -> Closing:
    """Takes up what a listing shows. The same key twice is one report; order leaves no trace."""
    known = {report.key: report for report in closing.reports}
    for key in keys:
        if key.round == closing.round:
            known.setdefault(key, Report(key))
    reports = sorted(known.values(), key=lambda report: (report.key.node, report.key.incarnation))
    return replace(closing, reports=tuple(reports))


def unasked(closing: Closing) -> tuple[Closing, tuple[ContributionKey, ...]]:
    """The contributions to examine now, each asked for once; none unless this node closes."""
    if not closing.mine or closing.phase is not Phase.OPEN:
        return closing, ()
    keys = tuple(report.key for report in closing.reports if not report.asked)
    reports = tuple(replace(report, asked=True) for report in closing.reports)
    return replace(closing, reports=reports), keys


def examined(closing: Closing, verdict: Report) -> Closing:
    """One contribution has been accepted or rejected. Late answers of older rounds are ignored."""
    reports = tuple(
        verdict if report.key == verdict.key and not report.examined else report
        for report in closing.reports
    )
    return replace(closing, reports=reports)


def ask_again(closing: Closing, key: ContributionKey) -> Closing:
    """The store did not answer; the contribution is asked for once more."""
    reports = tuple(
        replace(report, asked=False) if report.key == key and not report.examined else report
        for report in closing.reports
    )
    return replace(closing, reports=reports)


def all_in(closing: Closing, verdict: Verdict) -> bool:
    """Every learner that rounds wait for has reported."""
    return verdict.expected <= {report.life for report in closing.reports}


def closable(closing: Closing, rules: Rules, verdict: Verdict, *, round_over: bool) -> bool:
    """The round may close: a quorum is accepted, or one is and nobody else is to be waited for."""
    accepted = len(closing.accepted)
    if accepted >= rules.quorum_size:
        return True
    return accepted > 0 and (round_over or all_in(closing, verdict))


def seems_closable(closing: Closing, rules: Rules, verdict: Verdict) -> bool:
    """The same from key names alone, for a node that does not examine contributions."""
    reports = len(closing.reports)
    return reports >= rules.quorum_size or (reports > 0 and all_in(closing, verdict))


def settled(closing: Closing) -> bool:
    """Every contribution seen so far has been examined."""
    return all(report.examined for report in closing.reports)


def is_void(closing: Closing, verdict: Verdict) -> bool:
    """Somebody reported, nothing can be merged, and nobody else is to be waited for."""
    return bool(closing.reports) and not closing.accepted and all_in(closing, verdict)


def merging(closing: Closing, attempt: int) -> Closing:
    """Fixes what is merged. What is accepted later is `late`, unless this attempt fails."""
    return replace(closing, phase=Phase.MERGING, attempt=attempt, merging=closing.accepted)


def refused(closing: Closing, culprit: ContributionKey) -> Closing:
    """An accepted contribution with which the committed values would not be finite."""
    reports = tuple(
        replace(report, head=None, weight=0.0, sha256="", rejected="nonfinite")
        if report.key == culprit
        else report
        for report in closing.reports
    )
    return replace(closing, reports=reports)


def merge_failed(closing: Closing) -> Closing:
    """Nothing was written; the next attempt has another number, hence other keys."""
    return replace(closing, phase=Phase.OPEN, merging=())


def writing(closing: Closing, record: bytes) -> Closing:
    """The record is on its way. From here on these bytes are sent until a record is read."""
    return replace(closing, phase=Phase.WRITING, record=record)


def doubted(closing: Closing) -> Closing:
    """ "Taken", or no clear answer: only reading tells."""
    return replace(closing, phase=Phase.DOUBT)


def written(closing: Closing) -> Closing:
    """The store said that this call created the record."""
    return replace(closing, phase=Phase.WRITTEN)


def claimed(closing: Closing, number: int, claimant: Life, me: Life) -> Closing:
    """A claim has been read, or this node's own confirmed."""
    mine = closing.mine or claimant == me
    if number < closing.claims:
        return replace(closing, mine=mine)
    return replace(closing, claims=number, claimant=claimant, closer=claimant, mine=mine)
