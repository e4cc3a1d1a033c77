"""How soon the others go on when a process is killed."""

from __future__ import annotations

import signal
import time
from itertools import pairwise

import pytest

from tests.multiprocess.processes import Nodes, Process
from tests.whole import whole_run

pytestmark = pytest.mark.multiprocess

LEASE = 3.0
GRACE = 0.2
FEW_POLLS = 2.0
BARRIER = {
    "beat_seconds": 1.0,
    "lease_seconds": LEASE,
    "quorum_size": 3,
    "grace_seconds": GRACE,
    "overlap_steps": 0,
    "follow": 0,
    "round_seconds": 60.0,
}
"""Every round waits for all three, and for a minute if need be."""


class Pace:
    """When records came, seen from outside."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._seen: list[float] = []

    def rounds(self, count: int) -> None:
        """Waits for so many more, and notes when each was there."""
        wanted = len(self._nodes.log.read()) + count
        while len(self._nodes.log.records) < wanted:
            self._nodes.wait_for_round(len(self._nodes.log.records))
            self._seen.append(time.monotonic())

    @property
    def slack(self) -> float:
        """What undisturbed rounds take at most on this machine, five of them.

        A takeover is a claim, a close and a commit, by a process that may compile the close first.
        """
        return 5 * max(after - before for before, after in pairwise(self._seen))


def kill(victim: Process) -> None:
    victim.fate = "killed"
    victim.send(signal.SIGKILL)


@pytest.mark.parametrize("which", [pytest.param("a learner", marks=pytest.mark.long), "the closer"])
def test_the_others_go_on_within_a_lease_when_one_is_killed(which, tmp_path):
    """B43: noticed after the lease, not after the sixty seconds that a round may take."""
    with Nodes(tmp_path / "run", **BARRIER) as nodes:
        nodes.start_all(3)
        pace = Pace(nodes)
        pace.rounds(4)
        closer = nodes.log.records[-1].next_closer
        others = [p for p in nodes.awake if p.name != closer]
        kill(nodes.named(closer) if which == "the closer" else others[0])
        began = time.monotonic()
        round = len(nodes.log.read())
        # What it had published before it died may still make one round more without a wait.
        record = nodes.wait_for_round(round + 2)
        took = time.monotonic() - began
        nodes.stop()
    assert took < LEASE + GRACE + FEW_POLLS + pace.slack, (took, pace.slack)
    assert len(record.participants) == 2
    whole_run(tmp_path / "run" / "mailbox")


@pytest.mark.long
def test_a_round_whose_closer_is_killed_before_its_record_is_committed_once_by_another(tmp_path):
    """B56: killed in the very moment, with both payloads in the mailbox."""
    with Nodes(tmp_path / "run", **BARRIER, checkpoint_every=100) as nodes:
        victim = nodes.start("n0", "--dies-before", "0000000004.0", fate="killed")
        nodes.wait(lambda: victim.joined, "n0 to create the run")
        for name in ("n1", "n2"):
            nodes.start(name)
        pace = Pace(nodes)
        nodes.wait(lambda: not victim.running, "n0 to die")
        died = time.monotonic()
        record = nodes.wait_for_round(4)
        took = time.monotonic() - died
        pace.rounds(3)
        nodes.stop()
    assert record.closer in ("n1", "n2")
    assert took < LEASE + FEW_POLLS + pace.slack, (took, pace.slack)
    payloads = [e.key for e in nodes.log.store.list("") if "/data/0000000004.n0." in e.key]
    assert len(payloads) == 2
    whole_run(tmp_path / "run" / "mailbox")
