"""Shared work in a simulated run: `jdiloco.runtime.work` with tasks in place of a thread."""

from __future__ import annotations

from collections.abc import Callable

from jdiloco.errors import FormatError, JDilocoError, StoreUnavailable
from jdiloco.protocol import work
from jdiloco.protocol.desk import Desk, Piece
from jdiloco.protocol.joining import Steps, Waiting
from jdiloco.protocol.keys import Keys, Pool
from jdiloco.protocol.rules import Life, Rules
from jdiloco.testing.simulate.closer import Asking
from jdiloco.testing.simulate.world import Process, Sleep, Worker

Perform = Callable[[Steps], Asking]

AGAIN_SECONDS = 2.0


class Shared:
    """A desk, and the errands it needs."""

    def __init__(
        self,
        process: Process,
        pool: Pool,
        life: Life,
        keys: Keys,
        rules: Rules,
        waiting: Waiting,
        *,
        perform: Perform,
        wake: Callable[[JDilocoError | None], None],
    ) -> None:
        self.desk = Desk(pool)
        self._process = process
        self._perform = perform
        self._wake = wake
        self._poll_seconds = waiting.poll_seconds
        self._ask_at = 0.0
        nonce = process.name.replace("#", "x")
        self._claims = work.Claims(
            keys, pool, life, waiting, in_flight=rules.in_flight, nonce=nonce
        )
        self._worker = Worker(process)
        self._marking = False

    def go_on(self) -> None:
        """Asks for what is wanted and says what may be said."""
        if self._process.now >= self._ask_at and self.desk.ask():
            self._ask_at = self._process.now + self._poll_seconds
            self._worker.submit(self._take())
        self.tidy()

    def tidy(self) -> None:
        """Says what may be said."""
        piece = self.desk.due()
        if piece is not None and not self._marking:
            self._marking = True
            self._worker.submit(self._mark(piece))

    def _take(self) -> Asking:
        try:
            self.desk.answered((yield from self._patiently(self._claims.take)))
        except FormatError as error:
            self._wake(error)
        else:
            self._wake(None)

    def _mark(self, piece: Piece) -> Asking:
        say = self._claims.complete if piece.mark == "done" else self._claims.give_back
        yield from self._patiently(lambda: say(piece.held, piece.trained))
        self.desk.marked(piece)
        self._marking = False
        self._wake(None)
        self.tidy()

    def _patiently(self, make: Callable[[], Steps]) -> Asking:
        """A store that does not answer is asked again for as long as it takes."""
        while True:
            try:
                return (yield from self._perform(make()))
            except StoreUnavailable:
                yield Sleep(AGAIN_SECONDS)
