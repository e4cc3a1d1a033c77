"""That a run goes on, and nobody is held up: L1, L2, L3."""

from __future__ import annotations

from itertools import pairwise

from jdiloco import events
from jdiloco.protocol.keys import BeatKey, ContributionKey
from jdiloco.protocol.rules import closes
from jdiloco.testing.invariants.facts import Facts, Violations
from jdiloco.testing.simulate.history import Fate, Happened, History, Worked
from jdiloco.testing.simulate.scenario import NO_FAULTS


def l1_every_round_gets_a_record(facts: Facts) -> Violations:
    """L1: whoever can go on does: all nodes end, and while somebody can close no contribution waits
    for ever.

    L2 with it: once faults are over, a round that somebody reported to waits for no more than two
    lease timeouts, a takeover and a round of the slowest.
    """
    history = facts.history
    began, end = _closers(history)
    scenario = history.scenario
    wait = scenario.rules.overlap_steps is not None or any(plan.work for plan in scenario.nodes)
    if not history.ended and not (wait and end < scenario.horizon):
        yield f"nodes were still waiting after {scenario.horizon} s"
    limit, calm = _patience(facts), max(began, calm_after(history))
    for round, at in sorted(_first_reports(facts).items()):
        before = facts.record_puts.get(round - 1)
        since = max(at, calm, before.at if before else 0.0)
        put = facts.record_puts.get(round)
        waited = min(put.at if put else end, end) - since
        if waited > limit:
            yield f"round {round} waited for {waited:.1f} s, the limit is {limit:.1f} s"
    trained = [entry.at for entry in history.of(Worked)]
    joined = [entry.at for entry in history.of(Fate) if entry.kind == "joined"]
    moments = [put.at for put in facts.record_puts.values()]
    for before, after in pairwise([min(joined, default=0.0), *moments, float("inf")]):
        idle = min(after, end, max(trained, default=0.0)) - max(before, calm)
        if idle > limit:
            yield f"learners trained for {idle:.1f} s without a record, the limit is {limit:.1f} s"


def _patience(facts: Facts) -> float:
    scenario = facts.history.scenario
    rules = scenario.rules
    pace = max(plan.step_seconds for plan in scenario.nodes)
    merge = max(plan.merge_seconds for plan in scenario.nodes)
    # The average that a takeover waits for: faults of the store are in it for many rounds.
    commit = max([record.timing.commit or 0.0 for record in facts.in_order], default=0.0)
    training = 2 * pace * rules.sync_every / rules.fragments
    takeover = 4 * (10 * scenario.poll_seconds + 3 * max(merge, commit))
    return 2 * rules.lease_seconds + training + takeover + 10 * scenario.latency_seconds


def calm_after(history: History) -> float:
    """When nothing goes wrong any more."""
    scenario = history.scenario
    fates = [entry.at for entry in history.of(Fate) if entry.kind in ("killed", "started")]
    store = [scenario.faults.until] if scenario.faults != NO_FAULTS else []
    outages = [end for _, end in scenario.outages]
    pauses = [at + seconds for plan in scenario.nodes for at, seconds in plan.pauses]
    return max([0.0, *fates, *store, *outages, *pauses])


def _closers(history: History) -> tuple[float, float]:
    """The last time in which somebody could close without a break: from, to."""
    able = {plan.node for plan in history.scenario.nodes if closes(plan.role) and plan.stuck > 1e9}
    began, end, alive = 0.0, 0.0, set[str]()
    for fate in history.of(Fate):
        if fate.who.partition("#")[0].rstrip("b") not in able:
            continue
        if fate.kind == "joined":
            began = began if alive else fate.at
            alive.add(fate.who)
        elif fate.kind in ("ended", "killed") and fate.who in alive:
            alive.discard(fate.who)
            end = fate.at
    return began, history.scenario.horizon if alive else end


def _first_reports(facts: Facts) -> dict[int, float]:
    """When each round got its first contribution."""
    first: dict[int, float] = {}
    for name, put in facts.puts.items():
        key = facts.keys.parse(name) if name.startswith(facts.keys.log) else None
        if isinstance(key, ContributionKey):
            first.setdefault(key.round, put.at)
    return first


def l2_only_silence_ends_a_lease(facts: Facts) -> Violations:
    """L2: nobody takes over for a lease that has ended while its owner's beats came in.

    Time in which the store did not answer does not count, nor do beats so new that whoever took
    over cannot have seen them.
    """
    scenario = facts.history.scenario
    slack = 3 * scenario.poll_seconds + 4 * scenario.latency_seconds
    faults = scenario.faults
    slack += 0.0 if faults == NO_FAULTS else faults.stale_seconds + scenario.timeout_seconds
    for entry in facts.history.of(Happened):
        event = entry.event
        if not isinstance(event, events.TookOver) or "lease" not in event.because:
            continue
        beats = [(at, key) for at, key in _beats(facts, event.closer) if at <= entry.at]
        left = any(key.phase == "left" for _, key in beats)
        last = max([at for at, _ in beats if at <= entry.at - slack], default=0.0)
        out = sum(max(0.0, min(e, entry.at) - max(s, last)) for s, e in scenario.outages)
        silent = entry.at - last - out
        superseded = _higher_life(facts, event.closer, entry.at)
        if not left and not superseded and silent < scenario.rules.lease_seconds - slack:
            yield f"{event.node} took over from {event.closer} after {silent:.1f} s of silence"


def _beats(facts: Facts, life: str) -> list[tuple[float, BeatKey]]:
    prefix = f"{facts.keys.log}live/{life}."
    found = [(put.at, facts.keys.parse(name)) for name, put in facts.puts.items()]
    return [
        (at, key)
        for at, key in found
        if isinstance(key, BeatKey) and facts.keys.beat(key).startswith(prefix)
    ]


def _higher_life(facts: Facts, life: str, at: float) -> bool:
    node, _, number = life.rpartition(".")
    put = facts.puts.get(facts.keys.incarnation(node, int(number) + 1))
    return put is not None and put.at <= at


def l3_training_is_never_blocked_nor_ended_by_the_store(facts: Facts) -> Violations:
    """L3: a node that has joined ends by itself, superseded or killed; and asks in moderation."""
    joined: set[str] = set()
    for entry in facts.history.of(Fate):
        if entry.kind == "joined":
            joined.add(entry.who)
        bad = entry.kind == "ended" and entry.detail != "finished" and entry.who in joined
        if bad and not entry.detail.startswith("NodeSuperseded"):
            yield f"{entry.who} ended: {entry.detail}"
    if facts.history.scenario.rules.overlap_steps is None:
        for event in facts.history.events(events.Waiting):
            yield f"{event.node} waited for round {event.round}"
