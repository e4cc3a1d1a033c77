"""A store that every process of a simulated run shares: it takes its time, and misbehaves.

A create that gets no answer may still land, at once or seconds later, whether its sender lives or
not; a listing may show the mailbox as it was; a create may be refused with nothing stored. What it
never does is to break a promise of `jdiloco.store.base`: of several creates of one key one wins,
and a completed create is found by every later `get`.

In a signed run it holds names and bytes as `jdiloco.protocol.signing` makes them, and each process
asks through a door of its own. Whether what that lets in was written by a node is known here.
"""

from __future__ import annotations

import bisect
import builtins
import dataclasses
from collections.abc import Callable
from typing import Any

from jdiloco.errors import StoreUnavailable
from jdiloco.protocol import signing
from jdiloco.protocol.signing import RunKey
from jdiloco.testing.simulate.history import (
    Asked,
    Believed,
    Deleted,
    Entry,
    Forged,
    Sent,
    Stored,
)
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


SECRET = RunKey(b"the secret of every signed run here")


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
        self.past: dict[str, bytes] = {}  # What has been deleted.
        self.laid: builtins.list[str] = []  # Every name that ever came to lie here, in order.
        self._written: dict[str, bytes] = {}  # By nodes, whatever has become of it.
        self._read: dict[str, str | None] = {}  # What names stand for, as far as it was asked.

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
                return self._get(who, request.key)
            case "list":
                seconds = self.world.rng.uniform(0, self._scenario.faults.stale_seconds)
                return self._list(who, request, seconds if fate == "stale" else 0.0)
            case "delete":
                for key in request.keys:
                    self.remove(who, key)
        return None

    def put(self, who: str, key: str, data: bytes) -> bool:
        """Creates an object if there is none."""
        name, body = self._closed(key, data)
        if not self._lay(name, body):
            return False
        self._written[key] = data
        self._write(Stored(self.world.now, who, key, data))
        return True

    def remove(self, who: str, key: str) -> None:
        name, _ = self._closed(key, b"")
        data = self.objects.pop(name, None)
        if data is None:
            return
        self.past[name] = data
        del self._keys[bisect.bisect_left(self._keys, name)]
        self._gone.append((self.world.now, name))
        self._write(Deleted(self.world.now, who, key))

    def _lay(self, name: str, data: bytes) -> bool:
        if name in self.objects:
            return False
        self.objects[name] = data
        self.laid.append(name)
        self._born[name] = self.world.now
        bisect.insort(self._keys, name)
        return True

    def _get(self, who: str, key: str) -> bytes | None:
        name, _ = self._closed(key, b"")
        data = self.objects.get(name)
        if data is None or not _is_signed(key):
            return data  # Of all else the reader knows the hash.
        if self._scenario.signed:
            data = SECRET.open(key, data)
        if data is not None and data != self._written.get(key):
            self._write(Believed(self.world.now, who, key))
        return data

    def _list(self, who: str, request: Request, seconds: float) -> builtins.list[str]:
        prefix, after = request.key, request.after
        if self._scenario.signed:
            prefix, after = SECRET.prefix(prefix), SECRET.after(after)
        names = self._names(prefix, after, seconds)
        if not self._scenario.signed:
            found = names
        else:
            read = map(self._key, names)
            found = sorted(
                key for key in read if key and key.startswith(request.key) and key > request.after
            )
        for key in found:
            if key not in self._written:
                self._write(Believed(self.world.now, who, key))
        return found

    def _key(self, name: str) -> str | None:
        if name not in self._read:
            self._read[name] = SECRET.read_name(name)
        return self._read[name]

    def _names(self, prefix: str, after: str, seconds: float) -> builtins.list[str]:
        keys = self._keys
        first = max(bisect.bisect_left(keys, prefix), bisect.bisect_right(keys, after))
        last = bisect.bisect_left(keys, prefix + "\x7f")
        found = keys[first:last]
        if not seconds:
            return found
        then = self.world.now - seconds
        back = {
            key
            for when, key in self._gone
            if when > then and key.startswith(prefix) and key > after
        }
        return sorted(key for key in {*found, *back} if self._born[key] <= then)

    # What is behind the doors

    def _closed(self, key: str, data: bytes) -> tuple[str, bytes]:
        """An object as it lies there."""
        if not self._scenario.signed:
            return key, data
        return SECRET.name(key), SECRET.close(key, data) if _is_signed(key) else data

    @property
    def opened(self) -> dict[str, bytes]:
        """What lies there of all that nodes wrote."""
        written = self._written.items()
        return {key: data for key, data in written if self._closed(key, b"")[0] in self.objects}

    def forge(self, who: str, name: str, data: bytes, how: str, *, over: bool = False) -> None:
        """Puts an object there, by its name, for somebody who has no door."""
        if over and name in self.objects:
            self.objects[name] = data
        elif not self._lay(name, data):
            return
        self._write(Forged(self.world.now, who, name, how))


def _is_signed(key: str) -> bool:
    """The same as in a real run, and contributions: here they are signed as a whole."""
    return signing.is_signed(key) or signing.is_contribution(key)


def _no_answer() -> Any:
    raise StoreUnavailable("The store did not answer; the request may have been carried out.")


def _too_many_requests() -> Any:
    raise StoreUnavailable("HTTP 429: this key was written a moment ago.")
