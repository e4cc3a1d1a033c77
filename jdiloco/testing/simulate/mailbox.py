"""A store that every process of a simulated run shares: it takes its time, and misbehaves.

A create that gets no answer may still land, at once or seconds later, whether its sender lives or
not; a listing may show the mailbox as it was; a create may be refused with nothing stored. What it
never does is to break a promise of `jdiloco.store.base`: of several creates of one key one wins,
and a completed create is found by every later `get`.
"""

from __future__ import annotations

import bisect
import builtins
import dataclasses
from collections.abc import Callable
from typing import Any

from jdiloco.errors import StoreUnavailable
from jdiloco.testing.simulate.history import Asked, Deleted, Entry, Sent, Stored
from jdiloco.testing.simulate.scenario import NO_FAULTS, Scenario
from jdiloco.testing.simulate.world import Operation, Process, Resume, World


@dataclasses.dataclass(frozen=True, slots=True)
class Request(Operation):
    """One request. `key` is the prefix of a listing; `keys` are those to delete."""

    mailbox: Mailbox
    verb: str
    key: str = ""
    data: bytes = b""
    after: str = ""
    keys: tuple[str, ...] = ()

    def begin(self, process: Process, resume: Resume) -> None:
        self.mailbox.request(process, self, resume)


class Mailbox:
    """The objects, and what becomes of requests."""

    def __init__(self, world: World, scenario: Scenario, write: Callable[[Entry], None]) -> None:
        self.world = world
        self.objects: dict[str, bytes] = {}
        self._scenario = scenario
        self._write = write
        self._keys: list[str] = []
        self._born: dict[str, float] = {}
        self.sent: builtins.list[Sent] = []
        self._tried: dict[str, float] = {}  # When a create of a key arrived last.
        self._gone: list[tuple[float, str]] = []  # When which key was deleted.

    # What processes ask for

    def create(self, key: str, data: bytes) -> Request:
        return Request(self, "create", key, data)

    def get(self, key: str) -> Request:
        return Request(self, "get", key)

    def list(self, prefix: str, after: str = "") -> Request:
        return Request(self, "list", prefix, after=after)

    def delete(self, keys: tuple[str, ...]) -> Request:
        return Request(self, "delete", keys=keys)

    # What becomes of it

    def request(self, process: Process, request: Request, resume: Resume) -> None:
        """Sends a request, and its answer back."""
        keys = request.keys or (request.key,)
        sent = process.lives_to_send(request.verb, keys)
        if not sent:
            return
        if sent < len(keys):
            request = dataclasses.replace(request, keys=keys[:sent])
        self.sent.append(
            Sent(self.world.now, process.name, request.verb, request.key, len(request.data))
        )
        fate = self._fate(request)
        if fate != "ok":
            shown = request.key or " ".join(request.keys)
            self._write(Asked(self.world.now, process.name, request.verb, shown, fate))
        arrive = self._latency()

        def perform() -> Callable[[], Any]:
            if self._out():
                return _no_answer
            if self._too_soon(request):
                return _too_many_requests
            found = self._perform(process.name, request, fate)
            return (lambda: found) if fate != "lost" else _no_answer

        def answer_later() -> None:
            answer = perform()
            late = self._scenario.timeout_seconds if answer is _no_answer else self._latency()
            self.world.after(late, lambda: resume(answer))

        if fate in ("failed", "late"):
            self.world.after(self._scenario.timeout_seconds, lambda: resume(_no_answer))
            if fate == "late":
                delay = self.world.rng.uniform(0, self._scenario.faults.late_seconds)
                self.world.after(delay, lambda: self._land(process.name, request))
            return
        self.world.after(arrive, answer_later)

    def _land(self, who: str, request: Request) -> None:
        """Carries out a request to which nobody waits for an answer any more."""
        if not self._out():
            self._perform(who, request, "late")

    def _latency(self) -> float:
        return self.world.rng.uniform(0.2, 1.8) * self._scenario.latency_seconds

    def _out(self) -> bool:
        return any(start <= self.world.now < end for start, end in self._scenario.outages)

    def _too_soon(self, request: Request) -> bool:
        """Whether the store wants its writes to one key further apart, as Google's does."""
        if request.verb != "create":
            return False
        before = self._tried.get(request.key, -self._scenario.key_seconds)
        self._tried[request.key] = self.world.now
        return self.world.now - before < self._scenario.key_seconds

    def _fate(self, request: Request) -> str:
        faults = self._scenario.faults
        if self.world.now >= faults.until or faults == NO_FAULTS:
            return "ok"
        odds = [("failed", faults.fail)]
        if request.verb in ("create", "delete"):
            odds += [("lost", faults.lose), ("late", faults.late)]
        if request.verb == "create":
            odds.append(("taken", faults.taken))
        if request.verb == "list":
            odds.append(("stale", faults.stale))
        drawn = self.world.rng.random()
        for fate, probability in odds:
            if drawn < probability:
                return fate
            drawn -= probability
        return "ok"

    def _perform(self, who: str, request: Request, fate: str) -> Any:
        match request.verb:
            case "create":
                return fate != "taken" and self.put(who, request.key, request.data)
            case "get":
                return self.objects.get(request.key)
            case "list":
                seconds = self.world.rng.uniform(0, self._scenario.faults.stale_seconds)
                return self._list(request, seconds if fate == "stale" else 0.0)
            case "delete":
                for key in request.keys:
                    self.remove(who, key)
        return None

    def put(self, who: str, key: str, data: bytes) -> bool:
        """Creates an object if there is none."""
        if key in self.objects:
            return False
        self.objects[key] = data
        self._born[key] = self.world.now
        bisect.insort(self._keys, key)
        self._write(Stored(self.world.now, who, key, data))
        return True

    def remove(self, who: str, key: str) -> None:
        if self.objects.pop(key, None) is None:
            return
        del self._keys[bisect.bisect_left(self._keys, key)]
        self._gone.append((self.world.now, key))
        self._write(Deleted(self.world.now, who, key))

    def _list(self, request: Request, seconds: float) -> list[str]:
        keys = self._keys
        first = max(bisect.bisect_left(keys, request.key), bisect.bisect_right(keys, request.after))
        last = bisect.bisect_left(keys, request.key + "\x7f")
        found = keys[first:last]
        if not seconds:
            return found
        then = self.world.now - seconds
        back = {
            key
            for when, key in self._gone
            if when > then and key.startswith(request.key) and key > request.after
        }
        return sorted(key for key in {*found, *back} if self._born[key] <= then)


def _no_answer() -> Any:
    raise StoreUnavailable("The store did not answer; the request may have been carried out.")


def _too_many_requests() -> Any:
    raise StoreUnavailable("HTTP 429: this key was written a moment ago.")
