import errno
import itertools
import os
import resource
import stat
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdiloco.errors import StoreIgnoresConditions, StoreUnavailable, UsageError
from jdiloco.store import Entry, FolderStore, MemoryStore, exclusive
from jdiloco.store.folder import LEFTOVER_SECONDS_MAX, TRIES
from jdiloco.testing.conformance import StoreConformance, body_of, in_threads

NO_LINKS = [errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV]


class TestFolderStore(StoreConformance):
    """The contract, in a folder."""

    @pytest.fixture
    def store(self, tmp_path):
        return FolderStore(tmp_path / "run")

    def process_url(self, store):
        return store.url


class TestFolderStoreWithoutHardLinks(StoreConformance):
    """The contract, where only renaming without replacing is left (case B65)."""

    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
        return FolderStore(tmp_path / "run")


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "run")


def failing(code, *, times=10**9, then=None):
    """A system call that fails so often, and is then carried out."""
    left = [times]

    def call(*args, **kwargs):
        if left[0] > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code), args[0])
        assert then is not None
        return then(*args, **kwargs)

    return call


def below(path):
    """Every file and directory below `path`."""
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


# What is promised of power failures and killed writers


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_answer(store, monkeypatch):
    done = []
    fsync, link = os.fsync, os.link

    def traced_fsync(descriptor):
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        done.append((kind, os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def traced_link(source, target):
        done.append(("link", os.stat(source).st_ino))
        link(source, target)

    store.create("a/earlier", b"")
    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "link", traced_link)
    store.create("a/k", b"1")
    file = os.stat(f"{store.url}/a/k").st_ino
    directory = os.stat(f"{store.url}/a").st_ino
    assert done == [("file", file), ("link", file), ("directory", directory)]

    # "Taken" is acted upon as well, and whoever took it may have died before the last step.
    done.clear()
    assert not store.create("a/k", b"2")
    assert done == [("directory", directory)]


def test_a_new_directory_reaches_the_disk_in_its_parent(store, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    store.create("a/b/k", b"1")
    for directory in (os.path.dirname(store.url), store.url, f"{store.url}/a", f"{store.url}/a/b"):
        assert directory in synced


def test_unfinished_files_are_never_seen(store, tmp_path):
    store.create("k", b"1")
    (tmp_path / "run/~writing/host.1.7").write_bytes(b"half")
    assert store.list("") == [Entry("k", 1)]
    for key in ("~writing", "~writing/host.1.7"):
        with pytest.raises(UsageError):
            store.get(key)


@pytest.mark.parametrize(("age", "stays"), [(-60.0, True), (60.0, False)])
def test_only_unfinished_files_a_day_old_are_removed(store, tmp_path, monkeypatch, age, stays):
    """By the clock of the file system; this machine's is years ahead of it."""
    monkeypatch.setattr(time, "time", lambda: 4e9)
    store.create("k", b"1")
    left = tmp_path / "run/~writing/host.1.7"
    left.write_bytes(b"half")
    now = left.stat().st_mtime
    os.utime(left, (0, now - LEFTOVER_SECONDS_MAX - age))
    FolderStore(store.url).create("other", b"1")
    assert left.exists() == stays


def test_a_writer_whose_file_was_removed_says_so_and_shows_nothing(store, monkeypatch):
    write = FolderStore._write

    def removed_after(self, views):
        temporary = write(self, views)
        os.unlink(temporary)
        return temporary

    monkeypatch.setattr(FolderStore, "_write", removed_after)
    with pytest.raises(StoreUnavailable, match="naming `k` failed with ENOENT"):
        store.create("k", b"1")
    assert store.list("") == []


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_failed_write_leaves_no_file_behind(store, tmp_path, monkeypatch, call):
    store.create("a/earlier", b"")
    clean = below(tmp_path)
    monkeypatch.setattr(os, call, failing(errno.ENOSPC))
    with pytest.raises(StoreUnavailable, match="No space left"):
        store.create("a/k", b"1")
    assert below(tmp_path) == clean
    monkeypatch.undo()
    assert store.create("a/k", b"1")


def test_a_file_that_stays_short_is_never_named(store, tmp_path):
    store.create("a/earlier", b"")
    clean = below(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StoreUnavailable, match="EFBIG"):
            store.create("a/k", [b"x" * 90_000, b"x" * 90_000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert below(tmp_path) == clean


# File systems that can do less


@pytest.mark.parametrize("code", NO_LINKS, ids=errno.errorcode.get)
def test_without_hard_links_one_of_many_threads_still_wins(store, monkeypatch, code):
    monkeypatch.setattr(os, "link", failing(code))
    answers = in_threads(20, range(20), lambda writer: store.create("k", body_of(writer)))
    assert sum(answers) == 1
    assert store.get("k") == body_of(answers.index(True))


def test_writers_with_and_without_hard_links_exclude_each_other(store, monkeypatch):
    link = os.link

    def sometimes(source, target):
        if threading.current_thread().name[-1] in "02468":
            raise OSError(errno.EPERM, "no links here")
        link(source, target)

    monkeypatch.setattr(os, "link", sometimes)
    for n in range(20):
        key = f"k/{n}"
        answers = in_threads(8, range(8), lambda writer: store.create(key, body_of(writer)))  # noqa: B023
        assert sum(answers) == 1
        assert store.get(key) == body_of(answers.index(True))


def test_a_file_system_that_can_do_neither_is_refused(store, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(exclusive, "rename_without_replacing", failing(errno.EINVAL))
    with pytest.raises(StoreIgnoresConditions, match=r"neither link \(EPERM\) nor .* \(EINVAL\)"):
        store.create("k", b"1")
    assert store.list("") == []
    assert below(tmp_path) == ["run", "run/~writing"]


def test_renaming_without_replacing_does_not_replace(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    with pytest.raises(FileExistsError):
        exclusive.rename_without_replacing(f"{tmp_path}/old", f"{tmp_path}/new")
    exclusive.rename_without_replacing(f"{tmp_path}/old", f"{tmp_path}/ä newer")
    assert below(tmp_path) == ["new", "ä newer"]


def test_a_link_whose_answer_got_lost_is_known_as_ours(store, monkeypatch):
    """An NFS client asks again and hears that the name exists: it is its own."""
    link = os.link
    monkeypatch.setattr(os, "link", lambda old, new: (link(old, new), link(old, new)))
    assert store.create("k", b"1") is True
    assert store.create("k", b"2") is False


STEPS = {
    "open": (lambda store: store.get("a/k"), b"1"),
    "scandir": (lambda store: store.list("a/"), [Entry("a/k", 1)]),
    "unlink": (lambda store: store.delete(["a/k"]), None),
    "link": (lambda store: store.create("a/new", b"2"), True),
    "lstat": (lambda store: store.create("a/new", b"2"), True),
    "fsync": (lambda store: store.create("a/new", b"2"), True),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_stale_handle_is_looked_up_again(store, monkeypatch, step):
    """Case B71, for each system call that may meet one."""
    act, wanted = STEPS[step]
    store.create("a/k", b"1")
    monkeypatch.setattr(os, step, failing(errno.ESTALE, times=2, then=getattr(os, step)))
    assert act(store) == wanted


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_what_stays_wrong_is_said_with_path_and_cause(store, monkeypatch, step, code):
    act, _ = STEPS[step]
    store.create("a/k", b"1")
    monkeypatch.setattr(os, step, failing(code))
    with pytest.raises(StoreUnavailable, match=errno.errorcode[code]) as caught:
        act(store)
    monkeypatch.undo()
    assert store.url in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_directory_that_cannot_be_synced_is_no_error(store, monkeypatch):
    fsync = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not for directories")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    assert store.create("a/k", b"1")


# What is in the folder


def test_opening_and_reading_change_nothing_on_the_disk(store, tmp_path):
    assert store.list("") == []
    assert store.get("a/k") is None
    store.delete(["a/k"])
    assert below(tmp_path) == []


def test_directories_that_a_delete_leaves_empty_go_and_others_stay(store, tmp_path):
    for key in ("a/b/c/1", "a/b/c/2", "a/d/1", "e/1"):
        store.create(key, b"1")
    store.delete(["a/b/c/1"])
    assert "run/a/b/c" in below(tmp_path)
    store.delete(["a/b/c/2"])
    assert below(tmp_path) == [
        *("run", "run/a", "run/a/d", "run/a/d/1", "run/e", "run/e/1", "run/~writing")
    ]
    store.delete(["a/d/1", "e/1"])
    assert below(tmp_path) == ["run", "run/~writing"]


def test_a_directory_removed_just_before_the_name_is_given_is_made_again(store, monkeypatch):
    link, removals = os.link, []

    def removed_first(source, target):
        if len(removals) < TRIES - 1:
            directory = os.path.dirname(target)
            removals.append(directory)
            if os.path.isdir(directory):
                os.rmdir(directory)
        link(source, target)

    monkeypatch.setattr(os, "link", removed_first)
    assert store.create("a/b/k", b"1")
    assert store.get("a/b/k") == b"1"


def test_what_others_put_into_the_folder_is_no_object(store, tmp_path):
    store.create("a/k", b"1")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    here = tmp_path / "run/a"
    (here / "link").symlink_to(secret)
    (here / "folder").symlink_to(tmp_path)
    os.mkfifo(here / "pipe")
    (here / "directory").mkdir()
    for name in ("k~", ".nfs000000000001", "with blank", "#k#", "ä"):
        (here / name).write_bytes(b"1")
    assert store.list("") == [Entry("a/k", 1)]
    for name in ("link", "pipe", "directory", "folder"):
        assert store.get(f"a/{name}") is None


def test_reading_what_is_no_object_leaves_no_descriptor_open(store, tmp_path):
    store.create("a/k", b"1")
    os.mkfifo(tmp_path / "run/pipe")
    before = len(os.listdir("/proc/self/fd"))
    for key in ("a", "pipe", "a/k", "a/missing"):
        store.get(key)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_object_may_be_read_by_whom_the_umask_allows(store):
    umask = os.umask(0o027)
    try:
        store.create("k", b"1")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(os.stat(f"{store.url}/k").st_mode) == 0o640


@pytest.mark.parametrize("kind", [FolderStore, MemoryStore])
def test_a_key_that_goes_on_after_another_is_refused(tmp_path, kind):
    store = kind(str(tmp_path / "run"))
    store.create("a/b", b"1")
    for key in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(UsageError, match="cannot both be objects"):
            store.create(key, b"2")
    assert store.list("") == [Entry("a/b", 1)]


def test_a_listing_opens_only_directories_that_can_matter(store, monkeypatch):
    for r in range(5):
        store.create(f"run/log/{r:07}/{r}000.0", b"")
    for key in ("run/log/live/a", "run/data/x", "other/y"):
        store.create(key, b"")
    opened, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (opened.append(str(path)), scandir(path))[1])
    rows = store.list("run/log/", after="run/log/0000003/3000.0")
    assert [row.key for row in rows] == ["run/log/0000004/4000.0", "run/log/live/a"]
    assert [os.path.relpath(path, store.url) for path in opened] == [
        *("run/log", "run/log/0000003", "run/log/0000004", "run/log/live")
    ]


parts = st.text("ab.-0A", min_size=1, max_size=3).filter(lambda part: part[-1] != ".")
keys = st.lists(parts, min_size=1, max_size=3).map("/".join)
texts = st.text("ab.-0/", max_size=4)
numbers = itertools.count()


@settings(deadline=None, max_examples=60)
@given(st.lists(keys, max_size=12), texts, st.lists(keys, max_size=3))
def test_a_folder_lists_what_memory_lists(tmp_path_factory, made, after, deleted):
    folder = FolderStore(tmp_path_factory.getbasetemp() / f"drawn{next(numbers)}")
    stores = (folder, MemoryStore())
    for key in made:
        answers = {outcome(lambda: store.create(key, key.encode())) for store in stores}  # noqa: B023
        assert len(answers) == 1
    for store in stores:
        store.delete(deleted)
    prefixes = {"", *(key[:length] for key in made for length in (1, 2, 3, 4))}
    for prefix in prefixes - {".", ".."}:
        listings = {outcome(lambda: tuple(s.list(prefix, after=after))) for s in stores}  # noqa: B023
        assert len(listings) == 1


def outcome(act):
    """What `act` returns, or the kind of error it raises."""
    try:
        return act()
    except UsageError as error:
        return type(error)


# Where the folder is


def test_a_relative_path_means_the_same_after_changing_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = FolderStore("runs/demo")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.create("k", b"1")
    assert store.url == str(tmp_path / "runs/demo")
    assert FolderStore(store.url).get("k") == b"1"


def test_a_file_is_refused_where_a_folder_is_wanted(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="is a file"):
        FolderStore(tmp_path / "file")


def test_a_path_below_a_file_is_refused_naming_the_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"`[^`]*/file/x/y` can be no folder, as `[^`]*/file` is"):
        FolderStore(tmp_path / "file/x/y")


def test_a_file_that_takes_the_place_of_the_folder_is_named(store, tmp_path):
    (tmp_path / "run").write_bytes(b"")
    with pytest.raises(UsageError, match=f"`{store.url}` is a file"):
        store.create("a/k", b"1")


def test_preparing_makes_the_folder_and_nothing_in_it(tmp_path):
    store = FolderStore(tmp_path / "runs/demo")
    for _ in range(2):
        store.prepare()
        assert below(tmp_path) == ["runs", "runs/demo"]
    store.create("k", b"1")
    store.prepare()
    assert store.list("") == [Entry("k", 1)]


@pytest.mark.parametrize("path", ["/proc/nowhere/x", "/sys/kernel/x/y"])
def test_where_no_folder_can_be_made_preparing_says_so_with_the_systems_reason(path):
    if not os.path.isdir(os.path.dirname(os.path.dirname(path))):
        pytest.skip("this system has no such folder")
    reasons = "ENOENT|EPERM|EACCES|EROFS"
    with pytest.raises(UsageError, match=rf"Folder `{path}`: .*({reasons}) \(.*\) at `"):
        FolderStore(path).prepare()


def test_preparing_below_a_file_that_came_later_says_where_it_is(tmp_path):
    store = FolderStore(tmp_path / "file/x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match=r"ENOTDIR .* at `[^`]*/file/x"):
        store.prepare()


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync"])
def test_failing_to_prepare_leaves_nothing_behind(tmp_path, monkeypatch, call, code):
    store = FolderStore(tmp_path / "runs/demo")
    wanted = rf"`{store.url}`.* {errno.errorcode[code]} \({os.strerror(code)}\)"
    monkeypatch.setattr(os, call, failing(code))
    with pytest.raises(UsageError, match=wanted):
        store.prepare()
    assert below(tmp_path) == []


def test_failing_to_prepare_leaves_what_was_there(store, tmp_path, monkeypatch):
    store.create("a/k", b"1")
    before = below(tmp_path)
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(UsageError, match="ENOSPC"):
        store.prepare()
    monkeypatch.undo()
    assert set(before) - set(below(tmp_path)) <= {"run/~writing"}
    assert store.create("b/k", b"1")


def test_a_stale_handle_is_looked_up_again_before_a_folder_is_refused(store, monkeypatch):
    monkeypatch.setattr(os, "open", failing(errno.ESTALE, times=2, then=os.open))
    store.prepare()
