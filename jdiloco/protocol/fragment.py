"""One fragment as a learner holds it, and what round records do to it.

    void       the version stays, and what was sent is tried again
    settle     a newer version exists: what was sent is in it, or never will be merged
    align      the fragment takes the version
    lose_all   the parameters go back, or the learner leaves

A fragment is aligned once, with the newest version there is, after every record up to it has been
read. What the records before it said is remembered until then (`Meanwhile`), because what becomes
of the training since is decided when the fragment is aligned: see `alignment`. So what came late
stays pending until then, and is dropped only if the alignment does not keep it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from jdiloco.protocol import alignment
from jdiloco.protocol.alignment import How
from jdiloco.protocol.records import Ledger, RoundRecord
from jdiloco.protocol.rules import Life, Rules
from jdiloco.types import Counters


@dataclasses.dataclass(frozen=True, slots=True)
class Outstanding:
    """A contribution that was published and whose round has not been read."""

    round: int
    counters: Counters
    at_step: int  # Of this life, when the snapshot was taken.
    final: bool = False
    inherited: int = 0  # The earlier incarnation that sent it; 0: this one.


@dataclasses.dataclass(frozen=True, slots=True)
class Unmerged:
    """What was published and never merged, and is still in the parameters."""

    round: int
    reason: str  # For dropping it, unless an alignment keeps it.
    counters: Counters


@dataclasses.dataclass(frozen=True, slots=True)
class Meanwhile:
    """What the records read since a fragment's last alignment said of it."""

    merged: bool = False  # One merged the newest snapshot, which the parameters still hold.
    unmerged: Unmerged | None = None
    forced: bool = False  # The fragment has to be overwritten.


NOTHING = Counters()
NO_NEWS = Meanwhile()
NEW_LEDGER = Ledger()


@dataclasses.dataclass(frozen=True, slots=True)
class FragmentTraining:
    """One fragment, as the learner holds it."""

    version: int
    counters: Counters = NOTHING  # Since the last alignment, published or not.
    outstanding: Outstanding | None = None
    behind: bool = False  # A newer version exists whose values have not come.
    ledger: Ledger = NEW_LEDGER
    meanwhile: Meanwhile = NO_NEWS
    agreed: bool = True  # The learners agree enough for `adaptive` to carry.


@dataclasses.dataclass(frozen=True, slots=True)
class Align:
    """Take the values that `round` committed, and keep of the training since what `how` keeps."""

    round: int
    fragment: int
    version: int
    how: How
    from_snapshot: bool  # The rest counts from the newest snapshot, else from the old anchor.
    kept: Counters


@dataclasses.dataclass(frozen=True, slots=True)
class Revert:
    """Go back to the anchor that is held: what was trained since is not finite."""

    round: int
    fragment: int


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """This training will never be merged; `reason` is one of `records.DROPS`."""

    round: int
    fragment: int
    reason: str
    counters: Counters


Effects = tuple[Align | Revert | Drop, ...]
Changed = tuple[FragmentTraining, Effects]


@dataclasses.dataclass(frozen=True, slots=True)
class News:
    """A round record, reduced to what one life of a learner must know of it."""

    round: int
    fragment: int
    version: int
    void: bool
    merged: bool = False  # It merged this life's contribution.
    rejected: str = ""  # Why it did not.
    stranger: bool = False  # It merged a contribution of another life of this node.
    cosine: float | None = None  # Mean over the pairs of merged deltas, None without a pair.

    @classmethod
    def of(cls, record: RoundRecord, life: Life, sent: Outstanding | None = None) -> News:
        """What `record` says to `life`, which has `sent` outstanding for its fragment."""
        own = {life.incarnation}
        if sent is not None and sent.inherited and sent.round == record.round:
            own.add(sent.inherited)
        rejected = [
            r.reason for r in record.rejected if r.node == life.node and r.incarnation in own
        ]
        lives = {p.incarnation for p in record.participants if p.node == life.node}
        return cls(
            round=record.round,
            fragment=record.fragment,
            version=record.version,
            void=record.void,
            merged=bool(own & lives),
            rejected=rejected[0] if rejected else "",
            stranger=bool(lives - own),
            cosine=record.cosine if len(record.participants) > 1 else None,
        )


def has_snapshot(held: FragmentTraining) -> bool:
    """Whether an alignment to come may count from the newest snapshot."""
    return held.outstanding is not None or held.meanwhile.merged


def _lose(
    held: FragmentTraining, lost: Counters, *, reason: str, round: int, fragment: int
) -> Changed:
    """Drops a part of what has been trained."""
    if lost == NOTHING:
        return held, ()
    ledger = held.ledger.drop(reason, lost.samples)
    held = replace(held, counters=held.counters - lost, ledger=ledger)
    return held, (Drop(round, fragment, reason, lost),)


