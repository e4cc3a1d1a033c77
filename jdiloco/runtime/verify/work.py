"""Claims on units of shared work, and what marks them given back or complete."""

from __future__ import annotations

import collections

from jdiloco.protocol.keys import Pool, UnitKey
from jdiloco.protocol.records import WorkClaim, WorkMark
from jdiloco.protocol.rules import Life
from jdiloco.runtime.verify.chain import Walk
from jdiloco.runtime.verify.reading import Reader, always, unsealed

UNTOLD = "Nobody can tell what of the unit has been merged, so nobody takes it again."
STUCK = "Nobody can tell where the unit goes on, so nobody takes it."
NAME_ALONE = "It counts by its name alone: the unit is complete."


class Work:
    """Checks every unit that somebody has claimed."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._units: dict[tuple[Pool, int], set[UnitKey]] = collections.defaultdict(set)
        for pool, key in reader.stock.units:
            self._units[pool, key.unit].add(key)
        self.holders: set[Life] = set()

    def check(self, walk: Walk) -> None:
        """Claims count from 1 without a gap, and the work goes on where it was left."""
        names = {pool.unit(unit): (pool, unit) for pool, unit in self._units}
        named: dict[tuple[Pool, int], int] = {}
        for name, claim in walk.units.items():
            if name in names:
                named[names[name]] = claim
            else:
                key = f"{self._reader.keys.run}/{name}.{claim:03}"
                self._reader.absent(key, always, UNTOLD)
        for (pool, unit), found in sorted(self._units.items(), key=lambda item: str(item[0])):
            highest = max(named.get((pool, unit), 0), *(key.claim for key in found))
            self._check_unit(pool, unit, found, highest)

    def _check_unit(self, pool: Pool, unit: int, found: set[UnitKey], highest: int) -> None:
        begin = 0
        for number in range(1, highest + 1):
            claim = self._claim(pool, UnitKey(unit, number))
            marks = [key for key in sorted(found) if key.claim == number and key.mark]
            for key in marks:
                self._check_mark(pool, key, claim)
            if claim is None:
                continue
            if claim.begin < begin or (number == 1 and claim.begin):
                name = self._reader.keys.unit(pool, UnitKey(unit, number))
                what = f"begins after {claim.begin} batches, the claim before it after {begin}"
                self._reader.wrong(name, what, "Batches of the unit are merged twice, or never.")
            begin = claim.begin

    def _claim(self, pool: Pool, key: UnitKey) -> WorkClaim | None:
        name = self._reader.keys.unit(pool, key)
        data = self._reader.get(name, always, UNTOLD)
        if data is None:
            return None
        claim = unsealed(self._reader, name, data, WorkClaim, UNTOLD)
        if claim is not None:
            self.holders.add(Life(claim.node, claim.incarnation))
        return claim

    def _check_mark(self, pool: Pool, key: UnitKey, claim: WorkClaim | None) -> None:
        name = self._reader.keys.unit(pool, key)
        means = STUCK if key.mark == "back" else NAME_ALONE
        data = self._reader.get(name, always, means)
        mark = None if data is None else unsealed(self._reader, name, data, WorkMark, means)
        if mark is None or claim is None:
            return
        if (mark.node, mark.incarnation) != (claim.node, claim.incarnation):
            holder = Life(claim.node, claim.incarnation)
            what = f"was written by {Life(mark.node, mark.incarnation)}, the claim is of {holder}"
            self._reader.wrong(name, what, means)
        elif mark.batches < claim.begin:
            what = f"leaves {mark.batches} batches behind, and began after {claim.begin}"
            self._reader.wrong(name, what, means)
