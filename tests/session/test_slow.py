"""Nodes that are slow, or of which nothing is heard, with real threads and real waits."""

from __future__ import annotations

import itertools
import threading
import time

import jax
import pytest

from jdiloco import events
from jdiloco.testing.faults import FAIL, Call, FaultyStore
from tests.whole import whole_run

from .nodes import (
    Meeting,
    Recorder,
    algorithm,
    lock_step,
    memory,
    node_of,
    records,
    session,
    together,
    vector,
    wait_until,
)


def shrink(params):
    return jax.tree.map(lambda x: x * 0.9, params)


class Throttle:
    """A script: the first upload of what `part` names takes so long; beats are noted."""

    def __init__(self, part: str, seconds: float) -> None:
        self.beats: list[float] = []
        self.uploaded: list[float] = []
        self._part, self._seconds = part, seconds

    def __call__(self, call: Call):
        if "/live/b." in call.key and call.verb == "create":
            self.beats.append(time.monotonic())
        if self._part in call.key and call.verb == "create" and not self.uploaded:
            self.uploaded.append(time.monotonic())
            time.sleep(self._seconds)
            self.uploaded.append(time.monotonic())

    @property
    def longest_gap(self) -> float:
        """Between two beats while the upload ran."""
        since, until = self.uploaded
        during = [at for at in self.beats if since - 2 <= at <= until + 2]
        return max(after - before for before, after in itertools.pairwise(during))


@pytest.mark.long
@pytest.mark.parametrize("part", [".2.b.", "/data/"])
def test_an_upload_that_takes_ten_seconds_keeps_no_beat_waiting(part):
    """B54: beats every second, a lease of three; contributions and payloads. Both nodes remain."""
    settings = algorithm(beat_seconds=1.0, lease_seconds=3.0, sync_every=2, quorum_size=1, follow=0)
    mailbox, throttle, stop = memory(), Throttle(part, 10.0), threading.Event()
    seen, others = Recorder(), Recorder()

    def slow():
        store = FaultyStore(mailbox, throttle)
        with session(vector(1.0), settings, store, "b", callbacks=(seen,)) as s:
            params = s.params
            while not stop.is_set():
                params = s.step(shrink(params), samples=1)
                time.sleep(0.02)

    def other():
        wait_until(lambda: throttle.beats)
        members = []
        with session(vector(1.0), settings, mailbox, "a", callbacks=(others,)) as s:
            params = s.params
            wait_until(lambda: throttle.uploaded)
            while len(throttle.uploaded) < 2 or time.monotonic() < throttle.uploaded[1] + 1.0:
                params = s.step(shrink(params), samples=1)
                members.append({life.node for life in node_of(s).state.verdict.live})
                time.sleep(0.02)
        stop.set()
        return members

    _, members = together(slow, other)
    assert throttle.longest_gap < 2.0
    assert all("b" in living for living in members[len(members) // 4 :])
    assert not [e for e in others.of(events.TookOver) if "lease" in e.because]
    assert not seen.of(events.Degraded)
    whole_run(mailbox)


def test_a_node_whose_contribution_never_comes_is_not_waited_for_and_comes_back():
    """B59: rounds are committed by the two others; healed, the third takes part again."""
    settings = algorithm(quorum_size=2, follow=0, grace_seconds=0.05, sync_every=2)
    mailbox, meet, healed = memory(), Meeting(3), threading.Event()

    def script(call: Call):
        ill = call.verb == "create" and ".2.c." in call.key and not healed.is_set()
        return FAIL if ill and "0000000000.2" not in call.key else None

    def participants() -> list[set[str]]:
        return [{who.node for who in record.participants} for record in records(mailbox)]

    def node(name: str):
        store = FaultyStore(mailbox, script) if name == "c" else mailbox
        with session(vector(1.0), settings, store, name) as s:
            params = s.params
            meet(s)
            while not any("c" in names for names in participants()[6:]):
                params = s.step(shrink(params), samples=1)
                time.sleep(0.01)
                if len(participants()) >= 6:
                    healed.set()

    together(*(lambda name=name: node(name) for name in "abc"))
    assert all(names <= {"a", "b"} for names in participants()[1:6])
    assert all(len(names) == 2 for names in participants()[1:6])
    whole_run(mailbox)


def test_checkpoints_more_often_than_grace_windows_do_not_hold_up_rounds():
    """B92: every round waits a while for a node that is late, and a run checkpoint follows it."""
    settings = lock_step(1, sync_every=1, checkpoint_every=1, grace_seconds=0.15)
    mailbox, meet, seen = memory(), Meeting(2), Recorder()

    def node(name: str, late: float):
        with session(vector(1.0), settings, mailbox, name, callbacks=(seen,)) as s:
            params = s.params
            meet(s)
            while len(records(mailbox)) < 20:
                time.sleep(late)
                params = s.step(shrink(params), samples=1)

    together(lambda: node("a", 0.0), lambda: node("b", 0.1))
    log = whole_run(mailbox)
    assert len(log) >= 20
    assert len(seen.of(events.Checkpointed)) >= 3
    assert any(len(record.participants) == 2 for record in log)
