"""What every store promises, as tests. Subclass, provide `store`, done:

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)

        def process_url(self, store):
            return store.url  # Only if `open_store` in another process reaches the same objects.

The store that the fixture returns has to be empty. `pytest.register_assert_rewrite` with this
module's name makes failures say more. The module needs pytest, which the library does not.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

from jdiloco.errors import UsageError
from jdiloco.store import Entry, Store, open_store

T = TypeVar("T")

HOSTILE_KEYS = (
    *("", "/", "/a", "a/", "a//b", "/etc/passwd", "//a"),
    *(".", "..", "a/.", "a/..", "../a", "a/../b", "a/./b", "./a", "../../etc/passwd"),
    *("...", "a.", "a./b"),
    *("a b", "a\\b", "..\\a", "C:a", "~", "~a", "~writing/a", "a%2fb", "%2e%2e/a", "a:b", "a#1"),
    *("a\0b", "a\n", "\na", "a\tb", "ä", "a\u2024b", "\ud800", "a*", "a?", "$HOME", "`id`"),
    *(".nfs0001", "a/.nfs0001", "x" * 201, "x/" * 400 + "x", "x" * 5000),
)
"""Keys that every store refuses, whatever they would mean to it."""

# Loads the store layer alone: importing all of the library would make each process start slowly.
_OTHER_PROCESS = """
import sys, types
package = types.ModuleType("jdiloco")
package.__path__ = [sys.argv[1]]
sys.modules["jdiloco"] = package
from jdiloco.store import open_store
store = open_store(sys.argv[2])
print("ready", flush=True)
for line in sys.stdin:
    key, unit, times = line.split()
    print(store.create(key, unit.encode() * int(times)), flush=True)
