"""A living member of a run: threads that perform what the protocol decides.

    control    runs the member's state machine; asks no store and touches no array
    small      lists, beats, claims, records: requests that must not wait behind bulk
    upload     contributions of this node, from the device to the mailbox
    close      contributions of everybody: examined, merged, payloads uploaded
    deliver    committed values, from the mailbox to the learner
    save       run checkpoints, in the background

All of them are fed through queues. The learner runs in the user's thread; it and the control thread
speak through two queues as well, and through one slot that holds the learner's latest progress.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from jdiloco import events
from jdiloco.errors import (
    ClosingFailed,
    FormatError,
    JDilocoError,
    StoreUnavailable,
)
from jdiloco.protocol import effects as fx
from jdiloco.protocol import member
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.keys import MANIFEST, BeatKey, ClaimKey
from jdiloco.protocol.member import MemberState
from jdiloco.protocol.records import (
    Checkpoint,
    ContributionHead,
    Manifest,
    RoundRecord,
    unseal,
)
from jdiloco.protocol.rules import Life
from jdiloco.runtime import checkpoints, contributions
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.build import this_build
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.contributions import Rejection
from jdiloco.runtime.payloads import Library, Tensors, read_anchor
from jdiloco.runtime.rounds import RoundCloser
from jdiloco.runtime.schema import Schema
from jdiloco.runtime.workers import Worker
from jdiloco.store.base import Buffer, Store
from jdiloco.store.settle import create_owned

logger = logging.getLogger("jdiloco")

SETTLE_WAITS = (0.1, 0.3)
"""Seconds between the tries of one upload; after them the protocol decides when to try again."""

Fetch = Callable[[], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Commit:
    """For the learner: a round record, with its values when it is to align with them."""

    record: RoundRecord
    values: Tensors | None


@dataclasses.dataclass(frozen=True)
class Followed:
    """For the learner: the others wait for it in this round."""

    round: int


@dataclasses.dataclass(frozen=True)
class Halt:
    """For the learner: this node must not go on."""

    error: JDilocoError


ToLearner = Commit | Followed | Halt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a node stands in its run when it starts."""

    store: Store
    manifest: Manifest
    manifest_data: bytes
    chain: Chain
    life: Life
    schema: Schema
    algorithm: DiLoCo
    scratch: Path


