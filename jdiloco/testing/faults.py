"""Stores that misbehave on request.

    store = FaultyStore(MemoryStore(), {3: LOSE_ANSWER, 5: FAIL})

The third request is carried out and its answer lost; the fifth never arrives. A function says more:
`lambda call: FAIL if call.verb == "list" and call.number < 20 else None` is an outage of listings,
and one that blocks is a slow store. A fault that a verb does not have leaves it as it is, so every
fault can be tried at every request. The same script gives the same faults every time: there is no
chance in here. Requests count from 1, over all verbs, in the order in which they arrive.
"""

from __future__ import annotations

import builtins
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from jdiloco.errors import StoreUnavailable
from jdiloco.store.base import Buffer, Entry, Store, small_requests

T = TypeVar("T")


class Call(msgspec.Struct, frozen=True):
    """One request as a script sees it."""

    number: int  # The first is 1.
    verb: str  # `create`, `get`, `list` or `delete`.
    key: str  # The prefix, for `list`; for `delete` the keys with blanks between them.


class Fail(msgspec.Struct, frozen=True):
    """The request never arrives: nothing happens and StoreUnavailable is raised."""


class LoseAnswer(msgspec.Struct, frozen=True):
    """The request is carried out; then StoreUnavailable is raised."""


class SayTaken(msgspec.Struct, frozen=True):
    """A `create` answers that the key is taken and stores nothing, whether it is taken or not."""


class IgnoreCondition(msgspec.Struct, frozen=True):
    """A `create` replaces what is there and answers that it created it."""


class Hide(msgspec.Struct, frozen=True):
    """Keys stay out of the next `lists` listings; `get` finds them all the same.

    Said of a `create`, its key; said of a `list`, every key that contains `part`, beginning with
    that very listing.
    """

    lists: int = 1
    part: str = ""


class Crash(msgspec.Struct, frozen=True):
    """The process dies: once the request is carried out, or before it. No later one arrives."""

    before: bool = False
    keys: int | None = None  # A `delete` removes so many before the process dies; None: all.


Fault = Fail | LoseAnswer | SayTaken | IgnoreCondition | Hide | Crash
Script = Mapping[int, Fault | None] | Callable[[Call], Fault | None]

FAIL = Fail()
LOSE_ANSWER = LoseAnswer()
SAY_TAKEN = SayTaken()
IGNORE_CONDITION = IgnoreCondition()
CRASH = Crash()
CRASH_BEFORE = Crash(before=True)


class Crashed(BaseException):
    """Stands for a killed process. No Exception, so that nothing which tidies up catches it."""


