"""B75: a process dies after its k-th request, for every k; what is left is old or new, never a mix.

Each story makes one of the things happen that take several requests: creating a run, closing a
round, taking one over, writing run checkpoints and sweeping. Its victim is killed after 0, 1, 2, …
requests, until it lives to its end. Every time all properties hold (of these S2 says that what is
newest can be read at any moment), the others go on, and a victim that comes back takes part again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import pytest

from jdiloco.protocol.keys import MANIFEST
from jdiloco.protocol.records import RoundRecord
from jdiloco.testing.invariants import Facts, broken
from jdiloco.testing.simulate import Death, Faults, Plan, Scenario, scenario, simulate
from jdiloco.testing.simulate.history import Fate, History, Stored

REQUESTS_MAX = 1000
BACK_SECONDS = 1.0
"""How soon a victim is started again: well within its own lease."""
LANDED_SECONDS = 0.2
"""After so long a request that was sent has arrived."""

COMEBACKS = ("never", "same id", "new id")
SHORT = {
    "sync_every": 4,
    "fragments": 2,
    "quorum_size": 2,  # With one alone a node whose steps end a little later may be late for ever.
    "beat_seconds": 2.0,
    "lease_seconds": 4.0,
}
TO_THE_END = 36
"""Steps of those who go on: they outlive a victim's restart by several rounds."""


@dataclasses.dataclass(frozen=True)
class Story:
    """A run in which `victim` does something that takes several requests."""

    victim: str
    tell: Callable[..., Scenario]  # Of how the victim dies, and of settings.
    interrupted: tuple[str, ...]
    """Requests before which the victim has to have died at some k: parts of `verb key`."""


def creating(dies: Death, **settings) -> Scenario:
    """Another looks for the run while the first creates it."""
    plans = (
        Plan(node="x", steps=12, deaths=(dies,)),
        Plan(node="y", steps=TO_THE_END, starts=0.1),
    )
    return scenario(*plans, **{**SHORT, **settings})


def closing(dies: Death, **settings) -> Scenario:
    """The first closes rounds that want both, and leaves before the other."""
    plans = (
        Plan(node="x", steps=12, deaths=(dies,)),
        Plan(node="y", steps=TO_THE_END, starts=1.0),
    )
    return scenario(*plans, **{**SHORT, **settings})


def taking_over(dies: Death, **settings) -> Scenario:
    """The closer is gone between payload and record; who takes over from it dies too."""
    plans = (
        Plan(node="x", deaths=(Death(before="0000000001.0"),)),
        Plan(node="y", steps=16, starts=1.0, deaths=(dies,)),
        Plan(node="z", steps=TO_THE_END, starts=5.0),
    )
    patient = {"grace_seconds": 0.5}  # A step: three train, two are a quorum.
    return scenario(*plans, **{**SHORT, **patient, **settings})


def saving(dies: Death, **settings) -> Scenario:
    """The closer writes a run checkpoint after every cycle, and removes those before the last."""
    plans = (
        Plan(node="x", steps=14, deaths=(dies,)),
        Plan(node="y", steps=TO_THE_END, starts=1.0),
    )
    often = {"checkpoint_every": 1, "keep_rounds": 1}
    return scenario(*plans, **{**SHORT, **often, **settings})


STORIES = {
    "creating a run": Story(
        "x", creating, ("create creating/", "/save/initial", f"create {MANIFEST}", "delete creat")
    ),
    "closing a round": Story(
        "x", closing, ("1.2.x.0001", "1.x.0001.0002.anchor", "outer", "0000001.0", "delete run")
    ),
    "taking a round over": Story(
        "y", taking_over, ("1.1.001", "1.y.0001.0001.anchor", "0001.0001.outer", "0000000001.0")
    ),
    "saving and sweeping": Story(
        "x", saving, ("/save/0000000001.x.0001.0001/0", "/1", "delete run", "create run", "/data/")
    ),
}


def death(after: int, comeback: str) -> Death:
    back = None if comeback == "never" else BACK_SECONDS
    return Death(after=after, back_after=back, same_id=comeback == "same id")


@functools.cache
def prefixes(name: str, comeback: str = "", **settings) -> tuple[History, ...]:
    """A story for every k, and at the end without a death. Comebacks take turns if none is said."""
    return tuple(_prefixes(STORIES[name], comeback, settings))


def _prefixes(story: Story, comeback: str, settings: dict) -> Iterator[History]:
    for after in range(REQUESTS_MAX):
        chosen = comeback or COMEBACKS[after % len(COMEBACKS)]
        history = simulate(story.tell(death(after, chosen), **settings))
        yield history
        if died(history, story) is None:
            return
    raise AssertionError(f"the victim had not ended after {REQUESTS_MAX} requests")


def died(history: History, story: Story) -> Fate | None:
    """The death of the victim's first life."""
    fates = (e for e in history.of(Fate) if e.kind == "killed")
    return next((e for e in fates if e.who == f"{story.victim}#1"), None)


def check(history: History, story: Story) -> None:
    """Every property; rounds go on without the victim, and with it once it is back."""
    found = broken(history)
    assert not found, "\n".join(map(str, (*found, history)))
    end = died(history, story)
    if end is None:
        return
    facts = Facts(history)
    assert len(records_since(facts, end.at + LANDED_SECONDS)) >= 4, history
    lives = (f"{story.victim}#2", f"{story.victim}b#1")
    back = next((e.at for e in history.of(Fate) if e.kind == "joined" and e.who in lives), None)
    if back is not None:
        nodes = {who.node for record in records_since(facts, back) for who in record.participants}
        assert nodes & {story.victim, f"{story.victim}b"}, history


def records_since(facts: Facts, at: float) -> list[RoundRecord]:
    return [record for record in facts.in_order if facts.record_puts[record.round].at > at]


def own_records(history: History, story: Story) -> int:
    """Records that the victim's first life wrote."""
    stored = (e for e in history.of(Stored) if e.who == f"{story.victim}#1")
    return sum(entry.key.endswith(".0") and "/log/0" in entry.key for entry in stored)


@pytest.mark.parametrize("name", STORIES)
def test_a_victim_of_any_request_leaves_a_run_that_goes_on(name):
    for history in prefixes(name):
        check(history, STORIES[name])


@pytest.mark.parametrize("name", STORIES)
def test_the_victim_has_died_in_the_middle_of_what_the_story_is_about(name):
    """Otherwise the prefixes would prove nothing of it."""
    story = STORIES[name]
    ends = [end.detail for history in prefixes(name) if (end := died(history, story))]
    for part in story.interrupted:
        assert any(part in end for end in ends), f"never before {part!r}"


@pytest.mark.parametrize("name", STORIES)
def test_a_request_more_leaves_one_record_more_or_the_same(name):
    """Old or new: up to its death every history is the beginning of the next."""
    records = [own_records(history, STORIES[name]) for history in prefixes(name)]
    assert {after - before for before, after in itertools.pairwise(records)} == {0, 1}
    assert records[0] == 0
    assert records[-1] >= 2


@pytest.mark.long
@pytest.mark.parametrize("store", ["good", "bad"])
@pytest.mark.parametrize("comeback", COMEBACKS)
@pytest.mark.parametrize("name", STORIES)
def test_any_comeback_after_any_request_on_any_store(name, comeback, store):
    bad = Faults(fail=0.04, lose=0.04, late=0.04, taken=0.04, stale=0.08, until=12.0)
    settings = {"seed": 1, "faults": bad} if store == "bad" else {}
    for history in _prefixes(STORIES[name], comeback, settings):
        check(history, STORIES[name])
