"""Where a learner hears from the rest of its node.

Inbox               a queue that the node's threads fill
pods.SharedInbox    the same for every process of a pod, at the same steps
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable

from jdiloco.runtime.news import ToLearner

NEVER = 2**62


class Inbox:
    """The messages of one process to its own learner."""

    def __init__(self, messages: queue.SimpleQueue[ToLearner]) -> None:
        self._messages = messages
        self.pace: float | None = None  # Seconds of a usual step, as far as it is known.
        self.counted: tuple[int, int] = (0, 0)  # Steps, and samples since the learner last looked.

    @property
    def news(self) -> bool:
        """Whether there is something to take; costs nothing."""
        return not self._messages.empty()

    @property
    def look(self) -> int:
        """Steps after which the learner has to ask, whatever `news` says."""
        return NEVER

    def arrived(self) -> list[ToLearner]:
        """What has come."""
        return self._drained(0.0)

    def wait(self, seconds: float) -> list[ToLearner]:
        """What has come, once anything has or this time is over."""
        return self._drained(seconds)

    def _drained(self, seconds: float) -> list[ToLearner]:
        items: list[ToLearner] = []
        with contextlib.suppress(queue.Empty):
            while True:
                wait = 0.0 if items else seconds
                items.append(self._messages.get(block=wait > 0, timeout=wait or None))
        return items

    def agreed(self, verdict: Callable[[], bool]) -> bool:
        """What the process that speaks for the node finds; it alone is asked."""
        return verdict()
