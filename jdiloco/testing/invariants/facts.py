"""A history, read once for all properties."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jdiloco.protocol.keys import MANIFEST, ContributionKey, Keys, RecordKey
from jdiloco.protocol.records import Manifest, Participant, RoundRecord, unseal
from jdiloco.testing.simulate import values
from jdiloco.testing.simulate.history import Deleted, History, Stored
from jdiloco.testing.simulate.values import Delta


@dataclasses.dataclass(frozen=True)
class Put:
    """An object as it was first stored."""

    index: int  # Of the entry.
    at: float
    data: bytes


class Facts:
    """A history, read once for all properties."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.puts: dict[str, Put] = {}
        self.again: list[str] = []  # Keys that were stored a second time.
        self.deleted: list[tuple[int, str]] = []
        self.manifest: Manifest | None = None
        self.records: dict[int, RoundRecord] = {}
        self.record_puts: dict[int, Put] = {}
        for index, entry in enumerate(history.entries):
            if isinstance(entry, Stored):
                self._put(index, entry)
            elif isinstance(entry, Deleted):
                self.deleted.append((index, entry.key))
        if MANIFEST in self.puts:
            self.manifest = unseal(MANIFEST, self.puts[MANIFEST].data, Manifest)
            self._read_records(Keys(self.manifest.run))
        self.keys = Keys(self.manifest.run if self.manifest else "none")

    def _put(self, index: int, entry: Stored) -> None:
        if entry.key in self.puts:
            self.again.append(entry.key)
        else:
            self.puts[entry.key] = Put(index, entry.at, entry.data)

    def _read_records(self, keys: Keys) -> None:
        for name, put in self.puts.items():
            if name.startswith(keys.log) and isinstance(key := keys.parse(name), RecordKey):
                self.records[key.round] = unseal(name, put.data, RoundRecord)
                self.record_puts[key.round] = put

    @property
    def in_order(self) -> list[RoundRecord]:
        return [self.records[round] for round in sorted(self.records)]

    def before(self, record: RoundRecord) -> RoundRecord | None:
        """The record whose version `record` replaced, None for the initial one."""
        earlier = [
            other
            for other in self.records.values()
            if other.fragment == record.fragment and other.round < record.round and not other.void
        ]
        return max(earlier, key=lambda other: other.round, default=None)

    def value(self, record: RoundRecord | None, fragment: int) -> str | None:
        """What a record committed; None when it never was in the mailbox."""
        if record is None:
            assert self.manifest is not None
            return values.initial(self.manifest.checkpoint.prefix, fragment)
        put = self.puts.get(record.anchor.key) if record.anchor else None
        return values.decode(put.data).value if put else None

    def delta(self, record: RoundRecord, who: Participant) -> tuple[Put, Delta] | None:
        """A contribution that a record names."""
        key = ContributionKey(record.round, who.node, who.incarnation, who.final)
        name = self.keys.contribution(key)
        put = self.puts.get(name)
        return None if put is None else (put, unseal(name, put.data, Delta))


Violations = Iterator[str]