"""


class StoreConformance:
    """The contract of `jdiloco.store.base`. Subclass it and provide the fixture `store`."""

    threads = 20
    """How many threads race for one key."""

    processes = 4
    """How many processes race for one key."""

    process_keys = 80
    """How many keys processes race for."""

    kills = 12
    """How many writers are killed, at moments spread over one write."""

    kill_bytes = 24_000_000
    """How large an object a killed writer was writing."""

    def reopen(self, store: Store) -> Store:
        """Another store object for the same objects."""
        return open_store(store.url)

    def process_url(self, store: Store) -> str | None:
        """What another process passes to `open_store` to reach the same objects, if it can."""
        del store
        return None

    # Creating and reading

    def test_a_created_object_reads_back_as_it_was_written(self, store: Store) -> None:
        assert store.create("a/b.c/d-e_F0", b"bytes \0\xff") is True
        assert store.get("a/b.c/d-e_F0") == b"bytes \0\xff"

    def test_create_refuses_what_exists_and_keeps_the_first_bytes(self, store: Store) -> None:
        assert store.create("k", b"first") is True
        for body in (b"second, and longer", b"", b"first"):
            assert store.create("k", body) is False
        assert store.get("k") == b"first"
        assert store.list("") == [Entry("k", 5)]

    def test_what_is_not_there_reads_as_none(self, store: Store) -> None:
        store.create("a/b", b"1")
        for key in ("a", "a/b/c", "a/bb", "A/b", "c"):
            assert store.get(key) is None
            assert store.get(key, start=0, stop=0) is None

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        assert store.create("none", []) is True
        assert store.create("empty", b"") is True
        assert store.create("empty", b"1") is False
        assert store.get("none") == store.get("empty") == b""
        assert store.list("") == [Entry("empty", 0), Entry("none", 0)]

    def test_several_buffers_are_written_one_after_another(self, store: Store) -> None:
        array = np.arange(12.0).reshape(3, 4)
        buffers = [
            *(b"head", bytearray(b"er"), b"", memoryview(b"0123456")[2:5]),
            *(array.data, np.zeros((0, 5)).data, np.array(7).data),
        ]
        assert store.create("k", buffers)
        whole = b"header" + b"234" + array.tobytes() + np.array(7).tobytes()
        assert store.get("k") == whole
        assert store.list("k") == [Entry("k", len(whole))]

    def test_a_large_object_comes_back_whole(self, store: Store) -> None:
        rows = np.arange(4_000_000, dtype=np.float32).reshape(4, -1)
        assert store.create("large", [row.data for row in rows])
        body = store.get("large")
        assert body is not None
        np.testing.assert_array_equal(np.frombuffer(body, np.float32), rows.ravel())

    def test_the_callers_buffer_is_its_own_again_after_create(self, store: Store) -> None:
        buffer = bytearray(b"before")
        store.create("k", buffer)
        buffer[:] = b"after!"
        assert store.get("k") == b"before"

    def test_a_buffer_with_gaps_is_refused_and_nothing_stored(self, store: Store) -> None:
        with pytest.raises(UsageError, match="ascontiguousarray"):
            store.create("k", [b"head", np.zeros((4, 4))[:, ::2].data])
        assert store.get("k") is None

    @pytest.mark.parametrize("start", [0, 1, 5, 9, 10, 11, 10**12])
    @pytest.mark.parametrize("stop", [None, 0, 1, 5, 9, 10, 11, 10**12])
    def test_a_range_is_what_a_slice_would_be(
        self, store: Store, start: int, stop: int | None
    ) -> None:
        store.create("k", b"0123456789")
        assert store.get("k", start=start, stop=stop) == b"0123456789"[start:stop]

    def test_a_range_that_counts_from_the_end_is_refused(self, store: Store) -> None:
        store.create("k", b"0123456789")
        for start, stop in ((-1, None), (0, -1)):
            with pytest.raises(UsageError, match="first byte"):
                store.get("k", start=start, stop=stop)

    # Keys

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=lambda key: repr(key)[:30])
    def test_a_hostile_key_is_refused_by_every_verb(self, store: Store, key: str) -> None:
        for verb in (lambda: store.create(key, b"1"), lambda: store.get(key)):
            with pytest.raises(UsageError, match="is no key"):
                verb()
        store.create("bystander", b"1")
        with pytest.raises(UsageError, match="is no key"):
            store.delete(["bystander", key])
        assert store.list("") == [Entry("bystander", 1)]

    @pytest.mark.parametrize("prefix", ["/", "../", "a//", "a/../b", "~", "a b", "\0"])
    def test_a_prefix_that_no_key_has_is_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(UsageError, match="beginning of no key"):
            store.list(prefix)

    def test_long_and_odd_keys_are_kept_apart(self, store: Store) -> None:
        keys = [
            *("x" * 200, "x" * 199 + "y", "/".join(["y" * 79] * 10), "1", "01", "-", "_", "..a"),
            *(".hidden", "a..b", "-rf", "--", "con", "a-1", "a_1"),
        ]
        for key in keys:
            assert store.create(key, key.encode())
        assert [row.key for row in store.list("")] == sorted(keys)
        assert all(store.get(key) == key.encode() for key in keys)

    # Listing

    def test_a_listing_is_in_the_order_of_keys_and_filters_by_string(self, store: Store) -> None:
        keys = [
            *("a-b", "a.b", "a.b.c/d", "a/b", "a/b-c", "a/b.c", "a/bb/c", "a/c/0", "a/c-0/1"),
            *(
                "a0",
                "aa/a",
                "B",
                "b/0000000001.0",
                "b/0000000001.2.n",
                "b/live/n",
                "b/0000000002.0",
            ),
        ]
        for size, key in enumerate(keys):
            store.create(key, bytes(size))
        rows = sorted(Entry(key, size) for size, key in enumerate(keys))
        prefixes = ("", "a", "a.", "a/", "a/b", "a/b/", "a/c", "b/", "b/00000", "b/0000000001", "z")
        afters = ("", "0", "a", "a/", "a/b", "a/b-c", "a/b0", "a/c", "b/0000000001", "b/live", "é")
        for prefix, after in itertools.product(prefixes, afters):
            wanted = [row for row in rows if row.key.startswith(prefix) and row.key > after]
            assert store.list(prefix, after=after) == wanted, (prefix, after)

    def test_a_long_listing_is_complete(self, store: Store) -> None:
        keys = [f"many/{n:04}" for n in range(1100)]  # Buckets answer a thousand at a time.
        in_threads(8, keys, lambda key: store.create(key, b""))
        assert [row.key for row in store.list("many/")] == keys
        assert [row.key for row in store.list("many/", after=keys[1049])] == keys[1050:]

    def test_a_write_is_read_and_listed_at_once(self, store: Store) -> None:
        for n in range(100):
            store.create(f"k/{n:03}", b"%d" % n)
            assert store.get(f"k/{n:03}") == b"%d" % n
            assert len(store.list("k/")) == n + 1

    def test_another_store_object_sees_each_write_in_its_next_listing(self, store: Store) -> None:
        """Case B69: a listing that is remembered hides what others write."""
        other = self.reopen(store)
        for n in range(100):
            assert len(other.list("k/")) == n
            assert other.get(f"k/{n:03}") is None  # Must not be remembered.
            store.create(f"k/{n:03}", b"%d" % n)
            assert len(other.list("k/")) == n + 1
            assert other.get(f"k/{n:03}") == b"%d" % n

    # Deleting

    def test_delete_removes_what_is_there_and_ignores_what_is_not(self, store: Store) -> None:
        for key in ("a/1", "a/2", "a/3/4", "b"):
            store.create(key, b"1")
        store.delete(["a/1", "a/9", "a", "a/3/4", "c/d", "a/1", "b/c"])
        assert store.list("") == [Entry("a/2", 1), Entry("b", 1)]
        assert store.get("a/1") is None
        store.delete(iter(["a/2", "b"]))
        store.delete([])
        assert store.list("") == []

    def test_a_deleted_key_can_be_created_again(self, store: Store) -> None:
        """The protocol never does so; a store that remembers keys would still surprise."""
        for body in (b"1", b"2"):
            assert store.create("a/b/c", body)
            assert store.get("a/b/c") == body
            store.delete(["a/b/c"])

    # Races

    def test_one_of_many_threads_wins_each_key_and_its_bytes_stay(self, store: Store) -> None:
        together = threading.Barrier(self.threads, timeout=60.0)

        def race(writer: int) -> list[bool]:
            answers = []
            for key in range(8):
                together.wait()
                answers.append(store.create(f"race/{key}", body_of(writer)))
            return answers

        answers = in_threads(self.threads, range(self.threads), race)
        for key in range(8):
            winners = [writer for writer in range(self.threads) if answers[writer][key]]
            assert len(winners) == 1
            assert store.get(f"race/{key}") == body_of(winners[0])

    def test_a_reader_sees_nothing_or_the_whole_object(self, store: Store) -> None:
        wrote = threading.Event()
        body = bytes(range(256)) * 20_000

        def write() -> None:
            try:
                for n in range(4):
                    store.create(f"k/{n}", body)
            finally:
                wrote.set()

        def read() -> None:
            while not wrote.wait(0.001):
                for row in store.list("k/"):
                    assert row.size == len(body)
                    assert store.get(row.key, start=len(body) - 7) == body[-7:]
                assert store.get("k/3") in (None, body)

        in_threads(3, [write, read, read], lambda work: work())

    def test_writers_and_deleters_do_not_disturb_each_other(self, store: Store) -> None:
        def churn(worker: int) -> None:
            for n in range(25):
                assert store.create(f"a/b/{worker}.{n}", b"1")
                assert store.get(f"a/b/{worker}.{n}") == b"1"
                store.delete([f"a/b/{worker}.{n}"])

        in_threads(4, range(4), churn)
        assert store.list("") == []

    def test_one_of_many_processes_wins_each_key_and_its_bytes_stay(self, store: Store) -> None:
        url = self._process_url_or_skip(store)
        with contextlib.ExitStack() as running:
            writers = [running.enter_context(_OtherProcess(url)) for _ in range(self.processes)]
            for n in range(self.process_keys):
                for name, writer in enumerate(writers):
                    writer.send_create(f"race/{n}", f"{name},", times=1 + 100 * name)
                answers = [writer.answer() for writer in writers]
                assert sorted(answers) == ["False"] * (self.processes - 1) + ["True"]
                name = answers.index("True")
                assert store.get(f"race/{n}") == b"%d," % name * (1 + 100 * name)

    def test_a_killed_writer_leaves_nothing_or_the_whole_object(self, store: Store) -> None:
        url = self._process_url_or_skip(store)
        body = b"0123456789" * (self.kill_bytes // 10)
        unanswered = 0
        for n in range(self.kills):
            with _OtherProcess(url) as writer:
                writer.send_create(f"killed/{n:03}", "0123456789", times=len(body) // 10)
                # The later ones get time to finish; the first gets none.
                unanswered += not writer.kill_after(n / self.kills * 0.4)
            found = self.reopen(store).get(f"killed/{n:03}")
            assert found in (None, body)
            rows = store.list(f"killed/{n:03}")
            assert rows in ([], [Entry(f"killed/{n:03}", len(body))])
            assert rows or found is None
            created = store.create(f"killed/{n:03}", body)  # A server may have ended the write.
            assert not (created and rows)
            assert store.get(f"killed/{n:03}") == body
            store.delete([f"killed/{n:03}"])
        assert unanswered > 0
        assert store.list("") == []

    def _process_url_or_skip(self, store: Store) -> str:
        url = self.process_url(store)
        if url is None:
            pytest.skip("other processes cannot open this store")
        return url


def body_of(writer: int) -> bytes:
    """Bytes that no other writer writes, of another length than theirs."""
    return b"%d," % writer * (100 + 500 * writer)


def in_threads(threads: int, items: Sequence[object] | range, work: Callable[..., T]) -> list[T]:
    """`work` on each item, so many at once; what one raises is raised here."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


class _OtherProcess:
    """A process of its own that creates what it is told to. It is gone when the block ends."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> _OtherProcess:
        import jdiloco

        command = [sys.executable, "-c", _OTHER_PROCESS, jdiloco.__path__[0], self._url]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.answer() != "ready":
            self.__exit__()
            raise AssertionError("the other process could not open the store")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def send_create(self, key: str, unit: str, *, times: int) -> None:
        """Has it create `key` with `unit` that many times over; does not wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{key} {unit} {times}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The next line it says; empty when it ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill_after(self, seconds: float) -> bool:
        """Kills it; returns whether it had answered by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        return bool(self.answer())
