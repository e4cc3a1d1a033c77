"""The end of a node's data, and of its block, however it comes."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdiloco import events
from jdiloco.session import load

from .nodes import (
    Meeting,
    Recorder,
    algorithm,
    digest,
    lock_step,
    memory,
    no_threads_left,
    records,
    run_keys,
    session,
    together,
    train_on,
    vector,
)


def adds_up(left: events.Left) -> bool:
    return left.processed == pytest.approx(left.merged + left.dropped + left.pending)


def beats(mailbox, node: str) -> list[str]:
    keys = [entry.key.rpartition("/")[2] for entry in mailbox.list(run_keys(mailbox).log)]
    return [key for key in keys if key.startswith(f"{node}.")]


def last_phase(mailbox, node: str) -> str:
    return max(beats(mailbox, node)).split(".")[3]


def two_of_ten_steps(settings):
    """Two nodes train 10 steps with H=4."""
    mailbox, meet, seen = memory(), Meeting(2), Recorder()

    def node(index: int):
        with session(
            {"a": jnp.zeros(5), "b": jnp.zeros(3)},
            settings,
            mailbox,
            f"n{index}",
            leave_with_run=True,
            callbacks=(seen,),
        ) as s:
            params = s.params
            meet(s)
            for _ in range(10):
                params = s.step(jax.tree.map(lambda x: x - 1.0 - index, params), samples=8)
        return s.params

    return together(lambda: node(0), lambda: node(1)), mailbox, seen


@pytest.mark.parametrize("fragments", [1, 2])
def test_with_flush_the_last_steps_are_merged_and_all_nodes_end_equal(fragments):
    """B30: steps 9 and 10 are in the result; final rounds say so, with who took part (B36)."""
    settings = lock_step(2, fragments=fragments, flush_on_close=True, in_flight=1, keep_rounds=99)
    (one, other), mailbox, seen = two_of_ten_steps(settings)
    assert digest(one) == digest(other) == digest(load(mailbox, one))
    for left in seen.of(events.Left):
        assert adds_up(left)
        assert (left.because, left.steps, left.processed) == ("finished", 10, 80)
        assert (left.merged, left.dropped, left.pending) == (80, 0, 0)
    last = records(mailbox)[-1]
    assert all(p.final for p in last.participants)
    assert last.expected >= len(last.participants) >= 1


def test_without_flush_the_last_steps_are_dropped_with_a_reason():
    """B30: the ledger lists steps 9 and 10, and what is exported is the anchor."""
    (one, other), mailbox, seen = two_of_ten_steps(lock_step(2))
    assert digest(one) == digest(other) == digest(load(mailbox, one))
    assert len(records(mailbox)) == 2
    for left in seen.of(events.Left):
        assert adds_up(left)
        assert (left.merged, left.dropped, left.pending) == (64, 16, 0)
    assert {(e.reason, e.steps, e.samples) for e in seen.of(events.Dropped)} == {("left", 2, 16)}


def test_a_final_round_takes_the_merge_as_it_is():
    """No outer learning rate, and the momentum stays: a lone node ends with what it trained."""
    settings = algorithm(sync_every=100, flush_on_close=True, outer_lr=0.1, outer_momentum=0.5)
    with session(vector(1.0), settings, memory()) as s:
        s.step({"w": s.params["w"] * 0.25}, samples=1)
    np.testing.assert_array_equal(s.params["w"], 0.25)


@pytest.mark.parametrize("seed", range(3))
def test_nodes_of_different_pace_that_leave_with_the_run_end_equal(seed):
    """Whoever ends first waits for the others, and takes up the very last record."""
    rng = np.random.default_rng(seed)
    settings = algorithm(
        sync_every=4, fragments=2, flush_on_close=True, lease_seconds=3.0, outer_momentum=0.5
    )
    mailbox, seen = memory(), Recorder()
    steps, paces = rng.integers(5, 30, 3), rng.uniform(0.001, 0.02, 3)

    def node(index: int):
        with session(
            {"a": jnp.zeros(5), "b": jnp.zeros(3)},
            settings,
            mailbox,
            f"n{index}",
            leave_with_run=True,
            callbacks=(seen,),
        ) as s:
            params = s.params
            for _ in range(int(steps[index])):
                time.sleep(float(paces[index]))
                params = s.step(jax.tree.map(lambda x: x - 0.1, params), samples=8)
        return s.params

    results = together(*(lambda i=i: node(i) for i in range(3)))
    newest = digest(load(mailbox, results[0]))
    assert [digest(result) for result in results] == [newest] * 3
    assert all(adds_up(left) for left in seen.of(events.Left))


def test_the_last_beat_says_left():
    mailbox = memory()
    with session(vector(1.0), algorithm(), mailbox, "a"):
        pass
    assert last_phase(mailbox, "a") == "left"


def step_and_raise(s, error: BaseException) -> None:
    s.step(s.params, samples=3)
    raise error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_in_the_users_step_goes_on_and_the_node_says_left(error):
    mailbox, seen = memory(), Recorder()
    began = time.monotonic()
    with no_threads_left():
        s = session(vector(1.0), algorithm(lease_seconds=60.0), mailbox, "a", callbacks=(seen,))
        with pytest.raises(type(error)) as raised, s:
            step_and_raise(s, error)
    assert raised.value is error
    assert time.monotonic() - began < 20
    assert last_phase(mailbox, "a") == "left"
    (left,) = seen.of(events.Left)
    assert (left.because, left.dropped) == ("failed", 3)
    assert adds_up(left)
    np.testing.assert_array_equal(s.params["w"], 1.0)


def test_a_data_iterator_that_raises_goes_on_to_the_caller():
    def data():
        yield 0.5
        raise OSError("the disk is gone")

    with (
        no_threads_left(),
        pytest.raises(OSError, match="the disk is gone"),
        session(vector(1.0), algorithm(), memory()) as s,
    ):
        s.run(lambda params, item: ({"w": params["w"] - item}, 1), data())


def test_an_error_in_the_last_wait_leaves_no_thread():
    """The block waits for its last round with parameters it cannot read."""
    s = session(vector(1.0), algorithm(sync_every=1000, flush_on_close=True), memory())
    with no_threads_left(), pytest.raises(ValueError, match="'w' was donated or deleted"), s:
        s.step(s.params, samples=1)["w"].delete()


def test_parameters_donated_after_the_last_step_do_not_matter_without_flush():
    """The committed values need only their place."""
    donate = jax.jit(lambda p: {"w": p["w"] - 1}, donate_argnums=0)
    with session(vector(1.0), algorithm(sync_every=2), memory()) as s:
        params = s.params
        for _ in range(2):
            params = s.step(donate(params), samples=1)
        donate(params)
        assert s.params["w"].shape == (8,)
    assert not s.params["w"].is_deleted()


def test_a_node_that_has_never_stepped_leaves_at_once():
    began = time.monotonic()
    with session(vector(1.0), algorithm(lease_seconds=60.0), memory()):
        pass
    assert time.monotonic() - began < 20


def test_a_callback_that_raises_changes_nothing(caplog):
    """B112: each is logged; the others, and the run, go on."""

    def broken(event: events.Event) -> None:
        raise RuntimeError(f"no {type(event).__name__}")

    seen = Recorder()
    settings = algorithm(sync_every=1, overlap_steps=0)
    with session(vector(1.0), settings, memory(), callbacks=(broken, seen)) as s:
        for _ in range(2):
            s.step({"w": s.params["w"] - 1}, samples=1)
    assert len(seen.of(events.Committed)) == 2
    assert "a callback raised on" in caplog.text


@pytest.mark.parametrize("kind", [events.Aligned, events.Published, events.Committed])
def test_a_keyboard_interrupt_in_a_callback_leaves_the_loop(kind):
    """B112: on whichever thread the callback ran."""

    def interrupt(event: events.Event) -> None:
        if isinstance(event, kind):
            raise KeyboardInterrupt

    settings = algorithm(sync_every=1, lease_seconds=60.0)
    s = session(vector(1.0), settings, memory(), callbacks=(interrupt,))
    with no_threads_left(), pytest.raises(KeyboardInterrupt), s:
        train_on(s)
