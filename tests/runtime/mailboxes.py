"""Mailboxes that real runs left behind, and mailboxes with a fault in them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

import jdiloco
from jdiloco import events
from jdiloco.algo.merges import weighted_mean
from jdiloco.protocol.keys import MANIFEST, Keys
from jdiloco.protocol.records import Manifest, RoundRecord, seal, sha256, unseal
from jdiloco.runtime.inspect import take_stock
from jdiloco.store import MemoryStore, Store
from jdiloco.store.base import Entry
from jdiloco.testing.faults import FAIL, Call, FaultyStore
from tests.session.nodes import (
    Meeting,
    Recorder,
    algorithm,
    memory,
    records,
    session,
    together,
    wait_until,
)

Objects = dict[str, bytes]
_numbers = itertools.count()


def mixed_model(value: float = 1.0) -> dict[str, Any]:
    """bfloat16 and float32, and a tensor that RDA merges with the mean."""
    return {
        "dense": {"w": jnp.full((3, 40), value)},
        "bias": jnp.full(5, value, jnp.bfloat16),
        "embed": jnp.arange(6.0),
    }


def narrow_model() -> dict[str, Any]:
    """One tensor in float32."""
    return {"w": jnp.arange(8.0)}


def trained(params: Any, by: float) -> Any:
    return jax.tree.map(lambda x: (x - by * jnp.cos(x)).astype(x.dtype), params)


def train_until(s: Any, true: Callable[[], object], by: float, seconds: float = 60.0) -> Any:
    """Trains until `true()`, and returns the parameters; `by` NaN is a learner that diverges."""
    params, deadline = s.params, time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        params = s.step(trained(params, by), samples=3)
        time.sleep(0.002)
    return params


def rda_run() -> Objects:
    """Two nodes and one that joins; two fragments, checkpoints, sweeps."""
    store = memory()
    settings = algorithm(
        fragments=2, sync_every=2, checkpoint_every=1, overlap_steps=0, quorum_size=2
    )
    meeting = Meeting(2)

    def node(name: str, by: float) -> None:
        seen = Recorder()
        with session(mixed_model(), settings, store, name, callbacks=(seen,)) as s:
            if name != "c":
                meeting(s)
            until = 6 if name == "c" else 24
            train_until(s, lambda: len(seen.of(events.Committed)) >= until, by)

    def joiner() -> None:
        wait_until(lambda: store.get(MANIFEST) and len(records(store)) >= 4)
        node("c", 0.03)

    together(lambda: node("a", 0.01), lambda: node("b", 0.02), joiner)
    return objects_of(store)


def mean_run() -> Objects:
    """One fragment and the weighted mean; void, final and taken-over rounds."""
    store = memory()
    settings = algorithm(
        merge=weighted_mean(),
        sync_every=2,
        overlap_steps=0,
        flush_on_close=True,
        keep_rounds=50,
        checkpoint_every=50,
    )
    silenced: list[bool] = []

    def script(call: Call) -> Any:
        return FAIL if silenced else None

    seen = Recorder()
    first = session(narrow_model(), settings, FaultyStore(store, script), "a", callbacks=(seen,))
    with first as dying:
        train_until(dying, lambda: len(seen.of(events.Committed)) >= 3, 0.01)
        later = Recorder()
        with session(narrow_model(), settings, store, "b", callbacks=(later,)) as s:
            silenced.append(True)
            train_until(s, lambda: later.of(events.TookOver), 0.02)
            train_until(s, lambda: len(later.of(events.Committed)) >= 4, 0.02)
            train_until(s, lambda: any(c.void for c in later.of(events.Committed)), jnp.nan)
            train_until(s, lambda: not later.of(events.Committed)[-1].void, 0.02)
            train_until(s, lambda: has_unpublished(s), 0.02)
    return objects_of(store)


def shared_run() -> Objects:
    """A queue of three units that one node works off, a slice of its own before, and a barrier."""
    store = memory()
    settings = algorithm(sync_every=2, overlap_steps=0)
    with session(narrow_model(), settings, store, "a") as s:
        queue = jdiloco.SharedQueue(3, batches=lambda unit: range(4))
        s.run(lambda params, batch: (trained(params, 0.01), 3), queue)
        s.wait_at(jdiloco.Barrier("end", nodes=1), s.params)
    with session(narrow_model(), settings, store, "a", ranks=2) as s:
        params = s.params
        for _ in range(5):
            params = s.step(trained(params, 0.01), samples=3)
    return objects_of(store)


def has_unpublished(s: Any) -> bool:
    """Leaving now, a node that flushes publishes a final contribution."""
    (held,) = s._entry.learner.state.fragments
    return s._entry.learner.steps > s._entry.learner.state.steps and held.outstanding is None


# Objects


def objects_of(store: Store) -> Objects:
    """Everything in a store."""
    found = {entry.key: store.get(entry.key) for entry in store.list("")}
    return {key: data for key, data in found.items() if data is not None}


def mailbox(objects: Mapping[str, bytes], kind: type[MemoryStore] = MemoryStore) -> MemoryStore:
    """A fresh store that holds these."""
    store = kind(f"mailbox-{next(_numbers)}")
    for key, data in objects.items():
        assert store.create(key, data)
    return store


def keys_of(objects: Objects) -> Keys:
    return Keys(unseal(MANIFEST, objects[MANIFEST], Manifest).run)


def kinds_of(objects: Objects) -> dict[str, str]:
    """What each object is."""
    listed = [Entry(key, len(data)) for key, data in objects.items()]
    return take_stock(listed, keys_of(objects)).kinds


def records_of(objects: Objects) -> list[RoundRecord]:
    keys = keys_of(objects)
    found = []
    while (data := objects.get(keys.record(len(found)))) is not None:
        found.append(unseal(keys.record(len(found)), data, RoundRecord))
    return found


def chained(objects: Objects, records: list[RoundRecord]) -> Objects:
    """Objects with these records, each sealed anew and linked to those before it."""
    keys = keys_of(objects)
    objects = dict(objects)
    tip = sha256(objects[MANIFEST])
    bases = [tip] * len(records[0].versions)
    for record in records:
        index = record.round % len(bases)
        key = keys.record(record.round)
        linked = msgspec.structs.replace(record, previous=tip, base=bases[index])
        objects[key] = seal(key, linked)
        tip = sha256(objects[key])
        if not record.void:
            bases[index] = tip
    return objects
