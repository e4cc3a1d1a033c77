"""A store that counts what is asked of it: requests and bytes are what a bucket sells."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable, Sequence

import msgspec

from jdiloco.store.arguments import as_views
from jdiloco.store.base import Buffer, Entry, Store, small_requests
from jdiloco.types import Spent


class Tally(msgspec.Struct):
    """What went through one verb."""

    requests: int = 0
    keys: int = 0  # Created, found, listed, or asked to be deleted.
    bytes: int = 0  # Bodies sent or received; of listings the keys.


class CountingStore:
    """`inner`, with `tallies` of what went through each verb. A request that raises counts too.

    A call counts as one request. A bucket makes more of a listing of over a thousand keys and of an
    object of over 64 MiB, and of what its client tries again.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.tallies = {verb: Tally() for verb in ("create", "get", "list", "delete")}
        self._lock = threading.Lock()

    def within(self, seconds: float) -> CountingStore:
        """See `Bounded.within`. What goes this way is counted with all the rest."""
        small = CountingStore(small_requests(self.inner, seconds))
        small.tallies, small._lock = self.tallies, self._lock
        return small

    @property
    def url(self) -> str:
        """That of the store within."""
        return self.inner.url

    @property
    def requests(self) -> int:
        """Requests of all verbs."""
        return sum(tally.requests for tally in self.tallies.values())

    @property
    def bytes(self) -> int:
        """Bytes of all verbs."""
        return sum(tally.bytes for tally in self.tallies.values())

    @property
    def spent(self) -> Spent:
        """All of it so far."""
        with self._lock:
            create, get, list, delete = self.tallies.values()
            return Spent(
                creates=create.requests,
                gets=get.requests,
                lists=list.requests,
                deletes=delete.requests,
                sent=create.bytes,
                received=get.bytes + list.bytes,
            )

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        """See `Store.create`."""
        views = as_views(data)
        self._count("create", requests=1, bytes=sum(view.nbytes for view in views))
        created = self.inner.create(key, views)
        self._count("create", keys=int(created))
        return created

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> builtins.bytes | None:
        """See `Store.get`."""
        self._count("get", requests=1)
        body = self.inner.get(key, start=start, stop=stop)
        if body is not None:
            self._count("get", keys=1, bytes=len(body))
        return body

    def list(self, prefix: str, *, after: str = "") -> builtins.list[Entry]:
        """See `Store.list`."""
        self._count("list", requests=1)
        rows = self.inner.list(prefix, after=after)
        self._count("list", keys=len(rows), bytes=sum(len(row.key) for row in rows))
        return rows

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        doomed = builtins.list(keys)
        self._count("delete", requests=1, keys=len(doomed))
        self.inner.delete(doomed)

    def _count(self, verb: str, *, requests: int = 0, keys: int = 0, bytes: int = 0) -> None:
        with self._lock:
            tally = self.tallies[verb]
            tally.requests += requests
            tally.keys += keys
            tally.bytes += bytes
