"""What verifying a mailbox found."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """An object that is not as the run needs it."""

    key: str
    what: str  # Is wrong with it.
    means: str  # For the run.


@dataclasses.dataclass(frozen=True)
class Remark:
    """Something worth knowing that is no damage: what belongs to nothing, what came too late."""

    key: str
    what: str


HOWS = ("recomputed", "compared", "chained", "void", "unread")
"""How far a round could be checked.

    recomputed  its inputs are there, and give the committed bytes bit for bit
    compared    the same on another build, which promises no equal bits: equal within the tolerance
    chained     its record fits those before and after it; its inputs are gone, or cannot be used
    void        it committed nothing
    unread      its record is damaged or missing
"""


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Consecutive rounds of which the same can be said."""

    first: int
    last: int
    how: str  # One of HOWS.
    why: str = ""  # Not recomputed.

    @property
    def rounds(self) -> int:
        return self.last - self.first + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A mailbox, verified."""

    url: str
    run: str
    rounds: tuple[Stretch, ...]  # From round 0 to the newest that was there at the beginning.
    findings: tuple[Finding, ...]
    remarks: tuple[Remark, ...]
    objects: int  # That were read, or whose name and size are all they are.
    bytes: int
    later: int  # Rounds committed while the mailbox was being read, checked along the chain alone.

    @property
    def sound(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def count(self, how: str) -> int:
        """Rounds that were checked so."""
        return sum(stretch.rounds for stretch in self.rounds if stretch.how == how)
