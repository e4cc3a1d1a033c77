"""A member on the virtual clock: `jdiloco.runtime.node` with tasks in place of threads."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable
from typing import Any

from jdiloco.errors import FormatError, StoreUnavailable
from jdiloco.protocol import effects as fx
from jdiloco.protocol import member
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.joining import Look
from jdiloco.protocol.keys import MANIFEST, BeatKey, ClaimKey
from jdiloco.protocol.lives import Birth
from jdiloco.protocol.records import Build, ContributionHead, Manifest, RoundRecord, unseal
from jdiloco.protocol.rules import trains
from jdiloco.protocol.sweep import Shelf
from jdiloco.protocol.work import View, view
from jdiloco.runtime.contributions import Rejection
from jdiloco.testing.simulate.closer import (
    Asking,
    Closer,
    Replaced,
    create_owned,
    read_value,
    write_checkpoint,
)
from jdiloco.testing.simulate.history import Entry, Happened, Took
from jdiloco.testing.simulate.mailbox import Mailbox
from jdiloco.testing.simulate.scenario import Plan, Scenario
from jdiloco.testing.simulate.values import Delta, Values, seal
from jdiloco.testing.simulate.world import Process, Slot, Take, Worker

BUILD = Build("simulated", "simulated", "0", "simulated", 1)


class Control:
    """One living member."""

    def __init__(
        self,
        process: Process,
        mailbox: Mailbox,
        scenario: Scenario,
        plan: Plan,
        *,
        birth: Birth,
        chain: Chain,
        old: Shelf,
        write: Callable[[Entry], None],
    ) -> None:
        self.to_learner = Slot()  # See ToLearner.
        self.landed: Callable[[ContributionHead], None] = lambda head: None
        self.progress: tuple[str, int, int] = ("joining", 0, chain.round)
        self._told = self.progress
        self._process = process
        self._mailbox = mailbox
        self._write = write
        self._contributions: dict[int, Delta] = {}
        self._ready: dict[int, Values] = {}
        self._inbox: collections.deque[Callable[[float], fx.Event]] = collections.deque()
        self._stepping = False
        self._stopped = False
        self._wake_ticks = -1
        self._left = Slot()
        self.state = member.start(
            birth.life,
            scenario.rules,
            chain,
            poll_seconds=scenario.poll_seconds,
            role=plan.role,
            build=BUILD,
            now=process.now,
            beat=birth.beat,
            shelf=old,
        )
        self._closer = Closer(
            mailbox, self.state.keys, process, plan, updates=scenario.rules.updates
        )
        self._small, self._upload, self._close, self._deliver, self._save = (
            Worker(process) for _ in range(5)
        )
        self.wake()

    # What the learner calls

    def wake(self) -> None:
        self._answer(fx.Tick)

    def unread(self) -> tuple[Delta, ...]:
        """This node's contributions to rounds whose record it has not read."""
        return tuple(self._contributions.values())

    def contribute(self, delta: Delta) -> None:
        self._contributions[delta.head.round] = delta
        self._answer(lambda now: fx.Contributed(now, delta.head))

    def look(self, request: Look) -> View:
        """What the member says of some lives."""
        self._answer(lambda now: fx.Watched(now, request.lives))
        return view(self.state, request.lives)

    def emit(self, event: Any) -> None:
        self._write(Happened(self._process.world.now, self._process.name, event))

    def leave(self, seconds: float) -> Asking:
        """Says so with a last beat, as far as that goes in `seconds`."""
        self._stopped = True
        state = self.state
        me, (_, step, next_round) = state.me, self.progress
        last = BeatKey(me.node, me.incarnation, state.beat + 1, "left", step, next_round)

        def say() -> Asking:
            yield from self._try_create(state.keys.beat(last))
            self._left.put(None)

        self._small.submit(say())
        yield Take(self._left, seconds)

    # The control thread

    def _answer(self, event: Callable[[float], fx.Event]) -> None:
        self._inbox.append(event)
        if not self._stepping:
            self._drain()

    def _drain(self) -> None:
        self._stepping = True
        while self._inbox:
            make = self._inbox.popleft()
            if self._stopped:
                continue
            if self.progress != self._told:
                self._told = self.progress
                self._step(fx.Progress(self._process.now, *self._told))
            self._step(make(self._process.now))
        self._stepping = False
        self._sleep()

    def _step(self, event: fx.Event) -> None:
        self.state, effects = member.step(self.state, event)
        for effect in effects:
            _PERFORM[type(effect)](self, effect)

    def _sleep(self) -> None:
        """Sees to it that a Tick comes when the member wants one."""
        wake = member.wake_at(self.state)
        world = self._process.world
        if self._stopped or math.isinf(wake):
            return
        ticks = max(self._process.ticks_at(wake), world.ticks + 1024)
        if world.ticks < self._wake_ticks <= ticks:
            return
        self._wake_ticks = ticks

        def tick() -> None:
            if self._wake_ticks == ticks:
                self._wake_ticks = -1
                self.wake()

        world.at(ticks, lambda: self._process.when_awake(tick))

    # Small requests

    def _poll(self, effect: fx.Poll) -> None:
        def job() -> Asking:
            try:
                keys = tuple((yield self._mailbox.list(self.state.keys.log, effect.after)))
            except StoreUnavailable:
                keys = None
            self._answer(lambda now: fx.Listed(now, keys))

        self._small.submit(job())

    def _beat(self, effect: fx.Beat) -> None:
        def job() -> Asking:
            ok = yield from self._try_create(effect.key)
            self._answer(lambda now: fx.Beaten(now, ok))

        self._small.submit(job())

    def _try_create(self, key: str) -> Asking:
        try:
            yield self._mailbox.create(key, b"")
        except StoreUnavailable:
            return False
        return True

    def _try_get(self, key: str) -> Asking:
        try:
            return True, (yield self._mailbox.get(key))
        except StoreUnavailable:
            return False, None

    def _read_record(self, effect: fx.ReadRecord) -> None:
        def job() -> Asking:
            ok, data = yield from self._try_get(self.state.keys.record(effect.round))
            self._answer(lambda now: fx.RecordRead(now, effect.round, data, ok))

        self._small.submit(job())

    def _write_record(self, effect: fx.WriteRecord) -> None:
        def job() -> Asking:
            key = self.state.keys.record(effect.round)
            try:
                created = yield self._mailbox.create(key, effect.data)
            except StoreUnavailable:
                created = None
            self._answer(lambda now: fx.RecordSent(now, effect.round, created))

        self._small.submit(job())

    def _make_claim(self, effect: fx.MakeClaim) -> None:
        key = self.state.keys.claim(ClaimKey(effect.round, effect.number))

        def job() -> Asking:
            data = None
            try:
                created = yield self._mailbox.create(key, effect.data)
                data = effect.data if created else (yield self._mailbox.get(key))
            except StoreUnavailable:
                pass
            self._answer(lambda now: fx.ClaimRead(now, effect.round, effect.number, data))

        self._small.submit(job())

    def _read_claim(self, effect: fx.ReadClaim) -> None:
        def job() -> Asking:
            key = self.state.keys.claim(ClaimKey(effect.round, effect.number))
            _, data = yield from self._try_get(key)
            self._answer(lambda now: fx.ClaimRead(now, effect.round, effect.number, data))

        self._small.submit(job())

    def _read_place(self, effect: fx.ReadPlace) -> None:
        del effect
        me = self.state.me
        successor = self.state.keys.incarnation(me.node, me.incarnation + 1)

        def job() -> Asking:
            ok, data = yield from self._try_get(MANIFEST)
            asked, newer = yield from self._try_get(successor)
            run = unseal(MANIFEST, data, Manifest).run if data else ""
            found = run if ok and asked else None
            self._answer(lambda now: fx.PlaceRead(now, found, newer is not None))

        self._small.submit(job())

    # Contributions of this node

    def _upload_one(self, effect: fx.Upload) -> None:
        key = self.state.keys.contribution(effect.key)
        delta = self._contributions[effect.key.round]

        def job() -> Asking:
            try:
                yield from create_owned(self._mailbox, key, seal(key, delta))
                self.landed(delta.head)
                ok = True
            except (StoreUnavailable, FormatError):
                ok = False
            self._answer(lambda now: fx.Uploaded(now, effect.key, ok))

        self._upload.submit(job())

    def _forget(self, effect: fx.Forget) -> None:
        self._contributions.pop(effect.round, None)

    # Closing

    def _examine(self, effect: fx.Examine) -> None:
        def job() -> Asking:
            try:
                found = yield from self._closer.examine(effect)
                self._answer(lambda now: fx.Examined(now, effect.key, *found))
            except Rejection as rejection:
                reason = rejection.reason
                self._answer(lambda now: fx.Examined(now, effect.key, rejected=reason))
            except (StoreUnavailable, FormatError):
                self._answer(lambda now: fx.Examined(now, effect.key))

        self._close.submit(job())

    def _merge(self, effect: fx.Merge) -> None:
        checkpoint = self.state.chain.checkpoint

        def job() -> Asking:
            made: tuple = ()
            failed: dict[str, Any] = {}
            try:
                made = yield from self._closer.merge(effect, checkpoint)
            except (StoreUnavailable, FormatError, KeyError) as failure:
                failed = {"error": repr(failure)}
            except Replaced:
                failed = {"replaced": True}
            self._answer(lambda now: fx.Merged(now, effect.round, effect.attempt, *made, **failed))

        self._close.submit(job())

    def _took(self, effect: fx.Took) -> None:
        world = self._process.world
        self._write(Took(world.now, self._process.name, effect.record, effect.own))
        made = self._closer.take_value(effect.record.round)
        if made is not None and effect.own and trains(self.state.role):
            self._ready[effect.record.round] = made

        def job() -> Asking:
            self._closer.took(effect.record, made if effect.own else None)
            yield from ()

        self._close.submit(job())

    # Values for the learner

    def _deliver_one(self, effect: fx.Deliver) -> None:
        record = effect.record
        made_here = self._ready.pop(record.round, None)

        def job() -> Asking:
            value, ok, gone = made_here, True, False
            try:
                if effect.values and value is None:
                    value = yield from self._committed(record)
            except StoreUnavailable:
                ok = False
            except FormatError:
                ok, gone = False, True
            if ok:
                self.to_learner.put((record, value if effect.values else None))
            self._answer(lambda now: fx.Delivered(now, record.round, ok, gone))

        self._deliver.submit(job())

    def _committed(self, record: RoundRecord) -> Asking:
        """What a record committed; None when it is gone because a newer version replaced it."""
        chain = self.state.chain
        try:
            return (yield from read_value(self._mailbox, record.fragment, record, chain.checkpoint))
        except FormatError:
            if self.state.chain.records[record.fragment] != record:
                return None
            raise

    def _follow(self, effect: fx.Follow) -> None:
        self.to_learner.put(effect.round)

    def _pause(self, effect: fx.Pause) -> None:
        del effect
        self.to_learner.put(True)

    def _resume(self, effect: fx.Resume) -> None:
        del effect
        self.to_learner.put(False)

    # Housekeeping

    def _save_run(self, effect: fx.Save) -> None:
        newest = self.state.chain.checkpoint

        def copy() -> Asking:
            try:
                state = yield from self._closer.snapshot(effect, newest)
            except (StoreUnavailable, FormatError):
                self._answer(lambda now: fx.Saved(now, None))
                return
            self._save.submit(write(state))

        def write(state: list[Values]) -> Asking:
            made = None
            with contextlib.suppress(StoreUnavailable, FormatError):
                made = yield from write_checkpoint(
                    self._mailbox, effect.prefix, state, effect.round
                )
            self._answer(lambda now: fx.Saved(now, made))

        self._close.submit(copy())

    def _delete(self, effect: fx.Delete) -> None:
        def job() -> Asking:
            with contextlib.suppress(StoreUnavailable):
                yield self._mailbox.delete(effect.keys)

        self._save.submit(job())

    def _delete_under(self, effect: fx.DeleteUnder) -> None:
        def job() -> Asking:
            with contextlib.suppress(StoreUnavailable):
                found = yield self._mailbox.list(effect.prefix)
                yield self._mailbox.delete(tuple(found))

        self._save.submit(job())

    def _emit(self, effect: fx.Emit) -> None:
        self.emit(effect.event)

    def _stop(self, effect: fx.Stop) -> None:
        self.to_learner.put(effect.error)


ToLearner = tuple[RoundRecord, Values | None] | int | bool | Exception | None
"""A record and its value; a round to follow; whether to pause; an error; or news of shared work."""

_PERFORM: dict[type, Callable[[Control, Any], None]] = {
    fx.Poll: Control._poll,
    fx.Beat: Control._beat,
    fx.ReadRecord: Control._read_record,
    fx.WriteRecord: Control._write_record,
    fx.MakeClaim: Control._make_claim,
    fx.ReadClaim: Control._read_claim,
    fx.ReadPlace: Control._read_place,
    fx.Upload: Control._upload_one,
    fx.Forget: Control._forget,
    fx.Examine: Control._examine,
    fx.Merge: Control._merge,
    fx.Took: Control._took,
    fx.Deliver: Control._deliver_one,
    fx.Follow: Control._follow,
    fx.Pause: Control._pause,
    fx.Resume: Control._resume,
    fx.Save: Control._save_run,
    fx.Delete: Control._delete,
    fx.DeleteUnder: Control._delete_under,
    fx.Emit: Control._emit,
    fx.Stop: Control._stop,
}
