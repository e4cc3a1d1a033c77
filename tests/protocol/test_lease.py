"""Who is alive, as one observer sees it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jdiloco.protocol.keys import BeatKey
from jdiloco.protocol.lease import Lease, judge, observe
from jdiloco.protocol.rules import Life, Rules

RULES = Rules(sync_every=8, fragments=2, beat_seconds=2.0, lease_seconds=6.0)
A = Life("a", 1)


def beat(number: int, *, step: int = 1, phase: str = "training", node: str = "a", life: int = 1):
    return BeatKey(node, life, number, phase, step, 0)


def seen(*shown: tuple[BeatKey, float]) -> Lease:
    """The lease after listings that showed these beats, so many seconds apart."""
    leases: dict[Life, Lease] = {}
    for key, elapsed in shown:
        leases = observe(leases, [key], elapsed)
    return leases[Life(shown[-1][0].node, shown[-1][0].incarnation)]


def test_a_beat_that_stays_the_same_for_a_lease_timeout_ends_the_lease():
    assert seen((beat(1), 0.0), *[(beat(1), 1.0)] * 5).live(RULES)
    assert not seen((beat(1), 0.0), *[(beat(1), 1.0)] * 6).live(RULES)
    assert seen((beat(1), 0.0), *[(beat(1), 1.0)] * 5, (beat(2), 1.0)).unchanged == 0.0


def test_an_older_beat_in_a_stale_listing_is_no_sign_of_life():
    shown = [(beat(5), 1.0), (beat(4), 1.0)] * 3
    assert not seen((beat(5), 0.0), *shown).live(RULES)


def test_a_last_beat_ends_the_lease_at_once():
    assert not seen((beat(1), 0.0), (beat(2, phase="left"), 1.0)).live(RULES)


def test_a_learner_that_beats_but_does_not_get_ahead_is_not_expected():
    """It hangs, evaluates or loads data: alive, and nobody waits for it."""
    beats = [(beat(n, step=4), 1.0) for n in range(1, 8)]
    assert seen(*beats[:6]).expected(RULES)
    hung = seen(*beats)
    assert hung.live(RULES)
    assert not hung.expected(RULES)
    assert seen(*beats, (beat(8, step=5), 1.0)).expected(RULES)


def test_a_slow_learner_is_expected_for_three_of_its_usual_steps():
    beats, number = [(beat(1, step=1), 0.0)], 1
    for step in (1, 1, 1, 2, 2, 2, 2, 3):
        number += 1
        beats.append((beat(number, step=step), 2.0))
    slow = seen(*beats)
    assert slow.step_seconds == 8.0
    for _ in range(11):
        number += 1
        beats.append((beat(number, step=3), 2.0))
    assert seen(*beats).expected(RULES)
    beats.append((beat(number + 1, step=3), 2.0))
    assert not seen(*beats).expected(RULES)


def test_compiling_and_waiting_are_no_part_of_a_usual_step():
    """Or a learner that compiled for minutes would be waited for minutes when it hangs."""
    joins = [(beat(n, step=0, phase="joining"), 2.0) for n in range(1, 100)]
    compiles = [(beat(100 + n, step=0), 2.0) for n in range(50)]
    trains = [(beat(200, step=4), 2.0), (beat(201, step=8), 2.0)]
    assert seen(*joins, *compiles, *trains).step_seconds == 0.5
    waits = [(beat(300 + n, step=8, phase="waiting"), 2.0) for n in range(50)]
    resumes = [(beat(400, step=12), 2.0), (beat(401, step=16), 2.0)]
    assert seen(*joins, *compiles, *trains, *waits, *resumes).step_seconds == 0.5


def test_a_learner_that_waits_for_a_commit_is_expected_while_it_waits_and_when_it_goes_on():
    waits = [(beat(n, step=8, phase="waiting"), 1.0) for n in range(1, 30)]
    assert seen((beat(1, step=8), 0.0), *waits).expected(RULES)
    assert seen((beat(1, step=8), 0.0), *waits, (beat(30, step=8), 1.0)).expected(RULES)


def test_phases_that_publish_nothing_are_not_expected():
    for phase in ("joining", "finished", "syncing", "left"):
        assert not seen((beat(1, phase=phase), 0.0)).expected(RULES)


def test_of_a_node_only_its_highest_life_counts():
    leases = observe({}, [beat(9, life=1), beat(1, life=2)], 0.0)
    assert set(leases) == {Life("a", 2)}
    verdict = judge(leases, RULES)
    assert verdict.newer(Life("a", 1)) == 2
    assert verdict.newer(Life("a", 2)) is None


def test_a_life_that_was_named_and_never_beat_ages_too():
    leases: dict[Life, Lease] = {}
    for _ in range(6):
        leases = observe(leases, [], 1.0, named=[A])
    assert A not in judge(leases, RULES).live
    assert A in judge(observe({}, [], 1.0, named=[A]), RULES).live


def test_a_named_life_that_a_newer_one_replaced_is_forgotten():
    assert A not in observe({}, [beat(1, life=2)], 1.0, named=[A])


@given(st.permutations([beat(1), beat(2), beat(1, node="b"), beat(3, life=2)]))
def test_the_order_of_a_listing_leaves_no_trace(beats):
    assert observe({}, beats, 1.0) == observe({}, sorted(beats), 1.0)
