"""Shared work in real sessions: queues, ranks, barriers, and what becomes of it when a node dies.

A row is one coordinate of the model and its batch adds one to it, so what was merged can be counted
row by row in the contributions that the records name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdiloco
from jdiloco import events
from jdiloco.errors import BarrierTimeout, UsageError
from jdiloco.protocol.keys import ContributionKey, Pool
from jdiloco.runtime import contributions
from jdiloco.session import Session
from jdiloco.store import open_store
from tests.session.nodes import (
    PATIENCE,
    ROOT,
    Meeting,
    Recorder,
    algorithm,
    lock_step,
    memory,
    no_threads_left,
    node_of,
    records,
    run_keys,
    run_script,
    session,
    together,
    vector,
    wait_until,
)

UNITS, BATCHES = 8, 6
ROWS = UNITS * BATCHES


def rows_of(unit: int) -> range:
    return range(unit * BATCHES, (unit + 1) * BATCHES)


def queue(**settings: Any) -> jdiloco.SharedQueue:
    return jdiloco.SharedQueue(UNITS, **{"batches": rows_of, **settings})


def zeros() -> dict[str, Any]:
    return {"w": jnp.zeros(ROWS)}


def on_row(params: Any, row: int) -> tuple[Any, int]:
    return {"w": params["w"].at[row].add(1.0)}, 1


class Program:
    """A node that works on the queue. `seen` are the rows it trained on, in order."""

    def __init__(
        self,
        node: str,
        mailbox: Any,
        settings: Any = None,
        *,
        meet: Meeting | None = None,
        **more: Any,
    ) -> None:
        self.node = node
        self.meet = meet
        self.mailbox = mailbox
        self.settings = settings or algorithm(keep_rounds=10_000)
        self.seen: list[int] = []
        self.more = more

    def step(self, params: Any, row: int) -> tuple[Any, int]:
        self.seen.append(row)
        time.sleep(0.005)
        return on_row(params, row)

    def __call__(self) -> list[int]:
        with session(zeros(), self.settings, self.mailbox, self.node, **self.more) as s:
            if self.meet is not None:
                self.meet(s)
            s.run(self.step, queue())
        return self.seen


def merged_rows(mailbox: Any) -> np.ndarray:
    """How often each row was merged; with one fragment, once is all that may be."""
    store = open_store(mailbox)
    keys = run_keys(store)
    total = np.zeros(ROWS)
    for record in records(store):
        for who in record.participants:
            key = ContributionKey(record.round, who.node, who.incarnation, who.final)
            name = keys.contribution(key)
            total -= contributions.decode(name, store.get(name), room=0).tensors["w"]
    return np.round(total, 3)


def marks(mailbox: Any) -> dict[int, str]:
    """The mark of the highest claim on each unit."""
    store, pool = open_store(mailbox), Pool.queue("work", UNITS)
    keys = run_keys(store)
    found = [keys.parse_unit(pool, entry.key) for entry in store.list(keys.units(pool)[0])]
    newest = {key.unit: key for key in sorted(key for key in found if key is not None)}
    return {unit: key.mark for unit, key in newest.items()}


ALL_DONE = dict.fromkeys(range(UNITS), "done")


# Queues


def test_nodes_divide_a_queue_and_train_every_batch_exactly_once():
    store = memory()
    with no_threads_left():
        seen = together(*(Program(node, store) for node in "abc"))
    assert sorted(row for rows in seen for row in rows) == list(range(ROWS))
    assert marks(store) == ALL_DONE
    assert merged_rows(store).max() <= 1


def test_in_lock_step_every_batch_is_merged_exactly_once():
    """With standard DiLoCo nothing is overwritten, so what is trained is merged."""
    store, meet = memory(), Meeting(2)  # A round that was closed before b was seen would drop b's.
    settings = lock_step(2, keep_rounds=10_000, sync_every=3, grace_seconds=None)
    together(*(Program(node, store, settings, meet=meet) for node in "ab"))
    assert merged_rows(store).tolist() == [1.0] * ROWS


def test_a_queue_that_is_complete_ends_at_once_for_whoever_comes_later():
    store = memory()
    Program("a", store)()
    assert Program("b", store)() == []


def test_units_without_batches_are_a_batch_each():
    store, seen = memory(), []

    def step(params: Any, item: str) -> tuple[Any, int]:
        seen.append(item)
        return on_row(params, 0)

    with session(zeros(), algorithm(), store) as s:
        s.run(step, jdiloco.SharedQueue(["x", "y", "z"]))
        s.run(step, jdiloco.SharedQueue([1, 2], name="second", batches={1: "ab", 2: "c"}))
    assert seen == ["x", "y", "z", "a", "b", "c"]


def test_a_run_stopped_by_two_nodes_goes_on_with_three_and_then_with_one():
    """B90: what was merged is not merged again, and what was not is trained again."""
    store = memory()

    class Stopped(Exception):
        pass

    def until(program: Program, batches: int) -> Callable[[], list[int]]:
        def step(params: Any, row: int) -> tuple[Any, int]:
            if len(program.seen) == batches:
                raise Stopped
            return Program.step(program, params, row)

        def run() -> list[int]:
            program.step = step  # type: ignore[method-assign]
            try:
                return program()
            except Stopped:
                return program.seen

        return run

    first = together(*(until(Program(node, store), 8) for node in "ab"))
    second = together(*(until(Program(node, store), 6) for node in "cde"))
    third = Program("f", store)()
    assert marks(store) == ALL_DONE
    trained = {row for rows in (*first, *second, third) for row in rows}
    assert trained == set(range(ROWS))
    assert merged_rows(store).max() <= 1
    assert len(third) < ROWS  # What others had published is not trained again.


def test_an_iterator_that_raises_stops_the_node_and_its_unit_goes_on_elsewhere():
    store = memory()

    def broken(unit: int) -> Iterable[int]:
        for row in rows_of(unit):
            if row == 3:
                raise OSError("the disk is gone")
            yield row

    with (
        no_threads_left(),
        pytest.raises(OSError, match="the disk is gone"),
        session(zeros(), algorithm(keep_rounds=10_000), store, "a") as s,
    ):
        s.run(on_row, queue(batches=broken))
    assert Program("b", store)()[-1] == ROWS - 1
    assert marks(store) == ALL_DONE
    assert merged_rows(store).max() <= 1


def test_whoever_catches_what_a_step_raised_gives_the_unit_back_and_may_go_on():
    store, failures = memory(), []

    def step(params: Any, row: int) -> tuple[Any, int]:
        if row == 3 and not failures:
            failures.append(row)
            raise ValueError("once")
        return on_row(params, row)

    with session(zeros(), algorithm(keep_rounds=10_000), store, "a") as s:
        with pytest.raises(ValueError, match="once"):
            s.run(step, queue())
        s.run(step, queue())
    assert marks(store) == ALL_DONE
    assert merged_rows(store).max() <= 1


def test_a_node_waits_for_units_that_others_hold_unless_it_is_told_not_to():
    store, recorder = memory(), Recorder()
    begun, go_on = threading.Event(), threading.Event()

    def slow(params: Any, row: int) -> tuple[Any, int]:
        begun.set()
        go_on.wait(PATIENCE)
        return on_row(params, row)

    def a() -> None:
        with session(zeros(), algorithm(), store, "a") as s:
            s.run(slow, queue())

    def b() -> float:
        begun.wait(PATIENCE)
        with session(zeros(), algorithm(), store, "b", callbacks=(recorder,)) as s:
            s.run(on_row, queue(stay=False))
            first = dict(marks(store))
            recorder.events.clear()
            threading.Timer(0.5, go_on.set).start()
            s.run(on_row, queue())
        assert list(first.values()).count("") == 1
        return len(recorder.of(events.Resting))

    assert together(a, b)[1] == 1
    assert marks(store) == ALL_DONE


def test_a_node_that_is_named_to_close_gives_its_units_back_and_takes_some_again():
    """It leaves training to the other while that trains, and ends with the queue."""
    store, recorder = memory(), Recorder()
    first = Program("a", store, role="either", callbacks=(recorder,))

    def second() -> list[int]:
        wait_until(lambda: first.seen)
        return Program("b", store)()

    seen = together(first, second)
    assert recorder.of(events.Paused)
    assert sorted(row for rows in seen for row in rows) == list(range(ROWS))
    assert marks(store) == ALL_DONE
    assert merged_rows(store).max() <= 1
    given_back = [entry.key for entry in store.list("") if entry.key.endswith(".back")]
    assert given_back


def test_a_queue_says_what_it_wants():
    with pytest.raises(UsageError, match="name of a queue"):
        jdiloco.SharedQueue(3, name="Epoch 1")
    for none in (-1, 0, []):
        with pytest.raises(UsageError, match="there is no unit to train on"):
            jdiloco.SharedQueue(none)
    with pytest.raises(UsageError, match="at least 1, got 0"):
        jdiloco.Barrier("x", 0)


SLIPS = """
    import jdiloco, jdiloco.errors
    for call in (
        lambda: jdiloco.DiLoCo(sync_every=100, fragments=1, flush_on_close="yes"),
        lambda: jdiloco.SharedQueue(3, batches=[[1], [2], [3]]),
        lambda: jdiloco.SharedQueue(True),
        lambda: jdiloco.SharedQueue(3, name=7),
        lambda: jdiloco.Barrier("x", "3"),
    ):
        try:
            call()
        except jdiloco.errors.UsageError as error:
            print(error)
