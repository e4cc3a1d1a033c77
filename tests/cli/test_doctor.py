"""`jdiloco doctor`: what it says of stores that keep their promises, and of those that do not."""

import os

import pytest

from jdiloco.cli.doctor import examine, run_doctor
from jdiloco.errors import StoreDenied
from jdiloco.runtime.clock import Clock
from jdiloco.store import MemoryStore, open_store
from jdiloco.testing.faults import IGNORE_CONDITION, FaultyStore, Hide
from tests.session.nodes import run_script
from tests.store import stub
from tests.store.test_folder import failing

pytestmark = pytest.mark.usefixtures("credentials")


def told(store, megabytes=0.1):
    """The exit code and everything that is shown."""
    lines = []
    code = run_doctor(store, megabytes=megabytes, show=lines.append)
    return code, "\n".join(lines)


def broken(store):
    return [f.promise for f in examine(store, Clock(), megabytes=0.1) if f.kept is False]


def test_a_folder_can_carry_a_run_and_is_left_as_it_was(tmp_path):
    code, said = told(open_store(tmp_path / "runs"))
    assert code == 0, said
    assert said.count("kept") == 6
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_is_left_as_it_was_and_not_removed(tmp_path):
    (tmp_path / "runs").mkdir()
    assert told(open_store(tmp_path / "runs"))[0] == 0
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_a_real_bucket_can_carry_a_run_and_is_left_as_it_was(seaweed_server):
    store = open_store(seaweed_server.url("doctor"))
    store.create("bystander", b"1")
    code, said = told(store)
    assert code == 0, said
    for figure in (
        "one winner each",
        "one request for a look",
        "MB/s there",
        "create ",
        "from this machine's",
    ):
        assert figure in said
    assert [row.key for row in store.list("")] == ["bystander"]


def test_memory_can_carry_a_run_of_one_process():
    code, said = told(MemoryStore("doctor"))
    assert code == 0
    assert said.count("not tried") == 2


def test_a_gateway_that_ignores_conditions_is_refused(rclone_server):
    code, said = told(open_store(rclone_server.url("doctor")))
    assert code == 1
    assert "BROKEN a key is created once" in said
    assert "the condition (`If-None-Match: *`) is ignored" in said


def test_a_server_that_keeps_the_condition_but_not_in_a_race_is_refused():
    with stub.running() as server:
        server.races = True
        assert broken(open_store(server.url("p"))) == ["of two processes that race one wins"]


def test_credentials_that_may_not_delete_are_refused():
    with stub.running() as server:
        server.faults = lambda request: (
            stub.Fault(status=403, code="AccessDenied")
            if request.verb in ("POST", "DELETE")
            else None
        )
        code, said = told(open_store(server.url("p")))
        assert code == 1
        assert "BROKEN objects can be deleted" in said
        assert "removed by hand" in said


def test_what_a_server_without_start_after_costs_is_said():
    with stub.running() as server:
        server.ignores_after = True
        code, said = told(open_store(server.url("p")))
        assert code == 0
        assert "three listings instead of one" in said


def test_a_folder_that_can_neither_link_nor_rename_is_refused(tmp_path, monkeypatch):
    """Case B65: such a mount is found before a run is lost on it."""
    monkeypatch.setattr(os, "link", failing(95))
    monkeypatch.setattr("jdiloco.store.exclusive.rename_without_replacing", failing(95))
    code, said = told(open_store(tmp_path / "mount"))
    assert code == 1
    assert "neither link" in said or "can neither" in said


def test_planted_faults_are_found():
    ignoring = FaultyStore(MemoryStore(), lambda call: IGNORE_CONDITION)
    assert broken(ignoring) == ["a key is created once"]
    hiding = FaultyStore(
        MemoryStore(), lambda call: Hide(part="a0") if call.verb == "list" else None
    )
    assert "keys are listed in order, and from where one asks" in broken(hiding)


def test_a_bucket_that_is_not_there_cannot_be_examined(seaweed_server):
    store = open_store(f"s3://no-such-bucket/p?endpoint={seaweed_server.endpoint}&region=x")
    with pytest.raises(StoreDenied):
        store.get("k")


@pytest.mark.parametrize(
    ("where", "code"),
    [("FOLDER", 0), ("s3://b/p?endpoint=http://127.0.0.1:1&anonymous=true", 2), ("s3://", 2)],
)
def test_the_exit_code_tells_what_was_found(where, code, tmp_path):
    program = """
        import sys
        from jdiloco.cli import main
        sys.argv = ["jdiloco", "doctor", sys.argv[1], "--megabytes", "0.1"]
        try:
            main()
        except SystemExit as end:
            print("exit code", end.code or 0)
    """
    said = run_script(program, where.replace("FOLDER", str(tmp_path / "runs")))
    assert said.endswith(f"exit code {code}\n")
