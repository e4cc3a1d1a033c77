"""What a mailbox says about its run, read without joining it: nothing is written."""

from __future__ import annotations

import dataclasses
import os

from jdiloco.errors import UsageError
from jdiloco.protocol.keys import MANIFEST, BeatKey, ContributionKey, Keys, RecordKey
from jdiloco.protocol.records import Manifest, RoundRecord, unseal
from jdiloco.store import open_store
from jdiloco.store.base import Store


@dataclasses.dataclass(frozen=True)
class RunView:
    """A run as its mailbox shows it at one moment."""

    manifest: Manifest
    rounds: tuple[RoundRecord, ...]  # In order, from round 0.
    beats: tuple[BeatKey, ...]  # The newest of every node, by name.
    waiting: tuple[ContributionKey, ...]  # To rounds that have no record yet.


def read_run(mailbox: str | os.PathLike[str] | Store) -> RunView:
    """Reads every round record. Raises UsageError when the mailbox holds no run."""
    store = open_store(mailbox)
    data = store.get(MANIFEST)
    if data is None:
        raise UsageError(f"There is no run in {store.url}: it holds no {MANIFEST!r}.")
    manifest = unseal(MANIFEST, data, Manifest)
    keys = Keys(manifest.run)
    listed = [key for entry in store.list(keys.log) if (key := keys.parse(entry.key)) is not None]
    rounds = tuple(
        record
        for key in listed
        if isinstance(key, RecordKey) and (record := _record(store, keys, key.round)) is not None
    )
    return RunView(manifest, rounds, _newest(listed), _waiting(listed, len(rounds)))


def _record(store: Store, keys: Keys, round: int) -> RoundRecord | None:
    key = keys.record(round)
    data = store.get(key)
    return None if data is None else unseal(key, data, RoundRecord)


def _newest(listed: list) -> tuple[BeatKey, ...]:
    newest: dict[str, BeatKey] = {}
    for key in sorted(key for key in listed if isinstance(key, BeatKey)):
        newest[key.node] = key  # Sorted by incarnation, then by beat.
    return tuple(newest.values())


def _waiting(listed: list, round: int) -> tuple[ContributionKey, ...]:
    return tuple(k for k in listed if isinstance(k, ContributionKey) and k.round >= round)
