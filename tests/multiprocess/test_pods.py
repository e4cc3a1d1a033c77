"""Nodes that are pods: real `jax.distributed` worlds beside a plain node, on one folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jdiloco.cli.demo_process import environment
from jdiloco.runtime.verify import verify
from tests.multiprocess.processes import ROOT, compiled
from tests.session.nodes import records

pytestmark = pytest.mark.multiprocess

RUN = {
    "sync_every": 20,
    "fragments": 2,
    "overlap_steps": 5,
    "outer_momentum": 0.5,
    "beat_seconds": 0.5,
    "lease_seconds": 8.0,
    "checkpoint_every": 3,
}
USUAL = {
    "role": "both",
    "steps": 120,
    "seed": 0,
    "data": 0,
    "width": 8,
    "pause": 0.0,
    "task": "learn",
    "alignment": "overwrite",
    "anchors": "device",
    "leave_with_run": True,
    "run": RUN,
}


@dataclasses.dataclass
class Started:
    """A node: its processes and what they were told."""

    folder: Path
    name: str
    processes: list[subprocess.Popen]
    outputs: list[Path]

    def wait(self, seconds: float = 200.0) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.wait(max(0.1, deadline - time.monotonic()))

    def ended(self) -> list[dict[str, Any]]:
        """What each process ended with."""
        self.wait()
        codes = [process.returncode for process in self.processes]
        assert codes == [0] * len(codes), self.told()
        paths = [self.folder / f"ended.{self.name}.{i}" for i in range(len(self.processes))]
        return [json.loads(path.read_text()) for path in paths]

    def told(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in self.outputs)

    def step(self, process: int = 0) -> int:
        path = self.folder / f"step.{self.name}.{process}"
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(path.read_text())
        return -1


class Nodes:
    """Starts nodes, and ends whatever still runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Started] = []

    def start(
        self,
        name: str,
        layout: str,
        processes: int = 1,
        devices: int = 2,
        program: str = "pod_program",
        **told: Any,
    ) -> Started:
        said = {**USUAL, **told, "name": name, "layout": layout, "processes": processes}
        said["port"] = free_port()
        node = Started(self.folder, name, [], [])
        for index in range(processes):
            output = self.folder / f"output.{name}.{index}.{len(self.started)}"
            arguments = [str(self.folder), json.dumps({**said, "process": index})]
            if program == "pod_refusals":
                arguments = [str(self.folder), str(said["port"]), str(index)]
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", f"tests.multiprocess.{program}", *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env={
                        **environment(compiled()),
                        "JAX_PLATFORMS": "cpu",
                        "JAX_NUM_CPU_DEVICES": str(devices if processes > 1 else 1),
                    },
                )
            node.processes.append(process)
            node.outputs.append(output)
        self.started.append(node)
        return node

    def end(self) -> None:
        for node in self.started:
            for process in node.processes:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    try:
        yield made
    finally:
        made.end()


