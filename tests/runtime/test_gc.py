"""`jdiloco gc` on the mailboxes of real runs: what is left is a whole run, with less in it."""

from __future__ import annotations

import json

import pytest

from jdiloco import events
from jdiloco.cli.gc import run_gc
from jdiloco.errors import FormatError, UsageError
from jdiloco.runtime.export import export
from jdiloco.runtime.gc import collect
from jdiloco.runtime.verify import verify
from jdiloco.session import load
from jdiloco.store import FolderStore
from tests.session.nodes import Recorder, algorithm, digest, memory, records, session

from .mailboxes import (
    Objects,
    keys_of,
    mailbox,
    mixed_model,
    objects_of,
    rda_run,
    records_of,
    train_until,
)


@pytest.fixture(scope="module")
def rda() -> Objects:
    return rda_run()


def littered(objects: Objects) -> tuple[Objects, set[str]]:
    """A run's mailbox with what dead nodes leave behind, and what of that is to go."""
    keys, newest = keys_of(objects), records_of(objects)[-1]
    name = "x.0001.0007"
    garbage = {
        keys.payload(newest.round, name, "anchor"): b"lost" * 100,
        f"{keys.checkpoint(newest.checkpoint.round - 1, 'x', 1, 1)}/params/d/0": b"never named",
        f"{keys.log}live/x.0001.00000007.training.12.3": b"",
        f"{keys.log}live/y.0001.00000003.left.12.3": b"",
        f"{keys.after(0)}.2.x.0001": b"late",
        "creating/x.0a.00000001": b"",
        "0f/save/initial.x.0001.0001/_FILES": b"unborn",
    }
    needed = {
        keys.payload(newest.round + 1, name, "anchor"): b"of an open round",
        f"{keys.after(newest.round + 1)}.2.x.0001": b"of an open round",
        f"{keys.checkpoint(newest.round, 'x', 1, 2)}/params/d/0": b"being written",
        keys.incarnation("x", 1): b"",
    }
    return {**objects, **garbage, **needed}, set(garbage)


def test_what_dead_nodes_left_goes_and_the_run_is_as_whole_as_before(rda, tmp_path):
    objects, garbage = littered(rda)
    store = mailbox(objects)
    seen = collect(store, dry_run=True)
    assert objects_of(store) == objects
    made = collect(store)
    assert made.keys == seen.keys
    assert garbage <= set(made.keys)
    left = objects_of(store)
    assert left.keys() == objects.keys() - set(made.keys)
    assert made.total == (len(made.keys), sum(len(objects[key]) for key in made.keys))
    assert made.stored == (len(objects), sum(map(len, objects.values())))
    rest = mailbox({key: data for key, data in left.items() if key in rda})
    assert verify(rest).sound
    assert collect(store, once=True).keys == ()
    assert export(rest, tmp_path / "model").round == records_of(rda)[-1].round


def test_one_look_leaves_the_beats_of_the_silent(rda):
    objects, garbage = littered(rda)
    made = collect(mailbox(objects), once=True)
    silent = {key for key in garbage if ".training." in key or key.startswith("creating/")}
    assert len(silent) == 2
    assert garbage - silent <= set(made.keys)
    assert not silent & set(made.keys)


def test_a_run_goes_on_under_it_and_after_it():
    """Collected again and again by somebody else, while one trains; then another comes."""
    store, seen = memory(), Recorder()
    settings = algorithm(sync_every=2, overlap_steps=0, checkpoint_every=1, keep_rounds=1)
    with session(mixed_model(), settings, store, "a", callbacks=(seen,)) as s:
        for wanted in (4, 8, 12):
            train_until(s, lambda n=wanted: len(seen.of(events.Committed)) >= n, 0.01)
            collect(store, once=True)
    collect(store)
    assert digest(load(store, mixed_model())) == digest(s.params)
    later = Recorder()
    with session(mixed_model(9.0), settings, store, "b", callbacks=(later,)) as s:
        train_until(s, lambda: len(later.of(events.Committed)) >= 3, 0.01)
    assert len(records(store)) >= 15
    assert verify(store).sound


def test_where_a_record_is_damaged_nothing_is_removed(rda):
    objects, _ = littered(rda)
    newest = records_of(rda)[-1].round
    broken = {**objects, keys_of(rda).record(newest): b"rubbish"}
    store = mailbox(broken)
    with pytest.raises(FormatError, match="do not match their digest"):
        collect(store, once=True)
    assert objects_of(store) == broken
    with pytest.raises(UsageError, match="it is empty"):
        collect(memory())


def test_the_command_counts_what_it_removes(rda, tmp_path, capsys):
    objects, garbage = littered(rda)
    store = FolderStore(tmp_path)
    for key, data in objects.items():
        store.create(key, data)
    assert run_gc(store.url, dry_run=True, once=True, as_json=False) == 0
    said = capsys.readouterr().out
    assert "Would remove" in said
    assert "one look does not tell who is gone" in said
    assert objects_of(store) == objects
    assert run_gc(store.url, dry_run=False, once=False, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["removed"] is True
    assert garbage <= set(told["keys"])
    assert not garbage & set(objects_of(store))
