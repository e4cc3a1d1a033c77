"""Several nodes of one run in the threads of one process, with beats short enough for a test."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdiloco import events
from jdiloco.protocol.keys import MANIFEST, Keys
from jdiloco.protocol.records import Manifest, RoundRecord, unseal
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.node import Node
from jdiloco.runtime.run_key import open_mailbox
from jdiloco.session import Session
from jdiloco.store import MemoryStore, Store

POLL = 0.02
PATIENCE = 100.0
"""Seconds after which a test gives up waiting; on a machine that is busy, minutes are nothing."""
ROOT = Path(__file__).parents[2]
_numbers = itertools.count()


def algorithm(**settings: Any) -> DiLoCo:
    """Settings that close a round within milliseconds."""
    defaults = {
        "sync_every": 4,
        "fragments": 1,
        "beat_seconds": 0.1,
        "lease_seconds": 1.0,
        "outer_momentum": 0.5,
    }
    return DiLoCo(**{**defaults, **settings})


def lock_step(nodes: int, **settings: Any) -> DiLoCo:
    """Standard DiLoCo: everybody waits for everybody, and nobody is early."""
    barrier = {"overlap_steps": 0, "quorum_size": nodes, "follow": 0, "grace_seconds": 30.0}
    return algorithm(**{**barrier, "lease_seconds": 20.0, **settings})


class Recorder:
    """A callback that remembers. `of(kind)` gives the events of a kind in order."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: events.Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: type) -> list[Any]:
        with self._changed:
            return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type, count: int = 1, seconds: float = PATIENCE) -> list[Any]:
        """The events of a kind, once there are so many."""
        with self._changed:
            enough = self._changed.wait_for(
                lambda: sum(isinstance(event, kind) for event in self.events) >= count, seconds
            )
        assert enough, f"{count} {kind.__name__} wanted, found {[str(e) for e in self.events]}"
        return self.of(kind)


def session(
    params: Any, settings: DiLoCo, mailbox: str | Path | Store, node: str | None = None, **more: Any
) -> Session:
    """A session that polls fast and logs nothing."""
    quiet = {"poll_interval": POLL, "callbacks": (), **more}
    return Session(params, settings, mailbox, node_id=node, **quiet)


def together(*programs: Callable[[], Any], seconds: float = 2 * PATIENCE) -> list[Any]:
    """Runs programs at the same time and returns what each returned, or raises what one raised."""
    results: list[Any] = [None] * len(programs)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = programs[index]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(programs))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        while thread.is_alive() and not failures and time.monotonic() < deadline:
            thread.join(0.05)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), f"not done after {seconds} s"
    return results


def node_of(s: Session) -> Node:
    """What a session runs in its threads."""
    assert isinstance(s._entry.node, Node)
    return s._entry.node


class Meeting:
    """Lets nodes begin together, once each knows of all the others."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._barrier = threading.Barrier(nodes)

    def __call__(self, s: Session) -> None:
        node = node_of(s)

        def training() -> set[str]:
            return {beat.node for beat in node.state.beats if beat.phase == "training"}

        wait_until(lambda: len(training()) == self._nodes)
        self._barrier.wait(PATIENCE)


def train_on(s: Session, params: Any = None, seconds: float = PATIENCE) -> None:
    """Trains nothing, step by step, until the session has something to say."""
    params = s.params if params is None else params
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        params = s.step(params, samples=1)
        time.sleep(0.005)


def run_script(
    text: str, *arguments: str, seconds: float = 120.0, environment: dict[str, str] | None = None
) -> str:
    """Runs Python in a process of its own, without pytest's type checks; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        env={**os.environ, **(environment or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_until(true: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Returns once `true()`."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.005)


@contextlib.contextmanager
def no_threads_left() -> Iterator[None]:
    """No thread of the library goes on after the block."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        new = [t for t in threading.enumerate() if t not in before]
        ours = [thread for thread in new if thread.name.startswith("jdiloco")]
        for thread in ours:
            thread.join(PATIENCE)  # Who fails or is stopped waits two seconds for it.
        left = [thread.name for thread in ours if thread.is_alive()]
        assert not left, f"left behind: {left}"


def memory() -> MemoryStore:
    """A fresh store that nobody else uses."""
    return MemoryStore(f"session-{next(_numbers)}")


def records(mailbox: str | Path | Store) -> list[RoundRecord]:
    """Every round record of the run in a mailbox, in order; with the key in the environment."""
    store = open_mailbox(mailbox)
    keys = run_keys(store)
    found = []
    for round in itertools.count():
        data = store.get(keys.record(round))
        if data is None:
            return found
        found.append(unseal(keys.record(round), data, RoundRecord))
    raise AssertionError("unreachable")


def run_keys(store: Store) -> Keys:
    """The keys of the run in a store."""
    data = store.get(MANIFEST)
    assert data is not None, "there is no run"
    return Keys(unseal(MANIFEST, data, Manifest).run)


def digest(tree: Any) -> str:
    """A hash of every bit of a tree of arrays."""
    running = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        running.update(f"{array.shape}{array.dtype}".encode() + array.tobytes())
    return running.hexdigest()


def vector(value: float, size: int = 8, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """A model of one tensor."""
    return {"w": jnp.full(size, value, dtype)}
