"""Whether a node compresses what it sends is its own affair: the run commits the same bytes."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdiloco
from jdiloco import events
from jdiloco.protocol.records import RoundRecord
from jdiloco.runtime import messages
from jdiloco.runtime.inspect import take_stock
from jdiloco.runtime.verify import verify
from jdiloco.session import Session
from jdiloco.store import MemoryStore
from jdiloco.testing.faults import FAIL, Call, FaultyStore

from .nodes import (
    POLL,
    Meeting,
    Recorder,
    algorithm,
    digest,
    lock_step,
    memory,
    records,
    run_keys,
    session,
    together,
    wait_until,
)

RECORD = re.compile(r"/log/\d+/\d+\.0$")
SIZE = 3000
ROUNDS = 4
SETTINGS = {
    "sync_every": 2,
    "fragments": 2,
    "in_flight": 1,
    "checkpoint_every": 1000,
    "keep_rounds": 100,
}


def model() -> dict[str, jnp.ndarray]:
    return {"wide": jnp.ones(SIZE), "narrow": jnp.ones(SIZE, jnp.bfloat16)}


def moved(params, node: int, step: int):
    noise = np.random.default_rng([node, step]).normal(size=SIZE) / 100
    return {name: leaf - jnp.asarray(noise, leaf.dtype) for name, leaf in params.items()}


def run_of(*compressions: str | None, **settings) -> MemoryStore:
    """A run in lock step, one node for each choice."""
    store, meet = memory(), Meeting(len(compressions))
    agreed = lock_step(len(compressions), **{**SETTINGS, **settings})

    def train(node: int) -> None:
        more = {"compression": compressions[node]}
        with session(model(), agreed, store, f"n{node}", **more) as s:
            params = s.params
            meet(s)
            for step in range(ROUNDS):
                params = s.step(moved(params, node, step), samples=node + 1)

    together(*(lambda node=node: train(node) for node in range(len(compressions))))
    return store


def committed(store: MemoryStore) -> list[tuple]:
    """What rounds made of what: by content, without keys, times and run id."""

    def said(record: RoundRecord) -> tuple:
        made = (record.anchor, record.outer, record.update)
        named = [p and (p.size, p.sha256) for p in made]
        return (record.round, record.version, record.cosine, *named)

    return [said(record) for record in records(store)]


def compressed(store: MemoryStore, kind: str) -> list[bool]:
    """Of every contribution, or every payload: whether it is."""
    return [
        "zstd" in messages.read_metadata(lambda a, b, k=key: store.get(k, start=a, stop=b))
        for key in take_stock(store.list(""), run_keys(store)).of(kind)
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"delta_dtype": "float8_e4m3fn", "commit_dtype": "float8_e4m3fn"}]
)
def test_the_same_bytes_are_committed_whoever_compresses(settings):
    plain, mixed, packed = (
        run_of(*who, **settings) for who in ((None, None), (None, "zstd"), ("zstd", "zstd"))
    )
    assert len(records(plain)) == ROUNDS
    assert committed(plain) == committed(mixed) == committed(packed)
    for kind in ("contribution", "payload"):
        assert set(compressed(plain, kind)) == {False}
        assert set(compressed(packed, kind)) == {True}
    assert set(compressed(mixed, "contribution")) == {True, False}


def test_verify_recomputes_compressed_rounds_and_readers_need_no_setting():
    store = run_of("zstd", None)
    report = verify(store)
    assert not report.findings
    assert {round.how for round in report.rounds} == {"recomputed"}
    plain = run_of(None, None)
    assert digest(jdiloco.load(store, model())) == digest(jdiloco.load(plain, model()))


def test_a_node_goes_on_from_a_save_under_another_compression(tmp_path):
    """What it had sent compressed it finds there, and does not take for somebody else's."""
    within, agreed = memory(), algorithm(sync_every=2, lease_seconds=0.5)
    down: list[bool] = []

    def script(call: Call) -> Any:
        return FAIL if down or (call.verb == "create" and RECORD.search(call.key)) else None

    no_records = FaultyStore(within, script)
    with session(model(), agreed, no_records, "a", compression="zstd") as s:
        params = s.params
        for step in range(2):
            params = s.step(moved(params, 0, step), samples=1)
        wait_until(lambda: compressed(within, "contribution"))
        s.save(tmp_path / "1")
        down.append(True)
    seen = Recorder()
    quiet = {"poll_interval": POLL, "callbacks": (seen,)}
    with Session.restore(tmp_path / "1", model(), agreed, within, **quiet) as s:
        params = s.params
        seen.wait(events.Committed)
        s.step(moved(params, 0, 2), samples=1)
    assert not seen.of(events.Warned)
    assert records(within)[0].participants
    assert not verify(within).findings
