"""The one door for everything that nodes of a signed run write and read.

Names, small objects and what passes are `jdiloco.protocol.signing`'s. Callers on this side see keys
and bytes as in a run without a key; what does not carry the run key's signature is not there for
them, and is told once.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from jdiloco.protocol.signing import RunKey, is_signed
from jdiloco.store.arguments import KeysNested, as_views
from jdiloco.store.base import Buffer, Entry, Store, small_requests

FORGED_MAX = 1000
"""So many forged objects are told and remembered; whoever puts there more needs no telling."""

NAME = "has a name that was not made with the run's key"
BYTES = "holds other bytes than were signed under its name"

IN_THE_WAY = "lay where the run needs a folder, and was removed"

Told = Callable[[str, str], object]
"""Called with the name of an object, and with what is wrong with it; from any thread."""


@runtime_checkable
class Signer(Protocol):
    """Signs messages that are too large to be signed as a whole: what they say of themselves."""

    def sign(self, key: str, said: str) -> str:
        """The signature; "" in a run without a key."""
        ...

    def vouches(self, key: str, said: str, signature: str) -> bool:
        """Whether this was said by somebody who may."""
        ...


class Unsigned:
    """The signer of a run without a key: it refuses what is signed, as nobody has checked that."""

    def sign(self, key: str, said: str) -> str:
        """See `Signer`."""
        del key, said
        return ""

    def vouches(self, key: str, said: str, signature: str) -> bool:
        """See `Signer`."""
        del key, said
        return not signature


UNSIGNED = Unsigned()


class Forged:
    """The objects that were seen and are not of the run, by name, with what is wrong with them."""

    def __init__(self, told: Told = lambda name, because: None) -> None:
        self.told = told
        self._found: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def found(self) -> dict[str, str]:
        """What has been seen so far."""
        with self._lock:
            return dict(self._found)

    def note(self, name: str, because: str) -> None:
        """Tells of an object unless it has been told."""
        with self._lock:
            if name in self._found or len(self._found) >= FORGED_MAX:
                return
            self._found[name] = because
        self.told(name, because)


class SignedStore:
    """A store of which only what carries the key's signature is seen; it signs what it creates."""

    def __init__(self, inner: Store, key: RunKey, forged: Forged | None = None) -> None:
        self.inner = inner
        self.forged = forged or Forged()
        self._key = key

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self.inner.url

    def around(self, wrap: Callable[[Store], Store]) -> SignedStore:
        """The same door before another inside. What has been told is not told again."""
        return SignedStore(wrap(self.inner), self._key, self.forged)

    def name(self, key: str) -> str:
        """How the object under `key` is called in the store inside."""
        return self._key.name(key)

    def within(self, seconds: float) -> Store:
        """See `Bounded.within`."""
        return self.around(lambda inner: small_requests(inner, seconds))

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        """See `Store.create`."""
        if is_signed(key):
            data = self._key.close(key, b"".join(as_views(data)))
        name = self._key.name(key)
        try:
            return self.inner.create(name, data)
        except KeysNested as error:
            if error.below != name:
                raise
            self._clear_the_way(error.above)
        return self.inner.create(name, data)

    def _clear_the_way(self, name: str) -> None:
        """Removes what lies where a folder has to be; no object of a run lies above another.

        Directories carry no MAC, so anybody may take the name of one before the run needs it.
        """
        self.forged.note(name, IN_THE_WAY)
        self.inner.delete([name])

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        """See `Store.get`. Small objects are read whole, since only then can they be checked."""
        name = self._key.name(key)
        if not is_signed(key):
            return self.inner.get(name, start=start, stop=stop)
        data = self.inner.get(name)
        body = None if data is None else self._key.open(key, data)
        if data is not None and body is None:
            self.forged.note(name, BYTES)
        return None if body is None else body[start:stop]

    def list(self, prefix: str, *, after: str = "") -> builtins.list[Entry]:
        """See `Store.list`. Sizes are those of what lies there, signatures included."""
        rows = []
        for entry in self.inner.list(self._key.prefix(prefix), after=self._key.after(after)):
            key = self._key.read_name(entry.key)
            if key is None:
                self.forged.note(entry.key, NAME)
            elif key.startswith(prefix) and key > after:
                rows.append(Entry(key, entry.size))
        return sorted(rows)

    def strangers(self, prefix: str) -> builtins.list[Entry]:
        """Objects whose names begin so and were not made with the key; not told."""
        listed = self.inner.list(prefix)
        return [entry for entry in listed if self._key.read_name(entry.key) is None]

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        self.inner.delete([self._key.name(key) for key in keys])

    # As a signer

    def sign(self, key: str, said: str) -> str:
        """See `Signer`."""
        return self._key.sign(key, said)

    def vouches(self, key: str, said: str, signature: str) -> bool:
        """See `Signer`."""
        if self._key.vouches(key, said, signature):
            return True
        self.forged.note(self._key.name(key), BYTES)
        return False


def signer_of(store: Store) -> Signer:
    """Who signs what is sent to a store, and checks what is read from it."""
    return store if isinstance(store, SignedStore) else UNSIGNED


def forged_as(store: Store, key: str) -> str | None:
    """What is wrong with the object under `key`, if it has been seen not to be what was signed."""
    if not isinstance(store, SignedStore):
        return None
    return store.forged.found.get(store.name(key))


def forged_names(store: Store) -> list[str]:
    """Objects that have been seen and whose names nobody who holds the run's key has made."""
    if not isinstance(store, SignedStore):
        return []
    return sorted(name for name, because in store.forged.found.items() if because == NAME)


def strangers(store: Store, prefix: str) -> list[Entry]:
    """What is called so and was not made with the run's key, by name; none without a key."""
    return store.strangers(prefix) if isinstance(store, SignedStore) else []


def unsigned(store: Store) -> Store:
    """What lies behind the door; a store without one is its own inside."""
    return store.inner if isinstance(store, SignedStore) else store
