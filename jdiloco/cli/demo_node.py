"""What one process of the demo runs: `python -m jdiloco.cli.demo_node FOLDER ROLE ...`.

    node NAME SHARE [FIRST_STEP]   trains a share and takes part in the run
    lone SHARE                     trains a share alone, without a mailbox
    watch                          measures the held-out loss of the committed model

`train_in_run` is all there is to using jdiloco; `train_alone` is the same loop without it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jdiloco
from jdiloco.cli.demo_data import batches, held_out_rows
from jdiloco.cli.demo_journal import Journal
from jdiloco.cli.demo_model import ByteTransformer, evaluate, inner_optimizer, train_step
from jdiloco.cli.demo_plan import LONE, WATCH, Folder, Plan
from jdiloco.runtime.clock import Clock

WATCH_SECONDS = 5.0
"""Pause between two measurements of the committed model."""

ROWS_OFTEN = 64
"""Held-out windows of a measurement during the run."""

ROWS_FINAL = 1024
"""Held-out windows of the last measurement."""

ROWS_AT_ONCE = 64


def algorithm(plan: Plan) -> jdiloco.DiLoCo:
    """The settings of the run. Merge, outer step and alignment are the defaults."""
    return jdiloco.DiLoCo(
        sync_every=plan.sync_every,
        fragments=plan.fragments,
        quorum_size=plan.nodes,  # Wait for every node that is expected; a dead one is not for long.
        beat_seconds=1.0,
        lease_seconds=10.0,  # So long because five processes start and compile on two cores.
    )


def train_in_run(
    plan: Plan, folder: Folder, name: str, share: int, first_step: int, journal: Journal
) -> None:
    """Trains as a node of the run, from `first_step` of the plan to its last."""
    model, optimizer = beginning(plan, first_step)
    with jdiloco.Session(
        model,
        algorithm(plan),
        mailbox=str(folder.mailbox),
        node_id=name,
        poll_interval=0.25,
        callbacks=(journal.record,),
    ) as session:
        seed = plan.seed + int(name.rpartition("-")[2])
        reports = Reports(plan, journal, first_step)
        for batch in training_data(plan, folder, share, seed, first_step):
            loss = train_step(model, optimizer, batch)
            session.step(samples=plan.rows)
            reports.add(float(loss))


def train_alone(plan: Plan, folder: Folder, share: int, journal: Journal) -> None:
    """Trains the same model for as many steps on one share, and measures it now and then."""
    model, optimizer = beginning(plan, 0)
    reports = Reports(plan, journal, 0)
    measure_every = max(plan.steps // 12, 1)
    for step, batch in enumerate(training_data(plan, folder, share, plan.seed + 1, 0), 1):
        reports.add(float(train_step(model, optimizer, batch)))
        if step % measure_every == 0 and step < plan.steps:
            journal.write(held_out=measure(model, plan, folder, ROWS_OFTEN), step=step)
    journal.write(held_out=measure(model, plan, folder, ROWS_FINAL), step=plan.steps, final=True)


def watch_committed(plan: Plan, folder: Folder, ended: threading.Event, journal: Journal) -> None:
    """Measures the committed model until `ended`, and then a last time. Joins nothing."""
    model, _ = beginning(plan, 0)
    while not ended.wait(WATCH_SECONDS):
        with contextlib.suppress(jdiloco.JDilocoError):  # There is no run yet.
            load_committed(model, folder)
            journal.write(held_out=measure(model, plan, folder, ROWS_OFTEN))
    load_committed(model, folder)
    journal.write(held_out=measure(model, plan, folder, ROWS_FINAL), final=True)


def beginning(plan: Plan, first_step: int) -> tuple[ByteTransformer, nnx.Optimizer]:
    """The model and its optimiser before training; the same for every process of one plan.

    A node that joins later starts its schedule where the others are by then.
    """

    @nnx.jit  # One program instead of dozens of small ones.
    def create() -> ByteTransformer:
        return ByteTransformer(rngs=nnx.Rngs(plan.seed), context=plan.context)

    model = create()
    return model, inner_optimizer(model, plan.steps, peak=plan.learning_rate, first_step=first_step)


def training_data(
    plan: Plan, folder: Folder, share: int, seed: int, first_step: int
) -> Iterator[jax.Array]:
    """The batches of one node, one for each step that is left."""
    text = np.fromfile(folder.share(share), np.uint8)
    endless = batches(text, plan.rows, plan.context + 1, seed=seed)
    return map(jnp.asarray, itertools.islice(endless, plan.steps - first_step))


def load_committed(model: ByteTransformer, folder: Folder) -> None:
    """Puts the newest committed values into the model."""
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jdiloco.load(str(folder.mailbox), like=state))


def measure(model: ByteTransformer, plan: Plan, folder: Folder, rows: int) -> float:
    """The mean loss over `rows` windows of the text that nobody trains on."""
    text = np.fromfile(folder.held_out, np.uint8)
    windows = held_out_rows(text, rows, plan.context + 1)
    parts = np.split(windows, rows // ROWS_AT_ONCE)
    return float(np.mean([evaluate(model, jnp.asarray(part)) for part in parts]))


class Reports:
    """Writes the mean loss of every `report_every` steps."""

    def __init__(self, plan: Plan, journal: Journal, first_step: int):
        self._every = plan.report_every
        self._rows = plan.rows
        self._first = first_step
        self._last = plan.steps
        self._journal = journal
        self._step = first_step
        self._losses: list[float] = []

    def add(self, loss: float) -> None:
        """Counts a step."""
        self._step += 1
        self._losses.append(loss)
        if self._step % self._every == 0 or self._step == self._last:
            samples = (self._step - self._first) * self._rows
            loss = float(np.mean(self._losses))
            self._journal.write(step=self._step, loss=loss, samples=samples)
            self._losses.clear()


def when_parent_ends(act: Callable[[], None]) -> None:
    """Calls `act` from a thread once the parent has closed our standard input, or has died."""

    def wait() -> None:
        while os.read(0, 1):  # Not `sys.stdin`: its lock would be held while Python shuts down.
            pass
        act()

    threading.Thread(target=wait, name="parent", daemon=True).start()


def main() -> None:
    """Runs one role to its end. SIGTERM, and the end of the parent, stop it like Ctrl-C."""
    clock = Clock()
    started = clock.now()
    arguments = _parser().parse_args()
    folder = Folder(Path(arguments.folder))
    plan = folder.read_plan()
    name = getattr(arguments, "name", arguments.role)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Journal(folder.journal(name), lambda: clock.now() - started) as journal:
            run_role(arguments, plan, folder, journal)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def run_role(arguments: argparse.Namespace, plan: Plan, folder: Folder, journal: Journal) -> None:
    """Does what the command line asks for."""
    if arguments.role == WATCH:
        ended = threading.Event()
        when_parent_ends(ended.set)
        watch_committed(plan, folder, ended, journal)
        return
    when_parent_ends(lambda: signal.raise_signal(signal.SIGTERM))
    share = arguments.share
    if arguments.role == LONE:
        train_alone(plan, folder, share, journal)
    else:
        train_in_run(plan, folder, arguments.name, share, arguments.first_step, journal)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo_node")
    parser.add_argument("folder")
    roles = parser.add_subparsers(dest="role", required=True)
    node = roles.add_parser("node")
    node.add_argument("name")
    node.add_argument("share", type=int)
    node.add_argument("first_step", type=int, nargs="?", default=0)
    roles.add_parser(LONE).add_argument("share", type=int)
    roles.add_parser(WATCH)
    return parser


if __name__ == "__main__":
    main()