"""


def test_values_of_another_type_are_refused_with_what_was_wanted():
    """Without this suite's type checks, as users run."""
    wanted = (
        "`flush_on_close` must be True or False, got 'yes'",
        "`batches` is a list. Pass a function or a mapping",
        "`units` is a bool. Pass a sequence",
        "The name of a queue becomes part of a key",
        "`nodes` of barrier 'x' must be an integer of at least 1, got '3'",
    )
    lines = run_script(SLIPS).splitlines()
    for line, start in zip(lines, wanted, strict=True):
        assert line.startswith(start)


def test_a_name_stands_for_one_barrier():
    with session(vector(1.0), algorithm(), memory(), "a") as s:
        params = s.wait_at(jdiloco.Barrier("end", nodes=1), s.params)
        s.wait_at(jdiloco.Barrier("end", nodes=1, timeout=5.0), params)
        with pytest.raises(UsageError, match=r"wants 2 nodes, and this node came .* wanted 1"):
            s.wait_at(jdiloco.Barrier("end", nodes=2), params)


# Deaths

CHILD = """
    import sys, time
    import jax.numpy as jnp
    import jdiloco, jdiloco.errors
    from tests.session.test_work import algorithm, on_row, queue, session, zeros

    def step(params, row):
        print(row, flush=True)
        time.sleep(0.05)
        return on_row(params, row)

    with session(zeros(), algorithm(keep_rounds=10_000), sys.argv[1], "victim") as s:
        s.run(step, queue())
"""


