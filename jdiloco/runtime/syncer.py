"""A node that closes rounds and trains nothing.

Its closing is the member's, in the library's threads, like everybody's; what is here is the wait in
the user's thread until it is told to stop.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from jdiloco import events
from jdiloco.protocol import member
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.node import Halt, Node

WAIT_SECONDS = 0.1
"""How long it sleeps before it looks again at the stop flag and at the run."""


class Syncer:
    """What a dedicated syncer has in place of a `Learner`."""

    def __init__(self, node: Node, clock: Clock, *, check_stop: Callable[[], None]) -> None:
        self._node = node
        self._clock = clock
        self._check_stop = check_stop

    def open(self) -> None:
        """Says what it is: from now on whoever commits names it as the next closer."""
        self._node.progress("syncing", 0, self._node.state.chain.round)
        self._node.wake()

    def run(self, *, with_run: bool, patience: float) -> None:
        """Waits for a signal or, `with_run`, until every learner has gone.

        Contributions that are open then are closed first, as long as that takes less than
        `patience` seconds.
        """
        deserted: float | None = None
        while not (with_run and member.is_over(self._node.state)):
            self._check_stop()
            self._hear()
            state = self._node.state
            if not state.met_learner or state.verdict.learners:
                deserted = None
            elif deserted is None:
                deserted = self._clock.now()
            elif with_run and self._clock.now() >= deserted + patience:
                return

    def _hear(self) -> None:
        """Waits a moment; the only message there is says that this node must not go on."""
        try:
            message = self._node.to_learner.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            return
        if isinstance(message, Halt):
            raise message.error

    def leave(self, because: str) -> events.Left:
        """Its last event: it has processed nothing."""
        return events.Left(
            node=self._node.place.life.node,
            because=because,
            steps=0,
            processed=0.0,
            merged=0.0,
            dropped=0.0,
            pending=0.0,
        )
