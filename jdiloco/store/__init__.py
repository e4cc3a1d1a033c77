"""Where a run lives: objects under keys, in a folder, in memory, in a bucket.

Problem
    Nodes that share nothing but storage have to agree. The storage may be slow, may lose an
    answer, and may be reached by a writer that everybody believes dead.

Design
    Objects are created once and never changed, so the one thing asked of a store beyond reading
    and writing is that of several creates of one key at most one succeeds (`Store.create`). All
    agreement is a race for a key. Keys are *owned*, when only one writer can ever use them, or
    *contested*; a contested key is never deleted, as a delayed writer would create it a second
    time. Doubtful answers are settled by reading (`settle`), and stores themselves never wait.

    What callers rely on is in `base`; `jdiloco.testing.conformance` says the same as tests, for
    the stores here and for anybody's own. `jdiloco.testing.faults` breaks any store on request.

    A run may have a key. Then one more store stands before the one that holds the objects, and lets
    through only what was signed with it (`signed`).

Turned down
    * Compare-and-swap, to keep one moving head object: folders do not have it, buckets spell it in
      three ways, and a lost answer is harder to settle than with keys that are written once.
    * Locks and leases in the store: they outlive their owners, and need clocks that agree.
    * fsspec as the layer below: its exclusive create looks first and writes then.
    * A final file opened with O_EXCL, for the folder: exclusive, but seen half written.
    * Keys that are also folders of other keys: buckets have them, folders cannot.

Caveats
    A store that ignores the condition looks healthy until two writers meet; a session therefore
    creates its first key twice, and `jdiloco doctor` tries more. One that ignores it only under a
    race is found out when a closer, once a cycle, compares the record it goes on from. Listings may
    lag over NFS (`folder`). Whoever may write into a folder or bucket can also delete there, key
    or no key.

Tested
    `tests/store`: the conformance suite for each store, with threads, processes and killed
    writers, in buckets on real servers; every combination of faults against `settle`, every
    doubtful answer below the bucket's client; the folder without hard links, with stale handles
    and in the order of its system calls.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from jdiloco.errors import UsageError
from jdiloco.store.address import SCHEMES
from jdiloco.store.base import Bounded, Buffer, Entry, Store, small_requests
from jdiloco.store.folder import FolderStore
from jdiloco.store.memory import MemoryStore
from jdiloco.store.settle import create_contested, create_owned

__all__ = [
    "Bounded",
    "Buffer",
    "Entry",
    "FolderStore",
    "MemoryStore",
    "Store",
    "create_contested",
    "create_owned",
    "open_store",
    "small_requests",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_CHOICES = (
    "a folder (`runs/demo`, `file:///data/demo`), a bucket (`s3://bucket/prefix`, `gs://…`, "
    "`az://…`) or `memory://demo`"
)


def open_store(where: str | os.PathLike[str] | Store) -> Store:
    """The store that a path or URL names; a store is passed through.

    `runs/demo` and `file:///data/demo` are folders, made by the first write; `s3://bucket/prefix`,
    `gs://…` and `az://…` are in buckets (`jdiloco.store.address` has every form, and
    `jdiloco.store.clients` where credentials come from); `memory://demo` is one store for everybody
    in this process who uses that name. A relative path that begins like a URL (`a:b`) is written
    `./a:b`.
    """
    if isinstance(where, Store):
        return where
    if not isinstance(where, (str, os.PathLike)):
        raise UsageError(f"A mailbox is a folder, a URL or a `Store`, not {where!r:.60}.")
    text = os.fspath(where)
    scheme, separator, rest = text.partition("://")
    if not separator:
        _refuse_half_a_url(text)
        return _open_folder(text)
    match scheme:
        case "file":
            return _open_folder(_path_of(text))
        case "memory":
            return MemoryStore(rest)
        case _ if scheme in (*SCHEMES, "https"):
            return _open_bucket(text)
    raise UsageError(f"{text!r}: there is no store for `{scheme}://`. Use {_CHOICES}.")


def _refuse_half_a_url(text: str) -> None:
    """Refuses `memory:/demo` and its like, of which a folder called `memory:` would be made."""
    found = _SCHEME.fullmatch(text)
    if not found:
        return
    scheme, rest = found.groups()
    name = rest.lstrip("/") or "demo"
    match scheme:
        case "file":
            meant = f"Write `file:///{name}`, or the path alone"
        case "memory":
            meant = f"Write `memory://{name}`"
        case _ if scheme in SCHEMES:
            meant = f"Write `{scheme}://{name}`"
        case _:
            meant = f"There is no store for `{scheme}:`. Use {_CHOICES}"
    raise UsageError(
        f"{text!r} begins like a URL but has no `{scheme}://`. {meant}. If it is a path, write "
        f"`./{text}` or the absolute path."
    )


def _open_bucket(url: str) -> Store:
    """Imported only here: the client takes time and memory that most programs need not spend."""
    from jdiloco.store.bucket import BucketStore

    return BucketStore(url)


def _open_folder(path: str) -> FolderStore:
    if not path:
        raise UsageError(f"An empty path names no folder. Use {_CHOICES}.")
    return FolderStore(os.path.expanduser(path))


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise UsageError(
            f"{url!r} names no folder on this machine: a file URL has three slashes, as in "
            "`file:///data/demo`, and `?`, `#` and `%` are written %3F, %23 and %25."
        )
    return unquote(parts.path)
