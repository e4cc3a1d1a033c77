"""Case B73: a reader that is overtaken while it reads reads again."""

from __future__ import annotations

import threading
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

from jdiloco.runtime.export import export
from jdiloco.session import load
from jdiloco.store import Store
from jdiloco.testing.faults import FaultyStore

from .nodes import algorithm, digest, memory, node_of, records, session, vector, wait_until


class Overtaken:
    """A script: the first payload is asked for only once `meanwhile` is over."""

    def __init__(self, meanwhile) -> None:
        self._meanwhile = meanwhile
        self.gone = ""

    def __call__(self, call):
        if "/data/" in call.key and not self.gone:
            self.gone = call.key
            self._meanwhile()
        return None


def exported(mailbox: Store, path: Path):
    export(mailbox, path)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


READERS = {"load": lambda mailbox, path: load(mailbox, vector(0.0)), "export": exported}


@pytest.mark.parametrize("how", READERS)
def test_a_payload_that_was_swept_while_its_reader_slept_is_read_in_its_newer_version(
    how, tmp_path
):
    """Between the record and its values two newer versions come, and the old one is swept."""
    store, asleep, awake = memory(), threading.Event(), threading.Event()
    settings = algorithm(sync_every=2, overlap_steps=0, keep_rounds=1, checkpoint_every=2)
    found: list[str] = []

    def meanwhile() -> None:
        asleep.set()
        assert awake.wait(60)

    script, read = Overtaken(meanwhile), READERS[how]
    reader = threading.Thread(
        target=lambda: found.append(digest(read(FaultyStore(store, script), tmp_path / "model")))
    )
    with session(vector(1.0), settings, store, "ada") as s:
        params = train(s, s.params, store, rounds=3)
        reader.start()
        assert asleep.wait(60)
        before = len(records(store))
        while store.get(script.gone) is not None:
            params = train(s, params, store, rounds=2)
        assert len(records(store)) >= before + 2
        newest = digest(s.params)
        awake.set()
        reader.join(60)
    assert found == [newest]


def train(s, params, store: Store, rounds: int):
    """So many rounds more; returns the parameters once the last is committed and held."""
    wanted = len(records(store)) + rounds
    while len(records(store)) < wanted:
        params = s.step({"w": params["w"] - 1}, samples=1)
    wait_until(lambda: node_of(s).state.chain.read == wanted - 1)
    return params
