"""Whether a store keeps the promises that a run rests on, tried out there.

`examine` makes a few objects under a name of its own, has two other processes race for some more,
and removes them all. It yields what it finds as it goes. Both processes are on this machine: what
another machine would see of a network file system only another machine can tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

from jdiloco.errors import JDilocoError, StoreDenied, StoreIgnoresConditions, StoreUnavailable
from jdiloco.runtime.clock import Clock
from jdiloco.store import FolderStore, Store
from jdiloco.store.folder import missing

T = TypeVar("T")

RACES = 20
"""Keys that two processes race for. A store that fails only now and then may pass."""

LATENCY_TRIES = 15

NAMES = ("a-b", "a.b/c", "a/b", "a/b-c", "a/c/0", "a0", "live/x", "0/1.0", "0/2.0", "1/3.0")
"""Keys that stores order differently, unless they order them as strings."""

PLACES = ("", "a", "live", "0", "0/", "0/1", "2", "z")
"""Where else to begin a listing of them."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One promise, and whether it is kept; None: nothing depends on it."""

    promise: str
    kept: bool | None
    said: str


class Broken(JDilocoError):
    """A promise is not kept; the message says what was seen instead."""


class NotTried(Exception):
    """A promise that cannot be tried here; the message says why."""


def examine(store: Store, clock: Clock, *, megabytes: float = 8.0) -> Iterator[Finding]:
    """Tries one promise after the other; stops at one that all others rest on.

    Raises StoreUnavailable where the store does not answer or refuses, StoreDenied among them.
    """
    with _Probes(store, clock) as probes:
        if probes.made:
            yield Finding("the folder", None, "did not exist; made for this, and removed again")
        for promise, attempt in (
            ("an object reads back as it was written", probes.writes_and_reads),
            ("a key is created once", probes.creates_once),
            ("of two processes that race one wins", probes.races),
            ("what another process wrote is read and listed at once", probes.shows_at_once),
            ("keys are listed in order, and from where one asks", probes.lists_in_order),
            ("objects can be deleted, also those that are gone", probes.deletes),
        ):
            try:
                yield Finding(promise, True, attempt())
            except NotTried as reason:
                yield Finding(promise, None, f"not tried, as {reason}")
            except (Broken, StoreIgnoresConditions) as error:
                yield Finding(promise, False, str(error))
                if attempt in (probes.writes_and_reads, probes.creates_once):
                    return
        for fact, measure in (
            ("listing", probes.listing_cost),
            ("latency", probes.latency),
            ("bandwidth", lambda: probes.bandwidth(megabytes)),
            ("clock", probes.clock_offset),
        ):
            yield Finding(fact, None, measure())


