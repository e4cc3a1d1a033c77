"""What goes wrong around a node: the store, other nodes' bytes, its own numbers."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jdiloco import events
from jdiloco.algo.merges import weighted_mean
from jdiloco.errors import ClosingFailed, StoreIgnoresConditions
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.records import seal
from jdiloco.session import load
from jdiloco.testing.faults import FAIL, LOSE_ANSWER, Call, FaultyStore

from .nodes import (
    PATIENCE,
    Meeting,
    Recorder,
    algorithm,
    digest,
    lock_step,
    memory,
    no_threads_left,
    node_of,
    records,
    run_keys,
    session,
    together,
    train_on,
    vector,
    wait_until,
)
from .test_leaving import adds_up


class Outage:
    """A script that fails every request while `on`, or those that contain `part`."""

    def __init__(self, part: str = "", verb: str = "") -> None:
        self.on = False
        self.part, self.verb = part, verb

    def __call__(self, call: Call):
        return FAIL if self.on and self.part in call.key and self.verb in call.verb else None


def test_training_goes_on_through_an_outage_and_says_so():
    """Degraded once, Recovered once, and what was trained meanwhile is published afterwards."""
    outage, seen = Outage(), Recorder()
    store = FaultyStore(memory(), outage)
    with session(vector(1.0), algorithm(sync_every=2), store, callbacks=(seen,)) as s:
        params = step_until(s, s.params, lambda: len(seen.of(events.Committed)) >= 2)
        outage.on = True
        params = step_until(s, params, lambda: seen.of(events.Degraded))
        for _ in range(200):
            params = s.step(jax.tree.map(lambda x: x - 0.01, params), samples=1)
        before = len(records(store.inner))
        outage.on = False
        params = step_until(s, params, lambda: seen.of(events.Recovered))
        params = step_until(s, params, lambda: len(records(store.inner)) > before)
    assert len(seen.of(events.Degraded)) == len(seen.of(events.Recovered)) == 1
    (left,) = seen.of(events.Left)
    assert adds_up(left)


def test_a_node_stops_on_a_store_that_has_let_another_node_replace_a_record():
    """Its own write was confirmed, and what lies there now is somebody else's."""
    store, seen = memory(), Recorder()
    settings = algorithm(sync_every=2, overlap_steps=0)
    with session(vector(1.0), settings, store, callbacks=(seen,)) as s:
        params = step_until(s, s.params, lambda: len(seen.of(events.Committed)) >= 2)
        newest = records(store)[-1]
        key = run_keys(store).record(newest.round)
        store.delete([key])
        store.create(key, seal(key, msgspec.structs.replace(newest, write_id="other.0001.0001")))
        with pytest.raises(StoreIgnoresConditions, match=r"another than this node .*doctor"):
            step_until(s, params, lambda: False)


