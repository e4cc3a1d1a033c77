"""The settings of a run that decisions depend on, as the manifest gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jdiloco.protocol.alignment import OVERWRITE, Alignment

TAKEOVER_POLLS = 10
"""A round is never thought overdue before so many polls."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Plain values. `jdiloco.DiLoCo` documents each, checks them and makes this from them."""

    sync_every: int
    fragments: int
    in_flight: int = 1
    overlap_steps: int | None = None
    follow: int | None = None
    alignment: Alignment = OVERWRITE
    quorum_size: int = 1
    grace_seconds: float | None = None
    round_seconds: float | None = None
    beat_seconds: float = 10.0
    lease_seconds: float = 30.0
    keep_rounds: int = 2
    checkpoint_every: int = 10
    updates: bool = False  # Whether commits can have updates beside the whole anchor.

    @property
    def steps_ahead(self) -> float:
        """Steps that a learner can be ahead of the newest commit it holds."""
        flight = self.in_flight * self.sync_every / self.fragments
        return flight if self.overlap_steps is None else min(flight, float(self.overlap_steps))

    @property
    def small_seconds(self) -> float:
        """How long a small request may take: three in a row fit between two beats."""
        return self.beat_seconds / 3

    def patience(self, poll_seconds: float) -> float:
        """Seconds for a closer that died to be noticed and for another to take its place."""
        return self.lease_seconds + TAKEOVER_POLLS * poll_seconds + self.beat_seconds


ROLES = ("both", "learner", "syncer", "either")
"""What a node does: trains and closes rounds, one of the two, or trains until it is elected."""


def trains(role: str) -> bool:
    """Whether a node of this role may train."""
    return role != "syncer"


def closes(role: str) -> bool:
    """Whether a node of this role may close rounds."""
    return role != "learner"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Life:
    """One incarnation of a node: who does something, and in which of its lives."""

    node: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.node}.{self.incarnation:04}"


def share(total: int, lives: Iterable[Life], me: Life) -> int:
    """What falls to `me` of `total` things that lives divide among themselves; at least 1.

    The shares of lives that see the same others add up to `total`, the remainder going to the first
    in order, as long as there are no more lives than things.
    """
    order = sorted({*lives, me})
    each, rest = divmod(total, len(order))
    return max(1, each + (order.index(me) < rest))


NO_CLOSER = Life("", 0)
"""Who closes round 0 of a run that a node created which closes none."""
