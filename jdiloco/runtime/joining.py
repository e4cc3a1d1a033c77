"""Joining for real: performs the requests of `protocol.joining` on a store."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jdiloco.errors import FormatError, StoreDenied, StoreUnavailable
from jdiloco.protocol import joining as requests
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.joining import Steps
from jdiloco.protocol.records import Checkpoint, Manifest, RoundRecord
from jdiloco.runtime import checkpoints, contributions
from jdiloco.runtime.checkpoints import RunState
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.payloads import Library
from jdiloco.runtime.schema import Schema
from jdiloco.store.base import Store

T = TypeVar("T")

TRIES = 8
"""A request that the store does not answer is sent so often; the waits between grow to seconds."""
FIRST_WAIT = 0.1
LONGEST_WAIT = 5.0

DENIED_TRIES = 4
"""How often one is that the store refuses: a gateway that starts knows no buckets for a moment."""

BULK_WAITS = (0.1, 0.3, 1.0, 2.0, 4.0)
"""The same for each file of a checkpoint that is written or read."""

STOP_SECONDS = 0.1
"""How long a wait goes on before somebody asks whether it should."""

CLOSE_SECONDS = 2.0


class Performer:
    """Drives joining generators.

    `initial` makes the state of the run's first checkpoint; it is given the prefix of its keys.

    `check_stop` is asked several times a second, and may raise. `small` is the same store for what
    must not wait behind a checkpoint; None takes one store for everything. `tell` is told, once for
    each reason, why this takes longer than a moment. `close` when done.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        scratch: Path,
        initial: Callable[[str], RunState] | None = None,
        check_stop: Callable[[], None] = lambda: None,
        small: Store | None = None,
        tell: Callable[[str], None] = lambda because: None,
    ) -> None:
        self._store = store
        self._small = small or store
        self._clock = clock
        self._scratch = scratch
        self._initial = initial
        self._check_stop = check_stop
        self._saved: queue.SimpleQueue[Checkpoint | BaseException] = queue.SimpleQueue()
        self._saver: threading.Thread | None = None
        self._tell = tell
        self._told: set[str] = set()
        self._closed = False
        self._refused: tuple[str, int] = ("", 0)  # A key, and how often it could not be created.

    def run(self, steps: Steps[T]) -> T:
        """Performs every request, and returns what the generator returns."""
        answer: Any = None
        failure: StoreUnavailable | None = None
        while True:
            try:
                request = steps.throw(failure) if failure else steps.send(answer)
            except StopIteration as done:
                return done.value
            failure = None
            try:
                answer = self._with_patience(request)
            except StoreUnavailable as error:
                failure = error

    def close(self) -> None:
        """Gives up a checkpoint that is still being written."""
        self._closed = True
        if self._saver is not None:
            self._saver.join(CLOSE_SECONDS)

    def pause(self, seconds: float) -> None:
        """Sleeps, unless somebody stops it."""
        self._sleep(seconds)

    def library(self, schema: Schema) -> Library:
        """Reads versions with the patience of joining."""
        return Library(self._store, schema, self._scratch, waits=BULK_WAITS, sleep=self._sleep)

    def _with_patience(self, request: requests.Request) -> Any:
        wait = FIRST_WAIT
        for left in reversed(range(TRIES)):
            self._check_stop()
            try:
                return self._perform(request)
            except StoreUnavailable as error:
                if isinstance(error, StoreDenied) and left <= TRIES - DENIED_TRIES:
                    raise
                if isinstance(request, requests.Create) and self._may_go_on(request.key):
                    return False  # It may have landed: the generator reads back.
                if not left or isinstance(request, (requests.Create, requests.Saved)):
                    raise
                self._tell_once(str(error))
            self._sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError("unreachable")

    def _may_go_on(self, key: str) -> bool:
        """False once a store that answers reads has let this create fail too often in a row."""
        before, times = self._refused
        self._refused = (key, times + 1 if key == before else 1)
        return self._refused[1] < TRIES

    def _sleep(self, seconds: float) -> None:
        end = self._clock.now() + seconds
        while (left := end - self._clock.now()) > 0:
            self._clock.sleep(min(left, STOP_SECONDS))
            self._check_stop()

    def _perform(self, request: requests.Request) -> Any:
        match request:
            case requests.List(prefix, after):
                return [entry.key for entry in self._small.list(prefix, after=after)]
            case requests.Get(key):
                return self._small.get(key)
            case requests.ReadHead(key):
                return contributions.read_head(self._small, key)
            case requests.Create(key, data):
                return self._small.create(key, data)
            case requests.Delete(keys):
                return self._small.delete(keys)
            case requests.Sleep(seconds, because):
                if because:
                    self._tell_once(because)
                began = self._clock.now()
                self._sleep(seconds)
                return self._clock.now() - began
            case requests.SaveInitial(prefix):
                self._saver = threading.Thread(
                    target=self._save, args=(prefix,), name="jdiloco-create", daemon=True
                )
                self._saver.start()
                return None
            case requests.Saved(seconds):
                return self._await_saved(seconds)
        raise AssertionError(f"unreachable: {request}")

    def _tell_once(self, because: str) -> None:
        if because not in self._told:
            self._told.add(because)
            self._tell(because)

    def _save(self, prefix: str) -> None:
        assert self._initial is not None, "only a node with parameters creates a run"
        try:
            state = self._initial(prefix)
            files = checkpoints.write(
                state,
                self._store,
                prefix,
                scratch=self._scratch,
                waits=BULK_WAITS,
                sleep=self._sleep_unless_closed,
            )
            self._saved.put(Checkpoint(-1, state.versions, prefix, files))
        except BaseException as error:  # Raised where the run is created, whatever it is.
            self._saved.put(error)

    def _sleep_unless_closed(self, seconds: float) -> None:
        end = self._clock.now() + seconds
        while (left := end - self._clock.now()) > 0:
            if self._closed:
                raise StoreUnavailable("Joining was given up while the store did not answer.")
            self._clock.sleep(min(left, STOP_SECONDS))

    def _await_saved(self, seconds: float) -> Checkpoint | None:
        end = self._clock.now() + seconds
        while (left := end - self._clock.now()) > 0:
            self._check_stop()
            try:
                found = self._saved.get(timeout=min(left, STOP_SECONDS))
            except queue.Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            return found
        return None