def step_until(s, params, true, seconds: float = PATIENCE):
    """Trains until `true()`; returns the parameters."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        params = s.step(jax.tree.map(lambda x: x - 0.01, params), samples=1)
        time.sleep(0.003)
    return params


@pytest.mark.parametrize("part", [".2.", "/data/", "/log/0"])
def test_a_run_that_cannot_publish_says_so(part):
    """B102: the loss curve is never the only sign."""
    outage, seen = Outage(part, "create"), Recorder()
    store = FaultyStore(memory(), outage)
    with session(vector(1.0), algorithm(sync_every=2), store, callbacks=(seen,)) as s:
        outage.on = True
        step_until(s, s.params, lambda: seen.of(events.Degraded))
        assert not seen.of(events.Committed)
        outage.on = False
        step_until(s, s.params, lambda: seen.of(events.Committed))


def test_no_node_goes_on_from_a_round_whose_record_could_not_be_written():
    """B38: anchors, versions and hashes stay as they were, and the next attempt commits once."""
    outage, seen = Outage("/log/0000000/0000000000.0", "create"), Recorder()
    store = FaultyStore(memory(), outage)
    settings = algorithm(sync_every=2, fragments=1, in_flight=1)
    with session(vector(1.0), settings, store, callbacks=(seen,)) as s:
        outage.on = True
        step_until(s, s.params, lambda: _tries(store, outage.part) >= 3)
        assert not records(store.inner)
        assert not seen.of(events.Committed)
        assert not seen.of(events.Aligned)
        assert digest(load(store.inner, like=vector(0.0))) == digest(vector(1.0))
        outage.on = False
        step_until(s, s.params, lambda: seen.of(events.Aligned))
    assert [record.version for record in records(store.inner)][:1] == [1]
    assert [event.round for event in seen.of(events.Committed)].count(0) == 1


def _tries(store: FaultyStore, part: str) -> int:
    return sum(call.verb == "create" and part in call.key for call in list(store.calls))


def test_lost_answers_change_nothing():
    """Every third request is carried out and its answer lost; each round is committed once."""

    def script(call: Call):
        return LOSE_ANSWER if call.number > 40 and call.number % 3 == 0 else None

    store, seen = FaultyStore(memory(), script), Recorder()
    settings = algorithm(sync_every=2, overlap_steps=0, lease_seconds=5.0)
    with session(vector(1.0), settings, store, callbacks=(seen,)) as s:
        for _ in range(8):
            s.step({"w": s.params["w"] - 1}, samples=1)
    log = records(store.inner)
    assert [record.round for record in log] == [0, 1, 2, 3]
    assert [record.version for record in log] == [1, 2, 3, 4]


class Broken:
    """A store whose listing fails in a way that no store should."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.broken = False

    @property
    def url(self):
        return self.inner.url

    def create(self, key, data):
        return self.inner.create(key, data)

    def get(self, key, *, start=0, stop=None):
        return self.inner.get(key, start=start, stop=stop)

    def list(self, prefix, *, after=""):
        if self.broken:
            raise ZeroDivisionError("not a StoreUnavailable")
        return self.inner.list(prefix, after=after)

    def delete(self, keys):
        self.inner.delete(keys)


def test_a_store_that_fails_in_a_way_nobody_foresaw_is_asked_again():
    store, seen = Broken(memory()), Recorder()
    with session(vector(1.0), algorithm(sync_every=2), store, callbacks=(seen,)) as s:
        store.broken = True
        params = step_until(s, s.params, lambda: seen.of(events.Degraded))
        store.broken = False
        step_until(s, params, lambda: seen.of(events.Committed))


def train_on_while_broken(s, monkeypatch) -> None:
    monkeypatch.setattr(s._entry.node, "_tell_progress", lambda: 1 / 0)
    train_on(s)


def test_a_control_thread_that_fails_ends_the_loop(monkeypatch):
    """Never in silence: `step` raises, with the cause."""
    s = session(vector(1.0), algorithm(), memory())
    with no_threads_left(), pytest.raises(ClosingFailed, match="ZeroDivisionError") as raised, s:
        train_on_while_broken(s, monkeypatch)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


# Bytes of other nodes.


@pytest.mark.parametrize(
    "data",
    [
        b"cposix\nsystem\n(S'touch /tmp/never'\ntR.",
        (2**60).to_bytes(8, "little") + b"{}",
        b'\x50\0\0\0\0\0\0\0{"w":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4]}}',
        b"",
    ],
    ids=["pickle", "long header", "huge shape", "empty"],
)
def test_bytes_that_are_no_contribution_are_rejected(data):
    """B115: the round goes on without them, and the record says why."""
    mailbox, seen = memory(), Recorder()
    with session(vector(1.0), lock_step(1), mailbox, "a", callbacks=(seen,)) as s:
        wait_until(lambda: node_of(s).state.verdict.expected)
        key = run_keys(mailbox).contribution(ContributionKey(0, "mallory", 1, False))
        mailbox.create(key, data)
        wait_until(lambda: node_of(s).state.contributions)
        wait_until(lambda: all(r.examined for r in node_of(s).state.closing.reports))
        params = s.params
        for _ in range(4):
            params = s.step({"w": params["w"] - 1}, samples=1)
    (record, *_) = records(mailbox)
    assert [p.node for p in record.participants] == ["a"]
    assert [(r.node, r.reason) for r in record.rejected] == [("mallory", "corrupt")]


