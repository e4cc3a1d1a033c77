"""A store in the memory of one process: for tests, examples and simulated runs."""

from __future__ import annotations

import bisect
import builtins
import threading
from collections.abc import Iterable, Sequence

from jdiloco.errors import UsageError
from jdiloco.store.arguments import KeysNested, as_views, check_key, check_prefix, check_range
from jdiloco.store.base import Buffer, Entry


class _Objects:
    """What one name holds: the bytes, and their keys in order so that a listing need not sort."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bodies: dict[str, bytes] = {}
        self.keys: list[str] = []


_named: dict[str, _Objects] = {}
_named_lock = threading.Lock()


class MemoryStore:
    """Objects in this process. All stores of one name are one store, for as long as it runs.

    Without a name nobody else can open it, and it goes when the last reference to it does.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        if name is None:
            self._objects = _Objects()
            return
        if not name:
            raise UsageError("`memory://` needs a name, such as `memory://demo`.")
        with _named_lock:
            self._objects = _named.setdefault(name, _Objects())

    @property
    def url(self) -> str:
        """`memory://name`; without a name `memory://`, which opens nothing."""
        return f"memory://{self._name or ''}"

    def __repr__(self) -> str:
        return f"MemoryStore({self._name!r})"

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        """See `Store.create`. The bytes are copied: the caller may change its buffers."""
        check_key(key)
        body = b"".join(as_views(data))
        with self._objects.lock:
            if key in self._objects.bodies:
                return False
            self._refuse_nesting(key)
            self._objects.bodies[key] = body
            bisect.insort(self._objects.keys, key)
            return True

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        """See `Store.get`."""
        check_key(key)
        check_range(start, stop)
        with self._objects.lock:
            body = self._objects.bodies.get(key)
        return None if body is None else body[start:stop]

    def list(self, prefix: str, *, after: str = "") -> builtins.list[Entry]:
        """See `Store.list`."""
        check_prefix(prefix)
        rows = []
        with self._objects.lock:
            keys = self._objects.keys
            first = max(bisect.bisect_left(keys, prefix), bisect.bisect_right(keys, after))
            for index in range(first, len(keys)):
                if not keys[index].startswith(prefix):
                    break
                rows.append(Entry(keys[index], len(self._objects.bodies[keys[index]])))
        return rows

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        doomed = builtins.list(keys)
        for key in doomed:
            check_key(key)
        with self._objects.lock:
            for key in doomed:
                if self._objects.bodies.pop(key, None) is not None:
                    del self._objects.keys[bisect.bisect_left(self._objects.keys, key)]

    def _refuse_nesting(self, key: str) -> None:
        """Refuses what a folder cannot hold, so that a test in memory finds it."""
        keys, bodies = self._objects.keys, self._objects.bodies
        below = bisect.bisect_left(keys, f"{key}/")
        if below < len(keys) and keys[below].startswith(f"{key}/"):
            raise KeysNested(key, keys[below])
        parts = key.split("/")
        for length in range(1, len(parts)):
            if (above := "/".join(parts[:length])) in bodies:
                raise KeysNested(above, key)
