"""Where a run stands, from its mailbox alone: nothing is written, and nobody is asked.

Samples are means over the fragments, each as its newest merged contribution tells it: processed =
merged + dropped + pending. What a node has trained since is known to that node alone.

Whether a node lives cannot be read off one listing: a beat says that its writer lived when it was
written, not when that was, and no clock is compared. Two listings can tell, a beat or more apart.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import statistics
from collections.abc import Iterable, Mapping

from jdiloco.errors import FormatError
from jdiloco.protocol.keys import BeatKey, ClaimKey, Keys
from jdiloco.protocol.records import (
    Claim,
    Incarnation,
    Ledger,
    Manifest,
    RoundRecord,
    Timing,
    unseal,
)
from jdiloco.protocol.rules import Life
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.inspect import Stock, find_run, newest_beats, read_records, take_stock
from jdiloco.runtime.payloads import patient
from jdiloco.runtime.run_key import open_mailbox
from jdiloco.runtime.spending import read_accounts
from jdiloco.store.base import Store
from jdiloco.store.signed import forged_names
from jdiloco.types import Spent

WAITS = (0.1, 0.3, 1.0)
"""Seconds between the tries of a request that the store does not answer."""

ALIVE = ("alive", "silent", "left", "ended", "unknown")
"""What two looks at a mailbox tell of a node; `unknown` after one look, or without any beat.

