"""What a node says of itself and of its run: alive, participating and aligned are not the same."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise

import jax
import pytest

from jdiloco import events
from jdiloco.errors import UsageError
from jdiloco.protocol.records import Ledger
from jdiloco.protocol.rules import Life, share
from jdiloco.protocol.waste import Waste, look
from jdiloco.runtime.times import Account
from jdiloco.testing.faults import FaultyStore

from .nodes import (
    PATIENCE,
    Meeting,
    Recorder,
    algorithm,
    lock_step,
    memory,
    no_threads_left,
    node_of,
    session,
    together,
    vector,
    wait_until,
)
from .test_faults import Outage, step_until


def test_a_node_that_has_just_joined_is_alive_aligned_and_takes_part_in_nothing():
    with session(vector(1.0), algorithm(fragments=1), memory(), "a") as s:
        found = s.status
        assert (found.node, found.role, found.round, found.versions) == ("a", "both", -1, (0,))
        assert (found.alive, found.participating, found.aligned, found.fragments) == (1, 0, 1, 1)
        assert (found.merged_round, found.merged_with, found.together) == (None, (), False)
        assert (found.degraded, found.processed, found.totals.processed) == ((), 0, 0)


def test_two_nodes_see_that_they_train_together_and_where_every_sample_went():
    mailbox, meet = memory(), Meeting(2)

    def node(name: str):
        with session(vector(1.0), lock_step(2), mailbox, name) as s:
            params = s.params
            meet(s)
            for _ in range(10):
                params = s.step(jax.tree.map(lambda x: x - 0.1, params), samples=8)
            found = s.status
        return found

    one, other = together(lambda: node("a"), lambda: node("b"))
    for found, name in ((one, "b"), (other, "a")):
        assert found.together
        assert (found.merged_with, found.participants) == ((name,), ("a", "b"))
        assert (found.participating, found.merged_round, found.round) == (2, 1, 1)
        assert (found.aligned, found.versions) == (1, (2,))
        assert found.processed == found.merged + sum(found.dropped.values()) + found.pending
        assert (found.merged, found.totals.merged) == (64, 128)


def test_a_node_that_trains_alone_beside_living_others_shows_it():
    """Alive is two, participating is one: `learner` trains, and nothing of it arrives."""
    outage, mailbox = Outage(".2.", "create"), memory()
    settings = algorithm(sync_every=2, lease_seconds=3.0)
    outage.on = True
    with (
        session(vector(1.0), settings, mailbox, "a") as good,
        session(vector(1.0), settings, FaultyStore(mailbox, outage), "b") as bad,
    ):
        params = bad.params
        held = good.params
        deadline = time.monotonic() + PATIENCE
        while not (bad.status.degraded and good.status.round >= 3):
            assert time.monotonic() < deadline
            params = bad.step(jax.tree.map(lambda x: x - 0.1, params), samples=1)
            held = good.step(jax.tree.map(lambda x: x - 0.1, held), samples=1)
            time.sleep(0.003)
        found = bad.status
        assert found.alive == 2
        assert found.participants == ("a",)
        assert (found.merged_round, found.together) == (None, False)
        assert "could not be sent" in found.degraded[0]
        assert not good.status.degraded


def test_a_node_whose_publishes_all_fail_says_so_at_once_and_goes_on_saying_so():
    """B102."""
    outage, seen = Outage(".2.", "create"), Recorder()
    store = FaultyStore(memory(), outage)
    with session(vector(1.0), algorithm(sync_every=2), store, callbacks=(seen,)) as s:
        outage.on = True
        params = step_until(s, s.params, lambda: s.status.degraded)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            params = s.step(params, samples=1)
            assert s.status.degraded
            time.sleep(0.005)
        assert len(seen.of(events.Degraded)) == 1
        assert not seen.of(events.Recovered)
        outage.on = False
        step_until(s, params, lambda: seen.of(events.Recovered))
        assert not s.status.degraded


def test_the_status_of_a_session_that_was_not_entered_is_refused():
    with pytest.raises(UsageError, match="not been entered"):
        _ = session(vector(1.0), algorithm(), memory()).status


def test_a_syncer_has_a_status_and_no_batch():
    with session(vector(1.0), algorithm(), memory(), role="syncer") as s:
        wait_until(lambda: s.status.phase == "syncing")
        assert (s.status.learners, s.status.aligned) == (0, 0)
        with pytest.raises(UsageError, match="syncer"):
            _ = s.batch_size


# Shares of a global batch


@pytest.mark.parametrize(("total", "nodes"), [(64, 3), (7, 7), (10, 4), (1, 1), (1000, 9)])
def test_shares_add_up_to_the_whole_and_differ_by_one_at_most(total, nodes):
    """No row of a step is trained twice, and none is left."""
    lives = [Life(f"n{i:02}", 1) for i in range(nodes)]
    shares = [share(total, lives, life) for life in lives]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


def test_a_share_is_never_nothing():
    """More learners than rows: then the step is larger than asked for."""
    lives = [Life(f"n{i}", 1) for i in range(5)]
    assert [share(3, lives, life) for life in lives] == [1] * 5
    assert share(8, (), lives[0]) == 8


def test_a_global_batch_is_shared_among_the_learners_that_live():
    mailbox = memory()
    settings = algorithm(global_batch_size=65, lease_seconds=3.0)
    with session(vector(1.0), settings, mailbox, "a") as a:
        assert a.batch_size == 65
        with session(vector(1.0), settings, mailbox, "b") as b:
            wait_until(lambda: len(node_of(a).state.verdict.learners) == 2)
            wait_until(lambda: len(node_of(b).state.verdict.learners) == 2)
            assert (a.batch_size, b.batch_size) == (33, 32)
        wait_until(lambda: a.batch_size == 65)
    with session(vector(1.0), algorithm(), memory()) as s:
        assert s.batch_size is None


# What is dropped


def settled(waste: Waste, rounds: int, *, merged: int, dropped: int, ledger: Ledger):
    """So many rounds in each of which so much is settled."""
    said = []
    for _ in range(rounds):
        ledger = ledger.train(merged + dropped).merge(merged).drop("late", dropped)
        waste, much = look(waste, (ledger,))
        said.append(much)
    return waste, said, ledger


def test_more_than_a_fifth_dropped_is_said_once_until_it_is_less():
    """B60: over the rounds of four cycles, and not for what a node drops because it leaves."""
    waste, said, ledger = settled(Waste(), 5, merged=80, dropped=20, ledger=Ledger())
    assert not any(said)  # A fifth is not more than a fifth.
    waste, said, ledger = settled(waste, 20, merged=50, dropped=50, ledger=ledger)
    assert sum(said) == 1
    waste, said, ledger = settled(waste, 20, merged=100, dropped=0, ledger=ledger)
    assert not any(said)
    waste, said, ledger = settled(waste, 20, merged=50, dropped=50, ledger=ledger)
    assert sum(said) == 1
    left = ledger.train(10**6).drop("left", 10**6)
    assert look(waste, (left,))[0].share == waste.share


def test_a_node_that_overwrites_half_of_what_it_trains_hears_of_it():
    """A lone node that trains as long again while its round is closed."""
    seen = Recorder()
    with session(
        vector(1.0), algorithm(sync_every=2, grace_seconds=0.05), memory(), callbacks=(seen,)
    ) as s:
        step_until(s, s.params, lambda: seen.of(events.MuchDropped))
    event = seen.of(events.MuchDropped)[0]
    assert event.share > 0.2
    assert any(reason.startswith("overwritten:") for reason in event.reasons)


# Where the time goes


def test_the_time_of_each_round_is_accounted_for():
    """B114: the parts are the wall, and little of it has no name."""
    mailbox, meet = memory(), Meeting(3)
    recorders = [Recorder() for _ in range(3)]

    def node(index: int):
        settings = lock_step(3, grace_seconds=0.0)
        began = time.monotonic()
        with session(
            vector(1.0), settings, mailbox, f"n{index}", callbacks=(recorders[index],)
        ) as s:
            params = s.params
            meet(s)
            for _ in range(16):
                time.sleep(0.03)
                params = s.step(jax.tree.map(lambda x: x - 0.1, params), samples=8)
        return time.monotonic() - began

    walls = together(*(lambda i=i: node(i) for i in range(3)))
    for recorder, wall in zip(recorders, walls, strict=True):
        timed = recorder.of(events.Timed)
        assert [event.round for event in timed] == [0, 1, 2, 3]
        for event in timed:
            parts = (event.compute, event.wait, event.upload, event.download, event.merge)
            assert min(*parts, event.other) >= 0
            assert event.wall == pytest.approx(sum(parts) + event.other)
        total = sum(event.wall for event in timed)
        assert 16 * 0.03 <= sum(event.compute for event in timed) <= total <= wall
        assert sum(event.other for event in timed[1:]) < 0.15 * total


def test_time_in_which_two_threads_were_busy_is_shared():
    account = Account()
    account.block(2.0, {"upload": 2.0, "deliver": 1.0, "close": 1.0})
    assert (account.upload, account.download, account.merge, account.wait) == (1.0, 0.5, 0.5, 0.0)
    account.block(3.0, {"upload": 1.0, "deliver": 0.0, "close": 0.0})
    assert (account.upload, account.wait) == (2.0, 2.0)


# Histories, threads and signals


def test_the_rounds_that_a_callback_sees_go_up_over_restarts_too():
    """B109: what a plot has on its x axis never goes back."""
    mailbox, seen = memory(), Recorder()
    settings = algorithm(sync_every=2, overlap_steps=0)
    for _ in range(2):
        with session(vector(1.0), settings, mailbox, "a", callbacks=(seen,)) as s:
            params = s.params
            for _ in range(6):
                params = s.step(jax.tree.map(lambda x: x - 0.1, params), samples=8)
    rounds = [event.round for event in seen.of(events.Committed)]
    assert len(rounds) >= 6
    assert all(before < after for before, after in pairwise(rounds))
    timed = [event.round for event in seen.of(events.Timed)]
    assert all(before < after for before, after in pairwise(timed))


def test_a_step_that_raises_in_run_ends_the_node_and_goes_on_to_the_caller():
    def step(params, item):
        if item == 3:
            raise ZeroDivisionError("mine")
        return params, 1

    seen = Recorder()
    s = session(vector(1.0), algorithm(lease_seconds=60.0), memory(), callbacks=(seen,))
    with no_threads_left(), pytest.raises(ZeroDivisionError, match="mine"), s:
        s.run(step, range(9))
    assert seen.of(events.Left)[0].because == "failed"


def test_a_signal_reaches_every_session_of_the_main_thread():
    """Whichever was opened first; a later one is told by nobody else."""
    before = signal.getsignal(signal.SIGTERM)
    one = session(vector(1.0), algorithm(), memory(), "a")
    other = session(vector(1.0), algorithm(), memory(), "b")
    with one:
        first = one.params
        with other:
            second = other.params
            os.kill(os.getpid(), signal.SIGTERM)
            other.step(second, samples=1)
            raise AssertionError("unreachable")
        one.step(first, samples=1)
        raise AssertionError("unreachable")
    assert (one.stopped_by, other.stopped_by) == ("SIGTERM", "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is before
