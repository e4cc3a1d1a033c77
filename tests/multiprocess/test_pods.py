"""Nodes that are pods: real `jax.distributed` worlds beside a plain node, on one folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

    def start(self, name: str, layout: str, processes: int = 1, **told: Any) -> Started:
        said = {**USUAL, **told, "name": name, "layout": layout, "processes": processes}
        said["port"] = free_port()
        node = Started(self.folder, name, [], [])
        for index in range(processes):
            output = self.folder / f"output.{name}.{index}.{len(self.started)}"
            arguments = [str(self.folder), json.dumps({**said, "process": index})]
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.multiprocess.pod_program", *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env={
                        **environment(compiled()),
                        "JAX_PLATFORMS": "cpu",
                        "JAX_NUM_CPU_DEVICES": "2" if processes > 1 else "1",
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


def test_two_pods_and_a_plain_node_train_one_model(nodes):
    """Three layouts of one model, rounds of all three: one result, and `verify` finds nothing."""
    run = {**RUN, "quorum_size": 3, "follow": 0}
    began = [
        nodes.start("rows", "rows", 2, data=1, run=run),
        nodes.start("mixed", "mixed", 2, data=2, run=run),
        nodes.start("plain", "plain", data=3, run=run),
    ]
    ended = [process for node in began for process in node.ended()]
    assert len({end["committed"] for end in ended}) == 1
    assert len({end["first"] for end in ended}) == 1
    found = records(nodes.folder / "mailbox")
    assert max(len(record.participants) for record in found) == 3
    assert not any(record.rejected for record in found)
    report = verify(nodes.folder / "mailbox")
    assert not report.findings, report.findings
    assert {stretch.how for stretch in report.rounds} <= {"recomputed", "chained", "void"}
