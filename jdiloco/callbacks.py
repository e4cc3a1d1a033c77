"""What to do with events. A callback is any function of one event; it may run on any thread."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from jdiloco.events import Degraded, Event, Warned

logger = logging.getLogger("jdiloco")


def log_events(event: Event) -> None:
    """Logs one line for each event, under the name `jdiloco`. The default.

    Where a program has not set up logging to show them, the lines go to standard error. To have
    them elsewhere set a level or a handler for `logging.getLogger("jdiloco")` or for the root.
    """
    if not _is_set_up():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s jdiloco %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # A library's own handler at the root would say it twice.
    level = logging.WARNING if isinstance(event, (Warned, Degraded)) else logging.INFO
    logger.log(level, "%s", event)


def _is_set_up() -> bool:
    """Whether somebody chose where these lines go.

    A handler at the root alone proves nothing: importing Orbax puts one there, for warnings.
    """
    chosen = logger.handlers or logger.level != logging.NOTSET
    return bool(chosen or (logging.root.handlers and logging.root.level <= logging.INFO))


class JsonLines:
    """Appends one JSON object for each event to a file, with the class name under `event`."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf8", buffering=1)  # noqa: SIM115  (`close`)
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        line = json.dumps(event.fields())
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        """Writes what is buffered; events that come later are dropped."""
        with self._lock:
            self._file.close()
