"""The protocol's properties, as functions over a simulated run.

    found = broken(simulate(17))
    assert not found, "\n".join(map(str, found))

Each function is one numbered property and yields a sentence per violation. They look at what came
to lie in the mailbox, in which order, and at what nodes did, never at what nodes believed. S6 has
no function: it says that the others hold whatever clocks, listings and answers do, which is what
the faults of a simulated run are for.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from itertools import pairwise

from jdiloco import events
from jdiloco.protocol.keys import MANIFEST, BeatKey, ContributionKey, Keys, Pool, RecordKey, UnitKey
from jdiloco.protocol.records import (
    DROPS,
    REJECTIONS,
    Checkpoint,
    Manifest,
    Participant,
    Payload,
    RoundRecord,
    seal,
    sha256,
    unseal,
)
from jdiloco.protocol.rules import Life, closes
from jdiloco.testing.simulate import values
from jdiloco.testing.simulate.history import (
    Deleted,
    Entry,
    Fate,
    Happened,
    Held,
    History,
    Resumed,
    Snapped,
    Stored,
    Took,
    Worked,
)
from jdiloco.testing.simulate.scenario import NO_FAULTS, Scenario
from jdiloco.testing.simulate.values import Delta, Span


@dataclasses.dataclass(frozen=True)
class Broken:
    """A property that a run does not have."""

    name: str  # S1 to S8, L1 to L3, or `roles`.
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


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


def s1_one_record_per_round_in_one_chain(facts: Facts) -> Violations:
    """S1: a round has at most one record, which stays; records close in order, linked by hash."""
    contested = (facts.keys.incarnations(""), "manifest", "/log/")
    for key in facts.again:
        if _contested(facts, key, contested):
            yield f"{key} was stored twice"
    for _, key in facts.deleted:
        if _contested(facts, key, contested):
            yield f"{key} was deleted"
    if facts.manifest is None:
        return
    digest = sha256(facts.puts[MANIFEST].data)
    bases = [digest] * len(facts.manifest.plan)
    versions = [0] * len(bases)
    for expected, record in enumerate(facts.in_order):
        if record.round != expected:
            yield f"round {record.round} has a record, round {expected} has none"
            return
        index = record.round % len(bases)
        versions[index] += not record.void
        if record.previous != digest or record.base != bases[index]:
            yield f"the record of round {record.round} does not continue the chain"
        if record.fragment != index or list(record.versions) != versions:
            yield f"the record of round {record.round} has versions {record.versions}"
        digest = sha256(facts.record_puts[record.round].data)
        if not record.void:
            bases[index] = digest


def _contested(facts: Facts, key: str, kinds: tuple[str, str, str]) -> bool:
    nodes, manifest, log = kinds
    if key == manifest or key.startswith(nodes.removesuffix(".")):
        return True
    parsed = facts.keys.parse(key) if log in key else None
    return parsed is not None and type(parsed).__name__ in ("RecordKey", "ClaimKey")


def s2_newest_versions_are_complete(facts: Facts) -> Violations:
    """S2: the newest version of every fragment is in the mailbox at all times, whole."""
    if facts.manifest is None:
        return
    present: dict[str, bytes] = {}
    heads: dict[int, RoundRecord] = {}
    newest, checkpoint = -1, facts.manifest.checkpoint
    created = facts.puts[MANIFEST].index
    for index, entry in enumerate(facts.history.entries):
        if isinstance(entry, Stored):
            present[entry.key] = entry.data
            record = _record_of(facts, entry)
            if record is None:
                continue
            newest, checkpoint = record.round, _newer(checkpoint, record.checkpoint)
            if not record.void:
                heads[record.fragment] = record
        elif isinstance(entry, Deleted):
            present.pop(entry.key, None)
            if (round := _round_of(facts, entry.key)) is not None and round > newest:
                yield f"{entry.key} was deleted before its round had a record"
        else:
            continue
        if index >= created:
            yield from _incomplete(facts, present, heads, checkpoint, entry)


def _record_of(facts: Facts, entry: Stored) -> RoundRecord | None:
    if not entry.key.startswith(facts.keys.log):
        return None
    key = facts.keys.parse(entry.key)
    return facts.records[key.round] if isinstance(key, RecordKey) else None


def _newer(held: Checkpoint, found: Checkpoint) -> Checkpoint:
    return found if found.round > held.round else held


def _round_of(facts: Facts, key: str) -> int | None:
    """The round that an object belongs to."""
    data = f"{facts.keys.run}/data/"
    if key.startswith(data):
        return int(key.removeprefix(data)[:10])
    parsed = facts.keys.parse(key)
    return parsed.round if isinstance(parsed, ContributionKey) else None


def _incomplete(
    facts: Facts,
    present: dict[str, bytes],
    heads: dict[int, RoundRecord],
    checkpoint: Checkpoint,
    entry: Entry,
) -> Violations:
    assert facts.manifest is not None
    for fragment in range(len(facts.manifest.plan)):
        head = heads.get(fragment)
        payloads = (head.anchor, head.outer) if head else (None,)
        if all(payload and _whole(present, payload.key, payload) for payload in payloads):
            continue
        file = checkpoint.files[fragment]
        covered = checkpoint.versions[fragment] == (head.version if head else 0)
        if not (covered and _whole(present, f"{checkpoint.prefix}/{file.key}", file)):
            yield f"fragment {fragment} cannot be read after: {entry}"


def _whole(present: dict[str, bytes], key: str, payload: Payload) -> bool:
    data = present.get(key)
    return data is not None and sha256(data) == payload.sha256


def s3_nothing_is_merged_twice(facts: Facts) -> Violations:
    """S3: a contribution is merged into the version it was subtracted from, and no row is merged
    twice into one fragment, whichever node or life trained on it."""
    merged: dict[int, list[Span]] = collections.defaultdict(list)
    for record in facts.in_order:
        base = facts.before(record)
        for who in record.participants:
            found = facts.delta(record, who)
            if found is None:
                yield f"round {record.round} merged a contribution of {who.node} that never was"
                continue
            put, delta = found
            if put.index > facts.record_puts[record.round].index:
                yield f"round {record.round} merged a contribution that came later"
            if delta.base != facts.value(base, record.fragment):
                yield f"round {record.round} merged what {who.node} subtracted from something else"
            for span in delta.rows:
                if any(map(span.overlaps, merged[record.fragment])):
                    yield f"round {record.round} merged rows of {who.node} a second time: {span}"
                merged[record.fragment].append(span)


def s4_records_can_be_recomputed(facts: Facts) -> Violations:
    """S4: with what a record names by hash anybody gets the same bytes; recent inputs are kept."""
    for record in facts.in_order:
        if record.anchor is None:
            continue
        for who in record.participants:
            found = facts.delta(record, who)
            if found is None:
                continue  # S3 says so.
            put, delta = found
            if who.sha256 != sha256(put.data) or who.weight != values.weight(delta.head):
                yield f"round {record.round} names other bytes of {who.node} than it merged"
        base = facts.value(facts.before(record), record.fragment)
        inputs = [(who.sha256, who.weight) for who in record.participants]
        final = all(who.final for who in record.participants)
        if facts.value(record, record.fragment) != values.merged(str(base), inputs, final=final):
            yield f"round {record.round} committed a value that its inputs do not give"
    yield from _lost_inputs(facts)


def _lost_inputs(facts: Facts) -> Violations:
    for record in facts.in_order[-facts.history.scenario.rules.keep_rounds :]:
        for who in record.participants:
            key = ContributionKey(record.round, who.node, who.incarnation, who.final)
            if facts.keys.contribution(key) not in facts.history.objects:
                yield f"the contribution of {who.node} to round {record.round} is gone already"


def s5_nodes_act_on_committed_records_alone(facts: Facts) -> Violations:
    """S5: a node acts on a round only once its record is there, and on that record."""
    newest: dict[str, int] = {}
    for index, entry in enumerate(facts.history.entries):
        if isinstance(entry, Took):
            round = entry.record.round
            if not _is_there(facts, index, round, entry.record):
                yield f"{entry.who} acted on a record of round {round} that is not the one there"
            if round != newest.get(entry.who, round - 1) + 1:
                yield f"{entry.who} took round {round} after round {newest[entry.who]}"
            newest[entry.who] = round
        elif isinstance(entry, Held):
            record = facts.records.get(entry.round)
            there = entry.round < 0 or _is_there(facts, index, entry.round, record)
            if not there or facts.value(record, entry.fragment) != entry.value:
                yield f"{entry.who} holds a value of round {entry.round} that it did not commit"


def _is_there(facts: Facts, index: int, round: int, record: RoundRecord | None) -> bool:
    put = facts.record_puts.get(round)
    if put is None or record is None or put.index > index:
        return False
    return put.data == seal(facts.keys.record(round), record)


def s7_every_ledger_adds_up(facts: Facts) -> Violations:
    """S7: of what a participant processed, records and events tell where it went."""
    merged: collections.Counter[tuple[Life, int]] = collections.Counter()
    dropped = _drops_before_snapshots(facts)
    trained = _samples_before_snapshots(facts)
    for record in facts.in_order:
        for who in record.rejected:
            if who.reason == "counters":  # Nobody here sends wrong ones.
                yield f"round {record.round}: the ledger of {who.node} does not agree with records"
        for who in record.participants:
            found = facts.delta(record, who)
            if found is None:
                continue
            delta = found[1]
            life, ledger = Life(who.node, who.incarnation), who.ledger
            place = f"round {record.round}, {life}"
            if (who.counters.steps, who.counters.samples) != (delta.steps, delta.samples):
                yield f"{place}: counters are {who.counters} for {delta.steps}, {delta.samples}"
            key = ContributionKey(record.round, who.node, who.incarnation, who.final)
            if key not in trained:
                yield f"{place}: nobody took the snapshot that was merged"
            elif ledger.processed != trained[key]:
                yield f"{place}: the ledger has {ledger.processed} of {trained[key]} samples"
            parts = (ledger.merged, *ledger.dropped.values(), ledger.pending)
            if ledger.processed != sum(parts):
                yield f"{place}: the ledger has {ledger.processed} samples, its parts are {parts}"
            if ledger.pending != who.counters.samples:
                yield f"{place}: {ledger.pending} samples are pending, {who.counters} were sent"
            if ledger.merged != merged[life, record.fragment]:
                yield f"{place}: records before merged {merged[life, record.fragment]} samples"
            if ledger.dropped != dropped.get(key):
                yield f"{place}: dropped {ledger.dropped}, events say {dropped.get(key)}"
            if not ledger.dropped.keys() <= set(DROPS):
                yield f"{place}: dropped for {ledger.dropped}"
            merged[life, record.fragment] += who.counters.samples


def _samples_before_snapshots(facts: Facts) -> dict[ContributionKey, int]:
    """Per contribution: samples of its life and fragment by then, those it went on with included.

    Of what an earlier life sent those count that no record merged: a fragment is not reported on
    again before that is known.
    """
    scenario = facts.history.scenario
    samples = {plan.node: plan.samples for plan in scenario.nodes}
    resumed = {entry.who: entry for entry in facts.history.of(Resumed)}
    found = {}
    for entry in facts.history.of(Snapped):
        node, fragment = entry.key.node, entry.key.round % scenario.rules.fragments
        found[entry.key] = entry.steps * (samples.get(node) or samples[node.rstrip("b")])
        if (before := resumed.get(entry.who)) is not None:
            found[entry.key] += before.rest[fragment] + sum(
                inherited
                for key, inherited in before.sent
                if key.round % scenario.rules.fragments == fragment and not _is_merged(facts, key)
            )
    return found


def _is_merged(facts: Facts, key: ContributionKey) -> bool:
    record = facts.records.get(key.round)
    if record is None:
        return False
    return any((w.node, w.incarnation) == (key.node, key.incarnation) for w in record.participants)


def _drops_before_snapshots(facts: Facts) -> dict[ContributionKey, dict[str, int]]:
    """Per contribution: samples of its life and fragment that events said were dropped before."""
    sums: dict[tuple[str, int], dict[str, int]] = collections.defaultdict(dict)
    found = {}
    fragments = facts.history.scenario.rules.fragments
    for entry in facts.history.entries:
        if isinstance(entry, Happened) and isinstance(entry.event, events.Dropped):
            drop = entry.event
            reasons = sums[entry.who, drop.fragment]
            reasons[drop.reason] = reasons.get(drop.reason, 0) + drop.samples
        elif isinstance(entry, Snapped):
            found[entry.key] = dict(sums[entry.who, entry.key.round % fragments])
    return found


def s8_bad_contributions_are_rejected(facts: Facts) -> Violations:
    """S8: what is not finite, empty or of another version is rejected with its reason."""
    for record in facts.in_order:
        base = facts.before(record)
        version = base.version if base else 0
        for who in record.participants:
            found = facts.delta(record, who)
            if found is None:
                continue
            head = found[1].head
            if not found[1].finite or head.empty or head.version != version:
                yield f"round {record.round} merged a bad contribution of {who.node}"
        for who in record.rejected:
            if who.reason not in REJECTIONS:
                yield f"round {record.round} rejected {who.node} for {who.reason!r}"


def l1_every_round_gets_a_record(facts: Facts) -> Violations:
    """L1: whoever can go on does: all nodes end, and while somebody can close no contribution waits
    for ever.

    L2 with it: once faults are over, a round that somebody reported to waits for no more than two
    lease timeouts, a takeover and a round of the slowest.
    """
    history = facts.history
    began, end = _closers(history)
    scenario = history.scenario
    wait = scenario.rules.overlap_steps is not None or any(plan.work for plan in scenario.nodes)
    if not history.ended and not (wait and end < scenario.horizon):
        yield f"nodes were still waiting after {scenario.horizon} s"
    limit, calm = _patience(scenario), max(began, _calm(history))
    for round, at in sorted(_first_reports(facts).items()):
        before = facts.record_puts.get(round - 1)
        since = max(at, calm, before.at if before else 0.0)
        put = facts.record_puts.get(round)
        waited = min(put.at if put else end, end) - since
        if waited > limit:
            yield f"round {round} waited for {waited:.1f} s, the limit is {limit:.1f} s"
    trained = [entry.at for entry in history.of(Worked)]
    joined = [entry.at for entry in history.of(Fate) if entry.kind == "joined"]
    moments = [put.at for put in facts.record_puts.values()]
    for before, after in pairwise([min(joined, default=0.0), *moments, float("inf")]):
        idle = min(after, end, max(trained, default=0.0)) - max(before, calm)
        if idle > limit:
            yield f"learners trained for {idle:.1f} s without a record, the limit is {limit:.1f} s"


def _patience(scenario: Scenario) -> float:
    rules = scenario.rules
    pace = max(plan.step_seconds for plan in scenario.nodes)
    merge = max(plan.merge_seconds for plan in scenario.nodes)
    training = 2 * pace * rules.sync_every / rules.fragments
    takeover = 4 * (10 * scenario.poll_seconds + 3 * merge)
    return 2 * rules.lease_seconds + training + takeover + 10 * scenario.latency_seconds


def _calm(history: History) -> float:
    """When nothing goes wrong any more."""
    scenario = history.scenario
    fates = [entry.at for entry in history.of(Fate) if entry.kind in ("killed", "started")]
    store = [scenario.faults.until] if scenario.faults != NO_FAULTS else []
    outages = [end for _, end in scenario.outages]
    pauses = [at + seconds for plan in scenario.nodes for at, seconds in plan.pauses]
    return max([0.0, *fates, *store, *outages, *pauses])


def _closers(history: History) -> tuple[float, float]:
    """The last time in which somebody could close without a break: from, to."""
    able = {plan.node for plan in history.scenario.nodes if closes(plan.role) and plan.stuck > 1e9}
    began, end, alive = 0.0, 0.0, set[str]()
    for fate in history.of(Fate):
        if fate.who.partition("#")[0].rstrip("b") not in able:
            continue
        if fate.kind == "joined":
            began = began if alive else fate.at
            alive.add(fate.who)
        elif fate.kind in ("ended", "killed") and fate.who in alive:
            alive.discard(fate.who)
            end = fate.at
    return began, history.scenario.horizon if alive else end


def _first_reports(facts: Facts) -> dict[int, float]:
    """When each round got its first contribution."""
    first: dict[int, float] = {}
    for name, put in facts.puts.items():
        key = facts.keys.parse(name) if name.startswith(facts.keys.log) else None
        if isinstance(key, ContributionKey):
            first.setdefault(key.round, put.at)
    return first


def l2_only_silence_ends_a_lease(facts: Facts) -> Violations:
    """L2: nobody takes over for a lease that has ended while its owner's beats came in.

    Time in which the store did not answer does not count, nor do beats so new that whoever took
    over cannot have seen them.
    """
    scenario = facts.history.scenario
    slack = 3 * scenario.poll_seconds + 4 * scenario.latency_seconds
    faults = scenario.faults
    slack += 0.0 if faults == NO_FAULTS else faults.stale_seconds + scenario.timeout_seconds
    for entry in facts.history.of(Happened):
        event = entry.event
        if not isinstance(event, events.TookOver) or "lease" not in event.because:
            continue
        beats = [(at, key) for at, key in _beats(facts, event.closer) if at <= entry.at]
        left = any(key.phase == "left" for _, key in beats)
        last = max([at for at, _ in beats if at <= entry.at - slack], default=0.0)
        out = sum(max(0.0, min(e, entry.at) - max(s, last)) for s, e in scenario.outages)
        silent = entry.at - last - out
        superseded = _higher_life(facts, event.closer, entry.at)
        if not left and not superseded and silent < scenario.rules.lease_seconds - slack:
            yield f"{event.node} took over from {event.closer} after {silent:.1f} s of silence"


def _beats(facts: Facts, life: str) -> list[tuple[float, BeatKey]]:
    prefix = f"{facts.keys.log}live/{life}."
    found = [(put.at, facts.keys.parse(name)) for name, put in facts.puts.items()]
    return [
        (at, key)
        for at, key in found
        if isinstance(key, BeatKey) and facts.keys.beat(key).startswith(prefix)
    ]


def _higher_life(facts: Facts, life: str, at: float) -> bool:
    node, _, number = life.rpartition(".")
    put = facts.puts.get(facts.keys.incarnation(node, int(number) + 1))
    return put is not None and put.at <= at


def l3_training_is_never_blocked_nor_ended_by_the_store(facts: Facts) -> Violations:
    """L3: a node that has joined ends by itself, superseded or killed; and asks in moderation."""
    joined: set[str] = set()
    for entry in facts.history.of(Fate):
        if entry.kind == "joined":
            joined.add(entry.who)
        bad = entry.kind == "ended" and entry.detail != "finished" and entry.who in joined
        if bad and not entry.detail.startswith("NodeSuperseded"):
            yield f"{entry.who} ended: {entry.detail}"
    if facts.history.scenario.rules.overlap_steps is None:
        for event in facts.history.events(events.Waiting):
            yield f"{event.node} waited for round {event.round}"


def w1_every_row_is_trained_once(facts: Facts) -> Violations:
    """W1: without a death, a pause or a restart no row of shared work is trained twice."""
    fates = {entry.kind for entry in facts.history.of(Fate)}
    starts = [entry.who for entry in facts.history.of(Fate) if entry.kind == "started"]
    if fates & {"killed", "paused"} or len(set(starts)) > len(facts.history.scenario.nodes):
        return
    trained: list[Span] = []
    for worked in facts.history.of(Worked):
        for span in worked.rows:
            if any(map(span.overlaps, trained)):
                yield f"{worked.who} trained rows a second time: {span}"
            trained.append(span)


def w2_shared_work_is_completed(facts: Facts) -> Violations:
    """W2: once a node of a queue has ended by itself, every unit is complete, and a contribution
    covers its last batch. Not so in a run in which nobody is left to close rounds."""
    scenario = facts.history.scenario
    deserted = any(not closes(plan.role) for plan in scenario.nodes)
    if deserted and facts.history.events(events.Warned):
        return
    ended = {entry.who for entry in facts.history.of(Fate) if entry.detail == "finished"}
    sharers = {plan.node for plan in scenario.nodes if plan.work == "queue" and not plan.quits}
    if not any(who.partition("#")[0].rstrip("b") in sharers for who in ended):
        return
    pool = Pool.queue("work", len(scenario.units))
    marks = _marks(facts, pool)
    covered = _covered(facts)
    for unit, size in enumerate(scenario.units):
        name = pool.unit(unit)
        if marks.get(unit) != "done":
            yield f"{name} is not complete: {marks.get(unit)!r}"
        elif covered[name] != size:
            yield f"{name} has {size} batches and counts as complete after {covered[name]}"


def _marks(facts: Facts, pool: Pool) -> dict[int, str]:
    """The mark of the highest claim on each unit."""
    found: dict[int, UnitKey] = {}
    for name in facts.puts:
        key = facts.keys.parse_unit(pool, name)
        if key is not None:
            found[key.unit] = max(found.get(key.unit, key), key)
    return {unit: key.mark for unit, key in found.items()}


def _covered(facts: Facts) -> collections.Counter[str]:
    """How far any contribution covers each unit."""
    found: collections.Counter[str] = collections.Counter()
    for name, put in facts.puts.items():
        key = facts.keys.parse(name) if name.startswith(facts.keys.log) else None
        if isinstance(key, ContributionKey):
            for item in unseal(name, put.data, Delta).head.work:
                found[item.unit] = max(found[item.unit], item.batches)
    return found


def elected_nodes_leave_training_to_others(facts: Facts) -> Violations:
    """An `either` node that stays the named closer, while others take part in every
    round, takes part in none before long.

    Not in runs with shared work: there learners rest between units, and while all others do, an
    elected node has nobody to leave the training to.
    """
    plans = facts.history.scenario.nodes
    if any(plan.work for plan in plans):
        return
    either = {plan.node for plan in plans if plan.role == "either"}
    many = 2 * facts.history.scenario.rules.fragments + 6
    calm = _calm(facts.history) + facts.history.scenario.rules.lease_seconds
    elected, node = 0, ""
    for record in facts.in_order:
        others = {who.node for who in record.participants} - {record.next_closer}
        alone = facts.record_puts[record.round].at <= calm or not others
        elected = 0 if alone or record.next_closer != node else elected + 1
        node = record.next_closer
        itself = node in {who.node for who in record.participants}
        if node in either and itself and elected >= many:
            yield f"round {record.round}: {node} was elected {elected} rounds ago and still trains"


PROPERTIES: dict[str, Callable[[Facts], Violations]] = {
    "S1": s1_one_record_per_round_in_one_chain,
    "S2": s2_newest_versions_are_complete,
    "S3": s3_nothing_is_merged_twice,
    "S4": s4_records_can_be_recomputed,
    "S5": s5_nodes_act_on_committed_records_alone,
    "S7": s7_every_ledger_adds_up,
    "S8": s8_bad_contributions_are_rejected,
    "W1": w1_every_row_is_trained_once,
    "W2": w2_shared_work_is_completed,
    "L1": l1_every_round_gets_a_record,
    "roles": elected_nodes_leave_training_to_others,
    "L2": l2_only_silence_ends_a_lease,
    "L3": l3_training_is_never_blocked_nor_ended_by_the_store,
}


def broken(history: History) -> tuple[Broken, ...]:
    """Every violation of every property."""
    facts = Facts(history)
    return tuple(Broken(name, what) for name, check in PROPERTIES.items() for what in check(facts))
