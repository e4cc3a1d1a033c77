"""The learner for real: it runs in the user's thread, between the user's own steps.

A step where nothing is due counts two integers and looks at a queue. Where a round is due it
dispatches one jitted subtraction per fragment, compiled when the session opens, and hands the
result to a library thread, which waits for it. What it subtracts from and aligns with is held in
`anchors`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np

from jdiloco import events
from jdiloco.protocol import learner as machine
from jdiloco.protocol import resuming, waste
from jdiloco.protocol.alignment import Overwrite, kind
from jdiloco.protocol.fragment import has_snapshot
from jdiloco.protocol.learner import Align, Drop, News, Revert, Snapshot
from jdiloco.protocol.records import ContributionHead, Covered
from jdiloco.protocol.resuming import Private
from jdiloco.protocol.waste import Waste
from jdiloco.runtime import messages, wire
from jdiloco.runtime.anchors import Anchors
from jdiloco.runtime.backends import Backend
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.inbox import NEVER, Inbox
from jdiloco.runtime.news import Commit, Followed, Halt, Paused, Resumed, ToLearner, Values
from jdiloco.runtime.node import Node
from jdiloco.runtime.parameters import Holder, sendable
from jdiloco.runtime.pods.follower import FollowerNode
from jdiloco.runtime.private import Kept
from jdiloco.runtime.standing import much_dropped
from jdiloco.runtime.times import Clocked

TELLING = {"nonfinite", "zero_samples", "zero_steps", "counters", "schema", "corrupt"}
"""Reasons for a rejection that a user should hear of at the node that caused it."""
WAIT_SECONDS = 0.1
"""How long a waiting learner sleeps before it looks at the stop flag again."""


class SharedWork:
    """What a learner has in hand of shared work: nothing, of this class."""

    def cover(self) -> tuple[Covered, ...]:
        """What a contribution made now covers."""
        return ()

    def count(self, steps: int) -> None:
        """Steps have been trained, which the next contribution may cover."""
        del steps

    def owes(self, *, outstanding: bool) -> bool:
        """Whether a contribution is wanted, given whether the round of any is open."""
        del outstanding
        return False

    def set_down(self) -> None:
        """This node trains nothing for a while: others go on with what it has not ended."""


_NO_WORK = SharedWork()


class Learner:
    """One learner's training state between steps."""

    def __init__(
        self,
        node: Node | FollowerNode,
        holder: Holder,
        clock: Clock,
        values: Values,
        *,
        backend: Backend,
        check_stop: Callable[[], None],
        saved: Kept | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        place = node.place
        self.shared: SharedWork = _NO_WORK
        self._node = node
        self._inbox = Inbox(node.to_learner) if inbox is None else inbox
        self._holder = holder
        self._clock = clock
        self._check_stop = check_stop
        self._names = place.schema.plan
        self._wire = place.algorithm.delta_dtype
        self._anchors = Anchors(
            self._names,
            holder,
            backend,
            place.algorithm.alignment,
            values,
            dtype=wire.subtracted_as(self._wire),
        )
        self._state = machine.joined(
            place.life,
            place.algorithm.rules(),
            read=place.chain.read,
            versions=place.chain.versions,
            position=place.birth.position,
        )
        self._saved = saved  # What it goes on from.
        self._lost: tuple[Drop, ...] = ()
        if saved is not None:
            self._go_on_from(saved.private)
        self._steps = 0  # Since the machine last heard of them.
        self._samples = 0
        self._due = NEVER
        self._paced_at: float | None = None
        self._step_seconds = saved.private.step_seconds if saved else None
        self._heard_at = clock.now()  # When a commit last came.
        self._clocked = Clocked(clock.now, node.busy)
        self._waste = Waste()
        self._checked = False  # The first call is looked at whatever is due: it may be a trace.
        self._halted: BaseException | None = None
        self._unchanged = 0  # Snapshots in a row that moved nothing; -1 once that was told.
        self._warned_stuck = False
        self._warned_rejected: set[str] = set()

    def _go_on_from(self, private: Private) -> None:
        place = self._node.place
        self._state = resuming.resumed(private, place.life, place.algorithm.rules())
        if place.birth.overtaken:
            self._saved = None
            self._state, self._lost = resuming.overtaken(
                self._state,
                read=place.chain.read,
                versions=place.chain.versions,
                position=place.birth.position,
            )

    @property
    def state(self) -> machine.LearnerState:
        """What the protocol knows of this learner; steps of the newest calls may be missing."""
        return self._state

    @property
    def halted(self) -> bool:
        """Whether this node must not go on; `step` has raised why."""
        return self._halted is not None

    @property
    def steps(self) -> int:
        """Steps trained in this life."""
        return self._state.steps + self._steps

    @property
    def position(self) -> int:
        """Batches of the node's own data that are behind it."""
        return self._state.position + self._steps

    @property
    def unheard_seconds(self) -> float:
        """How long nothing has been committed, or since it began to rest."""
        return self._clock.now() - self._heard_at

    # Opening and reading

    def open(self, params: Any) -> Any:
        """Gives the parameters the run's newest values, and compiles what rounds will need."""
        for index in range(len(self._names)):
            if self._saved is None:
                params = self._anchors.replace(params, index)
            else:
                self._anchors.take_up(params, index, self._saved.then)
            self._anchors.prepare(params, index)
        self._send_again()
        self._saved = None
        self._perform(params, self._lost, {})
        self._plan()
        self._tell("training")
        self._node.wake()
        return params

    def _send_again(self) -> None:
        """What was outstanding goes out once more, which is harmless where it had landed."""
        if self._saved is None:
            return
        for head in self._saved.private.sent:
            tensors = messages.decode(self._saved.sent[head.round]).tensors
            self._node.contribute(head, lambda tensors=tensors: tensors)

    def kept(self, *, claimed: bool) -> Kept:
        """What a private checkpoint has to hold of this learner, between two steps."""
        self._settle_steps()
        self._plan()
        sent = self._node.unread(item.round for item in machine.outstanding(self._state))
        private = resuming.private(
            self._state,
            self._node.place.manifest.run,
            sent=tuple(head for head, _ in sent.values()),
            claimed=claimed,
            step_seconds=self._step_seconds,
        )
        values = cast("Mapping[str, np.ndarray]", self._anchors.values)  # No pod is saved.
        return Kept(
            private, values, self._anchors.kept(), {r: data for r, (_, data) in sent.items()}
        )

    def committed(self, params: Any) -> Any:
        """`params` with the newest committed values of every fragment, as copies."""
        return self._anchors.committed(params)

    # Stepping

    def step(self, params: Any, *, samples: int, steps: int) -> Any:
        """Counts a call; publishes and aligns what is due."""
        self._clocked.enter()
        try:
            return self._step(params, samples=samples, steps=steps)
        finally:
            self._clocked.leave()

    def _step(self, params: Any, *, samples: int, steps: int) -> Any:
        due = self._steps + steps >= self._due or self._inbox.news
        if due or not self._checked:
            self._refuse(params)
        self.shared.count(steps)
        self._steps += steps
        self._samples += samples
        if not due:
            self._tell("training")
            return params
        self._state = dataclasses.replace(self._state, last_call=steps)
        self._inbox.counted = (self.steps, self._samples)
        params = self._take(params, self._inbox.arrived())
        self._settle_steps()
        self._state, effects = machine.trained(self._state, steps=0, samples=0, last_call=steps)
        params = self._perform(params, effects, {})
        if machine.held_up(self._state):
            params = self._wait(params)
        self._plan()
        self._tell("training")
        return params

    def _refuse(self, params: Any) -> None:
        """Raises what speaks against this call, before anything of it counts."""
        if self._halted is not None:
            raise self._halted
        self._holder.check(params)
        self._checked = True

    def _plan(self) -> None:
        due = machine.steps_to_due(self._state)
        self._due = min(NEVER if due is None else due, self._inbox.look)

    def _tell(self, phase: str) -> None:
        self._node.progress(phase, self.steps, self._state.next_round)

    def _settle_steps(self) -> None:
        """Counts the steps that the machine has not heard of. What comes later comes after them."""
        if not self._steps:
            return
        self._measure_pace()
        self._state = machine.counted(self._state, steps=self._steps, samples=self._samples)
        self._steps = self._samples = 0

    def _measure_pace(self) -> None:
        """The first steps compile, and say nothing of the pace."""
        now = self._clock.now()
        if self._paced_at is not None:
            pace = (now - self._paced_at) / self._steps
            old = self._step_seconds
            self._step_seconds = pace if old is None else 0.9 * old + 0.1 * pace
        self._paced_at = now
        self._inbox.pace = self._step_seconds

    # Messages

    def _await(self) -> list[ToLearner]:
        """Waits a moment for messages, and looks at the stop flag."""
        self._check_stop()
        with self._clocked.blocked():
            return self._inbox.wait(WAIT_SECONDS)

    def _take(self, params: Any, items: list[ToLearner]) -> Any:
        """Takes up messages in order; of several versions of a fragment only the newest aligns."""
        if items:
            self._settle_steps()
        commits = [item for item in items if isinstance(item, Commit) and item.values is not None]
        newest = {item.record.fragment: item for item in commits}
        for item in items:
            match item:
                case Halt(error):
                    self._halted, self._due = error, 0
                    raise error
                case Followed(round):
                    self._state, _ = machine.follow(self._state, round)
                case Paused():
                    self._state = machine.pause(self._state)
                case Resumed():
                    self._state = machine.resume(self._state)
                case Commit(record):
                    chosen = newest.get(record.fragment) is item
                    params = self._commit(params, item, item.values if chosen else None)
        return params

    def _commit(self, params: Any, item: Commit, values: Values | None) -> Any:
        self._heard_at = self._clock.now()
        news = machine.news_of(self._state, item.record)
        self._warn_rejected(news)
        finite = values is None or self._is_finite(params, news)
        self._state, effects = machine.committed(
            self._state, news, values=values is not None, finite=finite
        )
        params = self._perform(params, effects, values or {})
        self._look_back(news)
        if not has_snapshot(self._state.fragments[news.fragment]):
            self._anchors.snapshots[news.fragment] = ()
        return params

    def _look_back(self, news: News) -> None:
        """Once for each round: where the time went, and whether too much was dropped."""
        node = self._state.life.node
        self.emit(self._clocked.take(node, news.round))
        ledgers = [held.ledger for held in self._state.fragments]
        self._waste, much = waste.look(self._waste, ledgers)
        if much:
            self.emit(much_dropped(node, news.round, self._waste, ledgers))

    def _is_finite(self, params: Any, news: News) -> bool:
        """Asked only where something is to be kept: the answer waits for the user's step."""
        if not machine.may_keep(self._state, news):
            return True
        return self._anchors.is_finite(params, news.fragment)

    def _wait(self, params: Any) -> Any:
        """Training stands still. Time that passes so is no training time."""
        told = ""
        began = self._clock.now()
        while phase := machine.held_up(self._state):
            self._warn_if_nobody_closes(since=max(began, self._heard_at))
            self._tell(phase)
            round = machine.waiting_for(self._state)
            if phase != told and round is not None and phase == "waiting":
                self.emit(events.Waiting(node=self._state.life.node, round=round))
            if phase != told and phase == "closing":
                self._node.wake()  # Nobody is to wait for a learner that has stopped.
                self.shared.set_down()  # Nor for what it has in hand.
            told = phase
            if phase == "closing":
                params = self._report(params)
            params = self._take(params, self._await())
        self._paced_at = self._clock.now()
        return params

    def rest(
        self,
        params: Any,
        *,
        until: Callable[[], bool],
        go_on: Callable[[], None],
        quiet: float,
    ) -> Any:
        """Trains nothing until something is so; commits are taken up all the same.

        After `quiet` seconds it says that it rests, and rounds do not wait for it. `go_on` is
        called again and again.
        """
        if self._halted is not None:
            raise self._halted
        began = self._heard_at = self._clock.now()
        told = False
        go_on()
        while not until():
            if not told and self._clock.now() - began >= quiet:
                told = True
                self.emit(events.Resting(node=self._state.life.node))
                self._tell("resting")
                self._node.wake()
            params = self._report(params)
            params = self._take(params, self._await())
            go_on()
        self._paced_at = self._clock.now()
        self._plan()
        self._tell("training")
        return params

    def _report(self, params: Any) -> Any:
        """Publishes, though no round is due, what others wait to hear of."""
        if not self.shared.owes(outstanding=bool(machine.outstanding(self._state))):
            return params
        self._settle_steps()
        self._state, effects = machine.report(self._state)
        return self._perform(params, effects, {})

    # Effects

    def _perform(self, params: Any, effects: tuple[machine.Effect, ...], values: Values) -> Any:
        for effect in effects:
            match effect:
                case Snapshot():
                    self._publish(params, effect)
                case Align():
                    params = self._align(params, effect, values)
                case Revert():
                    params = self._anchors.replace(params, effect.fragment)
                case Drop():
                    self.emit(_dropped(self._state.life.node, effect))
        return params

    def _publish(self, params: Any, snapshot: Snapshot) -> None:
        names = self._names[snapshot.fragment]
        delta = () if snapshot.empty else self._anchors.delta(params, snapshot.fragment)

        def fetch() -> Values:
            host = dict(zip(names, sendable(delta), strict=bool(delta)))
            if delta and not any(array.any() for array in host.values()):
                self._warn_unchanged(snapshot)
            elif self._unchanged > 0:
                self._unchanged = 0
            return wire.outgoing(host, self._wire)

        self._node.contribute(self._head(snapshot), fetch)

    def _warn_rejected(self, news: News) -> None:
        """Once for each reason that says something of this node's own training."""
        if news.rejected not in TELLING - self._warned_rejected:
            return
        self._warned_rejected.add(news.rejected)
        self._warn(
            f"Round {news.round} rejected this node's contribution as {news.rejected}. As "
            "long as that goes on nothing it trains is merged: look at its loss and at "
            "what it passes as `samples` and `steps`."
        )

    def _warn_if_nobody_closes(self, *, since: float) -> None:
        """Once, after a time in which a closer that died would have been replaced."""
        state = self._node.state
        if state is None:
            return  # The process that speaks for the pod will say so.
        patience = state.rules.patience(state.poll_seconds)
        if self._warned_stuck or self._clock.now() < since + patience:
            return
        self._warned_stuck = True
        alive = (life.node for life in state.verdict.live if life != self._state.life)
        others = ", ".join(sorted(alive)) or "nobody"
        closer = state.closing.closer
        if closer in state.verdict.live:
            why = (
                f"{closer.node}, which is to close the round, is alive: it compiles, its line is "
                "slow, or it waits for contributions (`quorum_size`, `round_seconds`)."
            )
        else:
            why = (
                f"A closer that died would have been replaced by now. Alive beside this node: "
                f"{others}. If none of them closes rounds, start a node whose role is not "
                "'learner'; else the rounds need a larger `lease_seconds`."
            )
        self._warn(f"Training has waited for a commit for {patience:.0f} s. {why}")

    def _warn_unchanged(self, snapshot: Snapshot) -> None:
        """Once no fragment of a whole cycle has moved: a scalar alone may well have converged."""
        if self._unchanged < 0:
            return
        self._unchanged += 1
        if self._unchanged < len(self._names):
            return
        self._unchanged = -1
        self._warn(
            f"No parameter of any fragment changed in the last "
            f"{snapshot.counters.steps} steps. Pass what the step returned to "
            "`session.step`; a program that trains a split NNX state opens the session "
            "with that state and passes it."
        )

    def _head(self, snapshot: Snapshot) -> ContributionHead:
        return machine.head_of(
            self._state,
            snapshot,
            self._node.place.manifest.run,
            step_seconds=self._step_seconds,
            work=self.shared.cover(),
            spent=self._node.spent(),
        )

    def _align(self, params: Any, align: Align, values: Values) -> Any:
        anchors, how = self._anchors, align.how
        anchors.values.update(values)
        if isinstance(how, Overwrite):
            params = anchors.replace(params, align.fragment)
        else:
            params = anchors.mix(params, align.fragment, how, from_snapshot=align.from_snapshot)
        self.emit(
            events.Aligned(
                node=self._state.life.node,
                round=align.round,
                fragment=align.fragment,
                version=align.version,
                how=kind(align.how),
                steps=align.kept.steps,
                samples=align.kept.samples,
            )
        )
        return params

    def emit(self, event: events.Event) -> None:
        """Hands an event to the callbacks."""
        self._node.emit(event)

    def _warn(self, message: str) -> None:
        self.emit(events.Warned(node=self._state.life.node, message=message))

    # Leaving

    def finish(self, params: Any, *, flush: bool, patience: float, with_run: bool) -> Any:
        """No more steps come: publishes the rest if asked to, and waits for what is in flight.

        Gives up once nothing has been committed for `patience` seconds.
        """
        if self._halted is not None:
            return params  # `step` has raised why, and nothing will come any more.
        params = self._take(params, self._inbox.arrived())
        self._settle_steps()
        if flush:
            self._holder.check(params)
        self._state, effects = machine.finish(self._state, flush=flush)
        params = self._perform(params, effects, {})
        self._heard_at = self._clock.now()

        def has_to_stay() -> bool:
            in_time = self._clock.now() < self._heard_at + patience
            return self._has_to_stay(with_run) and in_time

        while self._inbox.agreed(has_to_stay):
            params = self._take(params, self._await())
        return params

    def _has_to_stay(self, with_run: bool) -> bool:
        """Whether something is to come that this node waits for.

        It says `finished` only when all of its own is committed: until then it may publish, and
        others that leave with the run would go without what it brings.
        """
        if not machine.done(self._state):
            return True
        self._tell("finished")
        self._node.wake()
        if not with_run:
            return False
        member = self._node.state
        assert member is not None, "asked of the process that speaks"
        others = (member.verdict.expected | member.verdict.paused) - {member.me}
        if others:
            self._heard_at = self._clock.now()  # They train; that is no reason to give up.
        open_rounds = [key.round for key in member.contributions]
        newest = max(member.records_to, member.chain.read, *open_rounds)
        return bool(others) or newest > self._state.read

    def leave(self, because: str) -> events.Left:
        """Drops what will never be published, and says where every sample went."""
        self._settle_steps()
        self._state, effects = machine.leave(self._state)
        self._perform(None, effects, {})
        ledgers = [held.ledger for held in self._state.fragments]
        mean = functools.partial(_mean, len(ledgers))
        return events.Left(
            node=self._state.life.node,
            because=because,
            steps=self._state.steps,
            processed=mean(ledger.processed for ledger in ledgers),
            merged=mean(ledger.merged for ledger in ledgers),
            dropped=mean(sum(ledger.dropped.values()) for ledger in ledgers),
            pending=mean(ledger.pending for ledger in ledgers),
        )


def _mean(count: int, values: Iterable[int]) -> float:
    return sum(values) / count


def _dropped(node: str, drop: Drop) -> events.Dropped:
    return events.Dropped(
        node=node,
        round=drop.round,
        fragment=drop.fragment,
        reason=drop.reason,
        steps=drop.counters.steps,
        samples=drop.counters.samples,
    )
