"""Creating an object for certain, whatever the store answered.

A store may say "taken" of a write that was ours, say it with nothing stored, or say nothing at all
and store it all the same. So every answer but a plain success is settled by reading:

    after create                read back             then
    created                     -                     done
    taken, or no answer         an object             owned: done if it is ours in full
                                                      contested: done, with what was read
    taken, or no answer         nothing, no answer    wait, send the same bytes again

Nothing here knows how long to wait. `waits` gives the seconds between tries, and with them how many
tries there are: one more than waits. `sleep` waits; to give up early let it raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from jdiloco.errors import FormatError, StoreUnavailable
from jdiloco.store.arguments import as_views
from jdiloco.store.base import Buffer, Store

TAIL_BYTES = 64
"""How much of an owned object's end is read back: its length shows that it is all there."""


def create_owned(
    store: Store,
    key: str,
    data: Buffer | Sequence[Buffer],
    *,
    waits: Iterable[float],
    sleep: Callable[[float], object],
) -> None:
    """Creates an object under a key that only this writer uses; returns once it is there in full.

    Raises StoreUnavailable when the tries are used up and it may or may not be there, and
    FormatError when something else is: somebody else writes under this writer's name.
    """
    views = as_views(data)
    start = max(0, sum(view.nbytes for view in views) - TAIL_BYTES)
    found = _settle(store, key, views, start=start, waits=waits, sleep=sleep)
    if found is not None and found != b"".join(views)[start:]:
        raise FormatError(
            f"`{key}` in {store.url} holds other bytes than were sent there, though only this "
            "incarnation of this node may write it. Somebody uses its name: start under another."
        )


def create_contested(
    store: Store,
    key: str,
    data: Buffer | Sequence[Buffer],
    *,
    waits: Iterable[float],
    sleep: Callable[[float], object],
) -> bytes:
    """Creates an object unless another writer was first; returns what the store now holds.

    These are `data` or the winner's bytes: only a write id in them tells. Raises StoreUnavailable
    when the tries are used up; the outcome is then open, and stays open until the key has been
    read: call again with the same bytes.
    """
    views = as_views(data)
    found = _settle(store, key, views, start=0, waits=waits, sleep=sleep)
    return b"".join(views) if found is None else found


def _settle(
    store: Store,
    key: str,
    views: Sequence[memoryview],
    *,
    start: int,
    waits: Iterable[float],
    sleep: Callable[[float], object],
) -> bytes | None:
    """None when a create succeeded, else the object's bytes from `start` on."""
    tries = 0
    for wait in chain(waits, [None]):
        tries += 1
        doubt = "the key was said to be taken, but nothing is there"
        try:
            if store.create(key, views):
                return None
        except StoreUnavailable as error:
            doubt = str(error)
        try:
            if (found := store.get(key, start=start)) is not None:
                return found
        except StoreUnavailable as error:
            doubt = str(error)
        if wait is not None:
            sleep(wait)
    raise StoreUnavailable(
        f"`{key}` in {store.url} may or may not have been created after {tries} tries. The last "
        f"ended so: {doubt}"
    )
