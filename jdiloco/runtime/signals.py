"""SIGTERM and Ctrl-C, for every session that is open in the main thread.

The first signal is told to all of them, and the handlers from before are put back: a second one
acts as if there were no session. A handler that the program has set itself stays.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

NUMBERS = (signal.SIGTERM, signal.SIGINT)

_listeners: list[Callable[[int], None]] = []
_before: dict[int, Any] = {}


@contextlib.contextmanager
def listening(listener: Callable[[int], None]) -> Iterator[None]:
    """Calls `listener` with the number of the first signal; not outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _listeners.append(listener)
    _install()
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners:
            _restore()


def _install() -> None:
    for number in NUMBERS:
        handler = signal.getsignal(number)
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            _before[number] = handler
            signal.signal(number, _on_signal)


def _restore() -> None:
    for number, handler in list(_before.items()):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, handler)
    _before.clear()


def _on_signal(number: int, frame: Any) -> None:
    del frame
    _restore()
    for listener in _listeners:
        listener(number)