def wait_until(true: Any, node: Started, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, node.told()
        time.sleep(0.05)


NARROW = {"commit_dtype": "float8_e4m3fn", "momentum_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("key", "precision"),
    [
        ("", {}),
        pytest.param("the key of these pods", {}, marks=pytest.mark.long, id="signed"),
        pytest.param("", NARROW, marks=pytest.mark.long, id="narrow commits"),
    ],
)
def test_two_pods_and_a_plain_node_train_one_model(nodes, key, precision, monkeypatch):
    """Three layouts of one model, rounds of all three: one result, and `verify` finds nothing.

    One pod keeps its anchors off the devices, as on GPUs and TPUs.
    """
    if key:
        monkeypatch.setenv("JDILOCO_RUN_KEY", key)
    told = {"run": {**RUN, **precision, "quorum_size": 3, "follow": 0}, "alignment": "carry"}
    began = [
        nodes.start("rows", "rows", 2, data=1, **told),
        nodes.start("mixed", "mixed", 2, data=2, anchors="pinned_host", **told),
        nodes.start("plain", "plain", data=3, **told),
    ]
    pods = [node.ended() for node in began[:2]]
    ended = [*pods[0], *pods[1], *began[2].ended()]
    assert [one["anchors"] for one, _ in pods] == [["device"], ["pinned_host"]]
    for one, other in pods:
        assert one["aligned"] == other["aligned"]  # At the same steps, to the same values.
        assert len(one["aligned"]) > 4
    assert len({end["committed"] for end in ended}) == 1
    assert len({end["first"] for end in ended}) == 1
    found = records(nodes.folder / "mailbox")
    assert max(len(record.participants) for record in found) == 3
    assert not any(record.rejected for record in found)
    report = verify(nodes.folder / "mailbox")
    assert not report.findings, report.findings
    assert {stretch.how for stretch in report.rounds} <= {"recomputed", "chained", "void"}


@pytest.mark.long
def test_a_pod_and_a_plain_node_that_see_the_same_data_come_to_the_same_values(tmp_path):
    """Each alone in a run of its own, and every round waited for."""
    run = {**RUN, "overlap_steps": 0}
    made = [Nodes(tmp_path / name) for name in ("pod", "plain")]
    try:
        for one in made:
            one.folder.mkdir()
        (pod, plain) = (
            made[0].start("node", "mixed", 2, run=run, leave_with_run=False),
            made[1].start("node", "plain", run=run, leave_with_run=False),
        )
        values = [node.ended()[0]["values"] for node in (pod, plain)]
    finally:
        for one in made:
            one.end()
    for name in ("w", "v", "b", "s"):
        mine, theirs = (np.asarray(found[name]) for found in values)
        assert np.linalg.norm(mine - theirs) <= 1e-5 * np.linalg.norm(theirs)
    rounds = [[r.fragment for r in records(one.folder / "mailbox")] for one in made]
    assert rounds[0] == rounds[1]


def test_a_process_that_dies_takes_its_node_with_it_and_the_run_goes_on(nodes):
    """The pod joins again under its id, and stops as one when one of its processes is told to."""
    told = {"steps": 10**6, "pause": 0.02, "run": {**RUN, "quorum_size": 2}}
    mailbox = nodes.folder / "mailbox"
    plain = nodes.start("plain", "plain", data=3, **told)
    pod = nodes.start("pod", "rows", 2, data=1, **told)

    def merged(incarnation: int) -> bool:
        lives = {(p.node, p.incarnation) for r in records(mailbox) for p in r.participants}
        return ("pod", incarnation) in lives

    wait_until(lambda: (mailbox / "manifest").exists() and merged(1), pod)
    pod.processes[1].kill()
    wait_until(lambda: all(p.poll() is not None for p in pod.processes), pod)
    assert pod.processes[0].returncode != 0
    count = len(records(mailbox))
    wait_until(lambda: len(records(mailbox)) > count + 4, plain)
    again = nodes.start("pod", "mixed", 2, data=2, **told)
    wait_until(lambda: merged(2), again)
    again.processes[1].send_signal(signal.SIGTERM)
    ended = again.ended()
    assert [end["stopped_by"] for end in ended] == ["SIGTERM"] * 2
    assert ended[0]["committed"] == ended[1]["committed"]
    plain.processes[0].send_signal(signal.SIGTERM)
    plain.ended()
    report = verify(mailbox)
    assert not report.findings, report.findings


REFUSED = {
    "syncer": "`role` is 'syncer', and this node is a pod of 2 processes",
    "either": "`role` is 'either', and this node is a pod of 2 processes",
    "ranks": "A pod takes no `ranks`",
    "small": "`delta_dtype` is 'float8_e4m3fn'",
    "memory": "`mailbox` is memory://alone",
    "local": "'w' lies on devices of processes",
    "numpy": "'w' is a ndarray; this node is a pod of 2 processes",
    "cut otherwise": "Processes 0 and 1 of this node were given different `shardings of params`",
    "unlike": "Processes 0 and 1 of this node were given different `leave_with_run`",
    "elsewhere": "Process 1 of this node has sent its share of the initial values",
    "samples": "Processes 0 and 1 of this node have counted",
    "queue": "This node is a pod: it has no shared queue",
    "barrier": "This node is a pod",
    "save": "This node is a pod",
    "status": "Process 0 of a pod hears of the run",
}


@pytest.mark.long
def test_what_a_pod_cannot_do_is_refused_by_every_process_with_the_way_out(nodes):
    """And what it can: explicit axes, a share of the global batch, modules, leaves that move."""
    node = nodes.start("refused", "rows", 2, program="pod_refusals")
    node.wait()
    assert [process.returncode for process in node.processes] == [0, 0], node.told()
    for index, output in enumerate(node.outputs):
        said = dict(line.split(": ", 1) for line in output.read_text().splitlines() if ": " in line)
        for what, message in REFUSED.items():
            if what != "status" or index == 1:
                assert message in said[what], (what, said[what])


@pytest.mark.long
def test_no_process_of_a_pod_holds_a_whole_tensor_on_its_host(nodes):
    """A tensor of 128 MiB over four processes, beside a syncer that closes its rounds.

    Each holds a quarter of the newest version, and for a moment what it sends and what it reads.
    """
    whole = 128 * 2**20
    run = {**RUN, "fragments": 1, "overlap_steps": 0, "lease_seconds": 30.0, "sync_every": 5}
    told = {"task": "drift", "width": whole // 64, "run": run, "leave_with_run": False}
    syncer = nodes.start("syncer", "plain", role="syncer", **told)
    manifest = nodes.folder / "mailbox" / "manifest"
    wait_until(manifest.exists, syncer)
    pod = nodes.start("pod", "rows", 4, devices=1, role="learner", steps=20, **told)
    rounds = 4
    for process in pod.ended():
        print(process)
        assert process["peak"] < 0.85 * whole
        assert process["received"] < (rounds + 1) * (whole / 4 + 8 * 2**20)
        assert process["sent"] < rounds * (whole / 4 + 2**20)
    assert len(records(nodes.folder / "mailbox")) == rounds
