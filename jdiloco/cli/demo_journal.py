"""How the processes of a demo tell their parent what happens: a file of JSON lines each.

A journal outlives its writer, whatever kills it, and a reader that finds half a line waits for the
other half. Besides the library's events there are two kinds of line, both with `time`, the seconds
since the process started:

    {"step": 120, "loss": 2.31, "samples": 480, "time": 14.2}   the mean loss since the last such
    {"held_out": 2.05, "time": 14.9}                            with `"final": true` in the last
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jdiloco.events import Event

Line = dict[str, Any]


class Journal:
    """The writing side. Events come from several threads, so lines are written under a lock."""

    def __init__(self, path: Path, seconds: Callable[[], float]):
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()
        self._seconds = seconds

    def write(self, **values: Any) -> None:
        """Adds a line."""
        line = json.dumps({**values, "time": round(self._seconds(), 3)})
        with self._lock:
            self._file.write(line + "\n")

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def record(self, event: Event) -> None:
        """Adds an event; a callback for `jdiloco.Session`."""
        self.write(**event.fields())


class Follower:
    """The reading side: hands out every complete line once."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0

    def read(self) -> list[Line]:
        """The lines that were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
