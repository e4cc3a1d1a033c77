"""Who is alive, judged by one observer on its own clock.

A beat ages by listings that succeed: each that shows it unchanged adds the time since the listing
before, but at most two polls. So an outage of the store, or a pause of the observer, ends nobody's
lease, and no clock of another machine is ever compared. What comes out is a verdict; everything
else in the protocol sees the verdict and no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from jdiloco.protocol.keys import BeatKey
from jdiloco.protocol.rules import Life, Rules


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """What an observer knows of one life."""

    beat: BeatKey | None  # None: named somewhere, never seen.
    unchanged: float = 0.0  # Seconds for which the beat has been the same.
    still: float = 0.0  # Seconds for which the step has been the same.
    step_seconds: float | None = None  # Its usual step, as seen from here.

    @property
    def phase(self) -> str:
        """What it did when it last beat, "" before it ever has."""
        return self.beat.phase if self.beat is not None else ""

    def seen(self, beat: BeatKey | None, elapsed: float) -> Lease:
        """One listing later, which shows `beat`. An older one than is known is no sign of life."""
        if beat is None or (self.beat is not None and beat.beat <= self.beat.beat):
            return dataclasses.replace(
                self, unchanged=self.unchanged + elapsed, still=self.still + elapsed
            )
        waited = self.beat is not None and self.beat.phase == "waiting"
        still = elapsed if waited else self.still + elapsed
        trained = beat.step - (self.beat.step if self.beat else beat.step)
        if trained <= 0:
            return dataclasses.replace(self, beat=beat, unchanged=0.0, still=still)
        if not self._in_stride(beat):
            return Lease(beat, step_seconds=self.step_seconds)
        pace = still / trained
        usual = pace if self.step_seconds is None else 0.9 * self.step_seconds + 0.1 * pace
        return Lease(beat, step_seconds=usual)

    def _in_stride(self, beat: BeatKey) -> bool:
        """Whether the time since the beat before was training alone.

        The first steps compile, and a step after a commit may have waited for it; three times such
        a step would be a long time to wait for a learner that hangs.
        """
        before = self.beat
        trains = before is not None and before.phase == "training" and before.step > 0
        return trains and beat.phase == "training"

    def live(self, rules: Rules) -> bool:
        """Neither left nor silent for a lease timeout."""
        if self.beat is not None and self.beat.phase == "left":
            return False
        return self.unchanged < rules.lease_seconds

    def expected(self, rules: Rules) -> bool:
        """A learner that rounds wait for: live, training, and getting ahead.

        One that waits for a commit trains as soon as it has it, so it counts; its step stands
        still, which says nothing of it.
        """
        if self.beat is None or not self.live(rules):
            return False
        if self.beat.phase != "training":
            return self.beat.phase == "waiting"
        return self.still < max(rules.lease_seconds, 3 * (self.step_seconds or 0.0))


Leases = Mapping[Life, Lease]


def observe(
    leases: Leases, beats: Iterable[BeatKey], elapsed: float, *, named: Iterable[Life] = ()
) -> dict[Life, Lease]:
    """The leases after a listing, `elapsed` seconds (at most two polls) after the one before.

    `named` are lives that matter though they may never have been seen to beat: they age too. Of
    every node only the highest incarnation is kept; a life whose beats were swept is forgotten.
    """
    newest: dict[str, BeatKey] = {}
    for beat in beats:
        known = newest.get(beat.node)
        if known is None or (beat.incarnation, beat.beat) > (known.incarnation, known.beat):
            newest[beat.node] = beat
    shown = {Life(beat.node, beat.incarnation): beat for beat in newest.values()}
    after = {
        life: leases[life].seen(beat, elapsed) if life in leases else Lease(beat)
        for life, beat in shown.items()
    }
    for life in named:
        if life not in after and not _ended_by(life, newest):
            after[life] = leases.get(life, Lease(None)).seen(None, elapsed)
    return after


def _ended_by(life: Life, newest: Mapping[str, BeatKey]) -> bool:
    beat = newest.get(life.node)
    return beat is not None and beat.incarnation > life.incarnation


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What the rest of the protocol knows of the others."""

    live: frozenset[Life] = frozenset()
    expected: frozenset[Life] = frozenset()  # Learners that rounds wait for.
    learners: frozenset[Life] = frozenset()  # Live, and training now or about to.
    paused: frozenset[Life] = frozenset()  # Of them, those that close rounds until others stop.
    syncers: frozenset[Life] = frozenset()  # Live, and closing rounds alone.
    newest: tuple[tuple[str, int], ...] = ()  # The highest incarnation seen of each node.

    def newer(self, life: Life) -> int | None:
        """A higher incarnation of this life's node, if one has been seen."""
        found = dict(self.newest).get(life.node, 0)
        return found if found > life.incarnation else None


NOBODY = Verdict()


def judge(leases: Leases, rules: Rules, *, before: Verdict = NOBODY) -> Verdict:
    """The verdict on everybody seen. That a node has a newer life is never forgotten."""
    newest = dict(before.newest)
    for life in leases:
        newest[life.node] = max(life.incarnation, newest.get(life.node, 0))
    live = frozenset(life for life, lease in leases.items() if lease.live(rules))

    def phased(*phases: str) -> frozenset[Life]:
        return frozenset(life for life in live if leases[life].phase in phases)

    return Verdict(
        live=live,
        expected=frozenset(life for life, lease in leases.items() if lease.expected(rules)),
        learners=phased("joining", "training", "waiting", "resting", "closing"),
        paused=phased("closing"),
        syncers=phased("syncing"),
        newest=tuple(sorted(newest.items())),
    )
