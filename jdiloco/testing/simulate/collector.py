"""Somebody who calls for `garbage` while a simulated run goes on, or after it."""

from __future__ import annotations

from collections.abc import Callable

from jdiloco.errors import JDilocoError
from jdiloco.protocol import garbage
from jdiloco.protocol.keys import MANIFEST
from jdiloco.protocol.records import Manifest, unseal
from jdiloco.testing.simulate.closer import Asking
from jdiloco.testing.simulate.history import Entry, Fate
from jdiloco.testing.simulate.mailbox import Mailbox
from jdiloco.testing.simulate.performing import ask, perform
from jdiloco.testing.simulate.scenario import Collection, Scenario
from jdiloco.testing.simulate.world import Process, World


class Collector(Process):
    """One call. It joins nothing, and may die after any of its requests."""

    def __init__(
        self,
        world: World,
        mailbox: Mailbox,
        scenario: Scenario,
        plan: Collection,
        *,
        number: int,
        write: Callable[[Entry], None],
    ) -> None:
        super().__init__(world, f"gc#{number}", 0.0)
        self._mailbox = mailbox
        self._scenario = scenario
        self._requests = plan.requests
        self._write = write

    def start(self) -> None:
        self.run(self._collect())

    def lives_to_send(self, verb: str, keys: tuple[str, ...]) -> int:
        del verb
        if self._requests is None:
            return len(keys)
        sent = min(len(keys), self._requests)
        self._requests -= sent
        if sent < len(keys):
            self._end("ended", "killed")
        return sent

    def _end(self, kind: str, detail: str = "") -> None:
        self._write(Fate(self.world.now, self.name, kind, detail))
        self.die()

    def _collect(self) -> Asking:
        try:
            data = yield self._mailbox.get(MANIFEST)
            if data is None:
                self._end("ended", "no run")
                return
            manifest = unseal(MANIFEST, data, Manifest)
            look = garbage.look_through(manifest, data, self._scenario.rules)
            found = yield from self._perform(look)
            yield from self._perform(garbage.remove(found))
        except JDilocoError as error:
            self._end("ended", f"{type(error).__name__}: {error}")
            return
        removed = sum(map(len, found.values()))
        self._end("ended", f"removed {removed}")

    def _perform(self, steps) -> Asking:
        return (yield from perform(steps, lambda request: ask(self._mailbox, request)))
