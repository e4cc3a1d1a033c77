"""A virtual clock, and processes that live on it: tasks that wait, are paused, and die.

Time is counted in ticks of 2^-20 seconds. Sums of such times are exact in floating point for any
clock within years of zero, so a node whose clock is hours off computes the very same differences.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Generator
from typing import Any

from jdiloco.errors import JDilocoError

TICKS = 2**20
"""Ticks in a second."""

Task = Generator["Operation", Any, Any]
Answer = Callable[[], Any]  # Looked at when the process is awake; raises what the task is to get.
Resume = Callable[[Answer], None]


class World:
    """What is to happen, in order; the only source of chance."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ticks = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def now(self) -> float:
        """Seconds since the simulation began."""
        return self.ticks / TICKS

    def at(self, ticks: int, call: Callable[[], None]) -> None:
        """Calls at a time; of several at one time in the order in which they were asked for."""
        self._count += 1
        heapq.heappush(self._queue, (max(ticks, self.ticks), self._count, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls after some seconds, rounded up to ticks."""
        self.at(self.ticks + math.ceil(seconds * TICKS), call)

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Lets things happen; returns whether `done` came true before the time was over."""
        limit = math.ceil(until * TICKS)
        while self._queue and not done():
            ticks, _, call = heapq.heappop(self._queue)
            if ticks > limit:
                return False
            self.ticks = ticks
            call()
        return done()


class Operation:
    """What a task can wait for."""

    def begin(self, process: Process, resume: Resume) -> None:
        """Starts it; `resume` is called once."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class Sleep(Operation):
    """Answers the seconds that passed on the process's clock."""

    seconds: float

    def begin(self, process: Process, resume: Resume) -> None:
        began = process.now
        process.world.after(self.seconds, lambda: resume(lambda: process.now - began))


class Slot:
    """A queue between the threads of a process."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._waiter: Callable[[], None] | None = None

    def put(self, item: Any) -> None:
        self.items.append(item)
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            waiter()

    def take(self) -> list[Any]:
        items, self.items = self.items, []
        return items

    def wait(self, waiter: Callable[[], None]) -> None:
        self._waiter = waiter


@dataclasses.dataclass(frozen=True, slots=True)
class Take(Operation):
    """Answers what lies in a slot, as soon as something does; nothing after `seconds`."""

    slot: Slot
    seconds: float

    def begin(self, process: Process, resume: Resume) -> None:
        unanswered = [True]

        def once() -> None:
            if unanswered:
                unanswered.clear()
                resume(self.slot.take)

        if self.slot.items:
            process.world.after(0.0, once)
            return
        self.slot.wait(lambda: process.world.after(0.0, once))
        process.world.after(self.seconds, once)


class Process:
    """Runs tasks until it dies. While it is paused nothing in it moves, and its clock goes on."""

    def __init__(self, world: World, name: str, clock: float) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self._clock_ticks = round(clock * TICKS)
        self._paused_until = 0

    @property
    def now(self) -> float:
        """Its own clock."""
        return (self.world.ticks + self._clock_ticks) / TICKS

    def ticks_at(self, now: float) -> int:
        """The world's time at which its own clock shows `now`, rounded up."""
        return math.ceil(now * TICKS) - self._clock_ticks

    def pause(self, seconds: float) -> None:
        self._paused_until = self.world.ticks + math.ceil(seconds * TICKS)

    def die(self) -> None:
        """Nothing in it moves any more; requests it has sent are on their way all the same."""
        self.alive = False

    def lives_to_send(self, verb: str, keys: tuple[str, ...]) -> int:
        """How many of a request's keys it sends; it has died over those that are left."""
        del verb
        return len(keys)

    def when_awake(self, call: Callable[[], None]) -> None:
        """Calls now, or once it wakes up, or never if it is dead by then."""
        if not self.alive:
            return
        if self.world.ticks < self._paused_until:
            self.world.at(self._paused_until, lambda: self.when_awake(call))
            return
        call()

    def run(self, task: Task, done: Callable[[Any], None] = lambda value: None) -> None:
        """Runs a task to its next wait, and so on; `done` gets what it returns."""
        self._resume(task, done, lambda: None)

    def _resume(self, task: Task, done: Callable[[Any], None], answer: Answer) -> None:
        def go() -> None:
            try:
                operation = _send(task, answer)
            except StopIteration as end:
                done(end.value)
                return
            if self.alive:
                operation.begin(self, lambda later: self._resume(task, done, later))

        self.when_awake(go)


def _send(task: Task, answer: Answer) -> Operation:
    try:
        value = answer()
    except JDilocoError as error:
        return task.throw(error)
    return task.send(value)


class Worker:
    """A library thread: runs tasks one after another."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._tasks: collections.deque[Task] = collections.deque()
        self._busy = False

    @property
    def idle(self) -> bool:
        return not self._busy

    def submit(self, task: Task) -> None:
        self._tasks.append(task)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._tasks)
        if self._tasks:
            self._process.run(self._tasks.popleft(), lambda value: self._next())
