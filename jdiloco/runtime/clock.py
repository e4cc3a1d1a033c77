"""The one door to time, fresh names and chance. Everything else is handed a Clock."""

from __future__ import annotations

import secrets
import time


class Clock:
    """The machine's own. Tests and simulators pass another with the same three methods."""

    def now(self) -> float:
        """Seconds of a clock that only moves forward; its zero means nothing."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)

    def fresh(self, digits: int = 12) -> str:
        """A name that nobody has had before: lower-case hexadecimal digits."""
        return secrets.token_hex((digits + 1) // 2)[:digits]
