"""Coming into a run: who takes whose values, and what is refused."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdiloco
from jdiloco import events
from jdiloco.algo.merges import weighted_mean
from jdiloco.errors import (
    NodeIdInUse,
    NodeSuperseded,
    RunConfigMismatch,
    RunReplaced,
    SchemaMismatch,
    StoreIgnoresConditions,
    StoreUnavailable,
    UsageError,
)
from jdiloco.protocol.keys import MANIFEST, BeatKey
from jdiloco.runtime import joining
from jdiloco.session import load
from jdiloco.testing.faults import FAIL, IGNORE_CONDITION, Call, FaultyStore

from .nodes import (
    Recorder,
    algorithm,
    digest,
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

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "merge": weighted_mean()}


def test_nodes_with_other_seeds_begin_from_one_nodes_values():
    """B105: of several that start at once one creates the run; all hold its values, bit for bit."""
    mailbox = memory()
    created = Recorder()

    def node(seed: int):
        mine = {"w": jax.random.normal(jax.random.key(seed), (32,))}
        with session(mine, algorithm(), mailbox, f"n{seed}", callbacks=(created,)) as s:
            return digest(s.params), digest(mine)

    found = together(*(lambda i=i: node(i) for i in range(3)))
    (common,) = {held for held, _ in found}
    assert common in {own for _, own in found}
    assert len(created.of(events.RunCreated)) == 1
    assert digest(load(mailbox, vector(0.0, 32))) == common


def test_a_late_joiner_takes_the_runs_values_and_builds_on_them():
    """B51, B84, B85: the run is at 5.0, the joiner brings 0.0; the next commit is made of 5.0."""
    mailbox = memory()
    settings = algorithm(sync_every=1, overlap_steps=0, keep_rounds=99, **PLAIN)
    with session(vector(3.0), settings, mailbox, "first") as s:
        params = s.params
        for value in (4.0, 5.0):
            params = s.step(vector(value), samples=1)
    with session(vector(0.0), settings, mailbox, "late") as s:
        np.testing.assert_array_equal(s.params["w"], 5.0)
        params = s.step({"w": s.params["w"] + 0.25}, samples=1)
        np.testing.assert_array_equal(params["w"], 5.25)
    log = records(mailbox)
    assert [record.version for record in log] == [1, 2, 3]
    assert [p.node for p in log[-1].participants] == ["late"]


def test_a_joiner_while_the_others_train_holds_what_they_commit():
    mailbox = memory()
    settings = algorithm(sync_every=2, lease_seconds=5.0, **PLAIN)
    stop, seen = threading.Event(), Recorder()

    def train():
        with session(vector(0.0), settings, mailbox, "a", callbacks=(seen,)) as s:
            params = s.params
            while not stop.is_set():
                params = s.step({"w": params["w"] + 1.0}, samples=1)
                time.sleep(0.01)

    def join():
        try:
            seen.wait(events.Committed, 3)
            with session(vector(-7.0), settings, mailbox, "b") as s:
                assert float(s.params["w"][0]) >= 4.0
        finally:
            stop.set()

    together(train, join)


def test_a_run_config_mismatch_names_each_setting_with_both_values():
    """B32: another H is refused at the door."""
    mailbox = memory()
    with session(vector(1.0), algorithm(), mailbox), no_threads_left():
        other = algorithm(
            sync_every=5, outer_lr=0.5, merge=weighted_mean(), alignment=jdiloco.blend(0.25)
        )
        with pytest.raises(RunConfigMismatch) as raised, session(vector(1.0), other, mailbox):
            pass
    text = str(raised.value)
    assert "sync_every: the run has 4, this node 5" in text
    assert "outer_lr: the run has 0.7, this node 0.5" in text
    assert "merge: the run has rda(direct_pattern='embed'), this node weighted_mean()" in text
    assert "alignment: the run has overwrite(), this node blend(mixing=0.25)" in text
    assert "lease_seconds" not in text


def test_a_schema_mismatch_names_each_tensor_with_both_shapes():
    mailbox = memory()
    with session({"w": jnp.ones(4), "b": jnp.ones(2)}, algorithm(), mailbox), no_threads_left():
        other = {"w": jnp.ones((2, 2)), "c": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)}
        with pytest.raises(SchemaMismatch) as raised, session(other, algorithm(), mailbox):
            pass
    text = str(raised.value)
    assert "w: the run has float32[4], this node float32[2, 2]" in text
    assert "c: the run has nothing, this node float32[2]" in text
    assert "b: the run has float32[2], this node bfloat16[2]" in text


def test_an_id_that_is_alive_is_refused():
    mailbox = memory()
    with (
        session(vector(1.0), algorithm(), mailbox, "twin"),
        no_threads_left(),
        pytest.raises(NodeIdInUse, match="'twin' is alive as process"),
        session(vector(1.0), algorithm(), mailbox, "twin"),
    ):
        pass


def test_an_id_is_free_again_as_soon_as_its_node_has_left():
    """B120: the second session starts at once, well within a lease."""
    mailbox, settings = memory(), algorithm(beat_seconds=1.0, lease_seconds=60.0)
    with no_threads_left(), session(vector(1.0), settings, mailbox, "same"):
        pass
    began = time.monotonic()
    with session(vector(1.0), settings, mailbox, "same", poll_interval=0.1) as s:
        assert node_of(s).place.life.incarnation == 2
    assert time.monotonic() - began < 20


def test_who_has_to_wait_before_it_joins_says_why_and_once():
    """For a life of its own that died without a word, or for somebody who creates the run."""
    mailbox, seen = memory(), Recorder()
    settings = algorithm(lease_seconds=0.5)
    with session(vector(1.0), settings, mailbox, "a"):
        pass
    mailbox.create(run_keys(mailbox).beat(BeatKey("a", 1, 10**6, "training", 0, 0)), b"")
    with session(vector(1.0), settings, mailbox, "a", callbacks=(seen,)):
        pass
    (told,) = seen.of(events.Joining)
    assert "a process that ran as 'a' has not said that it left" in told.because

    empty, waits = memory(), Recorder()
    syncer = session(None, settings, empty, "s", role="syncer", callbacks=(waits,))

    def train():
        waits.wait(events.Joining)
        with session(vector(1.0), settings, empty, "n"):
            wait_until(lambda: waits.of(events.Joined))

    def close():
        with syncer:
            pass

    together(train, close)
    (told,) = waits.of(events.Joining)
    assert "there is no run in the mailbox yet" in told.because


def test_a_node_that_is_started_again_goes_on_in_its_data_after_what_it_has_sent():
    """What it had trained on and not sent is trained on once more."""
    mailbox, settings = memory(), algorithm(overlap_steps=0)
    for begins, steps, ends in ((0, 10, 10), (8, 4, 12), (12, 0, 12)):
        with session(vector(1.0), settings, mailbox, "same") as s:
            assert s.position == begins
            params = s.params
            for _ in range(steps):
                params = s.step({"w": params["w"] + 1.0}, samples=1)
            assert s.position == ends
    merged = [(p.position, p.counters.steps) for r in records(mailbox) for p in r.participants]
    assert merged == [(4, 4), (8, 4), (12, 4)]


def test_a_call_that_covers_several_steps_moves_the_position_by_as_many():
    with session(vector(1.0), algorithm(), memory()) as s:
        s.step(s.params, samples=8, steps=3)
        assert s.position == 3


def wipe(mailbox) -> None:
    mailbox.delete([entry.key for entry in mailbox.list("")])


def test_a_mailbox_that_holds_another_run_stops_the_node():
    mailbox = memory()
    with no_threads_left():
        s = session(vector(1.0), algorithm(), mailbox, "old")
        with pytest.raises(RunReplaced, match="this node joined run"), s:
            train_on_after(s, mailbox)
        old = node_of(s).place.manifest.run
    assert not [entry.key for entry in mailbox.list(f"{old}/log/") if ".left." in entry.key]


def train_on_after(s, mailbox) -> None:
    wait_until(lambda: node_of(s).state.beaten)
    wipe(mailbox)
    with session(vector(2.0), algorithm(), mailbox, "new"):
        pass
    train_on(s)


def test_an_emptied_mailbox_degrades_a_node_and_training_goes_on():
    """A folder that is not mounted looks the same, and comes back."""
    mailbox, seen = memory(), Recorder()
    with session(vector(1.0), algorithm(), mailbox, "a", callbacks=(seen,)) as s:
        wait_until(lambda: node_of(s).state.beaten)
        wipe(mailbox)
        params = s.params
        deadline = time.monotonic() + 20
        while not node_of(s).state.lost and time.monotonic() < deadline:
            params = s.step(params, samples=1)
            time.sleep(0.005)
        s.step(params, samples=1)
        assert node_of(s).state.lost
        assert seen.wait(events.Degraded)


def newer_life(mailbox, node: str) -> None:
    """What a second process that was started under the same id leaves in the mailbox."""
    keys = run_keys(mailbox)
    mailbox.create(keys.beat(BeatKey(node, 2, 1, "training", 0, 0)), b"")


def test_a_superseded_node_raises_from_step_and_leaves_in_silence():
    """It must not write any more, not even that it leaves; the block ends without waiting."""
    mailbox, settings = memory(), algorithm(lease_seconds=60.0)
    with no_threads_left(), session(vector(1.0), settings, mailbox, "a") as s:
        params = s.params
        newer_life(mailbox, "a")
        with pytest.raises(NodeSuperseded, match="There is an incarnation 2 of node"):
            train_on(s, params)
        with pytest.raises(NodeSuperseded):
            s.step(params, samples=1)  # Nobody trains on unnoticed.
        began = time.monotonic()
    assert time.monotonic() - began < 20  # Of a lease of 60 s.
    names = [entry.key for entry in mailbox.list(run_keys(mailbox).log)]
    assert not [name for name in names if "a.0001" in name and ".left." in name]


def test_a_superseded_node_that_waits_for_a_round_is_told_too():
    mailbox = memory()
    settings = algorithm(overlap_steps=0, sync_every=1, lease_seconds=60.0, quorum_size=2, follow=0)
    other = session(vector(1.0), settings, mailbox, "b")
    with no_threads_left(), other, session(vector(1.0), settings, mailbox, "a") as s:
        other.params  # noqa: B018  (it trains, but never comes to a step)
        wait_until(lambda: len(node_of(s).state.verdict.expected) == 2)
        threading.Timer(0.3, newer_life, (mailbox, "a")).start()
        with pytest.raises(NodeSuperseded):
            s.step({"w": s.params["w"] - 1}, samples=1)
        assert node_of(s).state.chain.read == -1


# Stores that do not answer, or lie.


def test_a_store_that_is_down_at_the_start_ends_in_an_error_after_bounded_tries(monkeypatch):
    monkeypatch.setattr(joining, "FIRST_WAIT", 0.01)
    store = FaultyStore(memory(), lambda call: FAIL)
    with (
        no_threads_left(),
        pytest.raises(StoreUnavailable),
        session(vector(1.0), algorithm(), store),
    ):
        pass
    assert len(store.calls) == joining.TRIES


@pytest.mark.parametrize("part", ["", MANIFEST, "save/", "node/"])
def test_a_store_that_can_only_be_read_ends_in_an_error(part, monkeypatch):
    """Whichever create it is that never comes through: the run's, the checkpoint's, the life's."""
    monkeypatch.setattr(joining, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(joining, "BULK_WAITS", (0.01, 0.01))

    def script(call: Call):
        return FAIL if call.verb == "create" and part in call.key else None

    store = FaultyStore(memory(), script)
    with (
        no_threads_left(),
        pytest.raises(StoreUnavailable),
        session(vector(1.0), algorithm(), store),
    ):
        pass


def test_a_store_that_comes_back_while_a_node_joins_is_no_trouble(monkeypatch):
    monkeypatch.setattr(joining, "FIRST_WAIT", 0.01)
    store = FaultyStore(memory(), dict.fromkeys((1, 2, 5, 6, 9, 14, 20, 21), FAIL))
    with session(vector(1.0), algorithm(), store) as s:
        np.testing.assert_array_equal(s.params["w"], 1.0)


def test_a_store_that_creates_twice_is_refused():
    def script(call: Call):
        return IGNORE_CONDITION if call.verb == "create" and "/node/" in call.key else None

    store = FaultyStore(memory(), script)
    with (
        no_threads_left(),
        pytest.raises(StoreIgnoresConditions),
        session(vector(1.0), algorithm(), store),
    ):
        pass


# Reading without joining.


def test_load_reads_the_newest_and_writes_nothing(tmp_path):
    """B50, B94: while a run goes on and when nobody runs; equal to what the nodes hold."""
    settings = algorithm(sync_every=1, overlap_steps=0, fragments=1)
    params = {"w": jnp.ones((4, 4)), "h": jnp.ones(3, jnp.bfloat16), "n": jnp.int32(7)}
    with session(params, settings, tmp_path / "run") as s:
        for _ in range(3):
            s.step(jax.tree.map(lambda x: x - 0.25, s.params), samples=1)
        during = load(tmp_path / "run", params)
        assert digest({k: during[k] for k in "wh"}) == digest({k: s.params[k] for k in "wh"})
        members = set(node_of(s).state.verdict.live)
    assert len(members) == 1
    before = listing(tmp_path)
    found = load(str(tmp_path / "run"), params)
    assert listing(tmp_path) == before
    assert digest({k: found[k] for k in "wh"}) == digest({k: s.params[k] for k in "wh"})
    assert found["n"] == 7
    assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in params.items()}


def listing(folder) -> list[tuple[str, int, int]]:
    files = sorted(path for path in folder.rglob("*"))
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def test_load_takes_shapes_alone():
    mailbox = memory()
    with session(vector(2.0), algorithm(), mailbox):
        pass
    found = load(mailbox, {"w": jax.ShapeDtypeStruct((8,), jnp.float32)})
    np.testing.assert_array_equal(found["w"], 2.0)


def test_load_says_what_is_missing():
    with pytest.raises(UsageError, match="There is no run in memory://"):
        load(memory(), vector(0.0))
    mailbox = memory()
    with session(vector(2.0), algorithm(), mailbox):
        pass
    with pytest.raises(
        SchemaMismatch, match=r"w: the run has float32\[8\], this node float32\[9\]"
    ):
        load(mailbox, vector(0.0, 9))