def test_the_work_of_a_process_that_is_killed_goes_on_where_its_contributions_end(tmp_path: Path):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    with child, contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        trained = [int(child.stdout.readline()) for _ in range(BATCHES + 3)]
        program = Program("survivor", tmp_path)
        other = threading.Thread(target=program)
        other.start()
        wait_until(lambda: len(program.seen) >= BATCHES)
        child.send_signal(signal.SIGKILL)
        trained += [int(line) for line in child.stdout]
        other.join(60)
    assert not other.is_alive()
    assert marks(tmp_path) == ALL_DONE
    assert {*trained, *program.seen} == set(range(ROWS))
    assert merged_rows(tmp_path).max() <= 1


# Ranks


def test_four_nodes_with_ranks_read_disjoint_slices_whose_union_is_all():
    """B108: one device each, a hundred ids."""
    store, ids = memory(), list(range(100))
    barrier = threading.Barrier(4)

    def program(node: str) -> Callable[[], tuple[int | None, list[int]]]:
        def run() -> tuple[int | None, list[int]]:
            with session(zeros(), algorithm(), store, node, ranks=4) as s:
                mine = ids[s.rank :: 4]
                params = s.params
                for row in mine[s.position :]:
                    params = s.step(on_row(params, row % ROWS)[0], samples=1)
                barrier.wait(PATIENCE)
            return s.rank, mine

        return run

    found = together(*map(program, "abcd"))
    assert sorted(rank for rank, _ in found) == [0, 1, 2, 3]
    assert sorted(row for _, rows in found for row in rows) == ids


def test_a_spare_node_waits_for_a_rank_and_goes_on_where_its_holder_left_it():
    store = memory()
    begun, over = threading.Event(), threading.Event()

    def holder() -> int:
        with session(zeros(), algorithm(), store, "a", ranks=1) as s:
            params = s.params
            for row in range(10):
                params = s.step(on_row(params, row)[0], samples=1)
            begun.set()
            time.sleep(0.3)
            over.set()
        return s.position

    def spare() -> tuple[bool, int]:
        begun.wait(PATIENCE)
        with session(zeros(), algorithm(), store, "b", ranks=1) as s:
            found = over.is_set(), s.position
        return found

    position, (waited, begin) = together(holder, spare)
    assert position == begin == 10
    assert waited


def test_a_step_that_is_refused_is_no_batch_of_a_slice():
    with session(zeros(), lock_step(1), memory(), "a", ranks=1) as s:
        params = s.params
        for _ in range(3):
            params = s.step(on_row(params, 0)[0], samples=1)
        with pytest.raises(UsageError):
            s.step(params, samples=-1)
        with pytest.raises(UsageError, match="structure"):  # The fourth is due, and looked at.
            s.step({"other": jnp.zeros(ROWS)}, samples=1)
        assert s.position == 3


