"""A storm over real processes, from one seed: killed, stopped, told to leave, and replaced.

    with Storm(folder, seed=1, nodes=5) as storm:
        storm.rage(150.0, kills=6, stops=6)
        storm.stop()

Misfortunes hit whoever is trained with at that moment, half of the time the node that closes the
next round. A process that is stopped sleeps for longer than its lease and wakes up as a zombie,
sometimes to find that its id has been started again.
"""

from __future__ import annotations

import collections
import random
import signal
import time
from pathlib import Path
from typing import Self

from tests.multiprocess.node import algorithm
from tests.multiprocess.processes import LOOK_SECONDS, PATIENCE, Nodes, Process

AWAKE_MIN = 2
"""So many train at any time, whatever happens to the others."""
LEASE = algorithm({}).lease_seconds


class Storm(Nodes):
    """So many nodes, and what befalls them."""

    def __init__(self, folder: Path, *, seed: int, nodes: int) -> None:
        super().__init__(folder)
        self.counts: collections.Counter[str] = collections.Counter()
        self._nodes = nodes
        self._rng = random.Random(seed)

    def __enter__(self) -> Self:
        super().__enter__()
        self.start_all(self._nodes)
        return self

    def rage(self, seconds: float, *, kills: int, stops: int) -> None:
        """Misfortunes for so many seconds, and on a slow machine until so many have struck."""
        began = time.monotonic()
        while (
            time.monotonic() < began + seconds
            or self.counts["kills"] < kills
            or self.counts["stops"] < stops
        ):
            assert time.monotonic() < began + seconds + PATIENCE, f"too slow: {self.counts}"
            self._look_until(time.monotonic() + self._rng.uniform(0.5, 3.0))
            self._strike()

    def _look_until(self, end: float) -> None:
        while time.monotonic() < end:
            self.look()
            time.sleep(LOOK_SECONDS)

    def _strike(self) -> None:
        missing = self._nodes - sum(not p.stopped and p.fate in ("", "twin") for p in self.running)
        awake = self.awake
        choices = {
            self._kill: 4 if len(awake) > AWAKE_MIN else 0,
            self._stop: 4 if len(awake) > AWAKE_MIN else 0,
            self._tell_to_leave: 1 if len(awake) > AWAKE_MIN else 0,
            self._join: 3 if missing > 0 else 0,
        }
        if any(choices.values()):
            (strike,) = self._rng.choices(list(choices), list(choices.values()))
            strike()

    def _victim(self) -> Process:
        """Half of the time the one that closes the next round."""
        awake = self.awake
        log = self.log.read()
        closers = [p for p in awake if log and p.name == log[-1].next_closer]
        if closers and self._rng.random() < 0.5:
            self.counts["closers hit"] += 1
            return closers[0]
        return self._rng.choice(awake)

    def _kill(self) -> None:
        victim = self._victim()
        victim.fate = "killed"
        victim.send(signal.SIGKILL)
        self.counts["kills"] += 1
        if self._rng.random() < 0.6:
            self.counts["restarts under the same id"] += 1
            self.after(self._rng.uniform(0.0, 3.0), lambda: self.start(victim.name))

    def _stop(self) -> None:
        victim = self._victim()
        asleep = LEASE * self._rng.uniform(1.2, 2.5)
        victim.send(signal.SIGSTOP)
        self.counts["stops"] += 1
        self.after(asleep, lambda: self._wake(victim))
        if self._rng.random() < 0.4:
            self.counts["twins"] += 1
            self.after(self._rng.uniform(0.0, asleep), lambda: self.start(victim.name, fate="twin"))

    def _wake(self, victim: Process) -> None:
        if victim.running:
            victim.send(signal.SIGCONT)

    def _tell_to_leave(self) -> None:
        victim = self._victim()
        victim.fate = "told to leave"
        victim.send(signal.SIGTERM)
        self.counts["leaves"] += 1

    def _join(self) -> None:
        self.counts["joins under a new id"] += 1
        self.start(f"new{len(self.processes)}")
