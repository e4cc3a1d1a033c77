"""Verifying a whole mailbox: in which order things are read, and what is held meanwhile."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from jdiloco.algo import merges
from jdiloco.algo.merges import Merge
from jdiloco.errors import FormatError, UsageError
from jdiloco.protocol.keys import CREATING, MANIFEST, Keys
from jdiloco.protocol.records import (
    Account,
    Build,
    Checkpoint,
    Manifest,
    RoundRecord,
    is_sealed,
)
from jdiloco.protocol.rules import Life
from jdiloco.runtime.build import this_build
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.inspect import Stock, manifest_of, no_run, take_stock
from jdiloco.runtime.payloads import patient
from jdiloco.runtime.run_key import open_mailbox, refuse_other_key, store_name
from jdiloco.runtime.schema import Schema
from jdiloco.runtime.verify.chain import Made, Walk
from jdiloco.runtime.verify.lives import Claims, Lives
from jdiloco.runtime.verify.reading import Progress, Reader, always, never, unsealed
from jdiloco.runtime.verify.report import Finding, Remark, Report, Stretch
from jdiloco.runtime.verify.rounds import GONE, Kept, Rounds, Settings
from jdiloco.runtime.verify.saved import Saved
from jdiloco.runtime.verify.work import Work
from jdiloco.store.base import Store
from jdiloco.store.signed import NAME, forged_as, forged_names, unsigned

WAITS = (0.1, 0.3, 1.0, 2.0)
"""Seconds between the tries of a request that the store does not answer."""


def verify(
    mailbox: str | os.PathLike[str] | Store,
    *,
    merges: Sequence[type] = (),
    build: Build | None = None,
    progress: Callable[[Progress], object] = lambda progress: None,
    key_file: str | os.PathLike[str] | None = None,
    clock: Clock | None = None,
) -> Report:
    """Checks everything that lies in a mailbox. Joins nothing and writes nothing.

    Arguments:
      merges: merge classes of your own that the run may use; without them its rounds are checked
        along the chain only.
      build: what rounds are recomputed on; None is this one. Rounds of the same build must come
        out bit for bit.
      progress: called before every object.
      key_file: the file that holds the run's key; None looks in the environment
        (`jdiloco.runtime.run_key`).

    Raises UsageError when there is no run, and FormatError for one of a newer format. What is
    damaged is no error: it is in the report.
    """
    store = patient(open_mailbox(mailbox, key_file), WAITS, (clock or Clock()).sleep)
    data = store.get(MANIFEST)
    if data is None:
        report = _without_manifest(store)
        data = store.get(MANIFEST)
        if data is None:  # What was found may be of a run that began after the first look.
            return report
    if not is_sealed(MANIFEST, data):
        return _unreadable(store, f"holds {len(data)} bytes that do not match their digest")
    manifest = manifest_of(store, data)
    keys = Keys(manifest.run)
    stock = take_stock(store.list(""), keys)
    reader = Reader(store, keys, stock, progress)
    reader.took(len(data))
    with tempfile.TemporaryDirectory(prefix="jdiloco-") as scratch:
        settings = _settings(manifest, merges, build or this_build())
        return _Verification(reader, manifest, data, settings, Path(scratch)).report()


STRANGER = "Nodes take no notice of it. `jdiloco gc` removes it, unless it is called a manifest."
LOST = (
    "No node can join or come back; those that are in the run stop once they look for it. Every "
    "run checkpoint but the first holds a copy of it, as the `manifest` of its item `run`."
)


def _without_manifest(store: Store) -> Report:
    """A manifest is never removed: without one there is no run, or one that has lost it."""
    refuse_other_key(store, [entry.key for entry in unsigned(store).list(MANIFEST)])
    if because := forged_as(store, MANIFEST):
        return _unreadable(store, because)
    keys = [entry.key for entry in store.list("")]
    logged = [key for key in keys if Keys(key.partition("/")[0]).parse(key) is not None]
    if not logged:  # What lies deeper is another mailbox, and a program may call its folder `log`.
        raise no_run(store)
    return _unreadable(store, f"is missing, and yet there is {logged[0]}")


def _unreadable(store: Store, what: str) -> Report:
    return Report(
        url=store.url,
        run="",
        rounds=(),
        findings=(Finding(store_name(store, MANIFEST), what, LOST),),
        remarks=(Remark(MANIFEST, "tells how to read all else: nothing else was checked"),),
        objects=1,
        bytes=0,
        later=0,
    )


def _settings(manifest: Manifest, known: Sequence[type], build: Build) -> Settings:
    said = manifest.algorithm
    try:
        return Settings(
            schema=Schema.of_manifest(manifest),
            merge=_merge(said["merge"], known),
            outer_lr=said["outer_lr"],
            outer_momentum=said["outer_momentum"],
            delta_dtype=said["delta_dtype"],
            keep_rounds=said["keep_rounds"],
            build=build,
        )
    except KeyError as error:
        raise FormatError(
            f"{MANIFEST!r} has no setting {error}: another version made it."
        ) from error


def _merge(said: dict, known: Sequence[type]) -> Merge | None:
    try:
        return merges.from_json(said, known=known)
    except UsageError:
        return None


class _Verification:
    """One mailbox, from the manifest to the newest record."""

    def __init__(
        self, reader: Reader, manifest: Manifest, data: bytes, settings: Settings, scratch: Path
    ) -> None:
        self._reader = reader
        self._keys = reader.keys
        self._settings = settings
        self._walk = Walk(manifest, data)
        self._claims = Claims(reader)
        self._saved = Saved(reader, settings.schema, data, scratch)
        self._kept: dict[int, Kept] = {}
        self._marks: dict[int, tuple[str, str]] = {}  # Rounds that are not just `chained`.
        self._checkpoints: dict[str, tuple[Checkpoint, dict[int, tuple[int, Made | None]]]] = {}
        self._with_objects = {round for round, _ in reader.stock.payloads}
        self._with_objects |= {key.round for key in reader.stock.contributions}
        self._note_checkpoint(manifest.checkpoint)

    def report(self) -> Report:
        """Reads everything, the records first and the newest of them last."""
        reader = self._reader
        lives = Lives(reader)
        for round in range(max(reader.stock.records, default=-1) + 1):
            self._take(round)
        count = self._walk.round
        self._check_rounds(lives)
        for round in self._claims.rounds:
            if round >= count:
                self._claims.of(round)
        work = Work(reader)
        work.check(self._walk)
        lives.check_known({*self._walk.lives, *work.holders})
        self._check_names()
        later = self._follow()
        self._check_end()
        reader.judge_absent(self._walk)
        reader.name_as_stored()
        self._check_signatures()
        return Report(
            url=reader.store.url,
            run=self._keys.run,
            rounds=self._stretches(count),
            findings=tuple(reader.findings),
            remarks=tuple(reader.remarks),
            objects=reader.objects,
            bytes=reader.bytes,
            later=later,
        )

    # Records

    def _take(self, round: int) -> None:
        key = self._keys.record(round)
        data = self._reader.get(key, always, self._unread_means(round))
        means = self._unread_means(round)
        record = None if data is None else unsealed(self._reader, key, data, RoundRecord, means)
        if data is None or record is None:
            self._marks[round] = ("unread", "")
            self._walk.skip()
            return
        named, before = self._walk.next_closer, self._walk.named[-1]
        if wrong := [*self._walk.take(record, data), *self._closer(record, named)]:
            means = "Nodes have acted on it all the same: what it says stands."
            self._reader.wrong(key, "; ".join(wrong), means)
        if record.checkpoint == before:
            record = msgspec.structs.replace(record, checkpoint=before)  # One copy for all.
        else:
            self._note_checkpoint(record.checkpoint)
            self._kept = {r: kept for r, kept in self._kept.items() if self._keeps(r)}
        if record.void:
            self._marks[round] = ("void", "")
        self._kept[round] = Kept(record, self._walk.base)

    def _unread_means(self, round: int) -> str:
        if round == max(self._reader.stock.records, default=-1):
            return "It is the newest: nodes that have not read it can neither go on nor join."
        return "Nodes that read it go on; what it merged and who took part is not known any more."

    def _closer(self, record: RoundRecord, named: Life | None) -> list[str]:
        """Whoever closes a round was named by the record before, or has claimed it."""
        life, claimants = Life(record.closer, record.incarnation), self._claims.of(record.round)
        if named in (None, life) or claimants is None or life in claimants:
            return []
        if life in self._claims.made_since(record.round):
            return []
        return [f"{life} closed it, {named} was named, and no claim of {life} is there"]

    def _keeps(self, round: int) -> bool:
        """Whether anything of a round is, or must be, in the mailbox."""
        walk = self._walk
        recent = round > walk.covered or round + self._settings.keep_rounds >= walk.round - 1
        return recent or round in walk.heads or round in self._with_objects

    def _note_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._checkpoints[checkpoint.prefix] = (checkpoint, self._walk.made(checkpoint))

    # What records name

    def _check_rounds(self, lives: Lives) -> None:
        """Rounds in order, and before each the checkpoints of the rounds before it."""
        rounds = Rounds(self._reader, self._settings, lives, self._walk)
        waiting = sorted(self._checkpoints_there(), key=lambda found: found[0].round)
        for round, kept in sorted(self._kept.items()):
            while waiting and waiting[0][0].round < round:
                self._check_checkpoint(rounds, *waiting.pop(0))
            how = rounds.check(kept)
            self._marks[round] = how
        for found in waiting:
            self._check_checkpoint(rounds, *found)
        rounds.check_open()

    def _checkpoints_there(self) -> list[tuple[Checkpoint, dict[int, tuple[int, Made | None]]]]:
        listed = {self._keys.checkpoint_of(key) for _, key in self._reader.stock.files}
        wanted = listed.union(self._walk.checkpoints)
        for prefix in sorted(listed - self._checkpoints.keys()):
            found = self._saved.unnamed(prefix)
            if found is not None and found.prefix == prefix:
                self._checkpoints[prefix] = (found, self._walk.made(found))
        return [found for prefix, found in self._checkpoints.items() if prefix in wanted]

    def _check_checkpoint(
        self, rounds: Rounds, checkpoint: Checkpoint, made: dict[int, tuple[int, Made | None]]
    ) -> None:
        versions = self._saved.check(checkpoint, made, self._walk)
        for fragment, version in versions.items():
            head, hashes = made.get(fragment, (None, None))
            if head is not None and (head < 0 or hashes is not None):
                rounds.load(fragment, head, version)

    # What is left of the listing

    def _check_names(self) -> None:
        stock, reader = self._reader.stock, self._reader
        self._check_beats()
        for key in (*stock.of("creating"), *stock.of("arrival")):
            reader.took(0)
            if stock.sizes[key]:
                what = f"holds {stock.sizes[key]} bytes; its name is all that it should be"
                reader.wrong(key, what, "It counts all the same: nobody reads it.")
        self._remark_on(stock.of("creating"), "left behind by a node that wanted to create the run")
        self._remark_on(stock.of("foreign"), "nothing of this run")
        named = {payload.key for kept in self._kept.values() for payload in kept.record.payloads}
        unread = {round for round, (how, _) in self._marks.items() if how == "unread"}
        settled = [(r, key) for r, key in stock.payloads if r < self._walk.round]
        strays = [key for r, key in settled if key not in named and r not in unread]
        self._remark_on(strays, "written by an attempt that came second: no record names its bytes")
        hidden = [key for r, key in settled if r in unread]
        whole = {(k.round, k.node, k.incarnation) for k in stock.contributions}
        parts = [p for p in stock.parts if (p.round, p.node, p.incarnation) not in whole]
        left = [self._keys.part(p) for p in parts if p.round < self._walk.round]
        self._remark_on(left, "a part of a contribution that is not there")
        self._remark_on(hidden, "cannot be checked, as the record of its round cannot be read")

    def _check_beats(self) -> None:
        """What counts is in their names; what they say beside that is for `status` alone."""
        for key in self._reader.stock.of("beat"):
            if not self._reader.stock.sizes[key]:
                self._reader.took(0)
                continue
            means = "It counts all the same; `status` does not know what its node spent."
            if (data := self._reader.get(key, never, means)) is not None:
                unsealed(self._reader, key, data, Account, means)

    def _remark_on(self, keys: Sequence[str], what: str) -> None:
        if keys:
            more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
            self._reader.remark(keys[0], f"{what}{more}")

    def _follow(self) -> int:
        """Takes the records that were written meanwhile. Returns how many there were."""
        listed = self._reader.store.list(self._keys.log, after=self._keys.after(self._walk.round))
        newer = max(take_stock(listed, self._keys).records, default=-1)
        later = range(self._walk.round, newer + 1)
        for round in later:
            self._take(round)
        return len(later)

    def _check_end(self) -> None:
        """Whether anything tells of records that are not there."""
        next_round, fragments = self._walk.round, len(self._settings.schema.plan)
        if (found := _beyond(self._reader.stock, self._keys, next_round, fragments)) is None:
            return
        means = "Rounds that were committed are lost: nodes that join would go on from older ones."
        what = f"is missing, and yet there is {found}, which comes later than it"
        self._reader.wrong(self._keys.record(next_round), what, means)

    def _check_signatures(self) -> None:
        """What lies beside the objects of a signed run and is called as if it were one of them."""
        mine = (MANIFEST, CREATING, f"{self._keys.run}/")
        for name in forged_names(self._reader.store):
            if name.startswith(mine):
                self._reader.wrong(name, NAME, STRANGER)

    def _stretches(self, count: int) -> tuple[Stretch, ...]:
        found: list[Stretch] = []
        for round in range(count):
            how, why = self._marks.get(round, ("chained", GONE))
            last = found[-1] if found else None
            if last is not None and (last.how, last.why) == (how, why):
                found[-1] = dataclasses.replace(last, last=round)
            else:
                found.append(Stretch(round, round, how, why))
        return tuple(found)


def _beyond(stock: Stock, keys: Keys, next_round: int, fragments: int) -> str | None:
    """An object that can only have been written once `next_round` had a record.

    A learner publishes a round after it has read the record of that fragment's last one; claims and
    payloads are of the round after the newest record, checkpoints of one that has a record.
    """
    found = [
        *(keys.contribution(k) for k in stock.contributions if k.round >= next_round + fragments),
        *(keys.beat(k) for k in stock.beats if k.next_round > next_round + fragments),
        *(keys.claim(k) for k in stock.claims if k.round > next_round),
        *(key for round, key in stock.payloads if round > next_round),
        *(key for round, key in stock.files if round >= next_round),
    ]
    return found[0] if found else None
