"""A pod's contributions on their way out: a part from each process, then the head.

Every process sends what it holds first copies of. The one that speaks for the pod looks for the
parts, which have its own processes' numbers and their hashes in their keys, and once all are there
it writes the head that names them. Until then the mailbox shows no contribution.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from jdiloco.errors import StoreUnavailable
from jdiloco.protocol.keys import Keys
from jdiloco.protocol.records import ContributionHead, Payload
from jdiloco.runtime import contributions
from jdiloco.runtime.pieces import Pieces
from jdiloco.runtime.pods import parts
from jdiloco.runtime.workers import Worker
from jdiloco.store.base import Buffer, Store
from jdiloco.store.settle import create_owned
from jdiloco.store.signed import signer_of

logger = logging.getLogger("jdiloco")

FIRST_LOOK = 0.02
LONGEST_LOOK = 1.0
"""Seconds between two listings while a part is missing; they grow from the first to the second."""

WAITS = (0.1, 0.3)

Fetch = Callable[[], Mapping[str, Pieces]]


class Desk:
    """Sends this process's parts, and looks for those of the others."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        process: int,
        *,
        now: Callable[[], float],
        sleep: Callable[[float], object],
        patience: float,
        compression: str | None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._process = process
        self._now = now
        self._sleep = sleep
        self._patience = patience
        self._compression = compression
        self._closed = False

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._closed = True

    # The process that speaks

    def encode(
        self, key: str, head: ContributionHead, share: Mapping[str, Pieces]
    ) -> Sequence[Buffer]:
        """The head, once the parts are there, of this process too.

        An empty contribution when one of the processes could not bring its part to the host.
        Raises StoreUnavailable when a part has not come for a lease timeout.
        """
        senders = frozenset[int]().union(*(pieces.senders for pieces in share.values()))
        if self._process in senders:
            self._create(head, parts.encode(share, compression=self._compression))
        found, signer = self._await(head, senders), signer_of(self._store)
        if any(part.sha256 == parts.FAILED_SHA256 for part in found):
            empty = msgspec.structs.replace(head, empty=True)
            return contributions.encode(key, empty, {}, signer=signer)
        named = msgspec.structs.replace(head, parts=found)
        return contributions.encode(key, named, {}, signer=signer)

    def _await(self, head: ContributionHead, senders: frozenset[int]) -> tuple[Payload, ...]:
        deadline, wait = self._now() + self._patience, FIRST_LOOK
        while True:
            found = self._listed(head)
            if senders <= found.keys():
                return tuple(found[process] for process in sorted(senders))
            if self._closed or self._now() > deadline:
                missing = ", ".join(map(str, sorted(senders - found.keys())))
                raise StoreUnavailable(
                    f"The parts of processes {missing} for round {head.round} have not come for "
                    f"{self._patience:.0f} s."
                )
            self._sleep(wait)
            wait = min(1.5 * wait, LONGEST_LOOK)

    def _listed(self, head: ContributionHead) -> dict[int, Payload]:
        found: dict[int, Payload] = {}
        for entry in self._store.list(self._keys.parts(head.round, head.node, head.incarnation)):
            part = self._keys.parse_part(entry.key)
            if part is not None:
                found.setdefault(part.process, Payload(entry.key, entry.size, part.sha256))
        return found

    def withdraw(self, round: int, node: str, incarnation: int) -> None:
        """Removes the parts of a contribution that was too late."""
        listed = self._store.list(self._keys.parts(round, node, incarnation))
        self._store.delete([entry.key for entry in listed])

    # Every process

    def send(self, head: ContributionHead, fetch: Fetch) -> bool:
        """Sends this process's part, if it has one; False when the store did not answer."""
        try:
            share = fetch()
            here = any(self._process in pieces.senders for pieces in share.values())
            data = parts.encode(share, compression=self._compression) if here else None
        except Exception:
            logger.exception("the share of round %d could not be made", head.round)
            data = parts.FAILED
        try:
            if data is not None:
                self._create(head, data)
        except StoreUnavailable:
            return False
        return True

    def _create(self, head: ContributionHead, data: Sequence[Buffer]) -> None:
        where = (head.round, head.node, head.incarnation, self._process)
        key = parts.part_key(self._keys, *where, data)
        create_owned(self._store, key, data, waits=WAITS, sleep=self._sleep)


class Sending:
    """A thread that sends parts until they have landed or nobody wants them any more."""

    def __init__(self, desk: Desk, sleep: Callable[[float], object], poll_seconds: float) -> None:
        self._desk = desk
        self._sleep = sleep
        self._poll_seconds = poll_seconds
        self._settled = -1  # The newest round that has a record.
        self._closed = threading.Event()
        self.worker = Worker("upload", lambda error: None)

    def submit(self, head: ContributionHead, fetch: Fetch) -> None:
        """Sends the share of a contribution."""

        def job() -> None:
            while head.round > self._settled and not self._closed.is_set():
                if self._desk.send(head, fetch):
                    return
                self._sleep(self._poll_seconds)

        self.worker.submit(job)

    def settle(self, round: int) -> None:
        """The record of a round has been read."""
        self._settled = max(self._settled, round)

    def close(self) -> None:
        """Begins nothing new."""
        self._closed.set()
        self._desk.close()
