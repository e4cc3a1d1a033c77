"""Verifying a mailbox: real runs are sound, and whatever is done to one object is found."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import random
import re

import msgspec
import numpy as np
import pytest

from jdiloco import events
from jdiloco.errors import FormatError, UsageError
from jdiloco.protocol.keys import MANIFEST, ClaimKey, ContributionKey, Pool, UnitKey
from jdiloco.protocol.records import (
    Manifest,
    Payload,
    WorkClaim,
    WorkMark,
    seal,
    sha256,
    unseal,
)
from jdiloco.runtime import messages
from jdiloco.runtime.build import this_build
from jdiloco.runtime.verify import Report, verify
from jdiloco.runtime.verify.chain import Walk
from jdiloco.store import FolderStore, MemoryStore
from jdiloco.testing.simulate import simulate
from tests.session.nodes import (
    Recorder,
    algorithm,
    memory,
    node_of,
    session,
    together,
    wait_until,
)

from .mailboxes import (
    Objects,
    chained,
    keys_of,
    kinds_of,
    mailbox,
    mean_run,
    mixed_model,
    narrow_model,
    objects_of,
    rda_run,
    records_of,
    shared_run,
    train_until,
    trained,
)

KINDS = (
    "manifest",
    "record",
    "claim",
    "contribution",
    "payload",
    "checkpoint",
    "incarnation",
    "work",
    "beat",
)


@pytest.fixture(scope="module")
def rda() -> Objects:
    return rda_run()


@pytest.fixture(scope="module")
def mean() -> Objects:
    return mean_run()


@pytest.fixture(scope="module")
def shared() -> Objects:
    return shared_run()


def found_in(objects: Objects) -> dict[str, str]:
    """What is wrong, by key."""
    found: dict[str, str] = {}
    for finding in verify(mailbox(objects)).findings:
        found[finding.key] = f"{found.get(finding.key, '')} {finding.what}".strip()
    return found


def of_kind(objects: Objects, *kinds: str) -> list[str]:
    return [key for key, kind in kinds_of(objects).items() if kind in kinds]


# Sound runs


def test_a_run_is_sound_and_its_newest_rounds_are_recomputed(rda):
    """RDA, bfloat16 and float32, two fragments, a joiner, checkpoints and sweeps."""
    report = verify(mailbox(rda))
    assert report.findings == ()
    assert report.sound
    count = len(records_of(rda))
    assert report.rounds[-1].last == count - 1
    assert report.count("recomputed") == 3  # `keep_rounds` is 2: those and the newest.
    assert report.count("chained") == count - 3
    assert report.objects == len(rda)
    assert report.bytes == sum(map(len, rda.values()))


def test_a_run_whose_inputs_are_all_kept_is_recomputed_whole(mean):
    """Weighted mean, one fragment; a takeover, a void round and a final one among them."""
    report = verify(mailbox(mean))
    assert report.findings == ()
    log = records_of(mean)
    assert [record.void for record in log].count(True) == report.count("void") >= 1
    assert report.count("recomputed") == len(log) - report.count("void")
    assert any(who.final for record in log for who in record.participants)
    assert of_kind(mean, "claim")


def test_a_mailbox_in_a_folder_is_read_alike(rda, tmp_path):
    store = FolderStore(tmp_path)
    for key, data in rda.items():
        assert store.create(key, data)
    assert dataclasses.replace(verify(tmp_path), url="") == dataclasses.replace(
        verify(mailbox(rda)), url=""
    )


def test_each_object_is_read_once_and_nothing_is_written(rda):
    reads: collections.Counter[str] = collections.Counter()

    class Counting(MemoryStore):
        def get(self, key, *, start=0, stop=None):
            reads[key] += 1
            return super().get(key, start=start, stop=stop)

        def create(self, key, data):
            assert not sealed, "verifying writes nothing"
            return super().create(key, data)

        def delete(self, keys):
            raise AssertionError("verifying removes nothing")

    sealed = False
    store = Counting("counting-reads")
    for key, data in rda.items():
        store.create(key, data)
    sealed = True
    verify(store)
    there = {key: count for key, count in reads.items() if key in rda}
    assert set(there.values()) == {1}
    assert there.keys() == {key for key, data in rda.items() if data}


def test_progress_is_told(rda):
    told = []
    verify(mailbox(rda), progress=told.append)
    assert told[-1].bytes == sum(map(len, rda.values()))
    assert [p.read for p in told] == sorted(p.read for p in told)
    assert {p.key for p in told} <= rda.keys()


def test_a_run_may_go_on_while_it_is_verified():
    """Objects are swept and added between the listing and the reading, and none is missed."""
    store, reports, seen = memory(), [], Recorder()
    settings = algorithm(fragments=2, sync_every=2, checkpoint_every=1, overlap_steps=0)

    def train() -> None:
        with session(mixed_model(), settings, store, "a", callbacks=(seen,)) as s:
            train_until(s, lambda: len(reports) >= 12, 0.01)

    def look() -> None:
        while len(reports) < 12:
            with contextlib.suppress(UsageError):  # The run is not there yet.
                reports.append(verify(store))
                rounds = 2 * len(reports)  # Or twelve looks might be over before the first round.
                wait_until(lambda rounds=rounds: len(seen.of(events.Committed)) >= rounds)

    together(train, look)
    assert [report.findings for report in reports] == [()] * 12
    assert rounds_of(reports[-1]) > rounds_of(reports[0]) + 12


def test_a_run_that_begins_between_two_looks_has_lost_no_manifest(rda, monkeypatch):
    """Its beats come after its manifest; the first look came before both."""
    store, looks = mailbox(rda), itertools.count()
    get = store.get

    def early(key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        first = key == MANIFEST and next(looks) == 0
        return None if first else get(key, start=start, stop=stop)

    monkeypatch.setattr(store, "get", early)
    assert verify(store).findings == ()
    assert next(looks) >= 2


def rounds_of(report: Report) -> int:
    return sum(stretch.rounds for stretch in report.rounds)


def test_what_was_swept_since_the_listing_is_not_missed():
    """The listing is of an earlier moment than everything that is read after it, by rounds."""
    store, snapshots, seen = memory(), [], Recorder()
    settings = algorithm(fragments=2, sync_every=2, checkpoint_every=1, overlap_steps=0)
    with session(mixed_model(), settings, store, "a", callbacks=(seen,)) as s:
        for rounds in range(4, 40, 5):
            train_until(s, lambda rounds=rounds: len(seen.of(events.Committed)) >= rounds, 0.01)
            snapshots.append(objects_of(store))

    class Late(MemoryStore):
        def list(self, prefix, *, after=""):
            return super().list(prefix, after=after) if prefix else early

    for first, second in itertools.combinations(snapshots, 2):
        early = mailbox(first).list("")
        late = mailbox(second, Late)
        report = verify(late)
        assert report.findings == ()
        assert report.later > 0


# Damage


def damaged(objects: Objects, chance: random.Random, kind: str) -> tuple[str, Objects]:
    """One bit of one object of a kind, the other way."""
    key = chance.choice([key for key in of_kind(objects, kind) if objects[key]])
    data = bytearray(objects[key])
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    return key, {**objects, key: bytes(data)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_one_flipped_bit_is_found_and_nothing_else_is_blamed(rda, mean, shared, kind, seed):
    chance = random.Random(f"{kind} {seed}")
    runs = {"claim": mean, "work": shared}
    objects = runs.get(kind, (rda, mean)[seed])
    key, broken = damaged(objects, chance, kind)
    assert list(found_in(broken)) == [key]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_found_wherever_it_is(rda, mean, shared, kind):
    chance = random.Random(kind)
    runs = {"claim": [mean], "work": [shared]}.get(kind, [rda, mean, shared])
    for index in range(60):
        key, broken = damaged(runs[index % len(runs)], chance, kind)
        assert list(found_in(broken)) == [key]


@pytest.mark.parametrize("kind", KINDS[:-1])  # A beat needs no body.
def test_an_object_cut_short_emptied_or_grown_is_found(rda, mean, shared, kind):
    objects = {"claim": mean, "work": shared}.get(kind, rda)
    key = next(key for key in reversed(of_kind(objects, kind)) if objects[key])
    for data in (objects[key][:-1], b"", objects[key] + b"\0"):
        assert list(found_in({**objects, key: data})) == [key]


@pytest.mark.parametrize("kind", ["record", "contribution", "payload", "checkpoint", "incarnation"])
def test_two_objects_in_each_other_s_place_are_found(rda, kind):
    first, *_, second = [k for k in of_kind(rda, kind) if k != sha256(rda[k])]
    assert rda[first] != rda[second]
    found = found_in({**rda, first: rda[second], second: rda[first]})
    assert found.keys() == {first, second}


def without(objects: Objects, *keys: str) -> Objects:
    return {key: data for key, data in objects.items() if key not in keys}


def test_a_missing_object_is_found_where_nobody_may_have_swept_it(rda, mean):
    keys, log = keys_of(rda), records_of(rda)
    newest = log[-1]
    assert newest.anchor is not None
    who = newest.participants[0]
    contribution = ContributionKey(newest.round, who.node, who.incarnation, who.final)
    checkpoint = f"{newest.checkpoint.prefix}/{newest.checkpoint.files[0].key}"
    for key in (
        keys.record(3),
        keys.incarnation("a", 1),
        newest.anchor.key,
        keys.contribution(contribution),
        checkpoint,
    ):
        assert found_in(without(rda, key)) == {key: "is missing"}
    (claim,) = of_kind(mean, "claim")
    (what,) = found_in(without(mean, claim)).values()
    assert "no claim of" in what


def test_an_old_object_may_be_gone(rda):
    """Payloads that checkpoints cover, contributions of long ago, beats, old checkpoints."""
    log = records_of(rda)
    kept = {record.checkpoint.prefix for record in log[-6:]}
    saved = of_kind(rda, "checkpoint")
    spare = [*of_kind(rda, "beat"), *(k for k in saved if not any(k.startswith(p) for p in kept))]
    report = verify(mailbox(without(rda, *spare)))
    assert report.findings == ()


def test_records_lost_from_the_end_are_told_by_what_came_after_them(rda):
    keys, count = keys_of(rda), len(records_of(rda))
    last = [keys.record(round) for round in range(count - 4, count)]
    found = found_in(without(rda, *last))
    assert "is missing, and yet there is" in found[last[0]]


def test_a_damaged_record_takes_no_other_down(rda, mean):
    """What it merged is not known any more, and not held against the records after it."""
    for objects, rounds in ((rda, (1, -2, -1)), (mean, (2, 3, -1))):
        for round in rounds:
            key = keys_of(objects).record(records_of(objects)[round].round)
            report = verify(mailbox({**objects, key: b"rubbish"}))
            assert [finding.key for finding in report.findings] == [key]
            assert report.count("unread") == 1
    keys = keys_of(rda)
    both = [keys.record(4), keys.record(5)]
    assert set(found_in({**rda, **dict.fromkeys(both, b"")})) == set(both)


def test_a_round_says_whether_its_inputs_are_gone_or_damaged(rda):
    """The newest round has all of them: without, spoiled, and with only some of them left."""
    newest = records_of(rda)[-1]
    keys = [
        keys_of(rda).contribution(ContributionKey(newest.round, p.node, p.incarnation, p.final))
        for p in newest.participants
    ]
    whys = {
        "its inputs are gone": without(rda, *keys),
        "some of its inputs are gone": without(rda, keys[0]),
        "its inputs are damaged": {**rda, **{key: rda[key][:-1] for key in keys}},
    }
    for why, objects in whys.items():
        last = verify(mailbox(objects)).rounds[-1]
        assert (last.how, last.why) == ("chained", why)


def test_a_mailbox_without_its_manifest_is_damaged_and_an_empty_one_is_no_run(rda):
    (finding,) = verify(mailbox(without(rda, MANIFEST))).findings
    assert finding.key == MANIFEST
    assert "is missing" in finding.what
    with pytest.raises(UsageError, match="it is empty"):
        verify(memory())
    with pytest.raises(UsageError, match="no `manifest`"):
        verify(mailbox({"program/log/monday.txt": b"", "program/log/0000000/1.txt": b""}))


def test_a_newer_format_is_refused_and_not_called_damage(rda):
    manifest = unseal(MANIFEST, rda[MANIFEST], Manifest)
    newer = seal(MANIFEST, msgspec.structs.replace(manifest, format=9))
    with pytest.raises(FormatError, match="written in format 9; this build reads 1"):
        verify(mailbox({**rda, MANIFEST: newer}))


@pytest.mark.parametrize("kind", ["beat", "arrival"])
def test_what_should_be_a_name_alone_and_holds_anything_is_found(shared, kind):
    key = of_kind(shared, kind)[0]
    assert list(found_in({**shared, key: b"x"})) == [key]


def test_what_belongs_to_nothing_is_remarked_on_and_no_damage(rda):
    run, keys = keys_of(rda).run, keys_of(rda)
    strays = {
        "notes.txt": "nothing of this run",
        f"{run}/log/live/a.0001.00000001.training.1": "nothing of this run",
        keys.payload(2, "a.0001.0099", "anchor"): "an attempt that came second",
        f"{run}/save/0000000002.a.0001.0099/run/metadata": "not complete",
        "creating/z.0a.00000001": "wanted to create the run",
    }
    report = verify(mailbox({**rda, **dict.fromkeys(strays, b"")}))
    assert report.findings == ()
    said = " ".join(f"{remark.key} {remark.what}" for remark in report.remarks)
    for what in strays.values():
        assert what in said


# Records that are whole and say what is not so


def forged(objects: Objects, round: int, **fields) -> Objects:
    """A record that says something else, and all after it linked to it."""
    log = records_of(objects)
    log[round] = msgspec.structs.replace(log[round], **fields)
    return chained(objects, log)


def test_records_linked_anew_are_as_good_as_before(rda):
    assert chained(rda, records_of(rda)) == rda


def first_participant(objects: Objects, **fields):
    """Another first participant of the newest record."""
    first, *others = records_of(objects)[-1].participants
    return (msgspec.structs.replace(first, **fields), *others)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: {"run": "another"}, "`run` is 'another'"),
        (lambda r: {"format": 1, "fragment": 1 - r.fragment}, "`fragment` is"),
        (lambda r: {"version": r.version + 1}, "`version` is"),
        (lambda r: {"versions": (9, 9)}, r"`versions` is \[9, 9\]"),
        (lambda r: {"heads": (0, 0)}, r"`heads` is \[0, 0\]"),
        (lambda r: {"write_id": "z.0001.0001"}, "`write_id` 'z.0001.0001' is none of"),
        (lambda r: {"closer": "z"}, "no claim of z.0001 is there"),
        (lambda r: {"expected": 0}, "0 learners were expected"),
        (lambda r: {"participants": r.participants * 2}, "reported more than once"),
        (lambda r: {"participants": ()}, "not void and merged nobody"),
        (lambda r: {"anchor": None}, "`outer` is named by a void round"),
        (lambda r: {"build": None}, "does not say on which build"),
    ],
)
def test_a_record_that_contradicts_those_before_it_is_found(rda, change, said):
    newest = records_of(rda)[-1]
    found = found_in(forged(rda, newest.round, **change(newest)))
    key = keys_of(rda).record(newest.round)
    assert re.search(said, found[key])


def test_a_record_that_names_another_before_it_is_found(rda):
    keys, log = keys_of(rda), records_of(rda)
    key = keys.record(log[-1].round)
    for field in ("previous", "base"):
        record = msgspec.structs.replace(log[-1], **{field: "0" * 64})
        assert f"`{field}` is" in found_in({**rda, key: seal(key, record)})[key]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: {"weight": p.weight * 2}, "its counters give"),
        (lambda p: {"position": 0}, "has 0 batches behind it"),
        (lambda p: {"position": p.counters.steps}, "was merged before up to batch"),
        (lambda p: {"ledger": p.ledger.merge(1)}, "the records before merged"),
        (lambda p: {"ledger": p.ledger.train(1)}, "pending"),
        (lambda p: {"ledger": p.ledger.train(1).drop("boredom", 1)}, "'boredom'"),
        (lambda p: {"counters": msgspec.structs.replace(p.counters, steps=0)}, "with counters"),
    ],
)
def test_a_ledger_that_does_not_add_up_is_found(rda, change, said):
    """S7: its merged part is what the records before it merged of that life and fragment."""
    newest = records_of(rda)[-1]
    who = first_participant(rda, **change(newest.participants[0]))
    found = found_in(forged(rda, newest.round, participants=who))
    assert said in found[keys_of(rda).record(newest.round)]


def test_a_rejection_for_no_reason_is_found(mean):
    record = next(record for record in records_of(mean) if record.rejected)
    for reason, key in (
        ("boredom", keys_of(mean).record(record.round)),
        ("corrupt", contribution_of(mean, record)),
    ):
        rejected = (msgspec.structs.replace(record.rejected[0], reason=reason),)
        assert key in found_in(forged(mean, record.round, rejected=rejected))


def contribution_of(objects: Objects, record) -> str:
    who = (*record.participants, *record.rejected)[0]
    key = ContributionKey(record.round, who.node, who.incarnation, who.final)
    return keys_of(objects).contribution(key)


def test_a_contribution_of_another_version_cannot_have_been_merged(mean):
    """S3: only into the version whose anchor it was subtracted from."""
    log = records_of(mean)
    versions = [record.version + 1 for record in log]
    later = [
        msgspec.structs.replace(r, version=v, versions=(v,))
        for r, v in zip(log, versions, strict=True)
    ]
    found = found_in(chained(mean, later))
    merged = [contribution_of(mean, r) for r in log if r.participants]
    assert all("`stale`" in found[key] for key in merged)


# Values


def with_anchor(objects: Objects, round: int, change) -> Objects:
    """Another anchor committed in a round: payload, record and all after it are consistent."""
    log = records_of(objects)
    record = log[round]
    assert record.anchor is not None
    tensors = {n: a.copy() for n, a in messages.decode(objects[record.anchor.key]).tensors.items()}
    change(next(iter(tensors.values())).reshape(-1))
    data = b"".join(messages.encode(tensors, {}))
    anchor = Payload(record.anchor.key, len(data), sha256(data))
    log[round] = msgspec.structs.replace(record, anchor=anchor)
    return chained({**objects, anchor.key: data}, log)


def flip_lowest_bit(values: np.ndarray) -> None:
    values[-1:].view(np.uint8)[0] ^= 1


def test_a_commit_that_its_inputs_do_not_give_is_found(mean):
    """S4: one last bit, with every hash in order; and the round after it stands on it."""
    round = next(r.round for r in records_of(mean) if not r.void) + 1
    found = found_in(with_anchor(mean, round, flip_lowest_bit))
    keys = keys_of(mean)
    assert "names anchor that its inputs do not give" in found[keys.record(round)]
    assert keys.record(round + 1) in found  # It was computed from the right one.


def test_a_bit_that_flips_in_a_closer_s_memory_is_found():
    """B119: what the node commits next is not what its inputs give."""
    store, seen = memory(), Recorder()
    settings = algorithm(sync_every=2, overlap_steps=0, keep_rounds=50)
    with session(narrow_model(), settings, store, "a", callbacks=(seen,)) as s:
        train_until(s, lambda: len(seen.of(events.Committed)) >= 3, 0.01)
        rounds = len(seen.of(events.Committed))
        held = node_of(s)._closer._closers[0]._held
        assert held is not None
        held.master = held.master.at[0, 0].add(2.0**-20)
        train_until(s, lambda: len(seen.of(events.Committed)) >= rounds + 2, 0.01)
    objects = objects_of(store)
    report = verify(store)
    (finding,) = report.findings
    key = keys_of(objects).record(rounds)
    assert finding.key == key
    assert "a computed something else than this build" in finding.means
    assert report.count("recomputed") == len(records_of(objects)) - 1


def test_rounds_of_another_build_are_compared_within_the_tolerance(rda, mean):
    here = this_build()
    there = msgspec.structs.replace(here, jaxlib="9.9.9", cpus=96)
    for objects in (rda, mean):
        plain, report = verify(mailbox(objects)), verify(mailbox(objects), build=there)
        assert report.findings == ()
        assert report.count("compared") == plain.count("recomputed") > 0
        why = next(stretch.why for stretch in report.rounds if stretch.how == "compared")
        assert here.jaxlib in why
        assert "9.9.9, " in why
        assert "96 CPUs" in why
    report = verify(mailbox(with_anchor(mean, 1, flip_lowest_bit)), build=there)
    assert report.findings == ()

    def far(values: np.ndarray) -> None:
        values[0] += 1e-3

    first, second = verify(mailbox(with_anchor(mean, 1, far)), build=there).findings
    assert "differs from what its inputs give: the anchor of `w` by" in first.what
    assert (first.key, second.key) == tuple(map(keys_of(mean).record, (1, 2)))


def test_a_merge_that_is_not_known_here_leaves_the_chain_to_check(mean):
    manifest = unseal(MANIFEST, mean[MANIFEST], Manifest)
    settings = {**manifest.algorithm, "merge": {"kind": "sign_mean"}}
    other = seal(MANIFEST, msgspec.structs.replace(manifest, algorithm=settings))
    report: Report = verify(mailbox(chained({**mean, MANIFEST: other}, records_of(mean))))
    assert report.findings == ()
    assert report.count("recomputed") == 0
    assert any("of a kind that is not known here" in stretch.why for stretch in report.rounds)


def test_a_checkpoint_that_holds_other_values_than_were_committed_is_found(rda):
    """Its files are what its record names; what they hold is not what the rounds committed."""
    log = records_of(rda)
    covered = log[-1].checkpoint.round
    head = log[log[covered].heads[0]]
    assert head.anchor is not None
    other = msgspec.structs.replace(head.anchor, sha256="0" * 64)
    log[head.round] = msgspec.structs.replace(head, anchor=other)
    found = found_in(chained(rda, log))
    what = found[f"{log[-1].checkpoint.prefix}/"]
    assert what == f"holds other values of fragment 0 than round {head.round} committed"


# Claims and lives


def test_a_claim_for_which_a_lower_one_is_missing_is_found(mean):
    keys = keys_of(mean)
    (claim,) = of_kind(mean, "claim")
    parsed = keys.parse(claim)
    assert isinstance(parsed, ClaimKey)
    assert parsed.number == 1
    second = keys.claim(ClaimKey(parsed.round, 2))
    assert found_in({**without(mean, claim), second: mean[claim]}).keys() >= {claim, second}


# Shared work


def test_shared_work_is_sound_and_a_lost_claim_is_found(shared):
    report = verify(mailbox(shared))
    assert report.findings == report.remarks == ()
    keys = keys_of(shared)
    for claim in (k for k in of_kind(shared, "work") if not k.endswith((".done", ".back"))):
        assert found_in(without(shared, claim)) == {claim: "is missing"}
    pool = Pool.queue("work", 3)
    mark = keys.unit(pool, UnitKey(1, 1, "done"))
    other = seal(mark, WorkMark("z", 1, 4))
    assert "was written by z.0001" in found_in({**shared, mark: other})[mark]
    second = keys.unit(pool, UnitKey(1, 2))
    again = seal(second, WorkClaim("a", 1, 3, begin=-1, round=0, write_id="x"))
    assert "begins after -1 batches" in found_in({**shared, second: again})[second]


# Simulated runs


@pytest.mark.parametrize("seed", range(1, 6))
def test_every_record_of_a_simulated_run_continues_the_chain(seed):
    """Faults, deaths, takeovers and all."""
    objects = simulate(seed).objects
    if MANIFEST not in objects:
        return
    manifest = unseal(MANIFEST, objects[MANIFEST], Manifest)
    walk = Walk(manifest, objects[MANIFEST])
    keys = keys_of(objects)
    for record in records_of(objects):
        assert walk.take(record, objects[keys.record(record.round)]) == []
    assert walk.round == len(records_of(objects))


def test_trained_parameters_move(mean):
    """The runs above would show little otherwise."""
    assert not np.array_equal(trained(narrow_model(), 0.1)["w"], narrow_model()["w"])
