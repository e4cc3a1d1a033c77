"""What a run asks of its store, counted in the simulator: a bucket sells requests.

Ten seconds a round, a poll a second, a beat each ten seconds. On buckets a listing or a write costs
about 5 $ a million, so a poll a second is 0.43 $ a node and day, and all else a tenth of that.
"""

from __future__ import annotations

import collections
import functools

import pytest

from jdiloco.testing.simulate import Plan, scenario, simulate
from jdiloco.testing.simulate.history import Took

POLL, BEAT = 1.0, 10.0
FROM, TO = 2, 7
"""Counted from one commit to another: everybody has joined, and nobody leaves yet."""


@functools.cache
def costs(nodes: int) -> dict[str, float]:
    """Requests of each verb per node and round, and `polls` and `seconds` per node and round."""
    history = simulate(
        scenario(
            *(Plan(node=f"n{n:02}", steps=85, step_seconds=1.0) for n in range(nodes)),
            sync_every=20,
            fragments=2,
            quorum_size=nodes,
            poll_seconds=POLL,
            beat_seconds=BEAT,
            lease_seconds=30.0,
            checkpoint_every=100,
            latency_seconds=0.05,
        )
    )
    assert history.ended
    committed = [min(t.at for t in history.of(Took) if t.record.round == r) for r in (FROM, TO)]
    counts: collections.Counter[str] = collections.Counter()
    for request in history.sent:
        if committed[0] <= request.at < committed[1]:
            counts["beat" if "/live/" in request.key else request.verb] += 1
            counts["bulk"] += "/data/" in request.key or ".2." in request.key
    found = {verb: count / nodes / (TO - FROM) for verb, count in counts.items()}
    return found | {"seconds": (committed[1] - committed[0]) / (TO - FROM)}


SIZES = [4, 16, pytest.param(64, marks=pytest.mark.long)]


@pytest.mark.parametrize("nodes", SIZES)
def test_an_idle_poll_costs_little_more_than_one_request(nodes):
    found = costs(nodes)
    polls = found["seconds"] / POLL
    assert found["list"] <= 1.05 * polls
    assert (found["list"] + found["beat"]) / polls <= 1.3


@pytest.mark.parametrize("nodes", SIZES)
def test_a_round_costs_about_five_requests_beside_polls(nodes):
    """4 + 1/N are needed, a delete now and then, a beat; and the closer reads its own."""
    found = costs(nodes)
    assert found["create"] + found["get"] + found["delete"] + found["beat"] <= 5.0 + 3.0 / nodes


@pytest.mark.parametrize("nodes", SIZES[1:])
def test_what_a_node_asks_for_does_not_grow_with_the_number_of_nodes(nodes):
    few, many = costs(4), costs(nodes)
    for verb in ("create", "get", "delete", "beat", "list", "bulk"):
        per_second = few[verb] / few["seconds"], many[verb] / many["seconds"]
        assert per_second[1] <= 1.2 * per_second[0], verb


@pytest.mark.parametrize("nodes", SIZES)
def test_a_fragment_crosses_the_line_of_a_node_some_three_times_a_round(nodes):
    """Up its contribution, down the commit; the closer reads all and writes values and momentum.

    So the bytes per node and round are those of about three fragments, whatever the number.
    """
    assert costs(nodes)["bulk"] <= 3.0 + 2.0 / nodes
