"""What happens in a simulated run beside what the protocol decides: who, how fast, which faults."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace

from jdiloco.protocol.alignment import adaptive, blend, carry, overwrite
from jdiloco.protocol.keys import Pool
from jdiloco.protocol.rules import Rules

ALIGNMENTS = (overwrite(), overwrite(), carry(), carry(), adaptive(), blend(0.5), blend(0.3))
POLL_SECONDS = 0.5
HOUR = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Death:
    """A process is killed at a time, after so many requests, or just before it creates `before`."""

    at: float | None = None
    after: int | None = None  # Requests that it sends first; each key of a delete counts as one.
    before: str = ""  # Part of a key.
    skip: int = 0  # So many such requests are sent first.
    back_after: float | None = None  # Seconds until it is started again; None: never.
    same_id: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One node: its work and its misfortunes.

    A dedicated syncer stays for as long as its steps would take, or leaves with its run.
    """

    node: str
    steps: int = 40  # Of each life, each on the next row; one that resumes does the rest of them.
    step_seconds: float = 0.5
    samples: int = 8  # Per step.
    starts: float = 0.0
    compile_seconds: float = 0.0
    clock: float = 0.0  # What its own clock shows when the world's shows zero.
    role: str = "both"
    leave_with_run: bool = False
    merge_seconds: float = 0.0
    stuck: float = float("inf")  # From then on its closing hangs, though it beats.
    nan_steps: tuple[int, ...] = ()  # After these its parameters are not finite.
    hangs: tuple[tuple[int, float], ...] = ()  # After a step its learner hangs for some seconds.
    pauses: tuple[tuple[float, float], ...] = ()  # The whole process sleeps: from, for seconds.
    deaths: tuple[Death, ...] = ()  # One per life, in order.
    work: str = ""  # "queue" or "rank": in place of rows of its own it trains what it claims.
    quits: int = 0  # After so many steps of a queue it leaves; 0: when the queue is over.
    again: tuple[float, ...] = ()  # Its id is started once more, whoever still runs.
    saves: tuple[int, ...] = ()  # Steps after which it saves what it needs to go on.
    resumes: int | None = None  # Which save a further start goes on from, 0 the newest; or none.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """Probabilities per request; every one leaves the protocol's promises as they are."""

    fail: float = 0.0  # It never arrives.
    lose: float = 0.0  # It is carried out and the answer lost.
    late: float = 0.0  # No answer; it is carried out seconds later, whoever is still alive.
    taken: float = 0.0  # A create is refused, though nothing is there.
    stale: float = 0.0  # A listing shows the mailbox as it was seconds ago.
    late_seconds: float = 15.0
    stale_seconds: float = 3.0
    until: float = float("inf")  # From then on the store is as good as it gets.


