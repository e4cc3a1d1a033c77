"""Incarnations and claims: who has lived, and who took over a round."""

from __future__ import annotations

import collections

from jdiloco.protocol.keys import ClaimKey, ContributionKey
from jdiloco.protocol.records import Claim, Incarnation
from jdiloco.protocol.rules import Life
from jdiloco.runtime.verify.reading import Reader, always, unsealed

NOBODY = (
    "Closers cannot see which contributions of earlier lives it vouches for and reject them; who "
    "starts under that id is not told who has it."
)
FREE = "It counts as nobody's; the next claim on that round is free. Its round is not in danger."


class Lives:
    """Every life that the mailbox knows."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.vouched: dict[Life, frozenset[str] | None] = {}  # Keys; None: it cannot be read.
        numbers: dict[str, list[int]] = collections.defaultdict(list)
        for node, number in reader.stock.incarnations:
            numbers[node].append(number)
        for node, found in sorted(numbers.items()):
            for number in range(1, max(found) + 1):
                self._read(Life(node, number))

    def check_known(self, named: set[Life]) -> None:
        """Whoever left anything behind has an incarnation; `named` are those in records."""
        stock = self._reader.stock
        traces = [Life(k.node, k.incarnation) for k in (*stock.beats, *stock.contributions)]
        for life in sorted({*named, *traces} - self.vouched.keys()):
            self._read(life)

    def _read(self, life: Life) -> None:
        key = self._reader.keys.incarnation(life.node, life.incarnation)
        data = self._reader.get(key, always, NOBODY)
        self.vouched[life] = None
        if data is None:
            return
        found = unsealed(self._reader, key, data, Incarnation, NOBODY)
        if found is None:
            return
        self.vouched[life] = frozenset(found.valid)
        for what in self._wrong(found, life):
            self._reader.wrong(key, what, NOBODY)

    def _wrong(self, found: Incarnation, life: Life) -> list[str]:
        wrong = []
        if (found.node, found.incarnation) != (life.node, life.incarnation):
            wrong.append(f"says that it is {Life(found.node, found.incarnation)}")
        for name in found.valid:
            key = self._reader.keys.parse(name)
            if not isinstance(key, ContributionKey) or key.node != life.node:
                wrong.append(f"vouches for {name!r}, which is no contribution of {life.node}")
            elif key.incarnation >= life.incarnation:
                wrong.append(f"vouches for {name!r}, which is of no earlier life")
        return wrong


class Claims:
    """Who claimed which round."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._highest: dict[int, int] = {}
        for key in reader.stock.claims:
            self._highest[key.round] = max(self._highest.get(key.round, 0), key.number)

    @property
    def rounds(self) -> list[int]:
        """Rounds that somebody claimed."""
        return sorted(self._highest)

    def of(self, round: int) -> set[Life] | None:
        """Who claimed a round; None when a claim on it cannot be read."""
        found: set[Life] | None = set()
        for number in range(1, self._highest.get(round, 0) + 1):
            claimant = self._read(round, number)
            if claimant is None or found is None:
                found = None
            else:
                found.add(claimant)
        return found

    def made_since(self, round: int) -> set[Life]:
        """The same for claims that the listing did not show yet."""
        found: set[Life] = set()
        number = self._highest.get(round, 0) + 1
        while (data := self._reader.store.get(self._key(round, number))) is not None:
            claimant = self._parse(self._key(round, number), data)
            found |= {claimant} if claimant else set()
            number += 1
        return found

    def _key(self, round: int, number: int) -> str:
        return self._reader.keys.claim(ClaimKey(round, number))

    def _read(self, round: int, number: int) -> Life | None:
        key = self._key(round, number)
        data = self._reader.get(key, always, FREE)
        return None if data is None else self._parse(key, data)

    def _parse(self, key: str, data: bytes) -> Life | None:
        found = unsealed(self._reader, key, data, Claim, FREE)
        return None if found is None else Life(found.node, found.incarnation)