`ended` is one whose work another node took over, once it had been silent for a lease.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What the run trains."""

    tensors: int
    parameters: int
    bytes: int  # At the tensors' own precision.
    fragments: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Where samples went, as means over fragments; summed over nodes for a whole run."""

    merged: float = 0.0
    dropped: Mapping[str, float] = dataclasses.field(default_factory=dict)  # By reason.
    pending: float = 0.0

    @property
    def dropped_total(self) -> float:
        return sum(self.dropped.values(), 0.0)

    @property
    def processed(self) -> float:
        return self.merged + self.dropped_total + self.pending

    @property
    def share_dropped(self) -> float:
        """Of what was processed; 0 when nothing was."""
        return self.dropped_total / self.processed if self.processed else 0.0

    def __add__(self, other: Samples) -> Samples:
        reasons = sorted({*self.dropped, *other.dropped})
        return Samples(
            merged=self.merged + other.merged,
            dropped={r: self.dropped.get(r, 0.0) + other.dropped.get(r, 0.0) for r in reasons},
            pending=self.pending + other.pending,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """One node, all its lives together."""

    node: str
    lives: int  # How often it has been started.
    alive: str  # One of ALIVE.
    ended_by: str | None  # Whose life took over its work, if one did and it has not come back.
    phase: str | None  # Of its own newest beat, as the next three; None when that was swept.
    step: int | None
    next_round: int | None
    beat: int | None
    rounds: int  # In which a contribution of it was merged.
    rejected: int  # Contributions.
    samples: Samples
    waiting: tuple[int, ...]  # Rounds without a record to which it has reported.
    spent: Spent | None  # As far as its lives have said (`spending`).


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """A round that has a record."""

    round: int
    fragment: int
    version: int
    void: bool
    closer: str
    participants: tuple[str, ...]
    expected: int
    rejected: Mapping[str, str]  # Reason by node.
    cosine: float | None  # Mean pairwise cosine of the deltas; None without a pair.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """A run at one moment."""

    url: str
    run: str
    model: Model
    settings: Mapping[str, object]  # As the manifest keeps them.
    rounds: int  # That have a record.
    void: int  # Of them.
    versions: tuple[int, ...]  # Per fragment.
    newest: Commit | None
    mean_participants: float  # Over the rounds that merged something.
    rejected: Mapping[str, int]  # Contributions of the whole run, by reason.
    timing: Timing
    next_round: int
    next_closer: str
    takeovers: int  # Claims of the whole run.
    checkpoint_round: int  # Of the newest that a record names; -1 for the initial one.
    checkpoints: int  # In the mailbox, named or not.
    nodes: tuple[NodeStatus, ...]
    samples: Samples  # Of all nodes.
    stored: Mapping[str, tuple[int, int]]  # Objects and bytes by kind.
    spent: Spent  # By all nodes, as far as they have said.
    forged: int  # Objects without the signature of the run's key, up to `signed.FORGED_MAX`.
    waited: float  # Seconds between the two looks; 0 after a single one.


def read_status(
    mailbox: str | os.PathLike[str] | Store,
    *,
    wait: float = 0.0,
    key_file: str | os.PathLike[str] | None = None,
    clock: Clock | None = None,
) -> Status:
    """Reads where a run stands. Holds one record at a time, however long the run is.

    `wait` is the seconds between two looks that tell who is alive: two beat intervals or more; 0
    looks once. `key_file` holds the run's key, None looks in the environment. Errors:
    `jdiloco.runtime.inspect.find_run`; FormatError for a damaged record.
    """
    clock = clock or Clock()
    store = patient(open_mailbox(mailbox, key_file), WAITS, clock.sleep)
    manifest, _ = find_run(store)
    keys = Keys(manifest.run)
    before: tuple[BeatKey, ...] = ()
    if wait > 0:
        before = take_stock(store.list(f"{keys.log}live/"), keys).beats
        clock.sleep(wait)
    stock = take_stock(store.list(""), keys)
    told = _Told(manifest)
    for record in read_records(store, keys, sorted(stock.records)):
        told.take(record)
    for life, spent in read_accounts(store, stock, keys).items():
        told.spent[life] = spent  # Newer than any record.
    nodes = _nodes(stock, told, before, read_ended(store, keys, stock), looked_twice=wait > 0)
    return Status(
        url=store.url,
        run=manifest.run,
        model=_model(manifest),
        settings=manifest.algorithm,
        rounds=told.rounds,
        void=told.void,
        versions=told.versions,
        newest=_commit(told.newest),
        mean_participants=told.mean,
        rejected=dict(sorted(told.reasons.items())),
        timing=told.newest.timing if told.newest else Timing(),
        next_round=told.rounds,
        next_closer=str(_next_closer(store, keys, stock, told)),
        takeovers=len(stock.claims),
        checkpoint_round=told.checkpoint_round,
        checkpoints=len({keys.checkpoint_of(key) for _, key in stock.files}),
        nodes=nodes,
        samples=sum((node.samples for node in nodes), Samples()),
        stored=stock.bytes_by_kind(),
        spent=sum((node.spent for node in nodes if node.spent), Spent()),
        forged=len(forged_names(store)),
        waited=wait,
    )


class _Told:
    """What the records tell, one after another."""

    def __init__(self, manifest: Manifest) -> None:
        self.rounds = self.void = self.merging = self.merged = 0
        self.versions: tuple[int, ...] = manifest.checkpoint.versions
        self.newest: RoundRecord | None = None
        self.named = Life(manifest.closer, 1)
        self.checkpoint_round = manifest.checkpoint.round
        self.reasons: collections.Counter[str] = collections.Counter()
        self.taken: collections.Counter[str] = collections.Counter()  # Rounds by node.
        self.refused: collections.Counter[str] = collections.Counter()
        self.ledgers: dict[Life, dict[int, Ledger]] = collections.defaultdict(dict)
        self.spent: dict[Life, Spent] = {}

    @property
    def mean(self) -> float:
        """Participants of a round that merged something; 0 when none did."""
        return self.merged / self.merging if self.merging else 0.0

    def take(self, record: RoundRecord) -> None:
        self.rounds = record.round + 1
        self.void += record.void
        self.merging += not record.void
        self.merged += len(record.participants)
        self.versions, self.newest = record.versions, record
        self.named = Life(record.next_closer, record.next_incarnation)
        self.checkpoint_round = max(self.checkpoint_round, record.checkpoint.round)
        self.reasons.update(who.reason for who in record.rejected)
        self.refused.update(who.node for who in record.rejected)
        self.taken.update({who.node for who in record.participants})
        for who in record.participants:
            ledger = who.ledger.merge(who.counters.samples)
            self.ledgers[Life(who.node, who.incarnation)][record.fragment] = ledger
            if who.spent is not None:
                self.spent[Life(who.node, who.incarnation)] = who.spent

    def samples(self, node: str) -> Samples:
        """Of all lives of a node."""
        found = [_mean(held.values()) for life, held in self.ledgers.items() if life.node == node]
        return sum(found, Samples())

    def spent_by(self, node: str) -> Spent | None:
        """By all lives of a node that have said."""
        found = [spent for life, spent in self.spent.items() if life.node == node]
        return sum(found, Spent()) if found else None


def _mean(ledgers: Iterable[Ledger]) -> Samples:
    """Of one life, over the fragments that it has contributed to."""
    found = list(ledgers)
    reasons = sorted({reason for ledger in found for reason in ledger.dropped})
    return Samples(
        merged=statistics.fmean(ledger.merged for ledger in found),
        dropped={
            r: statistics.fmean(ledger.dropped.get(r, 0) for ledger in found) for r in reasons
        },
        pending=statistics.fmean(ledger.pending for ledger in found),
    )


def _nodes(
    stock: Stock,
    told: _Told,
    before: tuple[BeatKey, ...],
    ended: Mapping[Life, str],
    *,
    looked_twice: bool,
) -> tuple[NodeStatus, ...]:
    def own(beats: Iterable[BeatKey]) -> dict[str, BeatKey]:
        said = [b for b in beats if Life(b.node, b.incarnation) not in ended]
        return {beat.node: beat for beat in newest_beats(said)}

    newest, older = own(stock.beats), own(before)
    born = [Life(node, number) for node, number in stock.incarnations]
    lives = collections.Counter(life.node for life in born if life not in ended)
    last = {life.node: ended.get(life) for life in sorted(born)}
    names = sorted({*newest, *lives, *told.taken, *told.refused})
    return tuple(
        NodeStatus(
            node=name,
            lives=lives[name],
            alive="ended"
            if last.get(name)
            else _alive(newest.get(name), older.get(name), looked_twice=looked_twice),
            ended_by=last.get(name),
            phase=beat.phase if (beat := newest.get(name)) else None,
            step=beat.step if beat else None,
            next_round=beat.next_round if beat else None,
            beat=beat.beat if beat else None,
            rounds=told.taken[name],
            rejected=told.refused[name],
            samples=told.samples(name),
            waiting=tuple(
                key.round
                for key in stock.contributions
                if key.node == name and key.round >= told.rounds
            ),
            spent=told.spent_by(name),
        )
        for name in names
    )


def read_ended(store: Store, keys: Keys, stock: Stock) -> dict[Life, str]:
    """Lives that nobody lived, made by another node to end the one before: by whom."""
    found = {}
    for node, number in stock.incarnations:
        if number == 1:
            continue  # There is none before it.
        key = keys.incarnation(node, number)
        data = store.get(key)
        with contextlib.suppress(FormatError):  # `verify` names what is damaged.
            if data is not None and (by := unseal(key, data, Incarnation).ended_by):
                found[Life(node, number)] = by
    return found


def _alive(beat: BeatKey | None, before: BeatKey | None, *, looked_twice: bool) -> str:
    if beat is None:
        return "unknown"
    if beat.phase == "left":
        return "left"
    if not looked_twice:
        return "unknown"
    return "silent" if beat == before else "alive"


def _model(manifest: Manifest) -> Model:
    return Model(
        tensors=len(manifest.tensors),
        parameters=sum(spec.size for spec in manifest.tensors),
        bytes=sum(spec.nbytes for spec in manifest.tensors),
        fragments=len(manifest.plan),
    )


def _commit(record: RoundRecord | None) -> Commit | None:
    if record is None:
        return None
    return Commit(
        round=record.round,
        fragment=record.fragment,
        version=record.version,
        void=record.void,
        closer=record.closer,
        participants=tuple(who.node for who in record.participants),
        expected=record.expected,
        rejected={who.node: who.reason for who in record.rejected},
        cosine=record.cosine if len(record.participants) > 1 else None,
    )


def _next_closer(store: Store, keys: Keys, stock: Stock, told: _Told) -> Life:
    """Whom the newest record names, or whoever has claimed the round that is open."""
    numbers = [claim.number for claim in stock.claims if claim.round == told.rounds]
    if not numbers:
        return told.named
    key = keys.claim(ClaimKey(told.rounds, max(numbers)))
    data = store.get(key)
    if data is None:
        return told.named
    claim = unseal(key, data, Claim)
    return Life(claim.node, claim.incarnation)
