"""Nodes that only train, only close, or do either, for real."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest

from jdiloco import events
from jdiloco.errors import UsageError
from jdiloco.session import load

from .nodes import (
    PATIENCE,
    Recorder,
    algorithm,
    memory,
    no_threads_left,
    node_of,
    records,
    session,
    together,
    vector,
    wait_until,
)
from .test_leaving import last_phase


def train(s, steps: int, pace: float = 0.005):
    """Trains so many steps, one every `pace` seconds."""
    params = s.params
    for _ in range(steps):
        params = s.step(jax.tree.map(lambda x: x - 0.01, params), samples=8)
        time.sleep(pace)
    return params


def train_until(s, true, seconds: float = 40.0) -> None:
    """Trains until `true()`."""
    params, deadline = s.params, time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        params = s.step(jax.tree.map(lambda x: x - 0.01, params), samples=8)
        time.sleep(0.003)


def closers(mailbox) -> list[str]:
    return [record.closer for record in records(mailbox)]


def test_a_syncer_closes_the_rounds_of_learners_and_ends_with_them():
    """It is given no parameters, comes before the run exists, and leaves no thread behind."""
    mailbox, seen = memory(), Recorder()
    settings = algorithm(sync_every=4, checkpoint_every=2, quorum_size=2, lease_seconds=3.0)

    def close():
        with session(
            None, settings, mailbox, "s", role="syncer", leave_with_run=True, callbacks=(seen,)
        ) as s:
            s.run()
        return s.stopped_by

    def learn(name: str):
        with session(vector(1.0), settings, mailbox, name, role="learner") as s:
            train_until(s, lambda: len(records(mailbox)) >= 6)

    with no_threads_left():
        together(close, lambda: learn("a"), lambda: learn("b"))
    log = records(mailbox)
    assert set(closers(mailbox)) == {"s"}
    assert {p.node for record in log for p in record.participants} == {"a", "b"}
    assert log[-1].checkpoint.round >= 0  # It writes run checkpoints too.
    (left,) = seen.of(events.Left)
    assert (left.because, left.steps, left.processed) == ("finished", 0, 0)
    assert last_phase(mailbox, "s") == "left"
    assert np.isfinite(np.asarray(load(mailbox, vector(0.0))["w"])).all()


def test_a_learner_alone_creates_a_run_that_whoever_can_close_takes_at_once():
    """The manifest names no closer, so nobody waits for one whose lease would have to end."""
    mailbox, seen = memory(), Recorder()
    settings = algorithm(sync_every=2, lease_seconds=60.0)
    with session(vector(1.0), settings, mailbox, "a", role="learner") as a:
        train(a, 6)
        assert not records(mailbox)

        def close():
            with session(
                vector(0.0), settings, mailbox, "b", role="syncer", callbacks=(seen,)
            ) as b:
                wait_until(lambda: records(mailbox))
                assert node_of(b).state.role == "syncer"

        began = time.monotonic()
        helper = threading.Thread(target=close)
        helper.start()
        train_until(a, lambda: len(records(mailbox)) >= 1)
        helper.join()
        assert time.monotonic() - began < 30
    assert seen.of(events.TookOver)[0].because == "the run names no closer"


def test_a_syncer_that_comes_late_is_named_and_one_that_goes_is_replaced():
    mailbox = memory()
    settings = algorithm(sync_every=2, lease_seconds=1.0)
    with session(vector(1.0), settings, mailbox, "a") as a:
        train_until(a, lambda: len(records(mailbox)) >= 2)
        come, go = threading.Event(), threading.Event()

        def close():
            with session(None, settings, mailbox, "s", role="syncer"):
                come.set()
                go.wait(60)

        helper = threading.Thread(target=close)
        helper.start()
        assert come.wait(PATIENCE)
        train_until(a, lambda: "s" in closers(mailbox))
        go.set()
        helper.join()
        before = len(records(mailbox))
        train_until(a, lambda: "a" in closers(mailbox)[before:])
    named = [record.next_closer for record in records(mailbox)]
    first = named.index("s")
    last = max(i for i, closer in enumerate(closers(mailbox)) if closer == "s")
    assert set(named[first : last + 1]) == {"s"}


def test_an_either_node_leaves_training_to_others_and_takes_it_up_again():
    """While it closes it takes commits, beats `closing`, and is waited for by nobody."""
    mailbox, seen = memory(), Recorder()
    settings = algorithm(sync_every=2, quorum_size=2, lease_seconds=2.0)
    steps, stop = [0], threading.Event()

    def either():
        with session(vector(1.0), settings, mailbox, "a", role="either", callbacks=(seen,)) as s:
            params = s.params
            while not stop.is_set():
                params = s.step(jax.tree.map(lambda x: x - 0.01, params), samples=8)
                steps[0] += 1
                time.sleep(0.005)

    def learner():
        wait_until(lambda: steps[0] > 3)
        with session(vector(1.0), settings, mailbox, "b", role="learner") as s:
            train_until(s, lambda: seen.of(events.Paused))
            train_until(s, lambda: last_phase(mailbox, "a") == "closing")
            trained, closed = steps[0], len(records(mailbox))
            aligned = len(seen.of(events.Aligned))
            train_until(s, lambda: len(records(mailbox)) >= closed + 4)
            assert steps[0] <= trained + 1
            assert len(seen.of(events.Aligned)) > aligned
            alone = records(mailbox)[closed + 1 :]
            assert {p.node for r in alone for p in r.participants} == {"b"}
            assert {r.closer for r in alone} == {"a"}
        trained = steps[0]
        wait_until(lambda: steps[0] > trained + 3)
        stop.set()

    together(either, learner)
    assert seen.of(events.Resumed)[0].because == "no other learner trains"


def test_two_either_nodes_share_the_work_and_both_end_with_the_same_values():
    mailbox = memory()
    settings = algorithm(sync_every=2, lease_seconds=2.0)

    def either(name: str):
        with session(vector(1.0), settings, mailbox, name, role="either", leave_with_run=True) as s:
            train(s, 30)
        return np.asarray(s.params["w"])

    one, other = together(lambda: either("a"), lambda: either("b"))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.step(vector(1.0), samples=1), "this node is a syncer"),
        (lambda s: s.params, "jdiloco.load"),
        (lambda s: s.run(lambda p, x: (p, 1), [1]), "trains nothing"),
    ],
)
def test_a_syncer_says_what_it_cannot_do(call, message):
    with (
        session(vector(1.0), algorithm(), memory(), role="syncer") as s,
        pytest.raises(UsageError, match=f"(?i){message}"),
    ):
        call(s)


def test_roles_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="must be one of 'both', 'learner'"):
        session(vector(1.0), algorithm(), memory(), role="closer")
    with pytest.raises(UsageError, match="`params` is None, and a node of role 'both' trains"):
        session(None, algorithm(), memory())
    with (
        session(vector(1.0), algorithm(), memory()) as s,
        pytest.raises(UsageError, match="nothing to train on"),
    ):
        s.run()


def test_a_learner_that_waits_where_nobody_closes_says_so():
    """Otherwise it would stand still for ever and look as if it trained."""
    seen = Recorder()
    settings = algorithm(sync_every=2, overlap_steps=0, lease_seconds=0.3)
    learner = session(vector(1.0), settings, memory(), "l", role="learner", callbacks=(seen,))

    def alone():
        with learner as s:
            train(s, 2)

    thread = threading.Thread(target=alone, daemon=True)
    thread.start()
    warned = seen.wait(events.Warned)
    assert "Alive beside this node: nobody" in warned[0].message
    assert "whose role is not 'learner'" in warned[0].message
    learner._on_signal(15)
    thread.join(20)
    assert not thread.is_alive()
