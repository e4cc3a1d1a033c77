"""The demo's processes: watched, reported and always ended. The run itself is `test_demo_run`."""

import subprocess
import sys

import pytest

from jdiloco.cli.demo_process import Child, stop
from jdiloco.cli.demo_view import state_of

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def spawn(tmp_path):
    """Starts a process that runs a line of Python; none outlives the test."""
    children = []

    def start(code):
        log = tmp_path / f"{len(children)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=file, stderr=file
            )
        children.append(Child(f"child-{len(children)}", process, log))
        return children[-1]

    yield start
    stop(children, seconds=0.0)


def test_a_crash_is_told_from_a_kill_and_from_an_end(spawn):
    finished, crashed, killed = spawn(""), spawn("1 / 0"), spawn("input()")
    killed.kill()
    for child in (finished, crashed):
        child.process.wait(30)
    assert [child.ending() for child in (finished, crashed, killed)] == [
        "finished",
        "crashed (exit code 1)",
        "killed",
    ]
    assert [child.crashed for child in (finished, crashed, killed)] == [False, True, False]
    assert "ZeroDivisionError" in crashed.tail()


def test_a_stranger_who_kills_is_named_by_the_signal(spawn):
    child = spawn("input()")
    child.process.kill()
    child.process.wait(30)
    assert child.ending() == "killed by signal 9"


def test_a_process_that_does_not_listen_is_killed(spawn):
    deaf = spawn(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True);"
        "input()"
    )
    while "deaf" not in deaf.tail():
        assert deaf.running
    stop([deaf], seconds=0.2)
    assert not deaf.running


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ({"step": 1, "loss": 2.0}, "training"),
        ({"event": "Waiting", "round": 3}, "waiting for round 3"),
        ({"event": "Joined", "round": 5}, "joined at round 5"),
        ({"event": "Degraded", "because": "no answer"}, "training, degraded: no answer"),
        ({"event": "Recovered"}, "training"),
        ({"event": "Committed"}, "starting"),
    ],
)
def test_the_state_is_what_was_said_last(line, state):
    assert state_of([line], "running") == state
    assert state_of([line], "killed") == "killed"
