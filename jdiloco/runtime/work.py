"""Shared work for real: queues, ranks and barriers, on a library thread.

What is taken, marked and owed is decided by `protocol.work` and `protocol.desk`; here is a thread
that performs it, and what a `Session` does with a queue between its training steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jdiloco import events
from jdiloco.errors import (
    BarrierTimeout,
    FormatError,
    JDilocoError,
    StoreUnavailable,
    UsageError,
)
from jdiloco.protocol import joining
from jdiloco.protocol import work as protocol
from jdiloco.protocol.desk import Desk, Piece
from jdiloco.protocol.joining import Steps, Waiting
from jdiloco.protocol.keys import Pool
from jdiloco.protocol.records import ContributionHead, Covered
from jdiloco.protocol.work import Claims, Held, Tally
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.joining import Performer
from jdiloco.runtime.learner import Learner, SharedWork
from jdiloco.runtime.node import Node
from jdiloco.runtime.queues import Barrier
from jdiloco.runtime.workers import Worker

T = TypeVar("T")

AGAIN_SECONDS = 2.0
"""How long a store that does not answer is left alone."""


class _Closed(BaseException):
    """Ends an errand; the session does not wait for it any more."""


class _Performer(Performer):
    """Performs joining's requests and asks the member of this node."""

    def __init__(self, node: Node, clock: Clock, *, check_stop: Callable[[], None]) -> None:
        place = node.place
        super().__init__(place.store, clock, scratch=place.scratch, check_stop=check_stop)
        self._node = node

    def _perform(self, request: joining.Request) -> Any:
        if isinstance(request, joining.Look):
            self._node.watch(request.lives)
            return protocol.view(self._node.state, request.lives)
        return super()._perform(request)


class Errands:
    """A thread that runs generators of requests, each for as long as it takes."""

    def __init__(self, node: Node, clock: Clock) -> None:
        self._clock = clock
        self._node = node
        self._closed = False
        self._performer = _Performer(node, clock, check_stop=self._check_closed)
        self._worker = Worker("work", node.halt)

    def submit(
        self, make: Callable[[], Steps[T]], done: Callable[[T | JDilocoError], None]
    ) -> None:
        """Runs what `make` makes, again until the store has answered; `done` gets the result."""

        def job() -> None:
            with contextlib.suppress(_Closed):
                done(self._patiently(make))
                self._node.wake_learner()

        self._worker.submit(job)

    def _patiently(self, make: Callable[[], Steps[T]]) -> T | JDilocoError:
        while True:
            self._check_closed()
            try:
                return self._performer.run(make())
            except StoreUnavailable:
                self._performer.pause(AGAIN_SECONDS)
            except JDilocoError as error:
                return error

    def _check_closed(self) -> None:
        if self._closed:
            raise _Closed

    def close(self, seconds: float) -> None:
        """Ends the thread, within a moment unless a request hangs."""
        self._closed = True
        self._worker.drop()
        self._worker.stop()
        self._worker.join(seconds)