NO_FAULTS = Faults()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collection:
    """Somebody calls for garbage."""

    at: float
    requests: int | None = None  # After so many it is killed; each key of a delete counts as one.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forgery:
    """Somebody reads all of the mailbox and writes there, without the run's key."""

    seconds: float = 0.4  # Between two objects.
    replays: bool = True  # What nodes have deleted is put back, too.
    overwrites: bool = False  # What is there is written over, too: that may stop a run.
    until: float = float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A whole run."""

    rules: Rules
    nodes: tuple[Plan, ...]
    seed: int = 0
    flush: bool = False
    units: tuple[int, ...] = ()  # The queue's, each of so many batches of a step.
    ranks: tuple[int, ...] = ()  # The same of the fixed slices.
    poll_seconds: float = POLL_SECONDS
    latency_seconds: float = 0.02  # The mean, each way.
    timeout_seconds: float = 1.0  # After so long a request without an answer is given up.
    faults: Faults = NO_FAULTS
    key_seconds: float = 0.0  # A key written less than so long ago refuses a write (HTTP 429).
    collections: tuple[Collection, ...] = ()
    signed: bool = False  # Nodes hold a run key.
    forgery: Forgery | None = None
    outages: tuple[tuple[float, float], ...] = ()  # The store does not answer: from, to.
    horizon: float = 600.0  # When the simulation is cut off.

    def pool(self, plan: Plan) -> Pool | None:
        """What a node claims from; None for one that trains on rows of its own."""
        match plan.work:
            case "queue":
                return Pool.queue("work", len(self.units))
            case "rank":
                return Pool.ranks(len(self.ranks))
        return None

    def batches(self, pool: Pool, unit: int) -> int:
        """How long a unit is."""
        return (self.ranks if pool.name.startswith("rank/") else self.units)[unit]


def scenario(*nodes: Plan, **settings) -> Scenario:
    """A run with rules that make it short; `settings` are fields of Rules or of Scenario."""
    fields = {field.name for field in dataclasses.fields(Rules)}
    rules: dict = {
        "sync_every": 8,
        "fragments": 2,
        "in_flight": 2,
        "beat_seconds": 2.0,
        "lease_seconds": 6.0,
        "checkpoint_every": 3,
    }
    rules |= {name: value for name, value in settings.items() if name in fields}
    others = {name: value for name, value in settings.items() if name not in fields}
    return Scenario(rules=Rules(**rules), nodes=nodes, **others)


def draw(seed: int) -> Scenario:
    """A run with whatever can go wrong, all of it drawn from one number."""
    rng = random.Random(seed)
    fragments = rng.choice((1, 2, 2, 3))
    count = rng.choice((1, 2, 3, 3, 4))
    calm = rng.choice((20.0, 35.0))
    settings = {
        "sync_every": rng.choice((4, 6, 9)),
        "fragments": fragments,
        "in_flight": rng.randint(1, fragments),
        "overlap_steps": rng.choice((None, None, None, 0, 2)),
        "follow": rng.choice((None, None, 0, 1)),
        "quorum_size": rng.randint(1, count),
        "grace_seconds": rng.choice((None, 0.0, 1.0)),
        "round_seconds": rng.choice((None, None, 10.0)),
        "keep_rounds": rng.choice((1, 2)),
        "checkpoint_every": rng.choice((1, 2, 4)),
    }
    settings["alignment"] = random.Random(f"alignment {seed}").choice(ALIGNMENTS)
    odds = rng.choice((0.0, 0.02, 0.06))
    plans = tuple(_draw_node(rng, index, calm) for index in range(count))
    plans, work = _draw_work(random.Random(f"work {seed}"), plans)
    plans = _draw_roles(random.Random(f"roles {seed}"), plans, calm)
    plans = _draw_saves(random.Random(f"saves {seed}"), plans)
    return scenario(
        *plans,
        **work,
        **settings,
        seed=seed,
        flush=rng.random() < 0.5,
        faults=Faults(fail=odds, lose=odds, late=odds, taken=odds, stale=3 * odds, until=calm),
        outages=((rng.uniform(8, 12), rng.uniform(12, 22)),) if rng.random() < 0.3 else (),
        latency_seconds=rng.choice((0.01, 0.03, 0.1)),
        horizon=400.0,
    )


def _draw_work(
    rng: random.Random, plans: tuple[Plan, ...]
) -> tuple[tuple[Plan, ...], dict[str, tuple[int, ...]]]:
    """In a third of the runs the nodes, or all but one, work on a shared queue; or on ranks, of
    which there may be fewer than nodes."""
    if rng.random() > 1 / 3:
        return plans, {}
    if rng.random() < 0.2:
        count = rng.choice((len(plans), max(1, len(plans) - 1)))
        slices = tuple(rng.randint(10, plan.steps) for plan in plans[:count])
        return tuple(replace(plan, work="rank") for plan in plans), {"ranks": slices}
    own = rng.choice((None, None, len(plans) - 1)) if len(plans) > 1 else None
    sharing = []
    for index, plan in enumerate(plans):
        quits = rng.randint(1, plan.steps // 3) if index and rng.random() < 0.3 else 0
        shared = replace(plan, work="queue", quits=quits)
        sharing.append(plan if index == own else shared)
    trained = sum(plan.steps for plan in sharing if plan.work)
    size = rng.choice((1, 4, 10, 25))
    sizes = [rng.choice((size, size, max(1, size // 2))) for _ in range(trained // size // 2)]
    return tuple(sharing), {"units": tuple(sizes)}


def _draw_roles(rng: random.Random, nodes: tuple[Plan, ...], calm: float) -> tuple[Plan, ...]:
    """For two runs in five: other roles than `both`, and up to two dedicated syncers."""
    if rng.random() < 0.6:
        return nodes
    choice = rng.choice((("learner",), ("both", "either"), ("either",), ("both", "learner")))
    nodes = tuple(replace(plan, role=rng.choice(choice)) for plan in nodes)
    syncers = rng.choice((1, 1, 2)) if "learner" in choice else rng.choice((0, 0, 1, 2))
    return (*nodes, *(_draw_syncer(rng, index, calm) for index in range(syncers)))


def _draw_syncer(rng: random.Random, index: int, calm: float) -> Plan:
    back_after = rng.choice((0.5, 4.0, 10.0, None))
    death = Death(at=rng.uniform(2, calm), back_after=back_after, same_id=rng.random() < 0.6)
    return Plan(
        node=f"s{index}",
        role="syncer",
        steps=rng.choice((60, 400)),
        starts=rng.choice((0.0, rng.uniform(0, 20))),
        clock=rng.uniform(-HOUR, HOUR) + 2 * HOUR,
        leave_with_run=True,
        merge_seconds=rng.choice((0.0, 0.1, 1.0)),
        stuck=rng.choice((float("inf"), float("inf"), rng.uniform(0, calm))),
        pauses=((rng.uniform(3, calm), rng.uniform(1, 20)),) if rng.random() < 0.2 else (),
        deaths=(death,) if rng.random() < 0.3 else (),
    )


def _draw_saves(rng: random.Random, plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Half of the nodes save now and then, and are started again from their newest or another."""

    def drawn(plan: Plan) -> Plan:
        if rng.random() < 0.5:
            return plan
        every = rng.choice((1, 3, 7, 20))
        saves = tuple(range(rng.randint(1, every), plan.steps, every))
        return replace(plan, saves=saves, resumes=rng.choice((0, 0, 0, 1, 3)))

    return tuple(map(drawn, plans))


