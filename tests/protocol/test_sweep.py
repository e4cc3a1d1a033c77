"""What a mailbox holds is bounded while somebody closes: the formula of `protocol.sweep`."""

from __future__ import annotations

import pytest

from jdiloco.protocol.keys import ContributionKey, RecordKey
from jdiloco.protocol.records import RoundRecord
from jdiloco.testing import simulate
from jdiloco.testing.invariants import Facts
from jdiloco.testing.simulate.history import Deleted, Stored

RUNS = {
    "alone": ({"fragments": 1, "in_flight": 1, "checkpoint_every": 5, "keep_rounds": 2}, 1),
    "two, four fragments": ({"fragments": 4, "in_flight": 2, "checkpoint_every": 1}, 2),
    "three": ({"fragments": 2, "in_flight": 2, "checkpoint_every": 3, "keep_rounds": 0}, 3),
}


def long_run(nodes: int, **settings) -> simulate.History:
    """200 rounds and more."""
    pace = 0.5 * settings["fragments"] / 200
    steps = int(130 / pace)
    names = "abc"[:nodes]
    plans = tuple(simulate.Plan(node=n, steps=steps, step_seconds=pace) for n in names)
    chosen = {"sync_every": 200, "poll_seconds": 0.1, "follow": 0, "quorum_size": nodes}
    return simulate.simulate(simulate.scenario(*plans, **chosen, **settings))


def lag(records: list[RoundRecord]) -> int:
    """The most rounds between the one a checkpoint is of and the first that names it."""
    first: dict[int, int] = {}
    for record in records:
        first.setdefault(record.checkpoint.round, record.round)
    return max([named - round for round, named in first.items() if round >= 0], default=0)


@pytest.mark.parametrize("name", RUNS)
def test_two_hundred_rounds_leave_what_the_formula_says(name):
    """B77: at the moment of every record, when what the one before replaced has been swept."""
    settings, nodes = RUNS[name]
    history = long_run(nodes, **settings)
    facts, rules = Facts(history), history.scenario.rules
    keys, present, most = facts.keys, set[str](), [0, 0, 0]
    for entry in history.entries:
        if isinstance(entry, Deleted):
            present.discard(entry.key)
        elif isinstance(entry, Stored):
            logged = entry.key.startswith(keys.log)
            if logged and isinstance(keys.parse(entry.key), RecordKey):
                held = _held(present, keys)
                most = [max(pair) for pair in zip(most, held, strict=True)]
            present.add(entry.key)
    assert len(facts.records) >= 200
    cycles = 2 * rules.checkpoint_every + 1
    bounds = (
        cycles * rules.fragments + 1 + lag(facts.in_order),
        3,
        (rules.keep_rounds + 1 + rules.in_flight) * nodes,
    )
    print(f"held {most}, at most {bounds}")
    assert all(held <= bound for held, bound in zip(most, bounds, strict=True))
    assert most[0] >= bounds[0] - rules.fragments - 2, "the bound says something"


def _held(present: set[str], keys) -> tuple[int, int, int]:
    """Rounds that payloads are of, checkpoints, and contributions."""
    payloads = {found[0] for key in present if (found := keys.parse_payload(key))}
    saved = {keys.checkpoint_of(key) for key in present if key.startswith(keys.saves)}
    logged = [key for key in present if key.startswith(keys.log)]
    reports = [key for key in logged if isinstance(keys.parse(key), ContributionKey)]
    return len(payloads), len(saved), len(reports)