def initial_state(schema: Schema, values: dict[str, np.ndarray]) -> RunState:
    """What a run begins from: the creator's values, no momentum, version 0 everywhere."""
    precision = schema.precision
    momentum = {s.name: np.zeros(s.shape, s.dtype) for s in precision.momenta(schema.tensors)}
    master = {
        spec.name: values[spec.name].astype(np.float32)
        for spec in precision.masters(schema.tensors)
    }
    versions = (0,) * len(schema.plan)
    return RunState(values, momentum, master, versions, -1, b"")


def newest_values(
    performer: Performer,
    library: Library,
    manifest: Manifest,
    data: bytes,
    listed: Iterable[str] | None = None,
) -> tuple[Chain, dict[str, np.ndarray]]:
    """Where the run stands, and the newest committed value of every tensor.

    `listed` is the log; it is listed here unless it is given. Errors: `_newest`.
    """
    chain = performer.run(requests.read_chain(manifest, data, listed))
    chain, found = _newest(performer, library, manifest, data, chain, library.values)
    return chain, {name: array for values in found for name, array in values.items()}


def newest_state(
    performer: Performer, library: Library, manifest: Manifest, data: bytes
) -> RunState:
    """Everything that is committed, with momentum and master copies. Errors: `_newest`."""
    chain = performer.run(requests.read_chain(manifest, data))
    chain, found = _newest(performer, library, manifest, data, chain, library.version)
    state = RunState({}, {}, {}, chain.versions, chain.read, data)
    for version in found:
        state.values.update(version.values)
        state.momentum.update(version.momentum)
        state.master.update(version.master)
    return state


def _newest(
    performer: Performer,
    library: Library,
    manifest: Manifest,
    data: bytes,
    chain: Chain,
    read: Callable[[int, RoundRecord | None, Checkpoint], T],
) -> tuple[Chain, list[T]]:
    """The chain from which every fragment's newest version could be read, and what `read` gives.

    A run goes on while it is read: a payload that is gone by the time it is wanted has been
    replaced by a newer one, so the records are read again. Raises FormatError when they still name
    what is gone.
    """
    while True:
        try:
            records = enumerate(chain.records)
            return chain, [read(index, record, chain.checkpoint) for index, record in records]
        except FormatError:
            library.forget()
            newer = performer.run(requests.read_chain(manifest, data))
            if newer.read == chain.read:
                raise
            chain = newer
