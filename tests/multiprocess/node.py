"""The program of one node: `python -m tests.multiprocess.node FOLDER NAME SEED [options]`.

It trains until the file `stop` lies in the folder, leaves with the run, and writes what it ends
with. Whatever its callbacks hear goes to a journal of its own, line by line, so that a kill loses
nothing that was said before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax

import jdiloco
from jdiloco import events
from jdiloco.errors import NodeIdInUse, NodeSuperseded
from jdiloco.store import FolderStore
from tests.multiprocess import task
from tests.session.nodes import digest

SUPERSEDED = 3
"""The exit code of a process whose id was started again while it slept."""
ID_IN_USE = 4

SETTINGS = "settings.json"
STEP_SECONDS = 0.005
POLL_SECONDS = 0.1


def algorithm(settings: dict[str, Any]) -> jdiloco.DiLoCo:
    """Rounds of ten steps, several a second on a machine that has time."""
    usual = {
        "sync_every": 20,
        "fragments": 2,
        "quorum_size": 3,
        "overlap_steps": 5,  # A busy machine makes the run slower, and throws nothing away.
        "outer_momentum": 0.5,
        "beat_seconds": 0.5,
        "lease_seconds": 3.0,
        "checkpoint_every": 5,
    }
    return jdiloco.DiLoCo(**{**usual, **settings})


class FatalStore(FolderStore):
    """Its process is killed in the moment in which it would create a key that ends so."""

    def __init__(self, path: Path, ending: str) -> None:
        super().__init__(path)
        self._ending = ending

    def create(self, key: str, data: Any) -> bool:
        if self._ending and key.endswith(self._ending):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(key, data)


def die_with_parent() -> None:
    """Also when this process is stopped, and however the parent dies. Linux has this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


def main(options: argparse.Namespace) -> int:
    die_with_parent()
    folder, name = options.folder, options.name
    journal = (folder / "journal" / f"{name}.{os.getpid()}").open("a", buffering=1)

    def tell(event: events.Event) -> None:
        journal.write(json.dumps({"at": time.monotonic(), **event.fields()}) + "\n")

    session = jdiloco.Session(
        task.initial(),
        algorithm(json.loads((folder / SETTINGS).read_text())),
        FatalStore(folder / "mailbox", options.dies_before),
        node_id=name,
        poll_interval=POLL_SECONDS,
        callbacks=(tell,),
        leave_with_run=True,
    )
    try:
        with session:
            train(session, folder / "stop", options.seed)
    except NodeSuperseded:
        return SUPERSEDED
    except NodeIdInUse:
        return ID_IN_USE
    if session.stopped_by is None:
        values = {"digest": digest(session.params), "name": name}
        (folder / "ended" / f"{name}.{os.getpid()}").write_text(json.dumps(values))
    return 0


def train(session: jdiloco.Session, stop: Path, seed: int) -> None:
    params = session.params
    state = task.optimizer.init(params)
    for number, windows in enumerate(task.batches(seed)):
        params, state = task.train_step(params, state, windows)
        jax.block_until_ready(params)
        params = session.step(params, samples=len(windows))
        time.sleep(STEP_SECONDS)
        if number % 10 == 0 and stop.exists():
            return


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="node")
    made.add_argument("folder", type=Path)
    made.add_argument("name")
    made.add_argument("seed", type=int)
    made.add_argument("--dies-before", default="", metavar="ENDING", help="the end of a key")
    return made


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