class FaultyStore:
    """`inner`, but for what `script` orders. `calls` holds every request so far, in order.

    Small requests that go their own way (`within`) are counted and broken with all others.
    """

    def __init__(self, inner: Store, script: Script) -> None:
        self.inner = inner
        self.calls: builtins.list[Call] = []
        self._script = script
        self._process = _Process()

    def within(self, seconds: float) -> FaultyStore:
        """See `Bounded.within`."""
        small = copy.copy(self)
        small.inner = small_requests(self.inner, seconds)
        return small

    @property
    def url(self) -> str:
        """That of the store within."""
        return self.inner.url

    @property
    def crashed(self) -> bool:
        """Whether the process that uses this store has died."""
        return self._process.crashed

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        """See `Store.create`."""
        fault = self._next("create", key)
        match fault:
            case SayTaken():
                return False
            case IgnoreCondition():
                self.inner.delete([key])
            case Hide(lists):
                self._hide(lambda other: other == key, lists)
        return self._answer(fault, lambda: self.inner.create(key, data))

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        """See `Store.get`."""
        fault = self._next("get", key)
        return self._answer(fault, lambda: self.inner.get(key, start=start, stop=stop))

    def list(self, prefix: str, *, after: str = "") -> builtins.list[Entry]:
        """See `Store.list`."""
        fault = self._next("list", prefix)
        if isinstance(fault, Hide):
            part = fault.part
            self._hide(lambda key: part in key, fault.lists)
        rows = self._answer(fault, lambda: self.inner.list(prefix, after=after))
        hiding = self._count_listing()
        return [row for row in rows if not any(hidden.hides(row.key) for hidden in hiding)]

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        doomed = builtins.list(keys)
        fault = self._next("delete", " ".join(doomed))
        if isinstance(fault, Crash) and fault.keys is not None:
            doomed = doomed[: fault.keys]
        self._answer(fault, lambda: self.inner.delete(doomed))

    def _next(self, verb: str, key: str) -> Fault | None:
        """Counts the request, asks the script about it and does what comes before the request."""
        with self._process.lock:
            if self._process.crashed:
                raise Crashed("This process died at an earlier request.")
            call = Call(len(self.calls) + 1, verb, key)
            self.calls.append(call)
        script = self._script
        fault = script.get(call.number) if isinstance(script, Mapping) else script(call)
        match fault:
            case Fail():
                raise StoreUnavailable(f"{verb} `{key}`: request {call.number} was made to fail.")
            case Crash(before=True):
                self._crash()
        return fault

    def _answer(self, fault: Fault | None, request: Callable[[], T]) -> T:
        """Carries out the request and does what comes after it."""
        answer = request()
        match fault:
            case LoseAnswer():
                raise StoreUnavailable("The request was carried out and its answer lost.")
            case Crash():
                self._crash()
        return answer

    def _crash(self) -> None:
        self._process.crashed = True
        raise Crashed("This process was made to die.")

    def _hide(self, hides: Callable[[str], bool], lists: int) -> None:
        with self._process.lock:
            self._process.hidden.append(_Hidden(hides, lists))

    def _count_listing(self) -> Sequence[_Hidden]:
        """What is hidden from the listing being answered; counts it against each."""
        with self._process.lock:
            hiding = self._process.hidden
            left = [_Hidden(hidden.hides, hidden.lists - 1) for hidden in hiding]
            self._process.hidden = [hidden for hidden in left if hidden.lists > 0]
        return hiding


class _Hidden(msgspec.Struct, frozen=True):
    hides: Callable[[str], bool]
    lists: int


class _Process:
    """What all ways to one faulty store share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.crashed = False
        self.hidden: list[_Hidden] = []


def crash_after(requests: int) -> Script:
    """The script of a process that carries out so many requests and dies; 0: dies at the first."""
    return {1: CRASH_BEFORE} if requests == 0 else {requests: CRASH}


def crash_after_writes(writes: int, *, besides: tuple[str, ...] = ()) -> Script:
    """The script of a process that changes so much in the store and dies before the next change.

    A create is one change, and so is each key of a delete; what is only read does not count, nor do
    creates of keys that contain one of `besides`.
    """
    lock = threading.Lock()
    done = 0

    def script(call: Call) -> Fault | None:
        nonlocal done
        beside = call.verb == "create" and any(part in call.key for part in besides)
        if call.verb not in ("create", "delete") or beside:
            return None
        count = len(call.key.split())
        with lock:
            left, done = writes - done, done + count
        if count <= left:
            return None
        return Crash(keys=left) if left > 0 else CRASH_BEFORE

    return script


def crash_prefixes(
    make: Callable[[], Store], program: Callable[[Store], object], *, requests_max: int = 1000
) -> Iterator[tuple[int, Store]]:
    """Runs `program` again and again, killing it after 0, 1, 2, … requests, until it ends.

    Each run has a fresh store from `make`. Yields how many requests were carried out and the store
    as the dead process left it, for the caller to restart from; last comes the run that ended.
    """
    for requests in range(requests_max + 1):
        store = FaultyStore(make(), crash_after(requests))
        try:
            program(store)
        except Crashed:
            yield requests, store.inner
            continue
        yield len(store.calls), store.inner
        return
    raise AssertionError(f"the program had not ended after {requests_max} requests")