# Numbers that are not finite.


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_node_with_nan_is_rejected_goes_back_and_takes_part_again(fragments):
    """The others go on; its ledger adds up; it is whole again within a few rounds, though its NaN
    has reached every fragment and each step spreads it."""
    names = "abc"[:fragments] if fragments > 1 else "a"
    settings = lock_step(2, fragments=fragments, sync_every=3, in_flight=1)
    mailbox, meet, seen = memory(), Meeting(2), Recorder()

    def train(params):
        mixed = sum(jnp.sum(leaf) for leaf in params.values()) * 0
        return jax.tree.map(lambda x: x * 0.9 + mixed, params)

    def node(index: int):
        mine = (seen,) if index else ()
        params = {name: jnp.ones(4) for name in names}
        with session(params, settings, mailbox, f"n{index}", callbacks=mine) as s:
            params = s.params
            meet(s)
            for step in range(30):
                params = train(params)
                if index and step == 4:
                    params = jax.tree.map(lambda x: x * jnp.nan, params)
                params = s.step(params, samples=8)
        return params, s.params

    (_, one), (mine, other) = together(lambda: node(0), lambda: node(1))
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves((one, mine)))
    assert digest(one) == digest(other)
    log = records(mailbox)
    rejected = [r.round for r in log if r.rejected]
    assert {(r.node, r.reason) for record in log for r in record.rejected} == {("n1", "nonfinite")}
    assert len(rejected) <= fragments
    assert [p.node for p in log[-1].participants] == ["n0", "n1"]
    (left,) = seen.of(events.Left)
    assert adds_up(left)
    assert {e.reason for e in seen.of(events.Dropped)} <= {"rejected", "left"}
    assert left.dropped > 0


def test_a_lone_node_with_nan_goes_back_to_its_anchor():
    """A void round: the version stays, and the node trains on from the values of before."""
    mailbox, seen = memory(), Recorder()
    with session(vector(1.0), lock_step(1, sync_every=1), mailbox, callbacks=(seen,)) as s:
        params = s.step({"w": s.params["w"] * jnp.nan}, samples=5)
        np.testing.assert_array_equal(params["w"], 1.0)
        params = s.step({"w": params["w"] - 0.5}, samples=7)
        assert np.isfinite(np.asarray(params["w"])).all()
    first, second = records(mailbox)
    assert (first.participants, first.version) == ((), 0)
    assert [r.reason for r in first.rejected] == ["nonfinite"]
    assert second.version == 1
    (left,) = seen.of(events.Left)
    assert (left.processed, left.merged, left.dropped) == (12, 7, 5)


def test_a_delta_that_leaves_the_range_of_the_wire_is_rejected_and_survived():
    """float16 on the wire: 1e6 becomes infinite."""
    mailbox = memory()
    settings = lock_step(1, sync_every=1, delta_dtype="float16", merge=weighted_mean())
    with session(vector(1.0), settings, mailbox) as s:
        params = s.step({"w": s.params["w"] - 1e6}, samples=1)
        np.testing.assert_array_equal(params["w"], 1.0)
    assert [r.reason for r in records(mailbox)[0].rejected] == ["nonfinite"]


# Participation.


def test_a_round_that_few_took_part_in_says_so():
    """B36: one of three reports while the others hang; the record names one of three expected."""
    settings = algorithm(sync_every=1, quorum_size=3, follow=0, lease_seconds=0.5)
    mailbox, seen, stop = memory(), Recorder(), threading.Event()

    def hang(index: int):
        with session(vector(1.0), settings, mailbox, f"n{index}"):
            stop.wait(PATIENCE)

    def train():
        try:
            with session(vector(1.0), settings, mailbox, "n0", callbacks=(seen,)) as s:
                wait_until(lambda: len(node_of(s).state.verdict.live) == 3)
                step_until(s, s.params, lambda: seen.of(events.Committed))
        finally:
            stop.set()

    together(train, lambda: hang(1), lambda: hang(2))
    record = records(mailbox)[0]
    assert [p.node for p in record.participants] == ["n0"]
    assert record.expected >= 1
    assert load(mailbox, vector(0.0))["w"].shape == (8,)