def _draw_node(rng: random.Random, index: int, calm: float) -> Plan:
    def sometimes(probability: float, value: tuple) -> tuple:
        return value if rng.random() < probability else ()

    pace = rng.choice((0.25, 0.4, 0.4, 0.9))
    twin = rng.uniform(8, calm) if rng.random() < 0.15 else None
    if twin is not None:
        return Plan(
            node=f"n{index}",
            steps=int(30 / pace),
            step_seconds=pace,
            pauses=((twin - rng.uniform(0, 6), rng.uniform(5, 15)),),
            again=(twin,),
        )
    steps = int(rng.uniform(12, 40) / pace)
    back_after = rng.choice((0.5, 4.0, 10.0, None)) if index else 3.0
    death = Death(at=rng.uniform(2, calm), back_after=back_after, same_id=rng.random() < 0.6)
    return Plan(
        node=f"n{index}",
        steps=steps,
        step_seconds=pace,
        starts=rng.choice((0.0, 0.0, rng.uniform(0, 20))),
        compile_seconds=rng.choice((0.0, 2.0)),
        clock=rng.uniform(-HOUR, HOUR) + 2 * HOUR,
        leave_with_run=rng.random() < 0.3,
        merge_seconds=rng.choice((0.0, 0.1, 1.0)),
        nan_steps=sometimes(0.2, (rng.randrange(steps),)),
        hangs=sometimes(0.15, ((rng.randrange(steps), rng.uniform(5, 15)),)),
        pauses=sometimes(0.25, ((rng.uniform(3, calm), rng.uniform(1, 20)),)),
        deaths=sometimes(0.4, (death,)),
    )
