"""Where the key of a run comes from, and mailboxes that are opened with it.

A key is text that nobody can guess, `openssl rand -hex 32`, the same on every node: in the file
that `key_file` names or, without that, in `JDILOCO_RUN_KEY` or in the file that
`JDILOCO_RUN_KEY_FILE` names. ASCII white space around it does not count. What it protects from
stands in `docs/who-may-write.md`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from jdiloco.errors import FormatError, RunKeyMismatch, UsageError
from jdiloco.protocol.keys import MANIFEST
from jdiloco.protocol.signing import RunKey, names_a_manifest
from jdiloco.store import open_store
from jdiloco.store.base import Store
from jdiloco.store.signed import Forged, SignedStore, Told, unsigned

KEY, KEY_FILE = "JDILOCO_RUN_KEY", "JDILOCO_RUN_KEY_FILE"

GIVE_KEY = f"Give it: `key_file=...`, `--key-file`, {KEY} or {KEY_FILE}."

Where = str | os.PathLike[str]


def read_run_key(
    key_file: Where | None = None, environment: Mapping[str, str] | None = None
) -> RunKey | None:
    """The run key; None where none is given.

    Raises UsageError for one that is too short, for a file that cannot be read, and for a variable
    that is set to nothing: a run without a key is never begun by accident.
    """
    environment = os.environ if environment is None else environment
    if key_file is not None:
        if not isinstance(key_file, (str, os.PathLike)):
            raise UsageError(
                f"`key_file` is a {type(key_file).__name__}, wanted the path of the file that "
                f"holds the run key. A key itself goes into the environment, as {KEY}."
            )
        return _from_file(Path(key_file), "`key_file`")
    given = [name for name in (KEY, KEY_FILE) if name in environment]
    if len(given) > 1:
        raise UsageError(f"Both {KEY} and {KEY_FILE} are set: unset one of them.")
    for name in given:
        if not environment[name].strip():
            raise UsageError(f"{name} is set to nothing: unset it, for a run without a key.")
    if KEY in given:
        return _from_bytes(environment[KEY].encode(errors="surrogateescape"))
    return _from_file(Path(environment[KEY_FILE]), KEY_FILE) if given else None


def _from_file(path: Path, named_by: str) -> RunKey:
    try:
        with path.expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read()
    except (OSError, RuntimeError, ValueError) as error:  # no such home, no such path
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UsageError(
            f"The run key in `{path}`, which {named_by} names, cannot be read: {why}."
        ) from error
    if os.name == "posix" and mode & 0o077:
        warnings.warn(
            f"Others on this machine may read the run key in `{path}`: `chmod 600 {path}`.",
            stacklevel=4,
        )
    return _from_bytes(secret)


def _from_bytes(text: bytes) -> RunKey:
    """The same key wherever its text stood: text would lose white space that bytes keep."""
    return RunKey(text.strip())


def signed(store: Store, key: RunKey | None, told: Told = lambda name, because: None) -> Store:
    """`store` with a door that this key opens; itself without a key, or where it has one."""
    if key is None or isinstance(store, SignedStore):
        return store
    return SignedStore(store, key, Forged(told))


def open_mailbox(where: Where | Store, key_file: Where | None = None) -> Store:
    """The store of a mailbox, with the run key that is given or stands in the environment."""
    return signed(open_store(where), read_run_key(key_file))


def refuse_other_key(store: Store, manifests: list[str]) -> None:
    """Raises RunKeyMismatch where a mailbox holds a run, and none with the key that is given here.

    `manifests` are the names of all that is called so: a listing of what lies behind the door.
    """
    there = sorted(filter(names_a_manifest, manifests))
    if not there or store_name(store, MANIFEST) in there:
        return
    if not isinstance(store, SignedStore):
        raise RunKeyMismatch(
            f"The run in {store.url} has a run key, and there is none here. {GIVE_KEY}"
        )
    if MANIFEST in there:
        raise RunKeyMismatch(
            f"The run in {store.url} has no run key, and there is one here. Give none, or name "
            "another mailbox: a key cannot be added to a run."
        )
    raise RunKeyMismatch(
        f"The run in {store.url} has another run key: it made the name `{there[0]}`, and the one "
        f"here makes `{store.name(MANIFEST)}`. {GIVE_KEY}"
    )


def store_name(store: Store, key: str) -> str:
    """How an object is called behind the door of a store, if it has one."""
    return store.name(key) if isinstance(store, SignedStore) else key


def refuse_unreadable(store: Store) -> None:
    """Says what a mailbox holds whose manifest is not to be had with the key that is given here.

    Returns when it holds no manifest at all. Raises RunKeyMismatch as `refuse_other_key` does, and
    FormatError when the manifest is not what was signed.
    """
    manifests = [entry.key for entry in unsigned(store).list(MANIFEST)]
    refuse_other_key(store, manifests)
    if isinstance(store, SignedStore) and store.name(MANIFEST) in manifests:
        raise FormatError(
            f"`{store.name(MANIFEST)}` in {store.url} is not what was signed under that name: it "
            "was damaged, or written over by somebody who does not hold the run's key. Every run "
            "checkpoint but the first holds a copy, as the `manifest` of its item `run`."
        )
