"""What an enumeration covers: who takes part, how far, and what may go wrong how often."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jdiloco.protocol import effects as fx
from jdiloco.protocol.alignment import OVERWRITE, Alignment
from jdiloco.protocol.rules import Rules

AT_ONCE: frozenset[type] = frozenset(
    {fx.ReadRecord, fx.ReadClaim, fx.ReadPlace, fx.Examine, fx.Merge, fx.Deliver, fx.Save}
)
"""Requests that by default are answered in the step that asks for them; see the package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One exploration. The first seat's node created the run and closes round 0."""

    seats: tuple[str, ...] = ("a", "b")
    """One process each, by its node's id; an id that comes twice is two lives of one node."""

    joined: tuple[bool, ...] = (True, True)
    """Whether a seat's process has joined when the exploration begins, or may start any time."""

    rounds: int = 2
    fragments: int = 1
    in_flight: int = 1
    quorum_size: int = 1
    checkpoint_every: int = 10
    alignment: Alignment = OVERWRITE
    keep_rounds: int = 2

    lost: int = 0
    """So many requests get no answer, or are told "taken" of a key where nothing is."""

    crashes: int = 0
    """So many processes are killed. A dead one may be started again at any later time."""

    nonfinite: tuple[int, ...] = ()
    """Rounds to which nobody's first contribution is finite."""

    judged: Literal["nobody", "dead", "anybody"] = "anybody"
    """Whose lease others may judge to have ended, at any time: of `anybody` also wrongly."""

    at_once: frozenset[type] = AT_ONCE
    joins_at_once: bool = True
    """A process joins in one step; False: one request of joining is one step."""

    reads_fail: bool = True
    """Whether the request that gets no answer may be one that only reads."""

    late_deletes: bool = False
    """A delete lands any time later, or never; False: in the step that asks for it."""

    @property
    def calm(self) -> bool:
        """Nothing goes wrong: whoever is named closes every round, and every round has a result."""
        faults = self.lost or self.crashes or self.nonfinite
        return not faults and self.judged == "nobody"

    @property
    def rules(self) -> Rules:
        return Rules(
            sync_every=self.fragments,
            fragments=self.fragments,
            in_flight=self.in_flight,
            follow=0,
            alignment=self.alignment,
            quorum_size=self.quorum_size,
            grace_seconds=0.0,
            keep_rounds=self.keep_rounds,
            checkpoint_every=self.checkpoint_every,
        )

    def __str__(self) -> str:
        """What is not as it is by default."""
        given = ((f, getattr(self, f.name)) for f in dataclasses.fields(self))
        shown = [f"{f.name}={value}" for f, value in given if value != f.default]
        return ", ".join(shown) or "as by default"
