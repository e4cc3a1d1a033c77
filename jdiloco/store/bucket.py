"""A store in a bucket: S3 and whatever speaks it, Google Cloud Storage, Azure.

An object of the run is an object of the bucket. A create is one conditional write (`If-None-Match`,
or Google's generation 0), sent once: if it were sent again below us, after an answer that got lost,
our own object would make the second one fail and we should read that as somebody else's. So a
create without a clear answer raises, and whoever called it settles the doubt by reading
(`jdiloco.store.settle`). What S3 calls a conflict (409) and says of a taken key (412) both come
back as False: of the first nothing is stored, and that too shows when it is read. Requests that
change nothing, and deletes, are repeated here, with growing waits, within the limits below. What a
server says of how long to wait (`Retry-After`) the client does not show.

Limits. As opened, a store is for objects of any size: a write may take as long as its size does
over `bytes_per_second_min`, a read as long as something arrives. `within` gives the same store for
small objects, on connections of its own, every call of which ends in so many seconds; so an upload
of a gigabyte over a slow line keeps no beat waiting.

Large objects are read in pieces, one request for each 64 MiB, so that a line that breaks costs a
piece. An object may have 5 GB, what S3 takes in one conditional write.

Listings ask for what lies behind `after` and do not trust the answer: what comes before it is left
out here. A bucket that begins at the start all the same (Azure; some gateways) is asked by
directory once that has cost a page of a thousand keys, so that old rounds are not listed for ever.

Credentials come from the environment (`jdiloco.store.clients`). None is in `url`, in errors or in
logs. The client hangs in a process that was forked after it was made: start processes with spawn.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from jdiloco.errors import StoreDenied, StoreUnavailable, UsageError
from jdiloco.store import address, answers
from jdiloco.store.arguments import as_views, check_key, check_prefix, check_range
from jdiloco.store.base import Buffer, Entry
from jdiloco.store.clients import BYTES_PER_SECOND_MIN, PIECE_BYTES, AnySize, Maker, Small
from jdiloco.store.listing import may_hold, safe_offset

OBJECT_BYTES_MAX = 5_000_000_000
"""S3 takes no more in one write; Azure a little more."""

PAGE_KEYS = 1000
"""What a bucket lists in one answer. More of what lies before `after`: it began at the start."""

T = TypeVar("T")


@contextlib.contextmanager
def _none_if_not_there() -> Iterator[None]:
    """Swallows that there is no such object; not that there is no such bucket."""
    try:
        yield
    except FileNotFoundError as error:
        if answers.is_missing_bucket(error):
            raise


class BucketStore:
    """Objects in a bucket. Any number of processes and machines may open it at once.

    Arguments:
      url: `s3://bucket/prefix`, `gs://…`, `az://…` or another form (`jdiloco.store.address`).
      endpoint, region: of an S3-compatible server; as `?endpoint=…&region=…` behind the URL.
      bytes_per_second_min: the slowest line to wait for. Half of what the line does when busy is a
        good choice; too high a rate gives uploads up that would have ended.

    Opening asks the bucket nothing.

    `honoured_after` is whether the newest listing began where it was asked to; None until one was.
    """

    honoured_after: bool | None = None

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        bytes_per_second_min: float = BYTES_PER_SECOND_MIN,
    ) -> None:
        if not bytes_per_second_min > 0:
            raise UsageError(f"`bytes_per_second_min` is above 0, not {bytes_per_second_min!r}.")
        self._address = address.parse(url, endpoint=endpoint, region=region)
        self._clients = AnySize(Maker(self._address, os.environ), bytes_per_second_min)
        self._ignores_after = False

    def within(self, seconds: float) -> BucketStore:
        """The same objects, for small requests: each ends within `seconds`, repeats included.

        Of a listing that is each page of a thousand keys.
        """
        small = copy.copy(self)
        small._clients = Small(self._clients.maker, seconds)
        return small

    @property
    def url(self) -> str:
        """The bucket's URL, with what was said of its server; never with credentials."""
        return self._address.url

    def __repr__(self) -> str:
        return f"BucketStore({self.url!r})"

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        """See `Store.create`. One request, whatever the answer."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        check_key(key)
        views = as_views(data)
        size = sum(view.nbytes for view in views)
        if size > OBJECT_BYTES_MAX:
            raise UsageError(
                f"`{key}` has {size} bytes, and a bucket takes at most {OBJECT_BYTES_MAX} in one "
                "write. Train with more `fragments`."
            )
        try:
            client = self._clients.writer(size)
            obstore.put(client, key, views, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except Exception as error:
            raise self._failed("writing", key, error) from None
        return True

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        """See `Store.get`. One request for each 64 MiB."""
        check_key(key)
        check_range(start, stop)
        if start == 0 and stop is None:
            return self._trying("reading", key, lambda: self._whole(key))
        return self._trying("reading", key, lambda: self._range(key, start, stop))

    def list(self, prefix: str, *, after: str = "") -> builtins.list[Entry]:
        """See `Store.list`."""
        check_prefix(prefix)
        top = prefix.rpartition("/")[0]
        rows = self._trying("listing", prefix, lambda: self._rows(top, prefix, after))
        return sorted(rows)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`. A request for each thousand keys where the bucket knows that."""
        doomed = builtins.list(dict.fromkeys(keys))
        for key in doomed:
            check_key(key)
        if doomed:
            self._trying("deleting", doomed[0], lambda: self._delete(doomed))

    def dated(self, key: str) -> datetime.datetime:
        """When the bucket says that an object was written. Raises StoreUnavailable for none."""
        import obstore

        check_key(key)
        return self._trying(
            "asking about", key, lambda: obstore.head(self._clients.reader, key)["last_modified"]
        )

    # What is asked of the client

    def _whole(self, key: str) -> bytes | None:
        """One request unless the object is large. No range: not all gateways know them."""
        import obstore

        with _none_if_not_there():
            found = obstore.get(self._clients.reader, key)
            size = found.meta["size"]
            return bytes(found.bytes()) if size <= PIECE_BYTES else self._range(key, 0, size)
        return None

    def _range(self, key: str, start: int, stop: int | None) -> bytes | None:
        pieces: builtins.list[bytes] = []
        while True:
            end = start + PIECE_BYTES if stop is None else min(stop, start + PIECE_BYTES)
            found = self._piece(key, start, end)
            if found is None:
                return None
            piece, size = found
            pieces.append(piece)
            start = end
            if start >= (size if stop is None else min(stop, size)):
                return b"".join(pieces)

    def _piece(self, key: str, start: int, end: int) -> tuple[bytes, int] | None:
        """Some bytes of an object, and its size. Nobody can ask for none: one is, and left out."""
        import obstore

        wanted = max(0, end - start)
        options: Any = {"range": (start, start + max(1, wanted))}
        with _none_if_not_there():
            try:
                found = obstore.get(self._clients.reader, key, options=options)
                return bytes(found.bytes())[:wanted], found.meta["size"]
            except Exception as error:
                if answers.is_past_the_end(error):
                    return b"", 0
                if not answers.is_not_partial(error):
                    raise
            whole = obstore.get(self._clients.reader, key)
            return bytes(whole.bytes())[start : start + wanted], whole.meta["size"]
        return None

    def _rows(self, top: str, prefix: str, after: str) -> builtins.list[Entry]:
        found = self._walk(top, prefix, after) if self._ignores_after else self._flat(top, after)
        rows, skipped = [], 0
        for row in found:
            if row.key <= after:
                skipped += 1
            elif row.key.startswith(prefix):
                rows.append(row)
        self._ignores_after |= skipped > PAGE_KEYS
        return rows

    def _flat(self, top: str, after: str) -> Iterator[Entry]:
        """Every object below the directory `top`, as one listing."""
        import obstore

        client, offset = self._clients.reader, safe_offset(top, after) if after else None
        honoured = True
        for page in obstore.list(client, top or None, offset=offset, chunk_size=PAGE_KEYS):
            for meta in page:
                honoured = honoured and meta["path"] > (offset or "")
                yield Entry(meta["path"], meta["size"])
        if offset:
            self.honoured_after = honoured

    def _walk(self, top: str, prefix: str, after: str) -> Iterator[Entry]:
        """The same, directory by directory, without those that hold nothing of what is wanted."""
        import obstore

        found = obstore.list_with_delimiter(self._clients.reader, top or None)
        for meta in found["objects"]:
            yield Entry(meta["path"], meta["size"])
        for name in found["common_prefixes"]:
            directory = name.rstrip("/") + "/"
            if may_hold(directory, prefix, after):
                yield from self._walk(directory[:-1], prefix, after)

    def _delete(self, keys: builtins.list[str]) -> None:
        """All at once; one by one where that stops at the first that is not there."""
        import obstore

        with _none_if_not_there():
            obstore.delete(self._clients.reader, keys)
            return
        for key in keys if len(keys) > 1 else ():
            self._delete([key])

    # Failing

    def _trying(self, verb: str, key: str, step: Callable[[], T]) -> T:
        try:
            return step()
        except Exception as error:
            raise self._failed(verb, key, error) from None

    def _failed(self, verb: str, key: str, error: Exception) -> Exception:
        from obstore.exceptions import BaseError

        if not isinstance(error, (BaseError, OSError, ValueError)):
            return error  # A fault of ours: it is not hidden.
        kind = StoreDenied if answers.is_denied(error) else StoreUnavailable
        return kind(f"{self.url}: {verb} `{key}` failed. {answers.reason(error)}")
