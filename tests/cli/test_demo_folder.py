"""The demo's folder, its journals, and what the command line says before anything starts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jdiloco.cli import app, demo_report
from jdiloco.cli.demo_data import BYTES_MIN
from jdiloco.cli.demo_journal import Follower, Journal
from jdiloco.cli.demo_plan import Folder, Plan
from jdiloco.cli.demo_process import Child
from jdiloco.errors import UsageError
from jdiloco.events import Waiting


def test_a_folder_that_no_demo_made_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"not the folder of an earlier demo.*--out"):
        Folder(tmp_path).prepare(Plan())
    (tmp_path / "demo.json").write_text('{"kind": "something else"}')
    with pytest.raises(UsageError, match="not the folder"):
        Folder(tmp_path).prepare(Plan())
    assert (tmp_path / "thesis.txt").exists()


def test_an_earlier_demo_is_replaced_and_nothing_else(tmp_path):
    folder = Folder(tmp_path / "demo")
    folder.prepare(Plan(steps=500))
    folder.journal("node-1").write_text("old")
    folder.report.write_text("old")
    (folder.path / "my-notes.txt").write_text("kept")
    folder.prepare(Plan(steps=600))
    assert folder.read_plan() == Plan(steps=600)
    assert not folder.journal("node-1").exists()
    assert not folder.report.exists()
    assert (folder.path / "my-notes.txt").exists()


def test_an_earlier_demo_can_be_kept(tmp_path):
    folder = Folder(tmp_path)
    folder.prepare(Plan())
    with pytest.raises(UsageError, match="`--keep` keeps it"):
        folder.prepare(Plan(), replace=False)


@pytest.mark.parametrize(
    ("settings", "message"), [({"nodes": 1}, "at least 2, got 1"), ({"steps": 100}, "160, got 100")]
)
def test_a_plan_that_shows_nothing_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        Plan(**settings)


def test_a_reader_waits_for_the_rest_of_a_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    with Journal(path, lambda: 1.5) as journal:
        journal.write(step=1, loss=2.5)
    assert follower.read() == [{"step": 1, "loss": 2.5, "time": 1.5}]
    with path.open("a") as file:
        file.write('{"step": 2')
        file.flush()
        assert follower.read() == []
        file.write("}\n")
    assert follower.read() == [{"step": 2}]


def test_an_event_is_a_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path, lambda: 0.0) as journal:
        journal.record(Waiting(node="node-1", round=4))
    (line,) = Follower(path).read()
    assert line == {"event": "Waiting", "node": "node-1", "round": 4, "time": 0.0}


def test_help_names_the_options():
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 0
    for option in ("--data", "--steps", "--nodes", "--out", "--keep", "--seed", "--no-kill"):
        assert option in result.output


def test_help_names_the_limits_that_the_refusals_name():
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert f"at least {BYTES_MIN:,} bytes" in result.output
    assert f"at least {2 * Plan().sync_every}." in result.output
    assert "at least 2;" in result.output


def test_the_version_is_that_of_the_package():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert re.fullmatch(
        r"jdiloco (\d+\.\d+\S*|\(run from its source, not installed\))\n", result.output
    )


@pytest.mark.parametrize("out", ["s3://bucket/run", "memory:/x"])
def test_a_url_is_no_folder_for_the_results(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="begins like a URL"):
        Folder(Path(out)).prepare(Plan())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_colon_reaches_the_processes_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Folder(Path("a:b"))
    folder.prepare(Plan())
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    Child.start(folder, "node-1", ["node", "node-1", "0"])
    assert str(tmp_path / "a:b") in started[0]
    assert demo_report.read_rounds(folder.mailbox) == ()


def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        Folder(tmp_path / "file/demo").prepare(Plan())


@pytest.mark.multiprocess
def test_the_command_answers_without_importing_jax():
    code = "import sys, jdiloco.cli, jdiloco.cli.demo; print('jax' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


@pytest.mark.multiprocess
def test_a_refusal_is_a_sentence_and_not_a_traceback(tmp_path):
    (tmp_path / "mine").touch()
    code = "from jdiloco.cli import main; main()"
    answer = subprocess.run(
        [sys.executable, "-c", code, "demo", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 2
    assert "not the folder of an earlier demo" in answer.stderr
    assert "Traceback" not in answer.stderr
