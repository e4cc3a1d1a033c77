"""Ctrl-C and SIGTERM: a node ends in good order, wherever it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jdiloco.store import FolderStore

from .nodes import ROOT, algorithm, lock_step, node_of, session, vector, wait_until

pytestmark = pytest.mark.multiprocess

PROGRAM = """
    import sys, threading, time
    import jax.numpy as jnp
    from jdiloco import events
    from tests.session.nodes import POLL, algorithm, lock_step, session

    mailbox, settings, name = sys.argv[1], eval(sys.argv[2]), sys.argv[3]

    def say(event):
        if isinstance(event, (events.Joined, events.Waiting, events.Left)):
            print(str(event), flush=True)

    params = {n: jnp.ones(4) for n in "abc"}
    with session(params, settings, mailbox, "child", callbacks=(say,)) as s:
        params = s.params
        for number in range(10**6):
            params = s.step({n: x - 0.01 for n, x in params.items()}, samples=1)
            if number == 5:
                print("trains", flush=True)
            time.sleep(0.01)
    assert s.stopped_by == name, s.stopped_by
    left = [t for t in threading.enumerate() if t.name.startswith("jdiloco")]
    for thread in left:
        thread.join(60)  # Who is told to stop waits two seconds for a thread; a busy machine more.
    assert not any(t.is_alive() for t in left), left
    print("ended", float(s.params["a"][0]), flush=True)
"""


SECONDS = 3.0


class Child:
    """A process of its own; `heard` waits for a line that contains a word."""

    def __init__(self, folder: Path, program: str, *arguments: str) -> None:
        self._began = time.monotonic()
        self._limit = SECONDS
        self._out, self._errors = folder / "child.out", folder / "child.errors"
        with self._out.open("w") as out, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program), str(folder / "run"), *arguments],
                cwd=ROOT,
                stdout=out,
                stderr=errors,
            )

    @property
    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def heard(self, word: str, seconds: float = 60.0) -> None:
        def spoken() -> bool:
            return any(word in line for line in self.lines)

        wait_until(lambda: spoken() or self.process.poll() is not None, seconds)
        assert spoken(), self.errors
        self._limit = max(SECONDS, 2 * (time.monotonic() - self._began))

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Sends a signal; the exit code, and what was written to standard error."""
        self.process.send_signal(number)
        return self.wait(), self.errors

    def wait(self) -> int:
        """The exit code, within three seconds; on a busy machine twice what the start took."""
        return self.process.wait(self._limit)


@pytest.fixture
def start(tmp_path):
    """Starts a program on the mailbox `tmp_path / "run"`, and ends it with the test."""
    children = []

    def begin(program: str, *arguments: str) -> Child:
        children.append(Child(tmp_path, program, *arguments))
        return children[-1]

    yield begin
    for child in children:
        child.process.kill()
        child.process.wait()


SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_a_signal_while_training_ends_the_block_and_nothing_else(number, fragments, start):
    """B33: at the next step boundary; what comes after the block runs, and the exit is clean."""
    settings = f"algorithm(fragments={fragments}, sync_every=6, lease_seconds=60.0)"
    child = start(PROGRAM, settings, number.name)
    child.heard("trains")
    assert child.end(number) == (0, "")
    assert "Left because=stopped" in child.lines[-2]
    assert "ended" in child.lines[-1]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_a_signal_while_waiting_for_a_round_ends_the_wait(number, start, tmp_path):
    """B111: its partner never reports, and its lease is long."""
    settings = lock_step(2, lease_seconds=3600.0)
    with session({n: vector(1.0, 4)["w"] for n in "abc"}, settings, tmp_path, "parent") as partner:
        wait_until(lambda: node_of(partner).state.beaten)
        child = start(PROGRAM, "lock_step(2, lease_seconds=3600.0)", number.name)
        child.heard("Waiting round=0")
        assert child.end(number) == (0, "")
        assert "ended 1.0" in child.lines[-1]


JOINS = """
    import sys
    from tests.session.nodes import algorithm, session, vector

    print("begins", flush=True)
    with session(vector(1.0), algorithm(lease_seconds=3600.0), sys.argv[1], "late"):
        print("never", flush=True)
"""


@pytest.mark.parametrize("number", SIGNALS, ids=lambda s: s.name)
def test_a_signal_while_joining_ends_the_program(number, start, tmp_path):
    """Somebody else began to create the run, and is silent; the block is never entered.

    The status is not 0: a scheduler would think that the node has done its work.
    """
    store = FolderStore(tmp_path / "run")
    store.create("creating/a.b.00000001", b"")
    child = start(JOINS)
    child.heard("begins")
    time.sleep(1.0)
    assert child.end(number) == (128 + number, "")
    assert child.lines == ["begins"]


FAILS = """
    import sys
    from tests.session.nodes import algorithm, session, vector

    with session(vector(1.0), algorithm(lease_seconds=60.0), sys.argv[1]) as s:
        s.step(s.params, samples=1)
        print("raises", flush=True)
        raise ZeroDivisionError("mine")
"""


def test_an_exception_ends_the_program_with_its_traceback(start):
    child = start(FAILS)
    child.heard("raises")
    assert child.wait() == 1
    assert child.errors.count("Traceback") == 1
    assert "ZeroDivisionError: mine" in child.errors


def test_handlers_are_back_after_the_block():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with session(vector(1.0), algorithm(), "memory://handlers"):
        assert {number: signal.getsignal(number) for number in SIGNALS} != before
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_a_handler_of_the_program_stays(monkeypatch):
    """Who handles signals himself goes on doing so."""

    def mine(number, frame):
        del number, frame

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with session(vector(1.0), algorithm(), "memory://own-handler"):
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_session_in_another_thread_leaves_signals_alone():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    failures: list[BaseException] = []

    def program() -> None:
        try:
            with session(vector(1.0), algorithm(), "memory://elsewhere") as s:
                s.step(s.params, samples=1)
                assert {number: signal.getsignal(number) for number in SIGNALS} == before
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=program)
    thread.start()
    thread.join(60)
    assert not failures


def test_a_signal_that_the_loop_swallows_is_raised_again():
    """A bare `except` around a step does not keep the node from stopping."""
    with session(vector(1.0), algorithm(), "memory://swallow") as s:
        params = s.params
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(BaseException, match="SIGTERM"):
            s.step(params, samples=1)
        s.step(params, samples=1)
        raise AssertionError("unreachable")
    assert s.stopped_by == "SIGTERM"


def test_run_ends_with_a_signal():
    def step(params, item):
        if item == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return params, 1

    with session(vector(1.0), algorithm(), "memory://run-signal") as s:
        s.run(step, range(10**6))
    assert s.stopped_by == "SIGINT"
