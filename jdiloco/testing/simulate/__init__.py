"""Whole runs in one process, under a virtual clock, from one number.

    history = simulate(17)
    print(history)
    assert not invariants.broken(history)

Every decision is made by the protocol code of production: `member.step`, the learner's machine and
the joining generators. What is simulated is the rest: clocks, a store that misbehaves, processes
that are killed at any point, sleep longer than their lease and come back, and somebody who writes
to the mailbox without the run's key. One seed gives one history. `Scenario` says what is to happen
in place of what a seed draws.
"""

from __future__ import annotations

import collections
import dataclasses

from jdiloco.testing.simulate.collector import Collector
from jdiloco.testing.simulate.forger import Forger
from jdiloco.testing.simulate.history import Entry, History
from jdiloco.testing.simulate.mailbox import Mailbox
from jdiloco.testing.simulate.node import Node
from jdiloco.testing.simulate.saves import Save
from jdiloco.testing.simulate.scenario import (
    Collection,
    Death,
    Faults,
    Forgery,
    Plan,
    Scenario,
    draw,
    scenario,
)
from jdiloco.testing.simulate.world import World

__all__ = [
    "Collection",
    "Death",
    "Faults",
    "Forgery",
    "History",
    "Plan",
    "Scenario",
    "draw",
    "scenario",
    "simulate",
]

STARTS_MAX = 12
"""How often one node is started again before it is given up."""


def simulate(what: int | Scenario) -> History:
    """Runs a scenario, or the one that a seed draws, to its end."""
    found = draw(what) if isinstance(what, int) else what
    return _Simulation(found).run()


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._world = World(scenario.seed)
        self._entries: list[Entry] = []
        self._mailbox = Mailbox(self._world, scenario, self._entries.append)
        self._starts: dict[str, int] = {}
        self._saves: dict[str, list[Save]] = collections.defaultdict(list)
        self._running = len(scenario.nodes)

    def run(self) -> History:
        for plan in self._scenario.nodes:
            self._world.after(plan.starts, lambda plan=plan: self._start(plan, plan.deaths))
            for when in plan.again:
                alone = dataclasses.replace(plan, deaths=(), pauses=())
                self._running += 1
                self._world.after(when, lambda plan=alone: self._start(plan, ()))
        for number, collection in enumerate(self._scenario.collections, 1):
            self._collect(number, collection)
        if self._scenario.forgery is not None:
            Forger(self._world, self._mailbox, self._scenario, self._scenario.forgery).start()
        ended = self._world.run(self._scenario.horizon, lambda: not self._running)
        return History(
            self._scenario,
            tuple(self._entries),
            self._mailbox.opened,
            ended,
            tuple(self._mailbox.sent),
        )

    def _collect(self, number: int, plan: Collection) -> None:
        write = self._entries.append
        collector = Collector(
            self._world, self._mailbox, self._scenario, plan, number=number, write=write
        )
        self._world.after(plan.at, collector.start)

    def _start(self, plan: Plan, deaths: tuple[Death, ...]) -> None:
        number = self._starts[plan.node] = self._starts.get(plan.node, 0) + 1
        death = deaths[0] if deaths else None

        def ended(node: Node, done: bool) -> None:
            self._after_end(plan, deaths, killed=node.killed, done=done)

        node = Node(
            self._world,
            self._mailbox,
            self._scenario,
            plan,
            start=number,
            death=death,
            write=self._entries.append,
            ended=ended,
            keep=self._saves[plan.node].append,
            save=self._chosen(plan) if number > 1 else None,
        )
        for since, seconds in plan.pauses:
            if since >= self._world.now:
                self._world.after(
                    since - self._world.now,
                    lambda seconds=seconds: node.fall_asleep(seconds),
                )
        node.start()

    def _chosen(self, plan: Plan) -> Save | None:
        """Which save a further start goes on from: the newest, or an older one."""
        saves = self._saves[plan.node]
        if plan.resumes is None or not saves:
            return None
        return saves[max(0, len(saves) - 1 - plan.resumes)]

    def _after_end(
        self, plan: Plan, deaths: tuple[Death, ...], *, killed: bool, done: bool
    ) -> None:
        """A killed process may be started again, and one that could not join is."""
        back = deaths[0].back_after if killed else 5.0
        if done or back is None or self._starts[plan.node] >= STARTS_MAX:
            self._running -= 1
            return
        if killed and not deaths[0].same_id:
            plan = dataclasses.replace(plan, node=f"{plan.node}b")
        rest = deaths[1:] if killed else deaths
        self._world.after(back, lambda: self._start(plan, rest))
