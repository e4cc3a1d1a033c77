"""The store: four verbs, and nothing that needs compare-and-swap.

Objects are created once and never changed, which every bucket and every folder can do. What the
protocol relies on is written down as tests, in `jdiloco.testing.conformance`:

* `create` lets exactly one of any number of racing writers win, and what can be read afterwards
  is that writer's bytes, whole;
* a completed create is seen by every later `get` and `list`, of any process;
* a writer that dies leaves either its whole object or nothing that a reader can see;
* keys are ordered and matched as strings: `a.b` comes before `a/b`, and `a/b` begins `a/bc`.

A call that got no clear answer raises `StoreUnavailable`; the write may have landed. Callers
settle such a doubt by reading back (`jdiloco.store.settle`), never by trusting the answer.

Requests are of two kinds. Small ones (listings, beats, claims, records) keep a lease alive and must
end soon; bulk ones may take as long as their size needs. A store as it was opened is for both; one
with connections to keep apart gives a second one for the small (`Bounded`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

Buffer = bytes | bytearray | memoryview


class Entry(msgspec.Struct, frozen=True, order=True):
    """One row of a listing."""

    key: str
    size: int  # Bytes.


@runtime_checkable
class Store(Protocol):
    """A place for objects. Any number of threads may use one store at once.

    Keys are `/`-separated parts of `[A-Za-z0-9._-]`, none ending in `.`; any other key is refused
    with UsageError (`jdiloco.store.arguments`). No key goes on after another key and a `/`: a
    folder cannot hold both.
    """

    @property
    def url(self) -> str:
        """Where this is, as a user would write it."""
        ...

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        """Writes an object unless the key is taken; several buffers are written one after another.

        When it returns the buffers are the caller's again. Returns True when this call created
        it and False when something is there already (or a store says so: some do with nothing
        stored). Raises StoreUnavailable without a clear answer.
        """
        ...

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        """The object's bytes, or those from `start` up to `stop`; None when there is none.

        A range is what a slice would be: what lies past the end is left out. Neither end may be
        negative.
        """
        ...

    def list(self, prefix: str, *, after: str = "") -> list[Entry]:
        """Every object whose key begins with `prefix` and is greater than `after`, in key order."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Removes objects; keys that are not there are ignored.

        Not all or nothing: when it raises, any of them may be gone. It can be called again.
        """
        ...


@runtime_checkable
class Bounded(Protocol):
    """A store that can say when a request has taken too long."""

    def within(self, seconds: float) -> Store:
        """The same objects, for small requests only: each ends within `seconds`.

        They go over connections of their own, so that none waits behind a large one.
        """
        ...


def small_requests(store: Store, seconds: float) -> Store:
    """`store` for requests that have to end within `seconds`; itself where it cannot bound them."""
    return store.within(seconds) if isinstance(store, Bounded) else store
