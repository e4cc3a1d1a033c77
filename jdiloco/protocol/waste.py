"""How much of what a learner trains comes to nothing, over the newest rounds.

Samples are settled when they are merged or dropped. Over the rounds of four cycles every fragment
has been settled about four times, so one unlucky round does not raise an alarm. What is dropped
because the node leaves does not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

from jdiloco.protocol.records import Ledger

CYCLES = 4
MUCH = 0.2
"""More than this share dropped is worth an event."""


@dataclasses.dataclass(frozen=True, slots=True)
class Waste:
    """What had been settled after each of the newest rounds: merged, dropped."""

    settled: tuple[tuple[int, int], ...] = ()
    much: bool = False  # It has been said, and not been better since.

    @property
    def share(self) -> float | None:
        """Dropped of what was settled in the window, None while nothing was."""
        if not self.settled:
            return None
        (merged, dropped), (merged_now, dropped_now) = self.settled[0], self.settled[-1]
        both = merged_now - merged + dropped_now - dropped
        return (dropped_now - dropped) / both if both else None


def look(waste: Waste, ledgers: Sequence[Ledger]) -> tuple[Waste, bool]:
    """Once after each round; True when too much begins to be dropped. One ledger a fragment."""
    merged = sum(ledger.merged for ledger in ledgers)
    dropped = sum(
        n for ledger in ledgers for reason, n in ledger.dropped.items() if reason != "left"
    )
    window = CYCLES * len(ledgers) + 1
    waste = replace(waste, settled=(*waste.settled, (merged, dropped))[-window:])
    share = waste.share
    if len(waste.settled) < window or share is None:
        return waste, False
    return replace(waste, much=share > MUCH), share > MUCH and not waste.much
