"""Library threads: each does one kind of request, in order."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger("jdiloco")

Job = Callable[[], object]

EXIT_SECONDS = 10.0
"""How long the end of a program waits for a request under way, for each thread that has one."""

_alive: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """A thread that runs jobs one after another.

    A daemon, so that a store that hangs cannot keep a program from ending. A job answers for its
    own failures; one that does not is a fault of ours: it is logged and the next job runs. What is
    no `Exception` is meant for the program: `failed` is given it.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"jdiloco-{name}", daemon=True)
        self._thread.start()
        _alive.add(self)

    def submit(self, job: Job) -> None:
        """Runs `job` after those before it."""
        self._jobs.put(job)

    def drop(self) -> None:
        """Forgets the jobs that have not begun."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()

    def stop(self) -> None:
        """Ends after the jobs that are queued; returns at once."""
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Waits until it has ended; False when it has not after `seconds`."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a request failed in a way nobody foresaw")
            except BaseException as error:
                self._failed(error)
            del job  # It may hold a whole model, and the next one may be long in coming.


@atexit.register
def _end_all() -> None:
    """Lets requests under way end before the interpreter does.

    A daemon thread that is inside JAX when the interpreter is taken down crashes the process.
    """
    for worker in list(_alive):
        worker.drop()
        worker.stop()
    for worker in list(_alive):
        worker.join(EXIT_SECONDS)
