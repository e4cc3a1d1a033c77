"""Where a run key comes from, and what is said of one that does not fit."""

from __future__ import annotations

import pytest

from jdiloco.errors import FormatError, RunKeyMismatch, UsageError
from jdiloco.protocol.keys import MANIFEST
from jdiloco.protocol.signing import RunKey
from jdiloco.runtime import run_key
from jdiloco.runtime.run_key import read_run_key, refuse_other_key, refuse_unreadable, signed
from jdiloco.store import MemoryStore

TEXT = "a secret of 22 letters"
OTHER = "another secret of this run"


def same(key: RunKey | None, text: str) -> bool:
    assert key is not None
    return key.name(MANIFEST) == RunKey(text.encode()).name(MANIFEST)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "key"
    path.write_text(f"{TEXT}\n")
    path.chmod(0o600)
    return path


def test_a_key_stands_in_the_environment_or_in_a_file_or_nowhere(file):
    assert read_run_key(None, {}) is None
    assert same(read_run_key(None, {run_key.KEY: TEXT}), TEXT)
    assert same(read_run_key(None, {run_key.KEY_FILE: str(file)}), TEXT)
    assert same(read_run_key(file, {}), TEXT)


@pytest.mark.parametrize("space", ["\u00a0", "\x1c", "\u2003"])
def test_the_same_text_is_the_same_key_in_the_environment_and_in_a_file(file, space):
    """White space that only Unicode knows belongs to the key in both, or nodes would not meet."""
    text = f"{space}{TEXT}{space}"
    file.write_bytes(f"{text}\n".encode())
    assert same(read_run_key(file, {}), text)
    assert same(read_run_key(None, {run_key.KEY: f"{text}\n"}), text)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/key", "a\0b"])
def test_a_path_that_cannot_be_is_told_as_a_file_that_cannot_be_read(path):
    with pytest.raises(UsageError, match="which `key_file` names, cannot be read"):
        read_run_key(path, {})


def test_an_argument_beats_the_environment(file):
    assert same(read_run_key(file, {run_key.KEY: OTHER}), TEXT)


def test_a_new_line_at_the_end_is_no_part_of_a_key(file):
    file.write_bytes(f"{TEXT}\r\n".encode())
    assert same(read_run_key(file, {}), TEXT)
    assert same(read_run_key(None, {run_key.KEY: f"{TEXT}\n"}), TEXT)


@pytest.mark.parametrize("name", [run_key.KEY, run_key.KEY_FILE])
def test_a_variable_that_is_set_to_nothing_is_refused(name):
    """`JDILOCO_RUN_KEY=$(cat misspelled)` must not begin a run without a key."""
    with pytest.raises(UsageError, match="set to nothing: unset it"):
        read_run_key(None, {name: " "})


def test_two_variables_are_refused(file):
    with pytest.raises(UsageError, match="unset one of them"):
        read_run_key(None, {run_key.KEY: TEXT, run_key.KEY_FILE: str(file)})


def test_a_file_that_is_not_there_or_too_short_is_refused(file, tmp_path):
    with pytest.raises(UsageError, match="which `key_file` names, cannot be read: No such file"):
        read_run_key(tmp_path / "missing", {})
    with pytest.raises(UsageError, match="JDILOCO_RUN_KEY_FILE names, cannot be read"):
        read_run_key(None, {run_key.KEY_FILE: str(tmp_path)})
    file.write_text("short\n")
    with pytest.raises(UsageError, match=r"5 bytes, wanted 16.*openssl rand -hex 32"):
        read_run_key(file, {})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_warned_of(file, mode):
    file.chmod(mode)
    with pytest.warns(UserWarning, match="Others on this machine may read the run key"):
        read_run_key(file, {})


def mailbox(*names: str) -> MemoryStore:
    store = MemoryStore()
    for name in names:
        store.create(name, b"{}")
    return store


def refused(store: MemoryStore, key: RunKey | None) -> str:
    with pytest.raises(RunKeyMismatch) as caught:
        refuse_unreadable(signed(store, key))
    return str(caught.value)


def test_a_run_with_a_key_refuses_who_has_none_or_another():
    key, other = RunKey(TEXT.encode()), RunKey(OTHER.encode())
    store = mailbox(key.name(MANIFEST))
    assert "has a run key, and there is none here. Give it: `key_file=...`" in refused(store, None)
    said = refused(store, other)
    assert "has another run key" in said
    assert other.name(MANIFEST) in said
    assert TEXT not in said + OTHER


def test_a_run_without_a_key_refuses_who_has_one():
    said = refused(mailbox(MANIFEST), RunKey(TEXT.encode()))
    assert "has no run key, and there is one here. Give none" in said


@pytest.mark.parametrize("key", [None, RunKey(TEXT.encode())])
def test_an_empty_mailbox_and_one_that_fits_refuse_nobody(key):
    """Whatever lies beside: who made it does not keep anybody out."""
    refuse_unreadable(signed(mailbox(), key))
    store = mailbox("manifest.json", MANIFEST, RunKey(TEXT.encode()).name(MANIFEST))
    refuse_other_key(signed(store, key), [entry.key for entry in store.list("")])


def test_a_manifest_that_was_written_over_is_no_manifest():
    key = RunKey(TEXT.encode())
    with pytest.raises(FormatError, match="not what was signed under that name"):
        refuse_unreadable(signed(mailbox(key.name(MANIFEST)), key))
