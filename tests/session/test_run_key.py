"""Real nodes of a run that has a key: who takes part, what is told, and what nothing can move."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import jdiloco
from jdiloco import events
from jdiloco.cli.status import run_status
from jdiloco.errors import FormatError, RunKeyMismatch
from jdiloco.protocol.keys import MANIFEST, BeatKey, ContributionKey, Keys
from jdiloco.protocol.records import Claim, Incarnation, RoundRecord, seal, unseal
from jdiloco.protocol.signing import RunKey
from jdiloco.runtime import contributions
from jdiloco.runtime.export import export
from jdiloco.runtime.gc import collect
from jdiloco.runtime.status import read_status
from jdiloco.runtime.verify import verify
from jdiloco.store import FolderStore, Store
from jdiloco.store.signed import BYTES, SignedStore

from .nodes import Meeting, Recorder, lock_step, memory, session, together, vector

SECRET = "9f1c a secret of this run"
KEY = RunKey(SECRET.encode())
ROUNDS = 20  # Under attack.


@pytest.fixture
def key_file(tmp_path) -> Path:
    path = tmp_path / "run.key"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def trained(store: Store | Path, key_file: Path | None, steps: int = 24, **more) -> None:
    """One node for a few rounds, in lock step with itself."""
    with session(vector(1.0), lock_step(1), store, "ada", key_file=key_file, **more) as s:
        params = s.params
        for _ in range(steps):
            params = s.step({"w": params["w"] - 1}, samples=1)


def test_nodes_with_the_key_train_one_model(key_file):
    store, meet = memory(), Meeting(2)

    def node(name: str):
        with session(vector(1.0), lock_step(2), store, name, key_file=key_file) as s:
            params = s.params
            meet(s)
            for _ in range(24):
                params = s.step({"w": params["w"] - 1}, samples=1)
        return np.asarray(s.params["w"])

    one, two = together(*(lambda n=n: node(n) for n in ("ada", "bob")))
    np.testing.assert_array_equal(one, two)
    report = verify(store, key_file=key_file)
    assert report.sound, report.findings
    assert read_status(store, key_file=key_file).rounds == 6
    np.testing.assert_array_equal(jdiloco.load(store, vector(0.0), key_file=key_file)["w"], one)


def test_the_same_values_are_committed_with_and_without_a_key(key_file):
    plain, with_key = memory(), memory()
    trained(plain, None)
    trained(with_key, key_file)
    np.testing.assert_array_equal(
        jdiloco.load(plain, vector(0.0))["w"],
        jdiloco.load(with_key, vector(0.0), key_file=key_file)["w"],
    )


def test_the_key_stands_in_the_environment_too(monkeypatch):
    monkeypatch.setenv("JDILOCO_RUN_KEY", SECRET)
    store = memory()
    trained(store, None)
    assert verify(store).sound
    assert [e.key for e in store.list(MANIFEST)] == [KEY.name(MANIFEST)]


def test_the_key_stands_nowhere(key_file, tmp_path, caplog):
    """Not in the mailbox, in a log line, an event or what a session shows of itself."""
    caplog.set_level(logging.DEBUG)
    rec = Recorder()
    trained(tmp_path / "box", key_file, callbacks=(rec, jdiloco.log_events))
    held = b"".join(p.read_bytes() for p in (tmp_path / "box").rglob("*") if p.is_file())
    names = " ".join(map(str, (tmp_path / "box").rglob("*")))
    shown = f"{names} {caplog.text} {[str(e) for e in rec.events]} {vars(KEY.__class__)}"
    assert SECRET.encode() not in held
    assert SECRET not in shown


# Who does not fit


def test_a_node_without_the_key_or_with_another_is_told_so(key_file, tmp_path):
    store = memory()
    trained(store, key_file)
    other = tmp_path / "other.key"
    other.write_text("the key of another run")
    other.chmod(0o600)
    for wrong, said in ((None, "there is none here"), (other, "another run key")):
        with (
            pytest.raises(RunKeyMismatch, match=said),
            session(vector(1.0), lock_step(1), store, "bob", key_file=wrong),
        ):
            pass
        for look in (read_status, verify, collect):
            with pytest.raises(RunKeyMismatch, match=said):
                look(store, key_file=wrong)
        with pytest.raises(RunKeyMismatch, match=said):
            jdiloco.load(store, vector(0.0), key_file=wrong)
        with pytest.raises(RunKeyMismatch, match=said):
            export(store, tmp_path / "model", key_file=wrong)
    assert all("bob" not in entry.key for entry in store.list(""))


def test_a_node_with_a_key_is_told_that_a_run_has_none(key_file):
    store = memory()
    trained(store, None)
    with pytest.raises(RunKeyMismatch, match="has no run key"):
        trained(store, key_file)
    with pytest.raises(RunKeyMismatch, match="has no run key"):
        verify(store, key_file=key_file)


def test_a_syncer_that_waits_for_a_run_is_told_at_once(key_file):
    store = memory()
    trained(store, key_file)
    with pytest.raises(RunKeyMismatch), session(None, lock_step(1), store, role="syncer"):
        pass


def test_a_manifest_that_was_written_over_keeps_newcomers_out(key_file):
    store = memory()
    trained(store, key_file)
    write_over(store, KEY.name(MANIFEST), b"{}")
    with pytest.raises(FormatError, match="not what was signed"):
        trained(store, key_file)
    (finding,) = verify(store, key_file=key_file).findings
    assert finding.what == BYTES


def write_over(store: Store, name: str, data: bytes) -> None:
    store.delete([name])
    store.create(name, data)


# Forgers


def forge(store: Store, run: str, rng: random.Random) -> None:
    """Creates something that would move a run without a key, or a piece of something."""
    keys = Keys(run)
    listed = [entry.key for entry in store.list("")]
    sent = [int(k.rpartition("/")[2][:10]) for k in listed if "/log/00" in k and ".2.ada." in k]
    round = max(sent, default=0) + rng.choice((0, 0, 1))
    node = rng.choice(("ada", "bob"))
    life = Incarnation(node, 2, "", 0, "", (), round, 10**6, "x", ended_by="mallory/1")
    claim = Claim("mallory", 1, "its lease has ended")
    target = rng.choice(
        (
            (keys.incarnation(node, 2), lambda key: seal(key, life)),
            (keys.beat(BeatKey(node, 2, 1, "left", 0, round)), lambda key: b""),
            (keys.beat(BeatKey(node, 1, 10**6, "left", 0, round)), lambda key: b""),
            (keys.beat(BeatKey("mallory", 1, 1, "training", 1, round)), lambda key: b""),
            (f"{keys.after(round)}.1.001", lambda key: seal(key, claim)),
            (keys.contribution(ContributionKey(round, "mallory", 1, False)), stolen(store, listed)),
            (keys.record(round), stolen(store, listed)),
            (MANIFEST, stolen(store, listed)),
        )
    )
    key, make = target
    macs = [mac for name in listed for mac in re.findall(r"\.([0-9a-f]{32})(?:/|$)", name)]
    end = rng.choice(("", f".{rng.getrandbits(128):032x}", *(f".{mac}" for mac in macs[-3:])))
    data = make(key)
    store.create(f"{key}{end}", data)


def stolen(store: Store, listed: list[str]):
    """The bytes of some object of the run, as they lie there."""

    def make(key: str) -> bytes:
        kind = ".2." if ".2." in key else ".0."
        there = [name for name in listed if kind in name and "/log/00" in name]
        return (store.get(there[-1]) or b"") if there else b"{}"

    return make


@contextlib.contextmanager
def under_attack(store: Store) -> Iterator[None]:
    """Somebody who has no key writes what he can for as long as the block lasts."""
    over = threading.Event()
    failed: list[BaseException] = []

    def attack() -> None:
        rng = random.Random(7)
        try:
            while not over.wait(0.005):
                runs = {e.key.partition("/")[0] for e in store.list("") if "/node/" in e.key}
                for run in runs:
                    forge(store, run, rng)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=attack, name="forger")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
    assert not failed, failed


def test_a_run_with_a_key_goes_on_under_attack_as_if_there_were_none(key_file, tmp_path, capsys):
    """Two nodes in lock step commit the same values, bit for bit, and tell what they see."""

    def run(mailbox: Path, *, attacked: bool):
        store, meet, rec = FolderStore(str(mailbox)), Meeting(2), Recorder()

        def node(name: str):
            told = {"callbacks": (rec,), "key_file": key_file}
            with session(vector(1.0), lock_step(2), mailbox, name, **told) as s:
                params = s.params
                meet(s)
                for _ in range(4 * ROUNDS):
                    params = s.step({"w": params["w"] * 0.9 - 1}, samples=1)
                    time.sleep(0.005)
            return np.asarray(s.params["w"])

        store.prepare()
        with under_attack(store) if attacked else contextlib.nullcontext():
            values = together(*(lambda n=n: node(n) for n in ("ada", "bob")))
        np.testing.assert_array_equal(*values)
        return values[0], rec

    alone, _ = run(tmp_path / "alone", attacked=False)
    attacked, rec = run(tmp_path / "attacked", attacked=True)
    np.testing.assert_array_equal(alone, attacked)
    told = [(event.node, event.name) for event in rec.of(events.Forged)]
    assert len(told) == len(set(told)) > 10
    trained = [event for event in rec.of(events.TookOver) if event.round < ROUNDS]
    assert not trained  # The round after the last is free for whoever leaves later.
    assert not rec.of(events.Degraded)
    committed = [event for event in rec.of(events.Committed) if event.node == "ada"]
    assert len(committed) == ROUNDS
    assert all(event.participants == ("ada", "bob") for event in committed)
    report = verify(tmp_path / "attacked", key_file=key_file)
    assert report.findings
    assert all("not made with the run's key" in finding.what for finding in report.findings)
    forged = read_status(tmp_path / "attacked", key_file=key_file).forged
    assert forged >= len(report.findings)
    run_status(str(tmp_path / "attacked"), wait=0.0, key_file=key_file, as_json=False)
    assert f"{forged} objects lie there without the signature" in " ".join(
        capsys.readouterr()[0].split()
    )

    attacked_box = FolderStore(str(tmp_path / "attacked"))
    made = collect(attacked_box, once=True, key_file=key_file)
    assert made.found["forged"][0] > 10
    left = verify(attacked_box, key_file=key_file)
    assert all(finding.key.startswith(MANIFEST) for finding in left.findings)
    assert left.count("recomputed") == report.count("recomputed") > 0


def test_without_a_key_the_same_attack_stops_a_run(tmp_path):
    """Or the test before would show nothing."""
    store = FolderStore(str(tmp_path))
    store.prepare()
    stopped = pytest.raises(jdiloco.errors.JDilocoError)
    with under_attack(store), stopped, session(vector(1.0), lock_step(1), store, "ada") as s:
        params = s.params
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            params = s.step({"w": params["w"] - 1}, samples=1)
            time.sleep(0.005)


@pytest.mark.parametrize("kept", ["memory", "folder"])
@pytest.mark.parametrize("taken", ["data", "log/0000000", "unit", "barrier", "barrier/e"])
def test_what_lies_where_a_run_needs_a_folder_is_told_and_removed(key_file, tmp_path, kept, taken):
    """Folders are named without the key, so anybody can take such a name before the run does."""
    store, seen = memory() if kept == "memory" else FolderStore(str(tmp_path / "box")), Recorder()
    told = {"key_file": key_file, "callbacks": (seen,)}
    with session(vector(1.0), lock_step(1, sync_every=1), store, "ada", **told) as s:
        run = next(e.key.partition("/")[0] for e in store.list("") if "/node/" in e.key)
        assert store.create(f"{run}/{taken}", b"in the way")
        params = s.wait_at(jdiloco.Barrier("e", nodes=1, timeout=60.0), s.params)
        for _ in range(2):
            params = s.step({"w": params["w"] - 1}, samples=1)
        s.run(lambda params, item: (params, 1), jdiloco.SharedQueue(2))
    assert [event.name for event in seen.of(events.Forged)] == [f"{run}/{taken}"]
    assert not seen.of(events.Degraded)
    assert verify(store, key_file=key_file).sound


def test_nobody_keeps_a_run_from_beginning_by_an_object_called_creating(key_file):
    store = memory()
    assert store.create("creating", b"in the way")
    trained(store, key_file)
    assert verify(store, key_file=key_file).sound


def test_what_lies_in_the_place_of_a_folder_unused_so_far_is_found_and_cleared(key_file):
    store = memory()
    trained(store, key_file)
    run = next(e.key.partition("/")[0] for e in store.list("") if "/node/" in e.key)
    store.create(f"{run}/barrier", b"in the way")
    (finding,) = verify(store, key_file=key_file).findings
    assert finding.key == f"{run}/barrier"
    assert collect(store, once=True, key_file=key_file).found["forged"] == (1, 10)
    assert verify(store, key_file=key_file).sound


# What was written over


def test_a_record_that_was_written_over_is_acted_on_by_nobody(key_file):
    """The node that comes later sees round 2 and nothing of what the forger put there."""
    store = memory()
    trained(store, key_file)
    door = SignedStore(store, KEY)
    run = next(e.key.partition("/")[0] for e in store.list("") if "/node/" in e.key)
    key = Keys(run).record(5)
    record = unseal(key, door.get(key) or b"", RoundRecord)
    forged = msgspec.structs.replace(record, next_closer="mallory")
    write_over(store, KEY.name(key), seal(key, forged) + (store.get(KEY.name(key)) or b"")[-65:])
    rec = Recorder()
    with pytest.raises(FormatError, match="is not there"):
        trained(store, key_file, callbacks=(rec,))
    assert [(e.name, e.because) for e in rec.of(events.Forged)] == [(KEY.name(key), BYTES)]
    (finding,) = verify(store, key_file=key_file).findings
    assert (finding.key, finding.what) == (KEY.name(key), BYTES)


def test_a_contribution_that_was_changed_is_told_and_merged_by_nobody(key_file):
    """Its digest is that of the changed tensors: only the signature tells."""
    store = memory()
    door = SignedStore(store, KEY)
    trained(store, key_file)
    run = next(e.key.partition("/")[0] for e in store.list("") if "/node/" in e.key)
    key = Keys(run).contribution(ContributionKey(5, "ada", 1, False))
    found = contributions.decode(key, door.get(key), room=0, signer=door)
    doubled = {name: 2 * array for name, array in found.tensors.items()}
    signature = contributions.messages.decode(door.get(key) or b"").metadata["signature"]

    class Thief:
        """Signs with what lay there."""

        def sign(self, key: str, said: str) -> str:
            del key, said
            return signature

        def vouches(self, key: str, said: str, signature: str) -> bool:
            raise NotImplementedError

    data = b"".join(contributions.encode(key, found.head, doubled, signer=Thief()))
    write_over(store, KEY.name(key), data)
    with pytest.raises(contributions.Rejection, match="corrupt"):
        contributions.decode(key, door.get(key), room=0, signer=door)
    assert contributions.read_head(door, key) is None
    assert door.forged.found == {KEY.name(key): BYTES}
    (finding,) = verify(store, key_file=key_file).findings
    assert finding.key == KEY.name(key)


def test_an_attack_does_not_keep_a_node_from_coming_back(key_file, tmp_path):
    """Nobody but who has the key takes up the next life of a node, or ends one."""
    store = FolderStore(str(tmp_path / "box"))
    store.prepare()
    with under_attack(store):
        for _ in range(2):
            trained(tmp_path / "box", key_file)
    lives = [e.key for e in SignedStore(store, KEY).list("") if "/node/" in e.key]
    assert [key.rpartition("/")[2] for key in lives] == ["ada.0001", "ada.0002"]
