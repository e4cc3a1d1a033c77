"""Case B70: Google takes a write to one key a second, and answers 429 to a faster one."""

import collections
import itertools

import pytest

from jdiloco import events
from jdiloco.testing import invariants
from jdiloco.testing.simulate import Death, Faults, Plan, scenario, simulate
from jdiloco.testing.simulate.history import Took

FOUR = tuple(Plan(node=f"n{n}", steps=120, step_seconds=0.5) for n in range(4))
FAST = {"beat_seconds": 0.5, "lease_seconds": 2.0, "poll_seconds": 0.125, "key_seconds": 1.0}


def writes(history) -> dict[tuple[str, str], list[float]]:
    """When each process wrote each key."""
    found = collections.defaultdict(list)
    for request in history.sent:
        if request.verb == "create":
            found[request.who, request.key].append(request.at)
    return found


def test_four_nodes_that_beat_twice_a_second_write_each_key_once():
    """Every beat has a key of its own, so no key is hot however fast nodes beat."""
    history = simulate(scenario(*FOUR, **FAST))
    assert history.ended
    assert not invariants.broken(history)
    assert len(history.of(Took)) > 4 * 10
    again = {key for (_, key), times in writes(history).items() if len(times) > 1}
    assert all("/node/" in key for key in again)  # Born twice, to try the store.
    assert not history.events(events.Degraded)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_sent_again_is_sent_ever_more_slowly(seed):
    """With lost answers and a dead closer, keys are tried again, contested ones by several."""
    plans = (Plan(node="n0", steps=120, deaths=(Death(at=15.0, back_after=8.0),)), *FOUR[1:])
    faults = Faults(fail=0.05, lose=0.05, late=0.05, taken=0.05, until=40.0)
    history = simulate(scenario(*plans, **FAST, faults=faults, seed=seed))
    assert history.ended
    assert not invariants.broken(history)
    for (_, key), times in writes(history).items():
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        if key.endswith(".0") and "/live/" not in key:
            waits = [min(0.125 * 2**n, 2.0) for n in range(len(gaps))]
            assert all(gap > 0.8 * wait for gap, wait in zip(gaps[1:], waits, strict=False)), gaps
