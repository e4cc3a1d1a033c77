"""Five real processes in a storm: no round is lost, nothing is merged twice, and it learns."""

from __future__ import annotations

import collections
import os
import sys
from pathlib import Path

import pytest

import jdiloco
from tests.multiprocess import task
from tests.multiprocess.processes import Nodes
from tests.multiprocess.storm import Storm
from tests.session.nodes import digest
from tests.whole import whole_run

pytestmark = pytest.mark.multiprocess

NODES = 5
LOSS_TOLERANCE = 0.05
"""Of the loss of the same run undisturbed."""


def summary(nodes: Nodes, loss: float) -> str:
    """One screen."""
    log = nodes.log.read()
    told = list(nodes.told())
    merged = sum(who.counters.samples for record in log for who in record.participants)
    dropped: collections.Counter[str] = collections.Counter()
    for event in told:
        if event["event"] == "Dropped":
            dropped[event["reason"]] += event["samples"]
    total = merged + dropped.total() or 1
    claims = collections.Counter(e["because"] for e in told if e["event"] == "TookOver")
    rejected = collections.Counter(who.reason for record in log for who in record.rejected)
    rows = {
        **getattr(nodes, "counts", {}),
        "processes": len(nodes.processes),
        "rounds": len(log),
        "void rounds": sum(record.void for record in log),
        "mean participants": f"{sum(len(r.participants) for r in log) / (len(log) or 1):.2f}",
        "takeovers": dict(claims) or "none",
        "rejected": dict(rejected) or "none",
        "merged": f"{merged / total:.0%} of the samples that were accounted for",
        **{f"dropped, {why}": f"{count / total:.0%}" for why, count in dropped.items()},
        "held-out loss": f"{loss:.4f}",
    }
    return "\n".join(f" {name:28} {value}" for name, value in rows.items())


def check(nodes: Nodes) -> float:
    """What has to hold of any run, from outside. Returns the loss of what it committed."""
    log = whole_run(nodes.folder / "mailbox")
    newest = jdiloco.load(nodes.folder / "mailbox", task.initial())
    loss = task.held_out_loss(newest)
    print(summary(nodes, loss))
    assert log
    ended = nodes.ended()
    assert len(ended) >= 2
    assert set(ended.values()) == {digest(newest)}, ended
    assert not left_over(nodes.folder)
    for event in nodes.told():
        if event["event"] == "Left":
            whole = event["merged"] + event["dropped"] + event["pending"]
            assert event["processed"] == pytest.approx(whole), event
    return loss


def left_over(folder: Path) -> list[str]:
    """Processes that name the folder on their command line."""
    if sys.platform != "linux":
        return []
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue  # It has just ended.
        if str(folder).encode() in command and b"tests.multiprocess.node" in command:
            found.append(pid)
    return found


def undisturbed(folder: Path, rounds: int) -> float:
    """The loss of the same nodes after so many rounds, when nothing happens to them.

    A round is a number of steps of a learner, so these are the same steps; samples are not the
    measure, as with fewer participants they make more rounds, and a lower loss.
    """
    with Nodes(folder) as calm:
        calm.start_all(NODES)
        calm.wait(lambda: len(calm.log.read()) >= rounds, "the undisturbed run", 900.0)
        calm.stop()
    return check(calm)


def test_a_short_storm_breaks_nothing(tmp_path):
    with Storm(tmp_path / "storm", seed=1, nodes=3) as storm:
        storm.rage(15.0, kills=1, stops=1)
        storm.stop()
    check(storm)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_long_storm_breaks_nothing_and_the_run_learns_all_the_same(tmp_path):
    """`JDILOCO_STORM=600 pytest -k long_storm -s` lets it rage for ten minutes."""
    seconds = float(os.environ.get("JDILOCO_STORM", "120"))
    with Storm(tmp_path / "storm", seed=2, nodes=NODES) as storm:
        storm.rage(seconds, kills=int(seconds / 25), stops=int(seconds / 25))
        storm.stop()
    loss = check(storm)
    calm = undisturbed(tmp_path / "calm", len(storm.log.read()))
    assert abs(loss - calm) <= LOSS_TOLERANCE * calm, (loss, calm)
    assert max(loss, calm) < 0.7 * task.held_out_loss(task.initial())
