"""What to do with events. A callback is any function of one event; it may run on any thread."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from jdiloco.events import (
    Aligned,
    Checkpointed,
    ClosingSlow,
    Degraded,
    Dropped,
    Event,
    MuchDropped,
    Published,
    Timed,
    UnitTaken,
    Waiting,
    Warned,
    WrongLedger,
)

logger = logging.getLogger("jdiloco")

TO_LOOK_AT = (ClosingSlow, Degraded, MuchDropped, Warned, WrongLedger)
"""Events that are logged as warnings."""

DETAILS = (Aligned, Checkpointed, Dropped, Published, Timed, UnitTaken, Waiting)
"""What makes up a round; `Committed` says that there was one."""


def log_events(event: Event) -> None:
    """Logs events under the name `jdiloco`, a line each. The default.

    What a user may want to look at is a warning, what makes up a round (`DETAILS`) is for level
    DEBUG. So at INFO there is a line a round, that of its commit, beside who comes, goes or fails:

        logging.getLogger("jdiloco").setLevel(logging.DEBUG)         # all of it

    Where a program has not set up logging to show them, the lines go to standard error. To have
    them elsewhere set a level or a handler for `logging.getLogger("jdiloco")` or for the root.
    """
    if not _is_set_up():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s jdiloco %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        logger.propagate = False  # A library's own handler at the root would say it twice.
    logger.log(_level(event), "%s", event)


def _level(event: Event) -> int:
    if isinstance(event, TO_LOOK_AT):
        return logging.WARNING
    return logging.DEBUG if isinstance(event, DETAILS) else logging.INFO


def _is_set_up() -> bool:
    """Whether somebody chose where these lines go.

    A handler at the root alone proves nothing: importing Orbax puts one there, for warnings.
    """
    chosen = logger.level != logging.NOTSET or logging.root.level <= logging.INFO
    return bool(logger.handlers or (logging.root.handlers and chosen))


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
