"""`jdiloco status` and `jdiloco verify`: what they print of real runs, and what they answer."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from jdiloco import cli, events
from jdiloco.cli.status import show, to_json
from jdiloco.protocol.keys import MANIFEST
from jdiloco.protocol.records import Incarnation, seal
from jdiloco.runtime import spending
from jdiloco.runtime.status import Samples, read_status
from jdiloco.store import FolderStore, MemoryStore
from tests.runtime.mailboxes import (
    Objects,
    keys_of,
    mailbox,
    mean_run,
    mixed_model,
    rda_run,
    records_of,
    train_until,
)
from tests.session.nodes import Recorder, algorithm, memory, node_of, session


@pytest.fixture(scope="module")
def rda() -> Objects:
    return rda_run()


@pytest.fixture(scope="module")
def mean() -> Objects:
    return mean_run()


def folder(path, objects: Objects) -> str:
    store = FolderStore(path)
    for key, data in objects.items():
        assert store.create(key, data)
    return str(path)


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the command line."""
    monkeypatch.setattr("sys.argv", ["jdiloco", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    code = ended.value.code
    return code if isinstance(code, int) else 0, out, err


# What a status says


def test_a_status_is_what_the_records_say(rda):
    log = records_of(rda)
    status = read_status(mailbox(rda))
    assert status.run == keys_of(rda).run
    assert (status.model.tensors, status.model.parameters) == (3, 131)
    assert status.model.bytes == 4 * 120 + 2 * 5 + 4 * 6
    assert status.rounds == status.next_round == len(log)
    assert status.versions == log[-1].versions
    assert status.newest is not None
    assert status.newest.participants == tuple(who.node for who in log[-1].participants)
    if not any(f"{len(log):010}.1." in key for key in rda):  # Else a claim says who closes.
        assert status.next_closer == f"{log[-1].next_closer}.0001"
    counts = [len(record.participants) for record in log]
    assert status.mean_participants == pytest.approx(sum(counts) / len(log))
    assert [node.node for node in status.nodes] == ["a", "b", "c"]
    assert sum(objects for objects, _ in status.stored.values()) == len(rda)
    assert sum(size for _, size in status.stored.values()) == sum(map(len, rda.values()))


def test_the_ledger_of_a_node_is_what_was_merged_of_it(rda):
    """Per fragment the records sum up to what the newest ledger has merged; then the mean."""
    merged = {(node, f): 0 for node in "abc" for f in range(2)}
    for record in records_of(rda):
        for who in record.participants:
            merged[who.node, record.fragment] += who.counters.samples
    status = read_status(mailbox(rda))
    for node in status.nodes:
        wanted = (merged[node.node, 0] + merged[node.node, 1]) / 2
        assert node.samples.merged == wanted
        samples = node.samples
        assert samples.processed == samples.merged + samples.dropped_total + samples.pending
    assert status.samples.merged == sum(node.samples.merged for node in status.nodes)


def test_takeovers_void_rounds_and_rejections_are_counted(mean):
    status = read_status(mailbox(mean))
    assert status.takeovers == 1
    assert status.void == sum(record.void for record in records_of(mean)) >= 1
    assert status.rejected["nonfinite"] == status.void
    assert status.checkpoint_round == -1
    assert status.checkpoints == 1
    (b,) = [node for node in status.nodes if node.node == "b"]
    assert (b.phase, b.alive, b.rejected) == ("left", "left", status.void)


def test_samples_of_nobody_are_no_division_by_zero():
    assert Samples().share_dropped == 0.0


def test_two_looks_tell_who_is_alive_and_one_does_not(mean):
    """No clock is compared: only whether a beat came between the two looks."""
    store = memory()
    with session(mixed_model(), algorithm(), store, "quick") as s:
        keys = node_of(s).state.keys
        store.create(keys.incarnation("gone", 1), b"")
        store.create(f"{keys.log}live/gone.0001.00000007.training.12.3", b"")
        once = {node.node: node.alive for node in read_status(store).nodes}
        twice = {node.node: node.alive for node in read_status(store, wait=0.5).nodes}
    assert once == {"gone": "unknown", "quick": "unknown"}
    assert twice == {"gone": "silent", "quick": "alive"}
    assert {n.node: n.alive for n in read_status(store).nodes}["quick"] == "left"


def test_a_node_that_another_ended_has_not_left_and_was_started_once():
    """Who goes on with a dead node's files makes a life for it that nobody lives."""
    store = memory()
    with session(mixed_model(), algorithm(), store, "quick") as s:
        keys = node_of(s).state.keys
    ended = Incarnation("gone", 2, "", 0, "", (), 0, 0, "x", ended_by="quick.0001")
    store.create(keys.incarnation("gone", 1), b"")
    store.create(keys.incarnation("gone", 2), seal(keys.incarnation("gone", 2), ended))
    store.create(f"{keys.log}live/gone.0001.00000007.training.12.3", b"")
    store.create(f"{keys.log}live/gone.0002.00000000.left.0.3", b"")
    (gone,) = [node for node in read_status(store).nodes if node.node == "gone"]
    assert (gone.lives, gone.alive, gone.ended_by) == (1, "ended", "quick.0001")
    assert (gone.phase, gone.step, gone.next_round) == ("training", 12, 3)


def test_readers_count_as_nobody_and_write_nothing():
    """B50: members, quorum and closer are what they were, and no request is a write."""
    store, seen, writes = memory(), Recorder(), []

    class ReadOnly(MemoryStore):
        def create(self, key, data):
            writes.append(key)
            return super().create(key, data)

        def delete(self, keys):
            writes.extend(keys)

    readers = [ReadOnly(store.url.removeprefix("memory://")) for _ in range(3)]
    with session(mixed_model(), algorithm(sync_every=2), store, "a", callbacks=(seen,)) as s:
        train_until(s, lambda: len(seen.of(events.Committed)) >= 3, 0.01)
        before = read_status(store)
        for reader in readers:
            found = read_status(reader)
            assert [node.node for node in found.nodes] == ["a"]
        train_until(s, lambda: len(seen.of(events.Committed)) >= 6, 0.01)
        state = node_of(s).state
        after = read_status(store)
    assert writes == []
    assert {life.node for life in state.leases} == {"a"}
    assert before.next_closer == after.next_closer == "a.0001"
    assert after.rounds > before.rounds
    assert after.newest is not None
    assert after.newest.expected == 1


# The commands


def test_status_fits_one_screen(rda):
    console = Console(width=120, record=True, file=io.StringIO())
    show(read_status(mailbox(rda)), console)
    text = console.export_text()
    assert len(text.splitlines()) <= 30
    for said in (
        "131 parameters",
        "2 fragments",
        "merge rda",
        "closed by",
        "--wait 0.2",
        "mailbox:",
    ):
        assert said in text
    assert "3 nodes" not in text


LONG = "a-host-with-a-name-of-24-5f2a9c01"


def test_status_can_be_read_on_80_columns(rda):
    """No heading and no figure is cut; only an id that is too long goes on in the next line."""
    status = read_status(mailbox(rda))
    nodes = tuple(dataclasses.replace(node, node=f"{LONG}-{node.node}") for node in status.nodes)
    console = Console(width=80, record=True, file=io.StringIO())
    show(dataclasses.replace(status, nodes=nodes), console)
    text = console.export_text()
    assert "…" not in text
    for heading in [
        "state",
        "lives",
        "step",
        "next",
        "rounds",
        "rejected",
        "processed",
        "merged",
        "dropped",
    ]:
        assert f" {heading}" in text
    lives = ("state", "lives", "step", "next", "rounds", "rejected")
    samples = ("processed", "merged", "dropped", "pending")
    for heading in (*lives, *samples, "writes", "reads", "lists", "sent", "received", "requests $"):
        assert f" {heading}" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "What Amazon would charge" in text


def test_status_as_json_is_one_object_with_every_figure(rda):
    status = read_status(mailbox(rda))
    found = json.loads(to_json(status))
    assert found["rounds"] == status.rounds
    assert found["nodes"][0]["samples"]["processed"] == status.nodes[0].samples.processed
    assert found["samples"]["share_dropped"] == status.samples.share_dropped
    assert found["newest"]["participants"]
    spent = status.nodes[0].spent
    assert spent is not None
    assert found["nodes"][0]["spent"]["creates"] == spent.creates > 0
    assert found["spent"]["requests_dollars"] == spending.requests_dollars(status.spent) > 0


def test_the_commands_answer_with_their_exit_status(rda, tmp_path, monkeypatch, capsys):
    where = folder(tmp_path / "run", rda)
    code, out, _ = run(monkeypatch, capsys, "status", where)
    assert code == 0
    assert keys_of(rda).run in out
    code, out, _ = run(monkeypatch, capsys, "status", where, "--json")
    assert json.loads(out)["run"] == keys_of(rda).run
    code, out, _ = run(monkeypatch, capsys, "verify", where)
    assert code == 0
    assert "Nothing wrong was found." in out
    assert "3 recomputed bit for bit" in out
    key = keys_of(rda).record(2)
    (tmp_path / "run" / key).write_bytes(b"rubbish")
    code, out, _ = run(monkeypatch, capsys, "verify", where)
    assert code == 1
    assert f"{key} holds 7 bytes that do not match their digest" in out
    assert "Found 1 thing that is wrong." in out
    code, out, _ = run(monkeypatch, capsys, "verify", where, "--json")
    assert code == 1
    assert [finding["key"] for finding in json.loads(out)["findings"]] == [key]


@pytest.mark.parametrize("command", ["status", "verify"])
def test_where_there_is_no_run_both_say_what_there_is(command, tmp_path, monkeypatch, capsys):
    places = {
        "nowhere": {},
        "being": {"creating/anna.0a.00000001": b"", "1f/save/initial.anna.0001.0001/x": b""},
        "other": {"thesis/chapter": b"years of work"},
    }
    for name, objects in places.items():
        folder(tmp_path / name, objects)
    (tmp_path / "empty").mkdir()
    wanted = {
        "nowhere": "there is no such folder",
        "empty": "it is empty",
        "being": "anna began to create one",
        "other": "holds 1 objects, 'thesis/chapter' first, but no `manifest`",
    }
    for name, said in wanted.items():
        code, out, err = run(monkeypatch, capsys, command, str(tmp_path / name))
        assert (code, out) == (2, "")
        assert said in err


def test_an_unreadable_manifest_is_damage_to_one_and_no_run_to_the_other(
    rda, tmp_path, monkeypatch, capsys
):
    where = folder(tmp_path, {**rda, MANIFEST: b"rubbish"})
    code, _, err = run(monkeypatch, capsys, "status", where)
    assert code == 2
    assert "is no run this build can read" in err
    code, out, _ = run(monkeypatch, capsys, "verify", where)
    assert code == 1
    assert "manifest holds 7 bytes that do not match their digest" in out


@pytest.mark.parametrize("command", ["status", "verify"])
def test_a_folder_that_holds_a_mailbox_is_none(command, rda, tmp_path, monkeypatch, capsys):
    """The parent of a mailbox has lost no manifest."""
    (tmp_path / "runs").mkdir()
    folder(tmp_path / "runs", rda)
    code, out, err = run(monkeypatch, capsys, command, str(tmp_path))
    assert (code, out) == (2, "")
    assert "There is no run" in err
