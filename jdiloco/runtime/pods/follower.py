"""A process of a pod that does not speak to the mailbox for it: its learner's surroundings.

It sends its parts and reads its share of what is committed, on threads of its own. What its learner
would tell the others is told by the pod's head, where the same learner runs.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping

from jdiloco import events
from jdiloco.errors import FormatError, StoreUnavailable
from jdiloco.protocol.records import ContributionHead, RoundRecord
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.news import ToLearner, Values
from jdiloco.runtime.place import Place
from jdiloco.runtime.pods.desk import Desk, Sending
from jdiloco.runtime.pods.inbox import Mind, SharedInbox
from jdiloco.runtime.pods.library import ShareLibrary
from jdiloco.runtime.workers import Worker
from jdiloco.types import Spent

logger = logging.getLogger("jdiloco")


class FollowerNode:
    """What `Node` is for the process that speaks."""

    state = None  # The member's; it is known to the head alone.

    def __init__(
        self,
        place: Place,
        mind: Mind,
        desk: Desk,
        library: ShareLibrary,
        *,
        clock: Clock,
        poll_seconds: float,
    ) -> None:
        self.place = place
        self.to_learner: queue.SimpleQueue[ToLearner] = queue.SimpleQueue()
        self._mind = mind
        self._library = library
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._closed = False
        self._sending = Sending(desk, clock.sleep, poll_seconds)
        self._reading = Worker("deliver", self.halt)
        self.inbox = SharedInbox(
            self.to_learner,
            mind,
            heard=self._hear,
            share=lambda: None,
            poll_seconds=poll_seconds,
        )

    # What a learner asks of its node

    def busy(self) -> dict[str, float]:
        return {}

    def progress(self, phase: str, step: int, next_round: int) -> None:
        """The head says how far the pod is."""

    def wake(self) -> None:
        """The head's control thread looks for itself."""

    def emit(self, event: events.Event) -> None:
        """The head's learner has the same to tell."""

    def tell(self, event: events.Event) -> None:
        """The head sees what lies in the mailbox, too."""

    def spent(self) -> Spent:
        """It goes to the head with every row, and is counted there."""
        return Spent()

    def contribute(self, head: ContributionHead, fetch: Callable[[], Mapping]) -> None:
        self._sending.submit(head, fetch)

    def unread(self, rounds: object) -> dict:
        return {}

    def halt(self, error: BaseException) -> None:
        """Ends the training of all, at their next exchange."""
        self._mind.failed = f"{type(error).__name__}: {error}"

    def leave(self, seconds: float, *, hurry: bool) -> None:
        """Ends its threads."""
        deadline = self._clock.now() + seconds
        self._closed = True
        self._sending.close()
        for worker in (self._sending.worker, self._reading):
            if hurry:
                worker.drop()
            worker.stop()
            worker.join(deadline - self._clock.now())
        self._library.forget()

    # What the head has announced

    def _hear(self, record: RoundRecord, wanted: bool) -> None:
        self._sending.settle(record.round)
        if not wanted:
            return

        def job() -> None:
            while not self._closed:
                try:
                    self.inbox.fetched(record.round, self._read(record))
                    return
                except StoreUnavailable as error:
                    logger.info("the values of round %d did not come: %s", record.round, error)
                    self._clock.sleep(self._poll_seconds)

        self._reading.submit(job)

    def _read(self, record: RoundRecord) -> Values | None:
        """None: a newer version has replaced them, or the head would have none either."""
        try:
            return self._library.anchor(record)
        except FormatError as error:
            logger.warning("the values of round %d cannot be read: %s", record.round, error)
            return None
