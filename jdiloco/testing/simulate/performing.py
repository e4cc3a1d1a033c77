"""Generators of requests, performed with patience: `jdiloco.runtime.joining` as tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jdiloco.errors import StoreUnavailable
from jdiloco.protocol import joining
from jdiloco.protocol.joining import Steps
from jdiloco.testing.simulate import values
from jdiloco.testing.simulate.closer import Asking
from jdiloco.testing.simulate.mailbox import Mailbox
from jdiloco.testing.simulate.world import Sleep

TRIES = 8
FIRST_WAIT = 0.1
LONGEST_WAIT = 5.0


def perform(steps: Steps, answer: Callable[[joining.Request], Asking]) -> Asking:
    """Performs every request, and returns what the generator returns."""
    found: Any = None
    failure: StoreUnavailable | None = None
    while True:
        try:
            request = steps.throw(failure) if failure else steps.send(found)
        except StopIteration as done:
            return done.value
        failure = None
        try:
            found = yield from _patiently(request, answer)
        except StoreUnavailable as error:
            failure = error


def _patiently(request: joining.Request, answer: Callable[[joining.Request], Asking]) -> Asking:
    wait = FIRST_WAIT
    for left in reversed(range(TRIES)):
        try:
            return (yield from answer(request))
        except StoreUnavailable:
            if isinstance(request, joining.Create):
                return False
            if not left or isinstance(request, joining.Saved):
                raise  # What was being saved has failed for good.
        yield Sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT)
    raise AssertionError("unreachable")


def ask(mailbox: Mailbox, request: joining.Request) -> Asking:
    """What anybody can ask of a mailbox."""
    match request:
        case joining.List(prefix, after):
            return (yield mailbox.list(prefix, after))
        case joining.Get(key):
            return (yield mailbox.get(key))
        case joining.ReadHead(key):
            return values.read_head(key, (yield mailbox.get(key)))
        case joining.Create(key, data):
            return (yield mailbox.create(key, data))
        case joining.Delete(keys):
            return (yield mailbox.delete(keys))
        case joining.Sleep(seconds):
            return (yield Sleep(seconds))
    raise AssertionError(f"unreachable: {request}")
