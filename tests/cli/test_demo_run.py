"""The demo from end to end, small: two minutes in all."""

import json
import signal
import subprocess
import sys
import time

import pytest

from jdiloco.cli.demo_data import source_files, standard_library
from jdiloco.cli.demo_journal import Follower
from jdiloco.cli.demo_plan import LONE, Folder

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(600)]

COMMAND = "from jdiloco.cli import main; main()"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A little text: the longest files of the standard library."""
    folder = tmp_path_factory.mktemp("text")
    files = source_files(standard_library())
    for path in sorted(files, key=lambda path: path.stat().st_size)[-12:]:
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def start(text, tmp_path):
    """Starts a demo with these options; it does not outlive the test."""
    started = []

    def run(*options):
        arguments = ["demo", "--data", str(text), "--out", str(tmp_path / "demo"), *options]
        demo = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(demo)
        return demo, Folder(tmp_path / "demo")

    yield run
    for demo in started:
        demo.kill()
        demo.communicate()


def processes_of(folder):
    """The processes that work in a demo's folder, by their command line."""
    command = ["ps", "-e", "-ww", "-o", "pid,args"]  # -ww: lines of any length.
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return {
        line.split()[-1 if "watch" in line else -2]: int(line.split()[0])
        for line in listed.stdout.splitlines()
        if "demo_node" in line and f"{folder.path} " in line
    }


def wait_until(happened, demo, seconds=240.0):
    deadline = time.monotonic() + seconds
    while not happened():
        assert demo.poll() is None, demo.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_one_node_is_killed_another_joins_and_all_samples_are_accounted_for(start):
    demo, folder = start("--nodes", "3", "--steps", "240")
    output, _ = demo.communicate(timeout=500)
    body = json.loads(folder.report.read_text())
    assert demo.returncode == (0 if body["holds"] else 1), output
    assert body["committed_loss"] < 3.5

    endings = [node["ending"] for node in body["nodes"]]
    assert sorted(endings) == ["finished", "finished", "finished", "killed"]
    assert [node["last_known"] for node in body["nodes"]] == [e == "killed" for e in endings]
    assert len(body["rounds"]) >= 8
    assert body["mean_participants"] > 1
    for node in body["nodes"]:
        parts = node["merged"] + sum(node["dropped"].values()) + node["pending"]
        assert parts == pytest.approx(body["processed"][node["node"]])
        if not node["last_known"]:
            left = Follower(folder.journal(node["node"])).read()[-1]
            assert left["event"] == "Left"
            assert left["processed"] == pytest.approx(parts)
    assert folder.report.with_suffix(".png").exists()
    assert processes_of(folder) == {}


def test_ctrl_c_ends_every_process(start):
    demo, folder = start("--nodes", "2", "--steps", "2000")
    wait_until(lambda: Follower(folder.journal("node-1")).read(), demo)
    assert {"node-1", "node-2", LONE, "watch"} == set(processes_of(folder))
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert "no process is left" in output
    assert processes_of(folder) == {}


def test_a_stranger_may_kill_any_process_and_the_others_finish(start):
    """The first node to join creates the run and closes its first rounds: that one is killed."""
    demo, folder = start("--nodes", "3", "--steps", "200", "--no-kill")

    def closer():
        names = [f"node-{i}" for i in (1, 2, 3)]
        lines = [line for name in names for line in Follower(folder.journal(name)).read()]
        return [line["closer"] for line in lines if line.get("event") == "Committed"]

    wait_until(closer, demo)
    pids = processes_of(folder)
    for name in (closer()[-1], LONE, "watch"):
        subprocess.run(["kill", "-9", str(pids[name])], check=True)
    output, _ = demo.communicate(timeout=400)
    body = json.loads(folder.report.read_text())
    endings = sorted(node["ending"] for node in body["nodes"])
    assert endings == ["finished", "finished", "killed by signal 9"], output
    assert body["committed_loss"] is not None  # Another process measured it.
    assert demo.returncode == 1  # Nothing to compare with: no success.
    assert "claim was not checked" in output
