"""A learner on the virtual clock: `jdiloco.runtime.learner` with step numbers for arrays."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from jdiloco import events
from jdiloco.errors import JDilocoError
from jdiloco.protocol import learner as machine
from jdiloco.protocol import resuming
from jdiloco.protocol.alignment import Blend, Overwrite, kind
from jdiloco.protocol.desk import Piece
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.learner import Align, Drop, Revert, Snapshot
from jdiloco.protocol.lives import Birth
from jdiloco.protocol.records import ContributionHead
from jdiloco.testing.simulate.closer import Asking
from jdiloco.testing.simulate.control import Control, ToLearner
from jdiloco.testing.simulate.history import (
    Entry,
    Held,
    Resumed,
    Saved,
    Snapped,
    Worked,
)
from jdiloco.testing.simulate.saves import Save
from jdiloco.testing.simulate.scenario import Plan, Scenario
from jdiloco.testing.simulate.values import Delta, Row, Trained, Values, spans
from jdiloco.testing.simulate.work import Shared
from jdiloco.testing.simulate.world import Process, Sleep, Take

NEVER = 2**62
WAIT_SECONDS = 0.1


class Learner:
    """The parameters of a fragment are its anchor and the rows trained on since."""

    def __init__(
        self,
        process: Process,
        control: Control,
        scenario: Scenario,
        plan: Plan,
        *,
        run: str,
        birth: Birth,
        held: list[Values],
        rounds: list[int],
        shared: Shared | None,
        write: Callable[[Entry], None],
        keep: Callable[[Save], None],
        saved: Save | None = None,
    ) -> None:
        self._process = process
        self._control = control
        self._scenario = scenario
        self._plan = plan
        self._run = run
        self._write = write
        self._shared = shared
        control.landed = self._landed
        self._keep = keep
        self._anchors = held
        self._rounds = rounds  # Whose records made the anchors.
        self._rows: list[Row] = []  # One for each step of this life and those it goes on from.
        self._inherited = 0  # Of them, steps of those.
        self._trained = [Trained() for _ in held]
        self._snapshots = [Trained() for _ in held]
        self._finite = [True] * len(held)
        self._steps = self._due = 0
        self._heard_at = process.now
        self._asleep = 0.0
        if saved is not None:
            self._resume(birth, saved)
        else:
            chain = control.state.chain
            versions = tuple(value.version for value in held)
            self.state = machine.joined(
                birth.life,
                scenario.rules,
                read=chain.read,
                versions=versions,
                position=birth.position,
            )
        for index, round in enumerate(self._rounds):
            self._note(index, round)

    def _resume(self, birth: Birth, saved: Save) -> None:
        self.state = resuming.resumed(saved.private, birth.life, self._scenario.rules)
        rest = tuple(held.ledger.pending for held in self.state.fragments)
        sent = () if birth.overtaken else machine.outstanding(self.state)
        keys = tuple(
            (
                ContributionKey(item.round, birth.life.node, item.inherited, item.final),
                item.counters.samples,
            )
            for item in sent
        )
        self._write(Resumed(self._process.world.now, self._process.name, rest, keys))
        if birth.overtaken:
            chain = self._control.state.chain
            self.state, effects = resuming.overtaken(
                self.state, read=chain.read, versions=chain.versions, position=birth.position
            )
            self._perform(effects, {})
            return
        self._anchors, self._rounds = list(saved.anchors), list(saved.rounds)
        self._rows, self._inherited = list(saved.rows), len(saved.rows)
        self._trained, self._snapshots = list(saved.trained), list(saved.snapshots)
        self._finite = list(saved.finite)
        for delta in saved.deltas:
            self._control.contribute(delta)

    def _save(self) -> None:
        """What a user's program does between two steps."""
        self._settle()
        self._plan_next()
        outstanding = {item.round for item in machine.outstanding(self.state)}
        deltas = tuple(d for d in self._control.unread() if d.head.round in outstanding)
        private = resuming.private(
            self.state,
            self._run,
            sent=tuple(delta.head for delta in deltas),
            claimed=self._shared is not None,
            step_seconds=self._plan.step_seconds,
        )
        # As it comes back from a file.
        private = msgspec.json.decode(msgspec.json.encode(private), type=resuming.Private)
        save = Save(
            private=private,
            anchors=tuple(self._anchors),
            rounds=tuple(self._rounds),
            rows=tuple(self._rows),
            trained=tuple(self._trained),
            snapshots=tuple(self._snapshots),
            finite=tuple(self._finite),
            deltas=deltas,
        )
        self._keep(save)
        self._write(Saved(self._process.world.now, self._process.name, len(self._rows)))

    def _note(self, index: int, round: int) -> None:
        self._rounds[index] = round
        value = self._anchors[index]
        now = self._process.world.now
        self._write(Held(now, self._process.name, index, value.version, value.value, round))

    @property
    def steps(self) -> int:
        return self.state.steps + self._steps

    # Training

    def train(self) -> Asking:
        """Every step of the plan, and what comes between two steps."""
        plan, world = self._plan, self._process.world
        self._plan_next()
        self._tell("training")
        self._control.wake()
        began = self._process.now
        if self._shared is not None:
            yield from self._train_units(self._shared)
        else:
            for step in range(len(self._rows), plan.steps):
                yield from self._train_row((plan.node, self.state.began + step))
        seconds = self._process.now - began
        trained = self._rows[self._inherited :]
        account = (len(trained), seconds, self._asleep, plan.step_seconds)
        rows = spans(trained)
        self._write(Worked(world.now, self._process.name, *account, rows))

    def _train_row(self, row: Row, piece: Piece | None = None) -> Asking:
        plan, step = self._plan, len(self._rows)
        took = yield Sleep(plan.step_seconds)
        hangs = dict(plan.hangs)
        hung = (yield Sleep(hangs[step])) if step in hangs else 0.0
        self._asleep += took - plan.step_seconds + hung
        self._rows.append(row)
        self._trained = [held.more(row, plan.samples) for held in self._trained]
        if piece is not None:
            piece.trained += 1
        if step in plan.nan_steps or not all(self._finite):  # A step spreads it.
            self._finite = [False] * len(self._finite)
        yield from self._step()
        if len(self._rows) in plan.saves:
            self._save()

    def _train_units(self, shared: Shared) -> Asking:
        """What `Session.run` does with a queue; of ranks a node takes one and no further."""
        desk = shared.desk
        while True:
            yield from self._rest(
                lambda: desk.ready or desk.over(stay=True, stuck=self._is_stuck()), shared.go_on
            )
            piece = desk.next()
            if piece is None and desk.pieces:
                self._control.emit(events.Warned(node=self._plan.node, message="stuck"))
            if piece is None:
                return
            unit = piece.held.unit
            size = self._scenario.batches(desk.pool, unit)
            while piece.trained < size and not piece.recalled:
                if self._plan.quits and len(self._rows) >= self._plan.quits:
                    return
                yield from self._train_row((desk.pool.unit(unit), piece.trained), piece)
            if self._plan.work == "rank":
                return
            piece.ended = not piece.recalled

    def _rest(self, until: Callable[[], bool], go_on: Callable[[], None]) -> Asking:
        """Trains nothing for a while; commits are taken, and what others must hear is published."""
        began = self._heard_at = self._process.now
        told = False
        go_on()
        while not until():
            if not told and self._process.now - began > self._scenario.poll_seconds:
                told = True
                self._tell("resting")
                self._control.wake()
            self._settle()
            self._report()
            self._take((yield Take(self._control.to_learner, WAIT_SECONDS)))
            go_on()
        self._asleep += self._process.now - began
        self._plan_next()
        self._tell("training")

    @property
    def _patience(self) -> float:
        return self._scenario.rules.patience(self._scenario.poll_seconds)

    def _is_stuck(self) -> bool:
        """Nothing has been committed for long, though this node rests."""
        return self._process.now >= self._heard_at + self._patience

    def _report(self) -> None:
        outstanding = bool(machine.outstanding(self.state))
        if self._shared is not None and self._shared.desk.owes(outstanding=outstanding):
            self.state, effects = machine.report(self.state)
            self._perform(effects, {})

    def _landed(self, head: ContributionHead) -> None:
        if self._shared is not None:
            self._shared.desk.landed(head.work)
            self._shared.tidy()

    def _step(self) -> Asking:
        self._steps += 1
        if self._steps < self._due and not self._control.to_learner.items:
            self._tell("training")
            return
        self._take(self._control.to_learner.take())
        self._settle()
        self.state, effects = machine.trained(self.state, steps=0, samples=0, last_call=1)
        self._perform(effects, {})
        if machine.held_up(self.state):
            yield from self._wait()
        self._plan_next()
        self._tell("training")

    def _wait(self) -> Asking:
        began, told = self._process.now, ""
        while phase := machine.held_up(self.state):
            self._tell(phase)
            round = machine.waiting_for(self.state)
            if phase != told and round is not None and phase == "waiting":
                self._control.emit(events.Waiting(node=self.state.life.node, round=round))
            if phase != told and phase == "closing":
                self._control.wake()
                self._set_down()
            told = phase
            if phase == "closing":
                self._report()
            self._take((yield Take(self._control.to_learner, WAIT_SECONDS)))
        self._asleep += self._process.now - began

    def _set_down(self) -> None:
        """Units go to others; a slice stays with its node."""
        if self._shared is not None and self._plan.work == "queue":
            self._shared.desk.recall()

    def _plan_next(self) -> None:
        due = machine.steps_to_due(self.state)
        self._due = NEVER if due is None else due

    def _tell(self, phase: str) -> None:
        self._control.progress = (phase, self.steps, self.state.next_round)

    def _settle(self) -> None:
        if self._steps:
            samples = self._steps * self._plan.samples
            self.state = machine.counted(self.state, steps=self._steps, samples=samples)
            self._steps = 0

    # Messages

    def _take(self, items: list[ToLearner]) -> None:
        if items:
            self._settle()
        commits = [item for item in items if isinstance(item, tuple) and item[1] is not None]
        newest = {record.fragment: record.round for record, _ in commits}
        for item in items:
            if isinstance(item, JDilocoError):
                raise item
            if isinstance(item, bool):
                self.state = (machine.pause if item else machine.resume)(self.state)
            elif isinstance(item, int):
                self.state, _ = machine.follow(self.state, item)
            elif isinstance(item, tuple):
                record, value = item
                self._heard_at = self._process.now
                chosen = value if newest.get(record.fragment) == record.round else None
                news = machine.news_of(self.state, record)
                finite = self._finite[record.fragment]
                self.state, effects = machine.committed(
                    self.state, news, values=chosen is not None, finite=finite
                )
                self._perform(effects, {} if chosen is None else {record.fragment: chosen})

    def _perform(self, effects: tuple[machine.Effect, ...], values: dict[int, Values]) -> None:
        for effect in effects:
            match effect:
                case Snapshot():
                    self._publish(effect)
                case Align(round, fragment):
                    self._anchors[fragment] = values[fragment]
                    self._align(effect)
                    self._note(fragment, round)
                case Revert(_, fragment):
                    self._restart(fragment)
                case Drop():
                    self._drop(effect)

    def _restart(self, fragment: int) -> None:
        self._trained[fragment] = Trained()
        self._finite[fragment] = True

    def _align(self, align: Align) -> None:
        """`jdiloco.runtime.alignment` with rows for arrays."""
        index = align.fragment
        self._control.emit(
            events.Aligned(
                node=self.state.life.node,
                round=align.round,
                fragment=index,
                version=align.version,
                how=kind(align.how),
                steps=align.kept.steps,
                samples=align.kept.samples,
            )
        )
        if isinstance(align.how, Overwrite):
            self._restart(index)
            return
        since = self._snapshots[index] if align.from_snapshot else Trained()
        rest = self._trained[index].without(since)
        kept = rest.share(align.how.mixing) if isinstance(align.how, Blend) else rest
        self._trained[index] = kept

    def _drop(self, drop: Drop) -> None:
        self._control.emit(
            events.Dropped(
                node=self.state.life.node,
                round=drop.round,
                fragment=drop.fragment,
                reason=drop.reason,
                steps=drop.counters.steps,
                samples=drop.counters.samples,
            )
        )

    def _publish(self, snapshot: Snapshot) -> None:
        life, index = self.state.life, snapshot.fragment
        head = machine.head_of(
            self.state,
            snapshot,
            self._run,
            step_seconds=self._plan.step_seconds,
            work=self._shared.desk.cover() if self._shared is not None else (),
        )
        base = self._anchors[index].value
        stop = self.state.steps
        held = self._snapshots[index] = self._trained[index]
        delta = Delta(head, base, spans(held.rows), held.samples, self._finite[index])
        key = ContributionKey(snapshot.round, life.node, life.incarnation, snapshot.final)
        trained = stop - self._inherited
        self._write(Snapped(self._process.world.now, self._process.name, key, trained))
        self._control.contribute(delta)

    # Leaving

    def finish(self) -> Asking:
        """Waits for what is in flight, and gives up after a while without a commit."""
        patience = self._patience
        if self._shared is not None:
            yield from self._give_back(self._shared, patience)
        self._take(self._control.to_learner.take())
        self._settle()
        self.state, effects = machine.finish(self.state, flush=self._scenario.flush)
        self._perform(effects, {})
        self._heard_at = self._process.now
        while self._has_to_stay() and self._process.now < self._heard_at + patience:
            self._take((yield Take(self._control.to_learner, WAIT_SECONDS)))

    def _give_back(self, shared: Shared, patience: float) -> Asking:
        """Says of everything in hand how far it is, for others to go on; up to a limit."""
        shared.desk.recall()
        until = self._process.now + patience
        yield from self._rest(
            lambda: not shared.desk.pieces or self._process.now >= until, shared.tidy
        )

    def _has_to_stay(self) -> bool:
        if not machine.done(self.state):
            return True
        self._tell("finished")
        self._control.wake()
        if not self._plan.leave_with_run:
            return False
        member = self._control.state
        others = (member.verdict.expected | member.verdict.paused) - {member.me}
        if others:
            self._heard_at = self._process.now
        open_rounds = [key.round for key in member.contributions]
        newest = max(member.records_to, member.chain.read, *open_rounds)
        return bool(others) or newest > self.state.read

    def leave(self, because: str) -> None:
        """Drops what will never be published, and says where every sample went."""
        self._settle()
        self.state, effects = machine.leave(self.state)
        self._perform(effects, {})
        ledgers = [held.ledger for held in self.state.fragments]
        count = len(ledgers)
        self._control.emit(
            events.Left(
                node=self.state.life.node,
                because=because,
                steps=self.state.steps,
                processed=sum(ledger.processed for ledger in ledgers) / count,
                merged=sum(ledger.merged for ledger in ledgers) / count,
                dropped=sum(sum(ledger.dropped.values()) for ledger in ledgers) / count,
                pending=sum(ledger.pending for ledger in ledgers) / count,
            )
        )
