"""A store in a folder: a local disk, or a shared one mounted on every machine.

An object is a file whose path below the folder is its key. It is written under another name in
`~writing`, which no key can spell, brought to the disk with fsync, and given its name in one step
(`jdiloco.store.exclusive`); then the directory is brought to the disk too, and only then has the
create completed. So a reader sees nothing or the whole object, also when the writer is killed or
the machine loses power.

What is left in `~writing` by killed writers is removed by the first write of a later store, once
it is a day old by the clock of the file system itself, which is the one that dated it. Should a
writer have been asleep for that long, it finds its file gone and says that the store failed.

Directories are made when needed and removed when a delete leaves them empty. `rmdir` refuses one
in which a writer has just put something, and a writer that finds its directory gone makes it
again, so the two need no agreement.

Nothing here waits: what NFS calls a stale handle is looked up again at once, a few times; any
other error of the operating system becomes StoreUnavailable, and the caller decides when to try
again.

Not for Windows; on a file system that ignores case, keys must differ in more than that. Over NFS a
listing may lag by the client's attribute cache: mount with `actimeo=1` or less. Symbolic links and
whatever else is no plain file below the folder is no object.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from jdiloco.errors import StoreUnavailable, UsageError
from jdiloco.store import exclusive
from jdiloco.store.arguments import (
    KeysNested,
    as_views,
    check_key,
    check_prefix,
    check_range,
    is_part,
)
from jdiloco.store.base import Buffer, Entry
from jdiloco.store.listing import may_hold

LEFTOVER_SECONDS_MAX = 24 * 3600.0
"""An unfinished file that nobody has written to for this long has lost its writer."""

TRIES = 4
"""How often a step is done at once again when the answer is that a handle is stale."""

_WRITING = "~writing"  # `~` is in no key, so no listing and no `get` can reach it.
_TRY_AGAIN = {errno.ESTALE, errno.EAGAIN, errno.EINTR}
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_file_numbers = itertools.count()

T = TypeVar("T")


class FolderStore:
    """Objects as files below `path`. Any number of processes and machines may open it at once.

    Opening and reading change nothing on the disk: `prepare`, or the first `create`, makes the
    folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(path)
        self._writing = os.path.join(self._root, _WRITING)
        self._leftovers_removed = False
        file = _file_in_the_way(self._root)
        if file is not None:
            raise self._in_the_way(file)

    @property
    def url(self) -> str:
        """The absolute path of the folder."""
        return self._root

    def __repr__(self) -> str:
        return f"FolderStore({self._root!r})"

    def prepare(self) -> None:
        """Makes the folder and proves that a file can be written in it; nothing else stays there.

        Raises UsageError at once where it cannot, with the reason that the operating system gives,
        and then leaves nothing behind.
        """
        made = missing(self._root)
        try:
            _again_while_stale(self._write_and_remove)
        except BaseException as error:
            for directory in made:
                _remove_if_empty(directory)
            if not isinstance(error, OSError):
                raise
            raise UsageError(
                f"Folder `{self._root}`: no file can be written there, as the operating system "
                f"says {_reason(error)} at `{error.filename or self._root}`. Put that right, or "
                "give the path of a folder that this process may write to."
            ) from error

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        """See `Store.create`. When it returns, the object outlives a power failure."""
        check_key(key)
        views = as_views(data)
        path = self._path(key)
        if self._trying("looking for", key, lambda: self._is_taken(key, path)):
            return False
        temporary = self._trying("writing", key, lambda: self._write(views))
        try:
            return self._trying("naming", key, lambda: self._publish(key, temporary, path))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        """See `Store.get`."""
        check_key(key)
        check_range(start, stop)
        return self._trying("reading", key, lambda: _read(self._path(key), start, stop))

    def list(self, prefix: str, *, after: str = "") -> builtins.list[Entry]:
        """See `Store.list`. Directories that hold nothing of what is asked for are not opened."""
        check_prefix(prefix)
        top, slash, _ = prefix.rpartition("/")
        rows = lambda: builtins.list(self._walk(top + slash, prefix, after))  # noqa: E731
        return self._trying("listing", prefix, rows)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`. Directories that it leaves empty go as well."""
        doomed = builtins.list(keys)
        for key in doomed:
            check_key(key)
        for key in doomed:
            self._trying("deleting", key, lambda key=key: _unlink(self._path(key)))
        for directory in {key.rpartition("/")[0] for key in doomed}:
            self._remove_empty(directory)

    def dated(self, key: str) -> datetime.datetime:
        """When the file system says that an object was written, by its clock."""
        check_key(key)
        seconds = self._trying("asking about", key, lambda: os.stat(self._path(key)).st_mtime)
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _trying(self, verb: str, key: str, step: Callable[[], T]) -> T:
        try:
            return _again_while_stale(step)
        except OSError as error:
            raise StoreUnavailable(
                f"Folder `{self._root}`: {verb} `{key}` failed with {_reason(error)} at "
                f"`{error.filename or self._path(key)}`. Once that is put right, the same call can "
                "be made again."
            ) from error

    # Writing

    def _is_taken(self, key: str, path: str) -> bool:
        """Saves writing a whole object that would then find its name taken."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return False
        except NotADirectoryError as error:
            raise self._below_a_file(key, error) from None
        if stat.S_ISDIR(mode):
            raise KeysNested(key, f"{key}/…")
        # Whoever put it there may have died before this; what is reported as there must stay.
        _sync_directory(os.path.dirname(path))
        return True

    def _below_a_file(self, key: str, error: NotADirectoryError) -> Exception:
        """What to raise for a key whose path goes on below a file."""
        file = _file_in_the_way(self._path(key))
        if file is None:  # Gone since: the next try may do better.
            return error
        if file.startswith(self._path("")):
            return KeysNested(file.removeprefix(self._path("")), key)
        return self._in_the_way(file)

    def _in_the_way(self, file: str) -> UsageError:
        if file == self._root:
            return UsageError(f"`{file}` is a file. A run needs a folder: give another path.")
        return UsageError(
            f"`{self._root}` can be no folder, as `{file}` is a file. A run needs a folder: give a "
            "path that leads through folders only."
        )

    def _write_and_remove(self) -> None:
        try:
            os.unlink(self._write([memoryview(b"can be written")]))
        finally:
            _remove_if_empty(self._writing)  # A writer that misses it makes it again.

    def _write(self, views: Sequence[memoryview]) -> str:
        """Writes a new file to the disk and returns its path."""
        descriptor, temporary = self._open_new()
        try:
            with open(descriptor, "wb") as file:
                if not self._leftovers_removed:
                    self._remove_leftovers(now=os.fstat(descriptor).st_mtime)
                for view in views:
                    file.write(view)
                file.flush()
                os.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary

    def _open_new(self) -> tuple[int, str]:
        """Opens a file that nobody else has, under a name that says whose it is."""
        owner = f"{os.uname().nodename}.{os.getpid()}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        while True:
            path = os.path.join(self._writing, f"{owner}.{next(_file_numbers)}")
            try:
                return os.open(path, flags, 0o666), path
            except FileNotFoundError:
                _make_directory(self._writing)
            except FileExistsError:
                continue  # Left by an earlier process of this number: the next name.

    def _remove_leftovers(self, *, now: float) -> None:
        """`now` is the time the file system gave a file written just now: no other clock counts."""
        self._leftovers_removed = True
        with contextlib.suppress(OSError), os.scandir(self._writing) as files:
            for file in files:
                with contextlib.suppress(OSError):
                    if now - file.stat(follow_symlinks=False).st_mtime > LEFTOVER_SECONDS_MAX:
                        os.unlink(file.path)

    def _publish(self, key: str, temporary: str, path: str) -> bool:
        """Names the finished file, in a directory that a delete may be removing again."""
        for tries_left in reversed(range(TRIES)):
            try:
                created = exclusive.publish(temporary, path)
                break
            except NotADirectoryError as error:
                raise self._below_a_file(key, error) from None
            except FileNotFoundError:
                if not tries_left:
                    raise
                with contextlib.suppress(FileNotFoundError):  # Removed again: the next try.
                    _make_directory(os.path.dirname(path))
        _sync_directory(os.path.dirname(path))
        return created

    # Reading

    def _walk(self, top: str, prefix: str, after: str) -> Iterator[Entry]:
        """The objects below `top` ("" or ending in `/`), in key order.

        Sorting directories with their `/` makes a walk the order of whole keys: `a.b` comes before
        `a/b`, as `.` comes before `/`, though the name `a` comes before `a.b`.
        """
        for key, item in self._names(top):
            if key.endswith("/"):
                if may_hold(key, prefix, after):
                    yield from self._walk(key, prefix, after)
            elif key.startswith(prefix) and key > after:
                with contextlib.suppress(FileNotFoundError):  # Deleted since.
                    info = item.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        yield Entry(key, info.st_size)

    def _names(self, top: str) -> builtins.list[tuple[str, os.DirEntry[str]]]:
        """What lies directly below `top`, by key; directories end in `/`."""
        try:
            with os.scandir(self._path(top)) as found:
                items = [item for item in found if is_part(item.name)]
        except _NOT_THERE:
            return []
        slashes = ("/" if item.is_dir(follow_symlinks=False) else "" for item in items)
        names = [(f"{top}{i.name}{slash}", i) for i, slash in zip(items, slashes, strict=True)]
        return sorted(names, key=lambda pair: pair[0])

    # Deleting

    def _remove_empty(self, directory: str) -> None:
        while directory:
            if not _remove_if_empty(self._path(directory)):
                return
            directory = directory.rpartition("/")[0]


def _again_while_stale(step: Callable[[], T]) -> T:
    for tries_left in reversed(range(TRIES)):
        try:
            return step()
        except OSError as error:
            if error.errno not in _TRY_AGAIN or not tries_left:
                raise
    raise AssertionError("unreachable: the last try returns or raises")


def _reason(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "an unknown error")
    return f"{name} ({error.strerror})"


def missing(path: str) -> list[str]:
    """`path` and what is above it, the lowest first, as far as it is not there."""
    found: list[str] = []
    while not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def _file_in_the_way(path: str) -> str | None:
    """The file, at `path` or above it, that keeps `path` from being a folder."""
    for highest in missing(path)[-1:]:
        path = os.path.dirname(highest)
    return path if os.path.exists(path) and not os.path.isdir(path) else None


def _read(path: str, start: int, stop: int | None) -> bytes | None:
    # Neither follows a link that somebody put into the folder nor hangs on a pipe.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except _NOT_THERE:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            return None
        end = info.st_size if stop is None else min(stop, info.st_size)
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(start)
            return file.read(max(0, end - start))
    finally:
        os.close(descriptor)


def _remove_if_empty(directory: str) -> bool:
    """Removes a directory, unless it holds something or is gone already; whether it did."""
    try:
        os.rmdir(directory)
    except OSError:
        return False
    return True


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except _NOT_THERE:
        return
    except OSError:
        if not os.path.isdir(path):  # A directory is no object. Linux says EISDIR, others EPERM.
            raise


def _make_directory(path: str) -> None:
    """Makes `path` and what is missing above it, each brought to the disk in its parent."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_directory(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
    _sync_directory(os.path.dirname(path))


def _sync_directory(path: str) -> None:
    """Brings the names in a directory to the disk, where the file system knows such a thing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # A delete emptied and removed it: there is no name left to keep.
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