class Node:
    """Threads and queues around one `MemberState`."""

    def __init__(
        self,
        place: Place,
        *,
        clock: Clock,
        poll_seconds: float,
        can_close: bool,
        callbacks: Iterable[Callable[[events.Event], None]],
        library: Library,
    ) -> None:
        self.place = place
        self.to_learner: queue.SimpleQueue[ToLearner] = queue.SimpleQueue()
        self._clock = clock
        self._callbacks = tuple(callbacks)
        self._library = library
        self._inbox: queue.SimpleQueue[fx.Event | None] = queue.SimpleQueue()
        self._progress = collections.deque([("joining", 0, place.chain.round)], maxlen=1)
        self._told = self._progress[-1]
        self._fetches: dict[int, tuple[ContributionHead, Fetch]] = {}
        self._ready: dict[int, Tensors] = {}  # Committed by this node, not yet delivered.
        self._state = member.start(
            place.life,
            place.algorithm.rules(),
            place.chain,
            poll_seconds=poll_seconds,
            can_close=can_close,
            build=this_build(),
            now=clock.now(),
        )
        self._closer = RoundCloser(
            place.store,
            self._state.keys,
            place.schema,
            place.algorithm,
            library,
            self._create_owned,
        )
        self._workers = {
            name: Worker(name) for name in ("small", "upload", "close", "deliver", "save")
        }
        self._control = threading.Thread(target=self._run, name="jdiloco-control", daemon=True)
        self._control.start()

    # What the training thread calls

    @property
    def state(self) -> MemberState:
        """The member's newest state: immutable, and replaced as a whole."""
        return self._state

    def progress(self, phase: str, step: int, next_round: int) -> None:
        """What the learner is doing; costs nothing, and is told with the next beat."""
        self._progress.append((phase, step, next_round))

    def wake(self) -> None:
        """Makes the control thread look at the progress now."""
        self._inbox.put(fx.Tick(self._clock.now()))

    def contribute(self, head: ContributionHead, fetch: Fetch) -> None:
        """Publishes a delta; `fetch` brings it to the host and runs on a library thread."""
        self._fetches[head.round] = (head, fetch)
        self._inbox.put(fx.Contributed(self._clock.now(), head))

    def emit(self, event: events.Event) -> None:
        """Hands an event to every callback; one that raises is logged and changes nothing."""
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception:
                logger.exception("jdiloco: a callback raised on %s", event)

    def leave(self, seconds: float) -> None:
        """Says so with a last beat, as far as that goes in `seconds`, and ends every thread."""
        deadline = self._clock.now() + seconds
        self._inbox.put(None)
        self._control.join(max(0.0, deadline - self._clock.now()))
        state = self._state
        phase, step, next_round = self._progress[-1]
        del phase
        last = BeatKey(
            state.me.node, state.me.incarnation, state.beat + 1, "left", step, next_round
        )
        self._workers["small"].submit(lambda: self._try_create(state.keys.beat(last)))
        for worker in self._workers.values():
            worker.stop()
        for worker in self._workers.values():
            worker.join(deadline - self._clock.now())

    # The control thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            logger.exception("jdiloco: the control thread failed")
            failed = ClosingFailed(f"The control thread of this node ended on {error!r}.")
            failed.__cause__ = error
            self.to_learner.put(Halt(failed))

    def _loop(self) -> None:
        while True:
            wait = member.wake_at(self._state) - self._clock.now()
            try:
                event = self._inbox.get(timeout=max(0.001, wait))
            except queue.Empty:
                event = fx.Tick(self._clock.now())
            if event is None:
                return
            self._tell_progress()
            self._step(event)

    def _tell_progress(self) -> None:
        newest = self._progress[-1]
        if newest != self._told:
            self._told = newest
            self._step(fx.Progress(self._clock.now(), *newest))

    def _step(self, event: fx.Event) -> None:
        self._state, effects = member.step(self._state, event)
        for effect in effects:
            _PERFORM[type(effect)](self, effect)

    def _answer(self, event: fx.Event) -> None:
        self._inbox.put(event)

    # Small requests

    def _poll(self, effect: fx.Poll) -> None:
        prefix = self._state.keys.log

        def job() -> None:
            try:
                listed = self.place.store.list(prefix, after=effect.after)
                keys = tuple(entry.key for entry in listed)
            except StoreUnavailable:
                keys = None
            self._answer(fx.Listed(self._clock.now(), keys))

        self._workers["small"].submit(job)

    def _beat(self, effect: fx.Beat) -> None:
        def job() -> None:
            self._answer(fx.Beaten(self._clock.now(), self._try_create(effect.key)))

        self._workers["small"].submit(job)

    def _try_create(self, key: str) -> bool:
        try:
            self.place.store.create(key, b"")
        except StoreUnavailable:
            return False
        return True

    def _read_record(self, effect: fx.ReadRecord) -> None:
        key = self._state.keys.record(effect.round)

        def job() -> None:
            ok, data = self._try_get(key)
            self._answer(fx.RecordRead(self._clock.now(), effect.round, data, ok))

        self._workers["small"].submit(job)

    def _try_get(self, key: str) -> tuple[bool, bytes | None]:
        try:
            return True, self.place.store.get(key)
        except StoreUnavailable:
            return False, None

    def _write_record(self, effect: fx.WriteRecord) -> None:
        key = self._state.keys.record(effect.round)

        def job() -> None:
            try:
                created = self.place.store.create(key, effect.data)
            except StoreUnavailable:
                created = None
            self._answer(fx.RecordSent(self._clock.now(), effect.round, created))

        self._workers["small"].submit(job)

    def _make_claim(self, effect: fx.MakeClaim) -> None:
        key = self._state.keys.claim(ClaimKey(effect.round, effect.number))

        def job() -> None:
            data = None
            try:
                created = self.place.store.create(key, effect.data)
                data = effect.data if created else self.place.store.get(key)
            except StoreUnavailable:
                logger.debug("jdiloco: no answer to a claim on round %d", effect.round)
            self._answer(fx.ClaimRead(self._clock.now(), effect.round, effect.number, data))

        self._workers["small"].submit(job)

    def _read_claim(self, effect: fx.ReadClaim) -> None:
        key = self._state.keys.claim(ClaimKey(effect.round, effect.number))

        def job() -> None:
            _, data = self._try_get(key)
            self._answer(fx.ClaimRead(self._clock.now(), effect.round, effect.number, data))

        self._workers["small"].submit(job)

    def _read_manifest(self, effect: fx.ReadManifest) -> None:
        del effect

        def job() -> None:
            ok, data = self._try_get(MANIFEST)
            run: str | None = ""
            try:
                run = unseal(MANIFEST, data, Manifest).run if data else ""
            except FormatError:
                logger.warning("jdiloco: the manifest in this mailbox is damaged")
            self._answer(fx.ManifestRead(self._clock.now(), run if ok else None))

        self._workers["small"].submit(job)

    # Contributions of this node

    def _upload(self, effect: fx.Upload) -> None:
        key = self._state.keys.contribution(effect.key)
        head, fetch = self._fetches[effect.key.round]

        def job() -> None:
            ok = True
            try:
                self._create_owned(key, self._contribution(key, head, fetch))
            except (StoreUnavailable, FormatError) as error:
                ok = False
                self._warn(error)
            self._answer(fx.Uploaded(self._clock.now(), effect.key, ok))
            if ok:
                self.emit(_published(head))

        self._workers["upload"].submit(job)

    def _contribution(self, key: str, head: ContributionHead, fetch: Fetch) -> Sequence[Buffer]:
        """Its bytes; an empty one when the delta cannot be brought to the host."""
        try:
            return contributions.encode(key, head, fetch())
        except Exception:
            logger.exception("jdiloco: the delta of round %d could not be made", head.round)
            return contributions.encode(key, msgspec.structs.replace(head, empty=True), {})

    def _forget(self, effect: fx.Forget) -> None:
        self._fetches.pop(effect.round, None)

    def _create_owned(self, key: str, data: Sequence[Buffer]) -> None:
        create_owned(self.place.store, key, data, waits=SETTLE_WAITS, sleep=self._clock.sleep)

    # Closing

    def _examine(self, effect: fx.Examine) -> None:
        def job() -> None:
            now = self._clock.now
            try:
                found = self._closer.examine(effect)
                answer = fx.Examined(now(), effect.key, found.head, found.weight, found.sha256)
            except Rejection as rejection:
                answer = fx.Examined(now(), effect.key, rejected=rejection.reason)
            except (StoreUnavailable, FormatError):
                answer = fx.Examined(now(), effect.key)
            self._answer(answer)

        self._workers["close"].submit(job)

    def _merge(self, effect: fx.Merge) -> None:
        checkpoint = self._state.chain.checkpoint

        def job() -> None:
            try:
                made = self._closer.merge(effect, checkpoint)
            except Exception as error:
                if not isinstance(error, StoreUnavailable):
                    logger.exception("jdiloco: closing round %d failed", effect.round)
                answer = fx.Merged(
                    self._clock.now(), effect.round, effect.attempt, error=str(error)
                )
            else:
                answer = fx.Merged(self._clock.now(), effect.round, effect.attempt, *made)
            self._answer(answer)

        self._workers["close"].submit(job)

    def _took(self, effect: fx.Took) -> None:
        def job() -> None:
            values = self._closer.committed(effect.record, own=effect.own)
            if values is not None:
                self._ready[effect.record.round] = values

        self._workers["close"].submit(job)

    # Values for the learner

    def _deliver(self, effect: fx.Deliver) -> None:
        record = effect.record

        def job() -> None:
            values = self._ready.pop(record.round, None)
            ok = True
            try:
                if effect.values and values is None:
                    specs = self.place.schema.fragment(record.fragment)
                    values = read_anchor(self.place.store, record, specs)
            except (StoreUnavailable, FormatError) as error:
                ok = False
                self._warn(error)
            if ok:
                self.to_learner.put(Commit(record, values if effect.values else None))
            self._answer(fx.Delivered(self._clock.now(), record.round, ok))

        self._workers["deliver"].submit(job)

    def _warn(self, error: Exception) -> None:
        if isinstance(error, FormatError):
            self.emit(events.Warned(node=self.place.life.node, message=str(error)))

    def _follow(self, effect: fx.Follow) -> None:
        self.to_learner.put(Followed(effect.round))

    # Housekeeping

    def _save(self, effect: fx.Save) -> None:
        newest = self._state.chain.checkpoint

        def copy() -> None:
            try:
                state = self._closer.snapshot(effect, newest, self.place.manifest_data)
            except (StoreUnavailable, FormatError):
                self._answer(fx.Saved(self._clock.now(), None))
                return
            self._workers["save"].submit(lambda: write(state))

        def write(state: checkpoints.RunState) -> None:
            try:
                files = checkpoints.write(
                    state,
                    self.place.store,
                    effect.prefix,
                    scratch=self.place.scratch,
                    waits=SETTLE_WAITS,
                    sleep=self._clock.sleep,
                )
                made = Checkpoint(effect.round, effect.versions, effect.prefix, files)
            except Exception as error:
                if not isinstance(error, StoreUnavailable):
                    logger.exception("jdiloco: writing a run checkpoint failed")
                made = None
            self._answer(fx.Saved(self._clock.now(), made))

        self._workers["close"].submit(copy)

    def _delete(self, effect: fx.Delete) -> None:
        def job() -> None:
            try:
                self.place.store.delete(effect.keys)
            except StoreUnavailable:
                logger.debug("jdiloco: %d objects stay in the mailbox", len(effect.keys))

        self._workers["save"].submit(job)

    def _delete_under(self, effect: fx.DeleteUnder) -> None:
        def job() -> None:
            try:
                found = self.place.store.list(effect.prefix)
                self.place.store.delete([entry.key for entry in found])
            except StoreUnavailable:
                logger.debug("jdiloco: %s stays in the mailbox", effect.prefix)

        self._workers["save"].submit(job)

    def _emit(self, effect: fx.Emit) -> None:
        self.emit(effect.event)

    def _stop(self, effect: fx.Stop) -> None:
        self.to_learner.put(Halt(effect.error))


def _published(head: ContributionHead) -> events.Published:
    return events.Published(
        node=head.node,
        round=head.round,
        fragment=head.fragment,
        version=head.version,
        steps=head.counters.steps,
        samples=head.counters.samples,
        final=head.final,
    )


_PERFORM: dict[type, Callable] = {
    fx.Poll: Node._poll,
    fx.Beat: Node._beat,
    fx.ReadRecord: Node._read_record,
    fx.WriteRecord: Node._write_record,
    fx.MakeClaim: Node._make_claim,
    fx.ReadClaim: Node._read_claim,
    fx.ReadManifest: Node._read_manifest,
    fx.Upload: Node._upload,
    fx.Forget: Node._forget,
    fx.Examine: Node._examine,
    fx.Merge: Node._merge,
    fx.Took: Node._took,
    fx.Deliver: Node._deliver,
    fx.Follow: Node._follow,
    fx.Save: Node._save,
    fx.Delete: Node._delete,
    fx.DeleteUnder: Node._delete_under,
    fx.Emit: Node._emit,
    fx.Stop: Node._stop,
}
