"""Every record against those before it.

Holds what a record must continue: the newest digest, per fragment the version and the record that
made it, and per life and fragment what has been merged. Nothing of it grows with the rounds.

A record that cannot be read takes no other down with it: the next one tells its digest, the
versions and the heads it left; what was merged in it is unknown from there on, and not held against
anybody.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jdiloco.algo.merges import COUNT_MAX, contribution_weight
from jdiloco.protocol.keys import Keys
from jdiloco.protocol.records import (
    DROPS,
    FORMAT,
    REJECTIONS,
    Checkpoint,
    Ledger,
    Manifest,
    Participant,
    Payload,
    RoundRecord,
    sha256,
)
from jdiloco.protocol.rules import Life
from jdiloco.protocol.schedule import fragment_of

Sentences = Iterator[str]

UNKNOWN = -2
"""In place of a round that no record which can be read tells."""


@dataclasses.dataclass
class _Account:
    """What records say of one life and fragment."""

    merged: int = 0
    known: bool = True  # Every record was read since the life began.
    ledger: Ledger = dataclasses.field(default_factory=Ledger)  # Of its newest contribution.


@dataclasses.dataclass(frozen=True)
class Made:
    """What a fragment's version hashes to."""

    anchor: str
    outer: str


class Walk:
    """The chain up to the newest record that was taken."""

    def __init__(self, manifest: Manifest, data: bytes) -> None:
        fragments = len(manifest.plan)
        digest = sha256(data)
        self.round = 0  # That comes next.
        self.versions = [0] * fragments
        self.heads = [-1] * fragments  # The round that made each version; UNKNOWN after a gap.
        self.base = -1  # That made the version which the record taken last has replaced.
        self.named = [manifest.checkpoint]  # The newest one or two that records name, oldest first.
        self.lives: dict[Life, str] = {}  # Who took part, and the record that says so.
        self.units: dict[str, int] = {}  # The highest claim on each that a contribution names.
        self.next_closer: Life | None = Life(manifest.closer, 1)
        self._run = manifest.run
        self._keys = Keys(manifest.run)
        self._tip: str | None = digest
        self._bases: list[str | None] = [digest] * fragments
        self._accounts: dict[tuple[Life, int], _Account] = {}
        self._reached: dict[tuple[str, int], int] = {}  # Batches, by node and fragment.
        self._unread: list[int] = []  # Rounds whose records could not be, right before this one.
        self._gaps: set[int] = set()  # Fragments of which a record could not be read.
        self._after: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
            -1: (tuple(self.versions), tuple(self.heads))
        }
        self._made: dict[int, Made] = {}

    @property
    def covered(self) -> int:
        """Payloads up to this round may have been swept; see `protocol.sweep`.

        Each of the newest records that could not be read may have named a checkpoint more.
        """
        if len(self._unread) >= 2:
            return self.round
        named = self.named[len(self._unread) - 2 :]
        return named[0].round if len(named) + len(self._unread) >= 2 else -1

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Prefixes of the checkpoints that must be there: the two newest, as far as is known."""
        return tuple(checkpoint.prefix for checkpoint in self.named[-2:][len(self._unread) :])

    def made(self, checkpoint: Checkpoint) -> dict[int, tuple[int, Made | None]]:
        """Per fragment: the round that made its version in a checkpoint, and its hashes."""
        _, heads = self._after.get(checkpoint.round, ((), ()))
        return {index: (head, self._made.get(head)) for index, head in enumerate(heads)}

    def skip(self) -> None:
        """The record of the next round cannot be read."""
        index = fragment_of(self.round, len(self.versions))
        self._unread.append(self.round)
        self._gaps.add(index)
        for (_, fragment), account in self._accounts.items():
            account.known = account.known and fragment != index
        self._tip, self._bases[index], self.next_closer = None, None, None
        self.heads[index] = UNKNOWN
        self.round += 1

    def take(self, record: RoundRecord, data: bytes) -> list[str]:
        """What is wrong with the record of the next round, which is good in itself."""
        self._catch_up(record)
        self.base = self.heads[fragment_of(self.round, len(self.heads))]
        wrong = [*self._links(record), *self._contents(record)]
        wrong += [s for who in record.participants for s in self._participant(record, who)]
        self._advance(record, sha256(data))
        return wrong

    # What is read off the next record when some before it could not be read

    def _catch_up(self, record: RoundRecord) -> None:
        if not self._unread:
            return
        fragments = len(self.versions)
        if len(record.heads) == len(record.versions) == fragments:
            own = fragment_of(self.round, fragments)
            stepped = 0 if record.void else 1
            for index in {fragment_of(round, fragments) for round in self._unread}:
                self.versions[index] = record.versions[index] - (stepped if index == own else 0)
                if index != own or record.void:
                    self.heads[index] = record.heads[index]
            last = self._unread[-1]
            if self.heads[index := fragment_of(last, fragments)] == last:
                self._bases[index] = record.previous
        self._unread.clear()

    # The checks

    def _links(self, record: RoundRecord) -> Sentences:
        fragments = len(self.versions)
        index = fragment_of(self.round, fragments)
        stepped = 0 if record.void else 1
        versions = [v + (stepped if i == index else 0) for i, v in enumerate(self.versions)]
        heads = [self.round if stepped and i == index else h for i, h in enumerate(self.heads)]
        for name, found, wanted in (
            ("format", record.format, FORMAT),
            ("run", record.run, self._run),
            ("round", record.round, self.round),
            ("fragment", record.fragment, index),
            ("previous", record.previous, self._tip),
            ("base", record.base, self._bases[index]),
            ("versions", list(record.versions), versions),
            ("version", record.version, versions[index]),
            ("heads", list(record.heads), heads),
        ):
            if wanted is not None and found != wanted:
                yield f"`{name}` is {_short(found)}, the records before it give {_short(wanted)}"

    def _contents(self, record: RoundRecord) -> Sentences:
        yield from self._attempt(record)
        reports = (*record.participants, *record.rejected)
        lives = [Life(report.node, report.incarnation) for report in reports]
        for life in sorted({life for life in lives if lives.count(life) > 1}):
            yield f"{life} reported more than once"
        for group in (record.participants, record.rejected):
            names = [(report.node, report.incarnation) for report in group]
            if names != sorted(names):
                yield "its reports are not in the order of their nodes"
        for who in record.rejected:
            if who.reason not in REJECTIONS:
                yield f"{who.node} was rejected for {who.reason!r}, which is no reason"
        if record.expected < len(reports):
            yield f"{record.expected} learners were expected and {len(reports)} reported"
        if bool(record.participants) == record.void:
            names = ", ".join(str(life) for life in lives[: len(record.participants)]) or "nobody"
            yield f"it is {'void' if record.void else 'not void'} and merged {names}"
        yield from self._checkpoint(record)

    def _attempt(self, record: RoundRecord) -> Sentences:
        """The names that an attempt gives to what it writes."""
        life = Life(record.closer, record.incarnation)
        if not record.write_id.startswith(f"{life}."):
            yield f"`write_id` {record.write_id!r} is none of {life}"
        for part, payload in (("anchor", record.anchor), ("outer", record.outer)):
            if (payload is None) != record.void:
                yield f"`{part}` is {'missing' if payload is None else 'named by a void round'}"
            elif payload is not None:
                yield from self._payload(record, part, payload)
        if record.update is not None:
            if record.void:
                yield "`update` is named by a void round"
            yield from self._payload(record, "update", record.update)
        if not record.void and (record.build is None or record.cosine is None):
            yield "it does not say on which build it was closed, or the cosine of its deltas"

    def _payload(self, record: RoundRecord, part: str, payload: Payload) -> Sentences:
        wanted = self._keys.payload(record.round, record.write_id, part)
        if payload.key != wanted:
            yield f"`{part}` lies at {payload.key!r}, its attempt would write {wanted!r}"

    def _checkpoint(self, record: RoundRecord) -> Sentences:
        before, found = self.named[-1], record.checkpoint
        if found == before:
            return
        if not before.round < found.round < record.round or found.prefix == before.prefix:
            yield f"its checkpoint is that of round {found.round}, before was {before.round}"
        versions, _ = self._after.get(found.round, (None, None))
        if versions is not None and found.versions != versions:
            yield (
                f"its checkpoint of round {found.round} holds versions {list(found.versions)}, "
                f"that round left {list(versions)}"
            )

    def _participant(self, record: RoundRecord, who: Participant) -> Sentences:
        life, counters = Life(who.node, who.incarnation), who.counters
        counts = (counters.steps, counters.samples)
        if not all(0 < count <= COUNT_MAX for count in counts):
            yield f"{life} was merged with counters {counts}"
        elif who.weight != (weight := contribution_weight(steps=counts[0], samples=counts[1])):
            yield f"{life} weighs {who.weight!r}, its counters give {weight!r}"
        if who.position < counters.steps:
            yield f"{life} has {who.position} batches behind it, and sent {counters.steps} steps"
        begin, place = who.position - counters.steps, (who.node, record.fragment)
        if begin < self._reached.get(place, 0):
            yield (
                f"{life} sent what it trained after batch {begin}, of {who.node} was merged before "
                f"up to batch {self._reached[place]}"
            )
        self._reached[place] = max(who.position, self._reached.get(place, 0))
        yield from self._ledger(record, who, life)

    def _ledger(self, record: RoundRecord, who: Participant, life: Life) -> Sentences:
        ledger, fragment = who.ledger, record.fragment
        account = self._accounts.get((life, fragment))
        if account is None:
            account = _Account(known=fragment not in self._gaps)
            self._accounts[life, fragment] = account
        if not ledger.adds_up:
            yield f"the ledger of {life} does not add up: {ledger}"
        if unknown := sorted(ledger.dropped.keys() - set(DROPS)):
            yield f"the ledger of {life} drops for {unknown}, which are no reasons"
        if ledger.pending != who.counters.samples:
            yield (
                f"{life} sent {who.counters.samples} samples, its ledger has {ledger.pending} "
                "pending"
            )
        if account.known and ledger.merged != account.merged:
            yield (
                f"the ledger of {life} has {ledger.merged} samples merged, the records before "
                f"merged {account.merged}"
            )
        if not ledger.goes_on_from(account.ledger):
            yield f"the ledger of {life} went back: from {account.ledger} to {ledger}"
        account.merged = ledger.merged + who.counters.samples
        account.known, account.ledger = True, ledger

    # What comes after

    def _advance(self, record: RoundRecord, digest: str) -> None:
        index = fragment_of(self.round, len(self.versions))
        if not record.void:
            self.versions[index] += 1
            self.heads[index] = self.round
            self._bases[index] = digest
            if record.anchor is not None and record.outer is not None:
                self._made[self.round] = Made(record.anchor.sha256, record.outer.sha256)
        self._tip = digest
        self.next_closer = Life(record.next_closer, record.next_incarnation)
        self._after[self.round] = (tuple(self.versions), tuple(self.heads))
        key = self._keys.record(self.round)
        for covered in (item for who in record.participants for item in who.work):
            self.units[covered.unit] = max(covered.claim, self.units.get(covered.unit, 0))
        for report in (*record.participants, *record.rejected):
            self.lives.setdefault(Life(report.node, report.incarnation), key)
        self.lives.setdefault(Life(record.closer, record.incarnation), key)
        self.round += 1
        if record.checkpoint.round > self.named[-1].round:
            self._name(record.checkpoint)

    def _name(self, checkpoint: Checkpoint) -> None:
        """What lies before the two newest checkpoints is not asked for any more."""
        self.named = [*self.named[-1:], checkpoint]
        oldest = self.named[0].round
        self._after = {round: kept for round, kept in self._after.items() if round >= oldest}
        used = {head for _, heads in self._after.values() for head in heads}
        self._made = {round: made for round, made in self._made.items() if round in used}


def _short(value: object) -> str:
    text = f"{value!r}" if not isinstance(value, float) or math.isfinite(value) else str(value)
    return text if len(text) <= 80 else f"{text[:20]}…"
