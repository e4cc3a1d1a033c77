"""A living member of a run: threads that perform what the protocol decides.

    control    runs the member's state machine; asks no store and touches no array
    small      lists, beats, claims, records: requests that must not wait behind bulk
    upload     contributions of this node, from the device to the mailbox
    close      contributions of everybody: examined, merged, payloads uploaded
    deliver    committed values, from the mailbox to the learner
    save       run checkpoints, in the background
    tell       callbacks

All of them are fed through queues. The learner runs in the user's thread; it and the control thread
speak through two queues as well, and through one slot that holds the learner's latest progress.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from jdiloco import events
from jdiloco.errors import (
    ClosingFailed,
    FormatError,
    JDilocoError,
    OutOfRange,
    StoreUnavailable,
)
from jdiloco.protocol import effects as fx
from jdiloco.protocol import member
from jdiloco.protocol.keys import MANIFEST, BeatKey, ClaimKey, ContributionKey
from jdiloco.protocol.member import MemberState
from jdiloco.protocol.records import (
    Account,
    Checkpoint,
    ContributionHead,
    Manifest,
    RoundRecord,
    seal,
    unseal,
)
from jdiloco.protocol.resuming import contribution_key
from jdiloco.protocol.rules import Life, trains
from jdiloco.protocol.sweep import Shelf
from jdiloco.runtime import checkpoints, contributions, wire
from jdiloco.runtime.build import this_build
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.contributions import Rejection
from jdiloco.runtime.held import Held
from jdiloco.runtime.news import Commit, Followed, Halt, Paused, Resumed, ToLearner, Values, Woken
from jdiloco.runtime.payloads import Library, read_anchor
from jdiloco.runtime.place import Place, PodHead
from jdiloco.runtime.rounds import Replaced, RoundCloser
from jdiloco.runtime.times import BLOCKING, Busy
from jdiloco.runtime.workers import Worker
from jdiloco.store.base import Buffer, small_requests
from jdiloco.store.settle import create_owned
from jdiloco.store.signed import signer_of
from jdiloco.types import Spent

logger = logging.getLogger("jdiloco")

SETTLE_WAITS = (0.1, 0.3)
"""Seconds between the tries of a bulk request; after them the protocol decides when to go on."""

WORKERS = ("small", "upload", "close", "deliver", "save", "tell")

SHORTEST_WAIT = 0.001
"""Seconds; the control thread never turns faster than this for time alone."""

Fetch = Callable[[], Mapping[str, Any]]
"""Brings a delta to the host: whole tensors, or what this process of a pod has to send of them."""


class Node:
    """Threads and queues around one `MemberState`."""

    def __init__(
        self,
        place: Place,
        *,
        clock: Clock,
        poll_seconds: float,
        role: str,
        callbacks: Iterable[Callable[[events.Event], None]],
        shelf: Shelf,
        values: Values,
        versions: Sequence[int],
        compression: str | None = None,
        spent: Callable[[], Spent] = Spent,
    ) -> None:
        """`values` are what its learner begins with, `versions` theirs, per fragment."""
        self.place = place
        self.to_learner: queue.SimpleQueue[ToLearner] = queue.SimpleQueue()
        self.landed: Callable[[ContributionHead], None] = lambda head: None
        self._small = small_requests(place.store, place.algorithm.rules().small_seconds)
        self._clock = clock
        self._callbacks = tuple(callbacks)
        self._compression = compression
        self.spent = spent
        self._inbox: queue.SimpleQueue[fx.Event | None] = queue.SimpleQueue()
        self._progress = collections.deque([("joining", 0, place.chain.round)], maxlen=1)
        self._told = self._progress[-1]
        self._fetches: dict[int, tuple[ContributionHead, Fetch]] = {}
        self._ready: dict[int, Values] = {}  # Committed by this node, not yet delivered.
        self._held = Held(place.store, place.schema, values, versions)
        self._state = member.start(
            place.life,
            place.algorithm.rules(),
            place.chain,
            poll_seconds=poll_seconds,
            role=role,
            build=this_build(),
            now=clock.now(),
            beat=place.birth.beat,
            shelf=shelf,
        )
        self._closer = RoundCloser(
            place.store,
            self._state.keys,
            place.schema,
            place.algorithm,
            self._library(),
            self._create_owned,
            compression=compression,
        )
        self._busy = {name: Busy(clock.now) for name in BLOCKING}
        self._workers = {name: Worker(name, self.halt) for name in WORKERS}
        self._control = threading.Thread(target=self._run, name="jdiloco-control", daemon=True)
        self._control.start()

    # What the training thread calls

    @property
    def state(self) -> MemberState:
        """The member's newest state: immutable, and replaced as a whole."""
        return self._state

    def busy(self) -> dict[str, float]:
        """For how long each thread that training may wait for has been at work, in seconds."""
        return {name: busy.seconds for name, busy in self._busy.items()}

    def progress(self, phase: str, step: int, next_round: int) -> None:
        """What the learner is doing; costs nothing, and is told with the next beat."""
        self._progress.append((phase, step, next_round))

    def wake(self) -> None:
        """Makes the control thread look at the progress now."""
        self._inbox.put(fx.Tick(self._clock.now()))

    def wake_learner(self) -> None:
        """Ends a wait of the training thread for messages."""
        self.to_learner.put(Woken())

    def watch(self, lives: tuple[Life, ...]) -> None:
        """These lives hold work: their leases matter though they may never have been seen."""
        self._inbox.put(fx.Watched(self._clock.now(), lives))

    def contribute(self, head: ContributionHead, fetch: Fetch) -> None:
        """Publishes a delta; `fetch` brings it to the host and runs on a library thread."""
        self._fetches[head.round] = (head, fetch)
        self._inbox.put(fx.Contributed(self._clock.now(), head))

    def unread(self, rounds: Iterable[int]) -> dict[int, tuple[ContributionHead, bytes]]:
        """This node's contributions to these rounds, as they go out, whose record is not known."""
        found = {}
        for round in rounds:
            if (held := self._fetches.get(round)) is None:
                continue
            head, fetch = held
            key = self._state.keys.contribution(contribution_key(head))
            found[round] = (head, b"".join(self._contribution(key, head, fetch)))
        return found

    def emit(self, event: events.Event) -> None:
        """Hands an event to every callback: see `hand_out`."""
        hand_out(event, self._callbacks)

    def warn(self, message: str) -> None:
        """Tells of something that its user may want to change."""
        self.emit(events.Warned(node=self.place.life.node, message=message))

    def tell(self, event: events.Event) -> None:
        """The same, on a thread of its own: a callback may be slow, and beats must not wait."""
        self._workers["tell"].submit(lambda: self.emit(event))

    def leave(self, seconds: float, *, hurry: bool) -> None:
        """Says so with a last beat, as far as that goes in `seconds`, and ends every thread.

        In a hurry nothing is begun that has not been. A node that must not go on says nothing.
        """
        deadline = self._clock.now() + seconds
        self._inbox.put(None)
        self._control.join(seconds)
        if hurry:
            for worker in self._workers.values():
                worker.drop()
        if not self._state.stopped:
            self._workers["small"].submit(self._say_left)
        for worker in self._workers.values():
            worker.stop()
        for name, worker in self._workers.items():
            if not worker.join(deadline - self._clock.now()):
                logger.info("left while a request (%s) was under way", name)

    def _say_left(self) -> None:
        state = self._state
        _, step, next_round = self._progress[-1]
        me = state.me
        beat = BeatKey(me.node, me.incarnation, state.beat + 1, "left", step, next_round)
        with contextlib.suppress(StoreUnavailable):
            self._create_beat(state.keys.beat(beat))

    def _create_beat(self, key: str) -> None:
        """Its name says all that others need; its body is for whoever pays the bill."""
        self._small.create(key, seal(key, Account(self.spent())))

    # The control thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            logger.exception("the control thread failed")
            failed = ClosingFailed(f"The control thread of this node ended on {error!r}.")
            failed.__cause__ = error
            self.halt(failed)
        except BaseException as error:
            self.halt(error)

    def halt(self, error: BaseException) -> None:
        """Ends the training loop with `error`."""
        self.to_learner.put(Halt(error))

    def _loop(self) -> None:
        while (event := self._next_event()) is not None:
            self._tell_progress()
            self._step(event)

    def _next_event(self) -> fx.Event | None:
        """What happens next, or that time has passed; None: the node leaves."""
        if self._state.stopped:
            return self._inbox.get()  # There is nothing left to wake up for.
        wait = member.wake_at(self._state) - self._clock.now()
        try:
            return self._inbox.get(timeout=max(SHORTEST_WAIT, wait))
        except queue.Empty:
            return fx.Tick(self._clock.now())

    def _tell_progress(self) -> None:
        newest = self._progress[-1]
        if newest != self._told:
            self._told = newest
            self._step(fx.Progress(self._clock.now(), *newest))

    def _step(self, event: fx.Event) -> None:
        self._state, effects = member.step(self._state, event)
        for effect in effects:
            _PERFORM[type(effect)](self, effect)

    def _ask(
        self, worker: str, request: Callable[[], fx.Event], failed: Callable[[], fx.Event]
    ) -> None:
        """Performs a request on a library thread and tells the member its answer.

        Whatever goes wrong, there is one: a member waits for as long as it takes.
        """

        def job() -> None:
            try:
                with self._busy.get(worker, contextlib.nullcontext()):
                    answer = request()
            except StoreUnavailable:
                answer = failed()
            except FormatError as error:
                self.warn(str(error))
                answer = failed()
            except Exception:
                logger.exception("a request failed in a way nobody foresaw")
                answer = failed()
            self._inbox.put(answer)

        self._workers[worker].submit(job)

    # Small requests

    def _poll(self, effect: fx.Poll) -> None:
        prefix = self._state.keys.log

        def request() -> fx.Event:
            listed = self._small.list(prefix, after=effect.after)
            return fx.Listed(self._clock.now(), tuple(entry.key for entry in listed))

        self._ask("small", request, lambda: fx.Listed(self._clock.now(), None))

    def _beat(self, effect: fx.Beat) -> None:
        def request() -> fx.Event:
            self._create_beat(effect.key)
            return fx.Beaten(self._clock.now(), True)

        self._ask("small", request, lambda: fx.Beaten(self._clock.now(), False))

    def _read_record(self, effect: fx.ReadRecord) -> None:
        key, round = self._state.keys.record(effect.round), effect.round

        def request() -> fx.Event:
            return fx.RecordRead(self._clock.now(), round, self._small.get(key))

        self._ask("small", request, lambda: fx.RecordRead(self._clock.now(), round, None, ok=False))

    def _write_record(self, effect: fx.WriteRecord) -> None:
        key, round = self._state.keys.record(effect.round), effect.round

        def request() -> fx.Event:
            created = self._small.create(key, effect.data)
            return fx.RecordSent(self._clock.now(), round, created)

        self._ask("small", request, lambda: fx.RecordSent(self._clock.now(), round, None))

    def _make_claim(self, effect: fx.MakeClaim) -> None:
        key = self._state.keys.claim(ClaimKey(effect.round, effect.number))

        def request() -> fx.Event:
            created = self._small.create(key, effect.data)
            return self._claim(effect, effect.data if created else self._small.get(key))

        self._ask("small", request, lambda: self._claim(effect, None))

    def _read_claim(self, effect: fx.ReadClaim) -> None:
        key = self._state.keys.claim(ClaimKey(effect.round, effect.number))
        self._ask(
            "small",
            lambda: self._claim(effect, self._small.get(key)),
            lambda: self._claim(effect, None),
        )

    def _claim(self, effect: fx.MakeClaim | fx.ReadClaim, data: bytes | None) -> fx.ClaimRead:
        return fx.ClaimRead(self._clock.now(), effect.round, effect.number, data)

    def _read_place(self, effect: fx.ReadPlace) -> None:
        del effect
        me = self.place.life
        successor = self._state.keys.incarnation(me.node, me.incarnation + 1)

        def request() -> fx.Event:
            data = self._small.get(MANIFEST)
            run = unseal(MANIFEST, data, Manifest).run if data else ""
            superseded = self._small.get(successor) is not None
            return fx.PlaceRead(self._clock.now(), run, superseded)

        self._ask("small", request, lambda: fx.PlaceRead(self._clock.now(), None))

    # Contributions of this node

    def _upload(self, effect: fx.Upload) -> None:
        key = self._state.keys.contribution(effect.key)
        head, fetch = self._fetches[effect.key.round]

        def request() -> fx.Event:
            self._send(key, head, self._contribution(key, head, fetch, self._compression))
            self.landed(head)
            self.emit(_published(head))
            return fx.Uploaded(self._clock.now(), effect.key, True)

        self._ask("upload", request, lambda: fx.Uploaded(self._clock.now(), effect.key, False))

    def _contribution(
        self, key: str, head: ContributionHead, fetch: Fetch, compression: str | None = None
    ) -> Sequence[Buffer]:
        """Its bytes; an empty one when the delta cannot be brought to the host."""
        pod, signer = self.place.pod, signer_of(self.place.store)
        try:
            if pod is not None:
                return pod.desk.encode(key, head, fetch())
            return contributions.encode(key, head, fetch(), compression=compression, signer=signer)
        except StoreUnavailable:
            raise
        except Exception:
            logger.exception("the delta of round %d could not be made", head.round)
            empty = msgspec.structs.replace(head, empty=True)
            return contributions.encode(key, empty, {}, signer=signer)

    def _send(self, key: str, head: ContributionHead, data: Sequence[Buffer]) -> None:
        """A life before this one may have sent it, and compressed it in another way or not."""
        try:
            self._create_owned(key, data)
        except FormatError:
            found, place = self.place.store.get(key), self.place
            specs = place.schema.fragment(head.fragment)
            room = wire.room(specs, place.algorithm.delta_dtype)
            signer = signer_of(place.store)
            if not contributions.are_same(key, data, found, room=room, signer=signer):
                raise

    def _forget(self, effect: fx.Forget) -> None:
        self._fetches.pop(effect.round, None)

    def _create_owned(self, key: str, data: Sequence[Buffer]) -> None:
        create_owned(self.place.store, key, data, waits=SETTLE_WAITS, sleep=self._clock.sleep)

    # Closing

    def _examine(self, effect: fx.Examine) -> None:
        def request() -> fx.Event:
            try:
                found = self._closer.examine(effect)
            except Rejection as rejection:
                return fx.Examined(
                    self._clock.now(),
                    effect.key,
                    rejected=rejection.reason,
                    parts=rejection.parts,
                )
            return fx.Examined(
                self._clock.now(),
                effect.key,
                found.head,
                found.weight,
                found.sha256,
                parts=len(found.head.parts),
            )

        self._ask("close", request, lambda: fx.Examined(self._clock.now(), effect.key))

    def _merge(self, effect: fx.Merge) -> None:
        checkpoint = self._state.chain.checkpoint

        def merged(*made: Any, **failed: Any) -> fx.Event:
            return fx.Merged(self._clock.now(), effect.round, effect.attempt, *made, **failed)

        def request() -> fx.Event:
            try:
                return merged(*self._closer.merge(effect, checkpoint))
            except Replaced:
                return merged(replaced=True)
            except OutOfRange as error:
                self.warn(str(error))
                return merged(culprit=self._closer.furthest(effect))
            except (JDilocoError, MemoryError) as error:
                return merged(error=f"{type(error).__name__}: {error}")

        self._ask("close", request, lambda: merged(error="see the log"))

    def _took(self, effect: fx.Took) -> None:
        """Here and not on the closing thread: what it is for is delivered next."""
        record = effect.record
        values = self._closer.take_values(record.round)
        if values is not None and effect.own and trains(self._state.role):
            pod = self.place.pod
            self._ready[record.round] = values if pod is None else pod.library.cut(values)
        self._workers["close"].submit(lambda: self._closer.committed(record, own=effect.own))

    # Values for the learner

    def _deliver(self, effect: fx.Deliver) -> None:
        record = effect.record
        made_here = self._ready.pop(record.round, None)

        def request() -> fx.Event:
            values = None
            if effect.values:
                try:
                    values = made_here if made_here is not None else self._committed(record)
                except FormatError as error:
                    logger.info("a reader was overtaken by the sweep: %s", error)
                    return fx.Delivered(self._clock.now(), record.round, False, gone=True)
                self._held.took(record, values)
            self.to_learner.put(Commit(record, values))
            return fx.Delivered(self._clock.now(), record.round, True)

        self._ask("deliver", request, lambda: fx.Delivered(self._clock.now(), record.round, False))

    def _committed(self, record: RoundRecord) -> Values | None:
        """What a record committed; None when it is gone because a newer version has replaced it."""
        pod, chain = self.place.pod, self._state.chain
        if pod is not None:
            values = pod.library.anchor(record)
        elif (values := self._by_update(record)) is None:
            specs = self.place.schema.fragment(record.fragment)
            values = read_anchor(self.place.store, record, specs)
        if values is not None or chain.records[record.fragment] != record:
            return values
        library = self._library() if pod is None else pod.library
        return library.values(record.fragment, record, chain.checkpoint)

    def _by_update(self, record: RoundRecord) -> Values | None:
        """What a record committed, where its update and what is held here are enough."""
        try:
            return self._held.updated(record)
        except FormatError as error:
            self.warn(f"{error} The whole anchor is read instead.")
            return None

    def _library(self) -> Library:
        place = self.place
        return Library(
            place.store, place.schema, place.scratch, waits=SETTLE_WAITS, sleep=self._clock.sleep
        )

    def _follow(self, effect: fx.Follow) -> None:
        self.to_learner.put(Followed(effect.round))

    def _pause(self, effect: fx.Pause) -> None:
        del effect
        self.to_learner.put(Paused())

    def _resume(self, effect: fx.Resume) -> None:
        del effect
        self.to_learner.put(Resumed())

    # Housekeeping

    def _save(self, effect: fx.Save) -> None:
        newest = self._state.chain.checkpoint

        def copy() -> None:
            try:
                state = self._closer.snapshot(effect, newest, self.place.manifest_data)
            except Exception as error:
                if not isinstance(error, StoreUnavailable):
                    logger.exception("copying the values for a run checkpoint failed")
                self._inbox.put(fx.Saved(self._clock.now(), None))
                return
            self._ask(
                "save",
                lambda: fx.Saved(self._clock.now(), self._checkpoint(effect, state)),
                lambda: fx.Saved(self._clock.now(), None),
            )

        self._workers["close"].submit(copy)

    def _checkpoint(self, effect: fx.Save, state: checkpoints.RunState) -> Checkpoint:
        files = checkpoints.write(
            state,
            self.place.store,
            effect.prefix,
            scratch=self.place.scratch,
            waits=SETTLE_WAITS,
            sleep=self._clock.sleep,
        )
        return Checkpoint(effect.round, effect.versions, effect.prefix, files)

    def _delete(self, effect: fx.Delete) -> None:
        def job() -> None:
            try:
                self.place.store.delete(effect.keys)
                if self.place.pod is not None:
                    self._withdraw(self.place.pod, effect.keys)
            except StoreUnavailable:
                logger.debug("%d objects stay in the mailbox", len(effect.keys))

        self._workers["save"].submit(job)

    def _withdraw(self, pod: PodHead, names: Iterable[str]) -> None:
        """The parts of this node's own contributions go with them."""
        for key in map(self._state.keys.parse, names):
            if isinstance(key, ContributionKey) and key.node == self.place.life.node:
                pod.desk.withdraw(key.round, key.node, key.incarnation)

    def _delete_under(self, effect: fx.DeleteUnder) -> None:
        def job() -> None:
            try:
                found = self.place.store.list(effect.prefix)
                self.place.store.delete([entry.key for entry in found])
            except StoreUnavailable:
                logger.debug("%s stays in the mailbox", effect.prefix)

        self._workers["save"].submit(job)

    def _emit(self, effect: fx.Emit) -> None:
        self.tell(effect.event)

    def _stop(self, effect: fx.Stop) -> None:
        self.to_learner.put(Halt(effect.error))


def hand_out(event: events.Event, callbacks: Iterable[Callable[[events.Event], None]]) -> None:
    """Hands an event to every callback; one that raises is logged and changes nothing.

    What is no `Exception` goes on: a KeyboardInterrupt is meant for the program.
    """
    for callback in callbacks:
        try:
            callback(event)
        except Exception:
            logger.exception("a callback raised on %s", event)


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
    fx.ReadPlace: Node._read_place,
    fx.Upload: Node._upload,
    fx.Forget: Node._forget,
    fx.Examine: Node._examine,
    fx.Merge: Node._merge,
    fx.Took: Node._took,
    fx.Deliver: Node._deliver,
    fx.Follow: Node._follow,
    fx.Pause: Node._pause,
    fx.Resume: Node._resume,
    fx.Save: Node._save,
    fx.Delete: Node._delete,
    fx.DeleteUnder: Node._delete_under,
    fx.Emit: Node._emit,
    fx.Stop: Node._stop,
}
