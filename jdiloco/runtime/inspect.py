"""What a mailbox says about its run, read without joining it: nothing is written."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterable, Iterator

from jdiloco.errors import FormatError, UsageError
from jdiloco.protocol.keys import (
    CREATING,
    MANIFEST,
    BeatKey,
    ClaimKey,
    ContributionKey,
    Keys,
    PartKey,
    Pool,
    RecordKey,
    UnitKey,
)
from jdiloco.protocol.records import Manifest, RoundRecord, unseal
from jdiloco.runtime.run_key import open_mailbox, refuse_unreadable
from jdiloco.store.base import Entry, Store

KINDS = (
    "manifest",
    "creating",
    "record",
    "claim",
    "contribution",
    "part",
    "beat",
    "payload",
    "checkpoint",
    "incarnation",
    "work",
    "arrival",
    "foreign",
)
"""What an object in a mailbox can be; `foreign` is nothing of the run."""


@dataclasses.dataclass(frozen=True)
class RunView:
    """A run as its mailbox shows it at one moment."""

    manifest: Manifest
    rounds: tuple[RoundRecord, ...]  # In order, from round 0.
    beats: tuple[BeatKey, ...]  # The newest of every node, by name.
    waiting: tuple[ContributionKey, ...]  # To rounds that have no record yet.


def read_run(
    mailbox: str | os.PathLike[str] | Store, *, key_file: str | os.PathLike[str] | None = None
) -> RunView:
    """Reads every round record. Errors: `find_run`."""
    store = open_mailbox(mailbox, key_file)
    manifest, _ = find_run(store)
    keys = Keys(manifest.run)
    stock = take_stock(store.list(keys.log), keys)
    rounds = tuple(read_records(store, keys, sorted(stock.records)))
    waiting = [key for key in stock.contributions if key.round >= len(rounds)]
    return RunView(manifest, rounds, newest_beats(stock.beats), tuple(waiting))


# The manifest


def find_run(store: Store) -> tuple[Manifest, bytes]:
    """The run of a mailbox, with the bytes of its manifest.

    Raises UsageError when there is none, saying what there is instead, RunKeyMismatch when it has
    another run key than is given here, and FormatError when its manifest cannot be read.
    """
    data = store.get(MANIFEST)
    if data is None:
        raise no_run(store)
    return manifest_of(store, data), data


def manifest_of(store: Store, data: bytes) -> Manifest:
    """Reads a manifest. Raises FormatError."""
    try:
        return unseal(MANIFEST, data, Manifest)
    except FormatError as error:
        raise FormatError(
            f"What {store.url} holds is no run this build can read: {error} "
            "Name another mailbox, or move what is there out of the way."
        ) from error


def no_run(store: Store) -> UsageError:
    """The error for a mailbox without a manifest; it says what is there instead.

    Raises the one for a run with another key than is given here.
    """
    refuse_unreadable(store)
    return UsageError(_what_is_there(store))


def _what_is_there(store: Store) -> str:
    if "://" not in store.url and not os.path.isdir(store.url):
        return f"There is no run in {store.url}: there is no such folder."
    listed = [entry.key for entry in store.list("")]
    creators = {key.removeprefix(CREATING).partition(".")[0] for key in listed if _creates(key)}
    if creators:
        names = ", ".join(sorted(creators))
        return f"There is no run in {store.url} yet: {names} began to create one. Look again later."
    if not listed:
        return f"There is no run in {store.url}: it is empty."
    return (
        f"There is no run in {store.url}: it holds {len(listed)} objects, {listed[0]!r} first, but "
        f"no `{MANIFEST}`. Name the folder that holds one."
    )


def _creates(key: str) -> bool:
    return key.startswith(CREATING)


# Listings


@dataclasses.dataclass(frozen=True)
class Stock:
    """A listing, sorted by what its objects are."""

    sizes: dict[str, int]  # Bytes of every object that was listed.
    kinds: dict[str, str]  # One of KINDS for each.
    records: frozenset[int]
    claims: tuple[ClaimKey, ...]
    contributions: tuple[ContributionKey, ...]
    parts: tuple[PartKey, ...]  # Of contributions of pods.
    beats: tuple[BeatKey, ...]
    incarnations: tuple[tuple[str, int], ...]
    payloads: tuple[tuple[int, str], ...]  # Round and key.
    units: tuple[tuple[Pool, UnitKey], ...]
    files: tuple[tuple[int, str], ...]  # Of checkpoints: round, -1 for the initial one, and key.

    def of(self, kind: str) -> list[str]:
        """The keys of one kind, in order."""
        return [key for key, found in self.kinds.items() if found == kind]

    def bytes_by_kind(self) -> dict[str, tuple[int, int]]:
        """Objects and bytes of every kind that there is."""
        objects: collections.Counter[str] = collections.Counter(self.kinds.values())
        sizes: collections.Counter[str] = collections.Counter()
        for key, kind in self.kinds.items():
            sizes[kind] += self.sizes[key]
        return {kind: (objects[kind], sizes[kind]) for kind in KINDS if objects[kind]}


def take_stock(listed: Iterable[Entry], keys: Keys) -> Stock:
    """Sorts a listing of a mailbox, or of a part of it."""
    sizes = {entry.key: entry.size for entry in listed}
    found = {key: _kind(key, keys) for key in sizes}
    parts: dict[str, list] = collections.defaultdict(list)
    for kind, value in found.values():
        parts[kind].append(value)
    return Stock(
        sizes=sizes,
        kinds={key: kind for key, (kind, _) in found.items()},
        records=frozenset(key.round for key in parts["record"]),
        claims=tuple(parts["claim"]),
        contributions=tuple(parts["contribution"]),
        parts=tuple(parts["part"]),
        beats=tuple(parts["beat"]),
        incarnations=tuple(parts["incarnation"]),
        payloads=tuple(parts["payload"]),
        units=tuple(parts["work"]),
        files=tuple(parts["checkpoint"]),
    )


_LOGGED = {
    RecordKey: "record",
    ClaimKey: "claim",
    ContributionKey: "contribution",
    BeatKey: "beat",
}


def _kind(key: str, keys: Keys) -> tuple[str, object]:
    """What an object is, with what its key says."""
    if key == MANIFEST:
        return "manifest", None
    if _creates(key):
        return "creating", None
    if key.startswith(keys.log) and (logged := keys.parse(key)) is not None:
        return _LOGGED[type(logged)], logged
    if key.startswith(f"{keys.run}/node/") and (life := keys.parse_incarnation(key)) is not None:
        return "incarnation", life
    if (claimed := keys.parse_work(key)) is not None:
        return "work", claimed
    if _arrived(key, keys):
        return "arrival", None
    if (round := keys.round_of(key)) is not None:
        if keys.parse_payload(key) is not None:
            return "payload", (round, key)
        if (part := keys.parse_part(key)) is not None:
            return "part", part
        if key.startswith(keys.saves) and key.count("/") >= 3:
            return "checkpoint", (round, key)
    return "foreign", None


def _arrived(key: str, keys: Keys) -> bool:
    kind, _, name = key.rpartition("/")[0].removeprefix(f"{keys.run}/").partition("/")
    return kind == "barrier" and keys.parse_arrival(name, key) is not None


def newest_beats(beats: Iterable[BeatKey]) -> tuple[BeatKey, ...]:
    """The newest beat of every node, by name."""
    newest: dict[str, BeatKey] = {}
    for beat in sorted(beats):
        newest[beat.node] = beat  # Sorted by incarnation, then by beat.
    return tuple(newest.values())


# Records


def read_records(store: Store, keys: Keys, rounds: Iterable[int]) -> Iterator[RoundRecord]:
    """Reads round records one after another; none is held. Raises FormatError."""
    for round in rounds:
        key = keys.record(round)
        data = store.get(key)
        if data is not None:
            yield unseal(key, data, RoundRecord)