def _taken_over(held: FragmentTraining) -> FragmentTraining:
    """What an earlier life sent and no record merged is training of this one from now on."""
    sent = held.outstanding
    if sent is None or not sent.inherited:
        return held
    return replace(held, ledger=held.ledger.train(sent.counters.samples))


def lose_all(held: FragmentTraining, *, reason: str, round: int, fragment: int) -> Changed:
    """Drops everything that is not outstanding, what was not merged for a reason of its own."""
    sent = held.outstanding.counters if held.outstanding else NOTHING
    effects: Effects = ()
    if (late := held.meanwhile.unmerged) is not None:
        held, effects = _lose(
            held, late.counters, reason=late.reason, round=late.round, fragment=fragment
        )
    held = replace(held, meanwhile=replace(held.meanwhile, merged=False, unmerged=None))
    rest = held.counters - sent
    held, more = _lose(held, rest, reason=reason, round=round, fragment=fragment)
    return held, (*effects, *more)


def void(held: FragmentTraining, news: News, *, revert: bool, kept: bool) -> Changed:
    """The version stays, and what was sent is tried again: the parameters still hold it (`kept`).

    Not so what is not finite, nor anything of one that finishes: it would send it again and again,
    a round each, and never end.
    """
    revert = revert and bool(news.rejected)
    sent = held.outstanding.counters if held.outstanding else NOTHING
    held = replace(_taken_over(held), outstanding=None)
    if kept and not revert and news.rejected != "nonfinite":
        return held, ()
    lost = held.counters if revert else sent
    reason = "rejected" if news.rejected else "late"
    held, effects = _lose(held, lost, reason=reason, round=news.round, fragment=news.fragment)
    return held, (*effects, Revert(news.round, news.fragment)) if revert else effects


def settle(rules: Rules, held: FragmentTraining, news: News, *, intact: bool) -> Changed:
    """A newer version exists, and the outstanding contribution is in it or never will be merged.

    `intact` says whether the parameters still hold what was sent; then an alignment may keep it.
    Not so what is not finite, nor what one that finishes had rejected: it would send it again and
    again. What came late from one that finishes does go out again.
    """
    sent = held.outstanding
    agreed = alignment.agrees(rules.alignment, news.cosine, before=held.agreed)
    meanwhile = replace(held.meanwhile, forced=held.meanwhile.forced or news.stranger)
    held = replace(held, behind=True, agreed=agreed, meanwhile=meanwhile)
    if sent is None:
        return held, ()
    if news.merged and sent.round == news.round:
        return _merged(held, sent, intact=intact), ()
    held = replace(_taken_over(held), outstanding=None)
    reason = "late"
    if news.rejected:
        reason = "superseded" if news.rejected == "superseded" else "rejected"
    hopeless = news.rejected == "nonfinite" or (sent.final and news.rejected)
    if intact and not hopeless:
        late = Unmerged(sent.round, reason, sent.counters)
        return replace(held, meanwhile=replace(meanwhile, unmerged=late)), ()
    held = replace(held, meanwhile=replace(meanwhile, forced=meanwhile.forced or intact))
    return _lose(held, sent.counters, reason=reason, round=news.round, fragment=news.fragment)


def _merged(held: FragmentTraining, sent: Outstanding, *, intact: bool) -> FragmentTraining:
    """What an earlier life sent is in the ledger of that life."""
    ledger = held.ledger if sent.inherited else held.ledger.merge(sent.counters.samples)
    rest = held.counters - sent.counters
    meanwhile = replace(held.meanwhile, merged=intact)
    return replace(held, counters=rest, outstanding=None, ledger=ledger, meanwhile=meanwhile)


def choose(rules: Rules, held: FragmentTraining, news: News, *, finite: bool) -> How:
    """What aligning with this version does; training that is old or unsound is never kept."""
    skipped = news.version - held.version - 1
    if held.meanwhile.forced or not finite or skipped > rules.in_flight:
        return alignment.Overwrite()
    return alignment.choose(rules.alignment, held.counters, agreed=held.agreed)


def align(held: FragmentTraining, news: News, how: How) -> Changed:
    """Takes a version: the counters go on from what is kept, the rest is dropped."""
    kept = alignment.kept(how, held.counters)
    from_snapshot = held.meanwhile.merged
    where = {"reason": "overwritten", "round": news.round, "fragment": news.fragment}
    if isinstance(how, alignment.Overwrite):
        held, effects = lose_all(held, **where)
    else:
        held, effects = _lose(held, held.counters - kept, **where)
    held = FragmentTraining(news.version, kept, ledger=held.ledger, agreed=held.agreed)
    align = Align(news.round, news.fragment, news.version, how, from_snapshot, kept)
    return held, (*effects, align)
