"""What one process of the demo runs: `python -m jdiloco.cli.demo_node FOLDER ROLE ...`.

    node NAME SHARE   trains a share and takes part in the run
    lone SHARE        trains a share alone, without a mailbox
    watch             measures the held-out loss of the committed model

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
from jdiloco import events
from jdiloco.cli.demo_data import batches, held_out_rows
from jdiloco.cli.demo_journal import Journal
from jdiloco.cli.demo_model import ByteTransformer, evaluate, inner_optimizer, train_step
from jdiloco.cli.demo_plan import LONE, WATCH, Folder, Plan
from jdiloco.errors import JDilocoError
from jdiloco.runtime.clock import Clock

WATCH_SECONDS = 5.0
"""Pause between two measurements of the committed model."""

ROWS_OFTEN = 64
"""Held-out windows of a measurement during the run."""

ROWS_FINAL = 1024
"""Held-out windows of the last measurement."""

ROWS_AT_ONCE = 64


def algorithm(plan: Plan) -> jdiloco.DiLoCo:
    """The settings of the run.

    The outer step is gentler than the default, 0.7 with momentum 0.9: that is made for hundreds of
    rounds of a fragment. This run has about 15, and would still carry most of them in its momentum
    when it ends.
    """
    return jdiloco.DiLoCo(
        sync_every=plan.sync_every,
        fragments=plan.fragments,
        outer_lr=1.0,
        outer_momentum=0.5,
        quorum_size=plan.nodes - 1,  # Closes without the slowest, or without one that was killed.
        beat_seconds=2.0,
        lease_seconds=10.0,  # So long because five processes start and compile on two cores.
    )


def train_in_run(plan: Plan, folder: Folder, name: str, share: int, journal: Journal) -> None:
    """Trains as a node of the run, from where the run is to the last step of the plan."""
    model = beginning(plan)
    joined: list[events.Joined] = []
    with jdiloco.Session(
        model,
        algorithm(plan),
        mailbox=folder.mailbox,
        node_id=name,
        poll_interval=0.25,
        callbacks=(journal.record, lambda event: keep(event, joined)),
    ) as session:
        first_step = min(joined[0].round * plan.sync_every // plan.fragments, plan.steps)
        optimizer = inner_optimizer(model, plan.steps, plan.learning_rate, first_step=first_step)
        reports = Reports(plan, journal, first_step)
        seed = plan.seed + int(name.rpartition("-")[2])
        for batch in training_data(plan, folder, share, seed, first_step):
            loss = train_step(model, optimizer, batch)
            session.step(samples=plan.rows)
            reports.add(float(loss))
    if session.stopped_by:  # The block ends in good order then, but the training has not ended.
        raise KeyboardInterrupt


def keep(event: events.Event, joined: list[events.Joined]) -> None:
    """Keeps the event that says at which round this node joined."""
    if isinstance(event, events.Joined):
        joined.append(event)


def train_alone(plan: Plan, folder: Folder, share: int, journal: Journal) -> None:
    """Trains the same model for as many steps on one share, and measures it now and then."""
    model = beginning(plan)
    optimizer = inner_optimizer(model, plan.steps, plan.learning_rate)
    reports = Reports(plan, journal, 0)
    measure_every = max(plan.steps // 12, 1)
    for step, batch in enumerate(training_data(plan, folder, share, plan.seed + 1, 0), 1):
        reports.add(float(train_step(model, optimizer, batch)))
        if step % measure_every == 0 and step < plan.steps:
            journal.write(held_out=measure(model, plan, folder, ROWS_OFTEN), step=step)
    journal.write(held_out=measure(model, plan, folder, ROWS_FINAL), step=plan.steps, final=True)


def watch_committed(plan: Plan, folder: Folder, ended: threading.Event, journal: Journal) -> None:
    """Measures the committed model until `ended`, and then a last time. Joins nothing."""
    model = beginning(plan)
    while not ended.wait(WATCH_SECONDS):
        with contextlib.suppress(JDilocoError):  # There is no run yet.
            jdiloco.load(folder.mailbox, like=model)
            journal.write(held_out=measure(model, plan, folder, ROWS_OFTEN))
    jdiloco.load(folder.mailbox, like=model)
    journal.write(held_out=measure(model, plan, folder, ROWS_FINAL), final=True)


def beginning(plan: Plan) -> ByteTransformer:
    """The model before training; the same for every process of one plan."""

    @nnx.jit  # One program instead of dozens of small ones.
    def create() -> ByteTransformer:
        return ByteTransformer(rngs=nnx.Rngs(plan.seed), context=plan.context)

    return create()


def training_data(
    plan: Plan, folder: Folder, share: int, seed: int, first_step: int
) -> Iterator[jax.Array]:
    """The batches of one node, one for each step that is left."""
    text = np.fromfile(folder.share(share), np.uint8)
    endless = batches(text, plan.rows, plan.context + 1, seed=seed)
    return map(jnp.asarray, itertools.islice(endless, plan.steps - first_step))


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
        train_in_run(plan, folder, arguments.name, share, journal)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo_node")
    parser.add_argument("folder")
    roles = parser.add_subparsers(dest="role", required=True)
    node = roles.add_parser("node")
    node.add_argument("name")
    node.add_argument("share", type=int)
    roles.add_parser(LONE).add_argument("share", type=int)
    roles.add_parser(WATCH)
    return parser


if __name__ == "__main__":
    main()
