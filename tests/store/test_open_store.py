import re
from pathlib import Path

import pytest

from jdiloco.errors import UsageError
from jdiloco.store import FolderStore, MemoryStore, Store, open_store


@pytest.mark.parametrize("backend", [FolderStore("x"), MemoryStore("x"), MemoryStore()], ids=repr)
def test_a_store_is_passed_through(backend):
    assert isinstance(backend, Store)
    assert open_store(backend) is backend


def test_paths_and_file_urls_are_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = {
        "runs/demo": tmp_path / "runs/demo",
        Path("runs/demo"): tmp_path / "runs/demo",
        "/data/demo": "/data/demo",
        "~/demo": tmp_path / "demo",
        "file:///data/my%20demo": "/data/my demo",
        "file://localhost/data/demo": "/data/demo",
        "./odd:name": tmp_path / "odd:name",
        Path("/data/odd:name"): "/data/odd:name",
        "runs/10:30": tmp_path / "runs/10:30",
        "10:30": tmp_path / "10:30",
    }
    for where, path in wanted.items():
        store = open_store(where)
        assert isinstance(store, FolderStore)
        assert store.url == str(path)


@pytest.mark.parametrize("where", ["runs/a b", "memory://m"])
def test_what_a_store_calls_itself_opens_it(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store(where)
    store.create("k", b"1")
    assert open_store(store.url).get("k") == b"1"
    store.delete(["k"])


@pytest.mark.parametrize("where", ["ftp://host/x", "S3://b", "", "memory://", "://x", "http://h"])
def test_what_names_no_store_is_refused_with_what_there_is(where):
    with pytest.raises(UsageError, match="memory://demo"):
        open_store(where)


@pytest.mark.parametrize("url", ["file://runs/demo", "file:///a?b", "file:///a#b"])
def test_a_file_url_of_another_machine_or_with_more_than_a_path_is_refused(url):
    with pytest.raises(UsageError, match="three slashes"):
        open_store(url)


def test_a_file_url_without_a_path_is_refused():
    with pytest.raises(UsageError, match="names no folder"):
        open_store("file://")


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("memory:/x", "Write `memory://x`"),
        ("memory:x", "Write `memory://x`"),
        (Path("memory://x"), "Write `memory://x`"),
        ("memory:", "Write `memory://demo`"),
        ("file:/data/x", "Write `file:///data/x`"),
        ("s3:/bucket/x", "Write `s3://bucket/x`"),
        ("gs:bucket/x", "Write `gs://bucket/x`"),
        ("Memory:/x", "no store for `Memory:`"),
        ("c:/data", "no store for `c:`"),
        ("odd:name", "`./odd:name`"),
    ],
)
def test_half_a_url_is_refused_with_what_to_write_and_makes_no_folder(
    where, wanted, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(wanted)):
        open_store(where)
    assert list(tmp_path.iterdir()) == []