def test_a_batch_whose_step_is_refused_is_trained_by_somebody_else():
    store, seen = memory(), []

    def wrong(params: Any, row: int) -> tuple[Any, int]:
        seen.append(row)
        return on_row(params, row)[0], -1 if row == 2 else 1

    settings = lock_step(1, sync_every=1)
    with (
        pytest.raises(UsageError, match="samples"),
        session(zeros(), settings, store, "a") as s,
    ):
        s.run(wrong, queue())
    assert seen == [0, 1, 2]
    assert Program("b", store, settings)()[0] == 2


def test_ranks_are_counted():
    with pytest.raises(UsageError, match="1 or more, not 0"):
        Session(zeros(), algorithm(), memory(), ranks=0)


# Barriers


def test_who_has_left_comes_to_no_barrier_and_only_with_its_own_parameters():
    store = memory()
    with session(zeros(), algorithm(), store, "a") as s:
        with pytest.raises(UsageError, match="structure"):
            s.wait_at(jdiloco.Barrier("b", 1), {"other": jnp.zeros(3)})
        held = s.wait_at(jdiloco.Barrier("b", 1), s.params)
    with pytest.raises(UsageError, match="has ended"):
        s.wait_at(jdiloco.Barrier("c", 1), held)


def test_a_node_at_a_barrier_holds_up_no_round_that_the_other_waits_for():
    """One waits at the barrier for one that waits with overlap_steps=0 for a round that would wait
    for the first; and the first takes part again afterwards."""
    store = memory()
    settings = lock_step(2, sync_every=2)

    def program(node: str, steps: int) -> Callable[[], int]:
        def run() -> int:
            with session(zeros(), settings, store, node, leave_with_run=True) as s:
                params = s.params
                params = s.wait_at(jdiloco.Barrier("begin", 2), params)
                for _ in range(steps):
                    params = s.step(on_row(params, 0)[0], samples=1)
                params = s.wait_at(jdiloco.Barrier("middle", 2, timeout=60.0), params)
                for _ in range(20):
                    params = s.step(on_row(params, 1)[0], samples=1)
                read = node_of(s).state.chain.read
            return read

        return run

    together(program("a", 2), program("b", 12))
    found = [{who.node for who in record.participants} for record in records(store)]
    assert {"b"} in found  # While the other was at the barrier.
    assert {"a", "b"} in found[found.index({"b"}) :]


def test_a_node_that_waits_takes_up_commits():
    store, there = memory(), threading.Event()

    def waiting() -> float:
        with session(zeros(), algorithm(), store, "a") as s:
            params = s.params
            there.set()
            params = s.wait_at(jdiloco.Barrier("x", 2), params)
            taken = float(params["w"][0])
        return taken

    def training() -> None:
        there.wait(PATIENCE)
        with session(zeros(), algorithm(outer_momentum=0.5), store, "b") as s:
            params = s.params
            for _ in range(200):
                params = s.step(on_row(params, 0)[0], samples=1)
                time.sleep(0.002)
            s.wait_at(jdiloco.Barrier("x", 2), params)

    assert together(waiting, training)[0] > 1.0


def test_a_barrier_that_too_few_reach_says_who_came():
    with session(zeros(), algorithm(), memory(), "a") as s:
        barrier = jdiloco.Barrier("lonely", 3, timeout=0.2)
        with pytest.raises(BarrierTimeout, match=r"1 of 3 nodes came .* within 0\.2 s: a"):
            s.wait_at(barrier, s.params)


def test_a_barrier_stays_open_and_counts_whoever_came_and_died():
    store = memory()
    with (
        pytest.raises(BarrierTimeout),
        session(zeros(), algorithm(), store, "a") as s,
    ):
        s.wait_at(jdiloco.Barrier("x", 2, timeout=0.5), s.params)
    for node in ("b", "a"):  # The second has been there before, and passes.
        with session(zeros(), algorithm(), store, node) as s:
            s.wait_at(jdiloco.Barrier("x", 2, timeout=5.0), s.params)


def test_a_barrier_wants_the_parameters_that_it_may_change():
    with (
        session(zeros(), algorithm(), memory(), "a") as s,
        pytest.raises(UsageError, match="Pass the parameters"),
    ):
        s.wait_at(jdiloco.Barrier("x", 1))


def test_another_queue_of_the_same_name_in_one_session_is_refused():
    """It would take the first one's units for its own, and train nothing."""

    def queue(units: int) -> jdiloco.SharedQueue:
        return jdiloco.SharedQueue(units, batches=lambda unit: [unit])

    with session(vector(1.0), algorithm(), memory(), "n") as s:
        s.run(lambda params, item: (params, 1), queue(1))
        with pytest.raises(UsageError, match="of 1 units; this one has 2"):
            s.run(lambda params, item: (params, 1), queue(2))
