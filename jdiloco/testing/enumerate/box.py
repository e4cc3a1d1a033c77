"""A mailbox as a value: what lies in it, and what is on its way there with nobody waiting for it.

Every different mailbox is one `Box` with one number, so that comparing two is comparing integers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from jdiloco.protocol.keys import ClaimKey, ContributionKey, Keys
from jdiloco.protocol.records import Checkpoint, RoundRecord, sha256
from jdiloco.protocol.rules import Life
from jdiloco.testing.enumerate import values

RUN = "run"
KEYS = Keys(RUN)

Objects = dict[str, tuple[bytes, bool]]
"""What was stored under a key, and whether it is still there."""

Late = tuple[str, bytes | None]
"""A create whose sender gave up or died, or (None) a delete."""


class Box:
    """What lies under which key. Of an object that was removed the bytes stay known."""

    __slots__ = ("_listed", "dead", "flaws", "late", "number", "objects")

    def __init__(
        self,
        number: int,
        objects: Objects,
        late: frozenset[Late],
        flaws: tuple[str, ...],
        dead: frozenset[Life],
    ) -> None:
        self.dead = dead  # Lives that are over, for settings in which that is known.
        self.number = number
        self.objects = objects
        self.late = late
        self.flaws = flaws  # What was done to contested keys that must not be.
        self._listed: dict[tuple[str, str], tuple[str, ...]] = {}

    def get(self, key: str) -> bytes | None:
        data, there = self.objects.get(key, (None, False))
        return data if there else None

    def ever(self, key: str) -> bytes | None:
        """What was first stored there, removed or not."""
        return self.objects.get(key, (None, False))[0]

    def list(self, prefix: str, after: str = "") -> tuple[str, ...]:
        asked = prefix, after
        if asked not in self._listed:
            self._listed[asked] = tuple(
                sorted(
                    key
                    for key, (_, there) in self.objects.items()
                    if there and key.startswith(prefix) and key > after
                )
            )
        return self._listed[asked]


class Boxes:
    """Every mailbox met so far."""

    def __init__(self) -> None:
        self.met: list[Box] = []
        self._numbers: dict[tuple, Box] = {}
        self._created: dict[tuple, tuple[bool, Box]] = {}

    def make(
        self,
        objects: Objects,
        late: frozenset[Late] = frozenset(),
        flaws: tuple[str, ...] = (),
        dead: frozenset[Life] = frozenset(),
    ) -> Box:
        objects = without_remains(objects)
        late = frozenset(item for item in late if _matters(objects, item))
        known = (tuple(sorted(objects.items())), late, flaws, dead)
        if known not in self._numbers:
            self._numbers[known] = Box(len(self.met), objects, late, flaws, dead)
            self.met.append(self._numbers[known])
        return self._numbers[known]

    def create(self, box: Box, key: str, data: bytes) -> tuple[bool, Box]:
        """Stores an object unless there is one."""
        asked = box.number, key, data
        if asked not in self._created:
            self._created[asked] = self._create(box, key, data)
        return self._created[asked]

    def _create(self, box: Box, key: str, data: bytes) -> tuple[bool, Box]:
        if box.get(key) is not None:
            return False, box
        return True, self.make({**box.objects, key: (data, True)}, box.late, box.flaws, box.dead)

    def overwrite(self, box: Box, key: str, data: bytes) -> Box:
        """What a store does that ignores the condition."""
        flaws = box.flaws
        if box.get(key) is not None and box.get(key) != data:
            flaws = (*flaws, f"{key} was stored twice")
        return self.make({**box.objects, key: (data, True)}, box.late, flaws, box.dead)

    def delete(self, box: Box, keys: Iterable[str]) -> Box:
        gone = [key for key in keys if box.get(key) is not None]
        if not gone:
            return box
        objects = dict(box.objects)
        for key in gone:
            objects[key] = (objects[key][0], False)
        flaws = tuple(f"{key} was deleted" for key in gone if is_contested(key))
        return self.make(objects, box.late, (*box.flaws, *flaws), box.dead)

    def send(self, box: Box, *items: Late) -> Box:
        """Something is on its way, and may land at any time or never."""
        return self.make(box.objects, box.late | set(items), box.flaws, box.dead)

    def bury(self, box: Box, life: Life) -> Box:
        """A life is over."""
        return self.make(box.objects, box.late, box.flaws, box.dead | {life})

    def landings(self, box: Box) -> Iterator[tuple[str, Box]]:
        """What may land now."""
        for item in sorted(box.late, key=str):
            key, data = item
            left = self.make(box.objects, box.late - {item}, box.flaws, box.dead)
            if data is None:
                yield f"a delete of {key} lands", self.delete(left, [key])
            else:
                yield f"{key} lands, late", self.create(left, key, data)[1]


def is_contested(key: str) -> bool:
    """A key that several may try to write, and that nothing may remove."""
    _, _, rest = key.partition("/log/")
    return "/node/" in key or (rest[:1].isdigit() and ".2." not in rest)


def without_remains(objects: Objects) -> Objects:
    """Without what was left of rounds that have a record, and that the record does not name.

    A record never changes, so nobody can commit such a round again: its claims, payloads of other
    attempts, and contributions that came late can lead to nothing but a write that is refused.
    """
    gone = {key for key in objects if _remains(objects, key)}
    return {key: found for key, found in objects.items() if key not in gone} if gone else objects


def _remains(objects: Objects, key: str) -> bool:
    round = _belongs_to(key)
    if round < 0:
        return False
    data, there = objects.get(KEYS.record(round), (b"", False))
    return there and key not in names_of(KEYS.record(round), data)


@functools.cache
def _belongs_to(key: str) -> int:
    """The round that a claim, a contribution or a payload is for; -1 of other objects."""
    if key.startswith(f"{RUN}/data/"):
        found = KEYS.round_of(key)
        return -1 if found is None else found
    parsed = KEYS.parse(key) if key.startswith(KEYS.log) else None
    return parsed.round if isinstance(parsed, ClaimKey | ContributionKey) else -1


@functools.cache
def names_of(key: str, data: bytes) -> frozenset[str]:
    """The contributions and payloads that a round record names."""
    record = values.read_record(key, data)
    reports = (*record.participants, *record.rejected)
    return frozenset(
        [
            *(
                KEYS.contribution(ContributionKey(record.round, r.node, r.incarnation, r.final))
                for r in reports
            ),
            *(payload.key for payload in record.payloads),
        ]
    )


def _matters(objects: Objects, item: Late) -> bool:
    """A create of what is there is refused, a delete of what is not there does nothing."""
    key, data = item
    there = objects.get(key, (None, False))[1]
    if data is None:
        return there
    return not there and not _remains(objects, key)


def committed(
    box: Box, fragment: int, record: RoundRecord | None, newest: Checkpoint
) -> values.Values | None:
    """A fragment's value, from its payload or the checkpoint that covers it; None: it is gone."""
    if record is not None and record.anchor is not None:
        data = box.get(record.anchor.key)
        if data is not None and sha256(data) == record.anchor.sha256:
            return values.decode(data)
    if newest.versions[fragment] != (0 if record is None else record.version):
        return None
    file = newest.files[fragment]
    data = box.get(f"{newest.prefix}/{file.key}")
    return values.decode(data) if data is not None and sha256(data) == file.sha256 else None