class Counter:
    """A desk that two threads use, and the claims behind it."""

    def __init__(self, pool: Pool, claims: Claims, errands: Errands, clock: Clock, poll: float):
        self.desk = Desk(pool)
        self._claims = claims
        self._errands = errands
        self._clock = clock
        self._poll_seconds = poll
        self._lock = threading.Lock()
        self._marking = False
        self._ask_at = 0.0
        self._failure: JDilocoError | None = None

    def go_on(self) -> None:
        """Asks for a unit unless one is there or on its way, and says what may be said."""
        now = self._clock.now()
        with self._lock:
            ask = now >= self._ask_at and self.desk.ask()
        if ask:
            self._ask_at = now + self._poll_seconds
            self._errands.submit(self._claims.take, self._answered)
        self.tidy()

    def _answered(self, found: Held | Tally | JDilocoError) -> None:
        with self._lock:
            if isinstance(found, JDilocoError):
                self._failure = found
            else:
                self.desk.answered(found)

    def tidy(self) -> None:
        """Says what may be said."""
        with self._lock:
            piece = None if self._marking else self.desk.due()
            if piece is None:
                return
            self._marking = True
        say = self._claims.complete if piece.mark == "done" else self._claims.give_back
        self._errands.submit(lambda: say(piece.held, piece.trained), lambda _: self._marked(piece))

    def _marked(self, piece: Piece) -> None:
        with self._lock:
            self.desk.marked(piece)
            self._marking = False
        self.tidy()

    def ready(self, *, stay: bool, stuck: bool) -> bool:
        """A unit lies ready, or none will come."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            return self.desk.ready or self.desk.over(stay=stay, stuck=stuck)

    def next(self) -> Piece | None:
        with self._lock:
            return self.desk.next()

    def end(self, piece: Piece) -> None:
        """There are no further batches of it."""
        with self._lock:
            piece.ended = True
        self.tidy()

    def recall(self) -> None:
        with self._lock:
            self.desk.recall()

    def cover(self) -> tuple[Covered, ...]:
        with self._lock:
            return self.desk.cover()

    def landed(self, work: tuple[Covered, ...]) -> None:
        with self._lock:
            self.desk.landed(work)
        self.tidy()

    def owes(self, *, outstanding: bool) -> bool:
        with self._lock:
            return self.desk.owes(outstanding=outstanding)

    @property
    def empty(self) -> bool:
        with self._lock:
            return not self.desk.pieces


class Work(SharedWork):
    """What a session does of shared work. All of it is called from the user's thread."""

    def __init__(
        self,
        node: Node,
        learner: Learner,
        clock: Clock,
        waiting: Waiting,
        *,
        patience: float,
        nonce: str,
    ) -> None:
        self._node = node
        self._learner = learner
        self._clock = clock
        self._waiting = waiting
        self._patience = patience
        self._nonce = nonce
        self._errands: Errands | None = None
        self._counters: dict[str, Counter] = {}
        self._pools: dict[str, Pool] = {}
        self._slice: tuple[Counter, Piece] | None = None
        self._batch: Piece | None = None  # What the step under way has trained a batch of.
        self._barriers: dict[str, int] = {}  # Those it came to, and how many they wanted.
        learner.shared = self
        node.landed = self.landed

    # What contributions say

    @property
    def has_claimed(self) -> bool:
        """Whether some of what this node trains may be claimed work."""
        return bool(self._counters)

    def cover(self) -> tuple[Covered, ...]:
        """What a contribution made now covers."""
        return tuple(item for counter in self._counters.values() for item in counter.cover())

    def landed(self, head: ContributionHead) -> None:
        """A contribution lies in the mailbox; called from a library thread."""
        for counter in list(self._counters.values()):
            counter.landed(head.work)

    def owes(self, *, outstanding: bool) -> bool:
        """Whether others wait to hear of what has been trained here."""
        return any(c.owes(outstanding=outstanding) for c in self._counters.values())

    def set_down(self) -> None:
        """Gives units back, as soon as they may be; a slice stays with its node."""
        for counter in self._counters.values():
            if self._slice is None or counter is not self._slice[0]:
                counter.recall()

    # Queues

    def counter(self, pool: Pool) -> Counter:
        """Where this node takes units of a pool. Raises UsageError for two pools of one name."""
        if (known := self._pools.setdefault(pool.name, pool)) != pool:
            raise UsageError(
                f"This session has worked on a `SharedQueue` {pool.name!r} of {known.count} units; "
                f"this one has {pool.count}. Give it a name of its own: `name=...`."
            )
        if pool.name not in self._counters:
            place = self._node.place
            claims = Claims(
                self._node.state.keys,
                pool,
                place.life,
                self._waiting,
                in_flight=place.algorithm.rules().in_flight,
                nonce=self._nonce,
            )
            self._counters[pool.name] = Counter(
                pool, claims, self._thread(), self._clock, self._waiting.poll_seconds
            )
        return self._counters[pool.name]

    def _thread(self) -> Errands:
        if self._errands is None:
            self._errands = Errands(self._node, self._clock)
        return self._errands

    def next(self, params: Any, counter: Counter, *, stay: bool) -> tuple[Any, Piece | None]:
        """The next unit to train, None when none is left; waits for one meanwhile."""

        def ready() -> bool:
            stuck = self._learner.unheard_seconds >= self._patience
            return counter.ready(stay=stay, stuck=stuck)

        params = self._rest(params, ready, counter.go_on)
        piece = counter.next()
        if piece is not None:
            self._emit_taken(counter, piece)
        elif not counter.empty:
            self._warn_stuck(counter)
        return params, piece

    def _emit_taken(self, counter: Counter, piece: Piece) -> None:
        unit = counter.desk.pool.unit(piece.held.unit)
        node = self._node.place.life.node
        self._node.emit(events.UnitTaken(node=node, unit=unit, begin=piece.held.begin))

    def _warn_stuck(self, counter: Counter) -> None:
        message = (
            f"Nothing has been committed for {self._patience:.0f} s: nobody seems to close rounds. "
            f"What this node trained last of {counter.desk.pool.name!r} could not be published, "
            "and will be trained again by whoever goes on with it."
        )
        self._node.warn(message)

    def _rest(self, params: Any, until: Callable[[], bool], go_on: Callable[[], None]) -> Any:
        return self._learner.rest(
            params,
            until=until,
            go_on=go_on,
            quiet=self._waiting.poll_seconds,
        )

    # Ranks

    def take_rank(self, params: Any, count: int) -> tuple[Any, int]:
        """Waits for one of `count` fixed slices; from then on every step counts towards it."""
        counter = self.counter(Pool.ranks(count))
        params, piece = self.next(params, counter, stay=True)
        if piece is None:
            raise FormatError(f"No slice of `ranks={count}` is left: claims on them are damaged.")
        self._slice = counter, piece
        return params, piece.held.unit

    @property
    def position(self) -> int:
        """Batches of the slice that are behind it."""
        return self._slice[1].trained if self._slice is not None else 0

    @contextlib.contextmanager
    def batch_of(self, piece: Piece) -> Iterator[None]:
        """The step in this block is one on a batch of `piece`."""
        self._batch = piece
        try:
            yield
        finally:
            self._batch = None

    def count(self, steps: int) -> None:
        """Steps have been trained, on the slice if it has one; none that was refused."""
        if self._batch is not None:
            self._batch.train()
        if self._slice is not None:
            self._slice[1].trained += steps

    # Barriers

    def wait_at(self, params: Any, barrier: Barrier) -> Any:
        """Comes to a barrier and waits for the others."""
        if (before := self._barriers.setdefault(barrier.name, barrier.nodes)) != barrier.nodes:
            raise UsageError(
                f"Barrier {barrier.name!r} wants {barrier.nodes} nodes, and this node came to it "
                f"when it wanted {before}. A name stands for one barrier: give the other its own."
            )
        place = self._node.place
        keys, thread = self._node.state.keys, self._thread()
        came: list[frozenset[str] | JDilocoError] = []
        ask = [self._clock.now()]
        end = None if barrier.timeout is None else ask[0] + barrier.timeout

        def go_on() -> None:
            if ask and self._clock.now() >= ask[0]:
                ask.clear()
                thread.submit(
                    lambda: protocol.come(keys, barrier.name, place.life, self._waiting), heard
                )

        def heard(found: frozenset[str] | JDilocoError) -> None:
            came[:] = [found]
            ask[:] = [self._clock.now() + self._waiting.poll_seconds]

        def until() -> bool:
            found = came[0] if came else frozenset()
            if isinstance(found, JDilocoError):
                raise found
            if len(found) < barrier.nodes and end is not None and self._clock.now() >= end:
                raise BarrierTimeout(
                    f"{len(found)} of {barrier.nodes} nodes came to barrier {barrier.name!r} "
                    f"within {barrier.timeout} s: {', '.join(sorted(found)) or 'none'}."
                )
            return len(found) >= barrier.nodes

        return self._rest(params, until, go_on)

    # Leaving

    def give_back(self, params: Any) -> Any:
        """Says of everything in hand how far it is, for others to go on; up to a limit.

        A node that must not go on says nothing: whoever takes its place finds out.
        """
        if self._learner.halted or not self._counters:
            return params
        for counter in self._counters.values():
            counter.recall()
        end = self._clock.now() + self._patience

        def tidy() -> None:
            for counter in self._counters.values():
                counter.tidy()

        def said() -> bool:
            empty = all(counter.empty for counter in self._counters.values())
            return empty or self._clock.now() >= end

        return self._rest(params, said, tidy)

    def close(self, seconds: float) -> None:
        """Ends the thread. What has not been said others find out: this life has ended."""
        if self._errands is not None:
            self._errands.close(seconds)