class _Probes:
    """The objects of one examination. They are gone when the block ends."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._top = f"doctor-{clock.fresh()}"
        self._racers: list[_Racer] = []
        self.made = missing(store.url) if isinstance(store, FolderStore) else []

    def __enter__(self) -> _Probes:
        if isinstance(self._store, FolderStore):
            self._store.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        for racer in self._racers:
            racer.stop()
        with contextlib.suppress(StoreUnavailable):
            self._store.delete([row.key for row in self._store.list(f"{self._top}/")])
        if isinstance(self._store, FolderStore):
            self._remove_folders(self._store.url)

    def _remove_folders(self, root: str) -> None:
        """Those that are empty: a run's writers make theirs again when they miss it."""
        for path in (f"{root}/~writing", *self.made):
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def _key(self, name: str) -> str:
        return f"{self._top}/{name}"

    # Promises

    def writes_and_reads(self) -> str:
        key, body = self._key("whole"), bytes(range(256)) * 40
        if not self._store.create(key, [body[:5000], body[5000:]]):
            raise Broken("a key that nobody ever used was said to be taken")
        for start, stop in ((0, None), (100, 200), (10_000, 99_999)):
            if self._store.get(key, start=start, stop=stop) != body[start:stop]:
                raise Broken(f"bytes {start} to {stop or 'the end'} came back as others")
        if self._store.get(self._key("nothing")) is not None:
            raise Broken("an object was read that nobody wrote")
        return f"{len(body):,} bytes, whole and in part"

    def creates_once(self) -> str:
        key = self._key("once")
        self._store.create(key, b"first")
        again = self._store.create(key, b"second")
        found = self._store.get(key)
        if again or found != b"first":
            raise Broken(
                "a second create of one key succeeded and replaced what was there: the condition "
                "(`If-None-Match: *`) is ignored"
            )
        return "the second create was refused, and the first bytes stayed"

    def races(self) -> str:
        doubtful, racers = 0, self._two_processes()
        for number in range(RACES):
            key = self._key(f"race/{number:03}")
            for racer in racers:
                racer.ask(key)
            answers = [racer.answer() for racer in racers]
            winners = [i for i, answer in enumerate(answers) if answer == "True"]
            found = self._store.get(key)
            if len(winners) > 1:
                raise Broken(f"both of two writers of one key succeeded, at try {number + 1}")
            if winners and found != racers[winners[0]].body:
                raise Broken("the winner's bytes are not what the key holds")
            doubtful += not winners
        said = f"{RACES} keys, one winner each"
        return said if not doubtful else f"{said}, but {doubtful} whose writers were not told"

    def _two_processes(self) -> list[_Racer]:
        if self._store.url.startswith("memory://"):
            raise NotTried("no other process can reach what is in the memory of this one")
        if not self._racers:
            self._racers = [_Racer(self._store.url, name) for name in ("one", "two")]
        return self._racers

    def shows_at_once(self) -> str:
        racers = self._two_processes()
        for number in range(RACES):
            key, racer = self._key(f"seen/{number:03}"), racers[number % 2]
            racer.ask(key)
            racer.answer()
            rows = [row.key for row in self._store.list(self._key("seen/"))]
            if key not in rows:
                raise Broken(f"a listing right after write {number + 1} did not show it")
            if self._store.get(key) != racer.body:
                raise Broken(f"reading right after write {number + 1} did not find it")
        return f"{RACES} of {RACES} writes"

    def lists_in_order(self) -> str:
        top = self._key("order/")
        wanted = sorted(top + name for name in NAMES)
        for key in wanted:
            self._store.create(key, b"")
        for after in (*NAMES, *PLACES):
            found = [row.key for row in self._store.list(top, after=top + after)]
            if found != [key for key in wanted if key > top + after]:
                raise Broken(f"what is listed after `{after}` is not what comes after it")
        return f"{len(wanted)} keys, from {len(NAMES) + len(PLACES)} places"

    def deletes(self) -> str:
        keys = [self._key(f"order/{name}") for name in ("a0", "a-b", "never")]
        try:
            for _ in range(2):
                self._store.delete(keys)
        except StoreDenied as error:
            raise Broken(f"{error} What was tried out here has to be removed by hand.") from None
        left = {row.key for row in self._store.list(self._key("order/"))}
        if left & {*keys} or any(self._store.get(key) is not None for key in keys):
            raise Broken("an object was there after it had been deleted")
        return "twice the same, without a complaint"

    # Figures

    def listing_cost(self) -> str:
        for number in range(3):
            self._store.create(self._key(f"cost/{number}"), b"")
        self._store.list(self._key("cost/"), after=self._key("cost/1"))
        if getattr(self._store, "honoured_after", None) is False:
            return (
                "begins at the start whatever is asked for, so once a run has a thousand rounds a "
                "look at it costs three listings instead of one"
            )
        return "one request for a look at a run"

    def latency(self) -> str:
        key = self._key("latency")
        self._store.create(key, b"1")
        prefix = self._key("latency")
        timed = {
            "create": [
                self._timed(lambda n=n: self._store.create(f"{key}.{n}", b"")) for n in _tries()
            ],
            "read": [self._timed(lambda: self._store.get(key)) for _ in _tries()],
            "list": [self._timed(lambda: self._store.list(prefix)) for _ in _tries()],
        }
        said = [
            f"{verb} {1000 * statistics.median(times):.1f} ms (at most {1000 * max(times):.1f})"
            for verb, times in timed.items()
        ]
        slowest = max(max(times) for times in timed.values())
        return f"{', '.join(said)}; `beat_seconds` of {max(1, round(10 * slowest))} or more suit it"

    def bandwidth(self, megabytes: float) -> str:
        key, body = self._key("bulk"), os.urandom(int(megabytes * 1e6))
        up = self._timed(lambda: self._store.create(key, body))
        down = self._timed(lambda: self._store.get(key))
        return (
            f"{megabytes / up:.1f} MB/s there, {megabytes / down:.1f} MB/s back, "
            f"of one object of {megabytes:g} MB"
        )

    def clock_offset(self) -> str:
        dated = getattr(self._store, "dated", None)
        key = self._key("clock")
        self._store.create(key, b"")
        written = dated(key) if dated else None
        if written is None:
            return "the store has none"
        ahead = (written - datetime.datetime.now(datetime.UTC)).total_seconds()
        return f"the store's is {ahead:+z.1f} s from this machine's; nothing depends on it"

    def _timed(self, step: Callable[[], object]) -> float:
        began = self._clock.now()
        step()
        return max(self._clock.now() - began, 1e-9)


def _tries() -> range:
    return range(LATENCY_TRIES)


class _Racer:
    """Another process that creates what it is told to, with bytes of its own."""

    def __init__(self, url: str, name: str) -> None:
        self.body = f"written by {name}".encode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jdiloco.cli.doctor_racer", url, self.body.decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()  # That it is ready.

    def ask(self, key: str) -> None:
        """Has it create `key`; does not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{key}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """`True`, `False`, or the error it met."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise StoreUnavailable("The other process ended: it could not open this store.")
        return line.strip()

    def stop(self) -> None:
        """It is gone when this returns."""
        self._process.kill()
        self._process.communicate()


def run_doctor(store: Store, *, megabytes: float, show: Callable[[str], object]) -> int:
    """Examines, and shows a line for each finding; 0: it can carry a run, 1: it cannot."""
    show(store.url)
    findings = []
    for finding in examine(store, Clock(), megabytes=megabytes):
        findings.append(finding)
        mark = {True: "kept", False: "BROKEN", None: ""}[finding.kept]
        show(f"  {mark:7}{finding.promise}: {finding.said}")
    if any(finding.kept is False for finding in findings):
        show("No run can be kept here. Choose another store.")
        return 1
    show("This store can carry a run.")
    return 0
