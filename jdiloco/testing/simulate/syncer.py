"""A dedicated syncer on the virtual clock: `jdiloco.runtime.syncer` without a user."""

from __future__ import annotations

from jdiloco import events
from jdiloco.errors import JDilocoError
from jdiloco.protocol import member
from jdiloco.testing.simulate.closer import Asking
from jdiloco.testing.simulate.control import Control
from jdiloco.testing.simulate.scenario import Plan, Scenario
from jdiloco.testing.simulate.world import Process, Take

WAIT_SECONDS = 0.1


class Syncer:
    """Closes rounds, in its control, and trains nothing."""

    def __init__(self, process: Process, control: Control, scenario: Scenario, plan: Plan) -> None:
        self._process = process
        self._control = control
        self._scenario = scenario
        self._plan = plan

    def train(self) -> Asking:
        """Stays until it is told to stop, or until its run is over."""
        self._control.progress = ("syncing", 0, self._control.state.chain.round)
        self._control.wake()
        end = self._process.now + self._plan.steps * self._plan.step_seconds
        while self._process.now < end:
            for item in (yield Take(self._control.to_learner, WAIT_SECONDS)):
                if isinstance(item, JDilocoError):
                    raise item
            if self._plan.leave_with_run and member.is_over(self._control.state):
                return

    def finish(self) -> Asking:
        """It has nothing in flight."""
        yield from ()

    def leave(self, because: str) -> None:
        """Its last event."""
        state = self._control.state
        self._control.emit(
            events.Left(
                node=state.me.node,
                because=because,
                steps=0,
                processed=0.0,
                merged=0.0,
                dropped=0.0,
                pending=0.0,
            )
        )
