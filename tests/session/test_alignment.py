"""What a session's parameters become when a commit arrives, with arrays and real rounds."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jdiloco import adaptive, blend, carry, events, load, overwrite, weighted_mean
from jdiloco.algo import alignment as kernel
from jdiloco.testing import oracle

from .nodes import (
    Meeting,
    Recorder,
    algorithm,
    digest,
    memory,
    node_of,
    records,
    session,
    together,
    vector,
    wait_until,
)
from .test_module import donating, net, rows
from .test_step import cache_size, make_step, model, no_compilation, train_with_aligns

KEEPING = [blend(0.5), carry(), adaptive()]
SETTINGS = [overwrite(), *KEEPING]
RATE = 0.5
"""With no momentum a lone node's commit is then half way between anchor and snapshot."""


def names(value: object) -> str | None:
    return type(value).__name__ if value in SETTINGS else None


def half(**settings: Any):
    chosen = {"outer_lr": RATE, "outer_momentum": 0.0, "merge": weighted_mean(), **settings}
    return algorithm(**{"sync_every": 2, "follow": 0, **chosen})


def ramp(start: float, dtype: Any = jnp.float32) -> jax.Array:
    return start + jnp.arange(64, dtype=jnp.float32).astype(dtype) / 16


def two_calls(s, seen: Recorder, first: Any, second: Any, *, like: str = "w"):
    """Publishes `first` after two steps, waits for the commit, and gives it `second` in flight."""
    s.step({**s.params, like: first}, samples=16, steps=2)
    seen.wait(events.Committed)
    wait_until(lambda: not node_of(s).to_learner.empty())
    return s.step({**s.params, like: second}, samples=24, steps=3)


WANTED = {
    "Overwrite": lambda theta, snapshot, committed: committed,
    "Blend": lambda theta, snapshot, committed: oracle.blended(theta, committed, 0.5),
    "Carry": lambda theta, snapshot, committed: oracle.carried(theta, snapshot, committed),
    "Adaptive": lambda theta, snapshot, committed: oracle.carried(theta, snapshot, committed),
}
KEPT = {"Overwrite": (0, 0), "Blend": (1, 12), "Carry": (3, 24), "Adaptive": (3, 24)}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("setting", SETTINGS, ids=names)
def test_a_commit_makes_of_the_parameters_what_the_formula_says(setting, dtype):
    """And the anchor is what was committed, unmixed; the next delta starts from there."""
    seen, mailbox = Recorder(), memory()
    start, sent, now = (ramp(x).astype(dtype) for x in (0.0, -1.0, -4.0))
    with session({"w": start}, half(alignment=setting), mailbox, callbacks=(seen,)) as s:
        found = two_calls(s, seen, sent, now)["w"]
        committed = s.params["w"]
        kind = type(setting).__name__
        (aligned,) = seen.of(events.Aligned)
        assert (aligned.steps, aligned.samples) == KEPT[kind]
        halved = oracle.outer_step(
            start, 0, oracle.delta(start, sent), outer_lr=RATE, outer_momentum=0.0
        )[0]
        np.testing.assert_array_equal(np.asarray(committed), oracle.narrow(halved, dtype))
        wanted = WANTED[kind](now, sent, committed)
        assert (found.dtype, found.weak_type) == (dtype, False)
        np.testing.assert_array_equal(np.asarray(found), oracle.narrow(wanted, dtype))
    counts = [record.participants[0].counters for record in records(mailbox)]
    then = [] if kind == "Overwrite" else [KEPT[kind]]
    assert [(c.steps, c.samples) for c in counts] == [(2, 16), *then]


@pytest.mark.parametrize("setting", KEEPING, ids=names)
def test_what_is_not_finite_is_never_kept(setting):
    seen = Recorder()
    with session({"w": ramp(0.0)}, half(alignment=setting), memory(), callbacks=(seen,)) as s:
        now = ramp(-4.0).at[7].set(jnp.nan)
        found = two_calls(s, seen, ramp(-1.0), now)["w"]
        np.testing.assert_array_equal(found, s.params["w"])
        assert np.isfinite(np.asarray(found)).all()
    assert [event.how for event in seen.of(events.Aligned)][:1] == ["overwrite"]
    assert [(e.reason, e.steps) for e in seen.of(events.Dropped)][:1] == [("overwritten", 3)]


@pytest.mark.parametrize("donate", [False, True])
def test_a_lone_node_that_carries_trains_as_if_there_were_no_run(donate):
    """With outer_lr=1 and no momentum Θ is the snapshot, so carrying gives back the parameters.

    To the bit in small integers, whenever commits arrive; the step donates what it is given, which
    no snapshot may be.
    """
    seen = Recorder()
    settings = half(outer_lr=1.0, alignment=carry(), sync_every=5)
    down = jax.jit(lambda p: {"w": p["w"] - 1.0}, donate_argnums=(0,) if donate else ())
    with session(vector(0.0, size=5000), settings, memory(), callbacks=(seen,)) as s:
        params = s.params
        step = 0
        while len(seen.of(events.Aligned)) < 8:
            step += 1
            params = s.step(down(params), samples=8)
            np.testing.assert_array_equal(np.array(params["w"][:5]), -float(step))
            time.sleep(0.002)
    assert {event.reason for event in seen.of(events.Dropped)} <= {"left"}
    (left,) = seen.of(events.Left)
    assert (left.processed, left.pending) == (8 * step, 0)


@pytest.mark.parametrize("kind", ["bf16", "committed"])
@pytest.mark.parametrize("setting", [blend(0.5), carry()], ids=names)
def test_no_alignment_makes_a_donating_step_compile_again(setting, kind):
    """Nor compiles anything itself, from the very first on: the session did when it opened."""
    seen, step = Recorder(), make_step()
    settings = algorithm(fragments=3, sync_every=6, alignment=setting)
    params = model(jnp.bfloat16 if kind == "bf16" else jnp.float32)
    if kind == "committed":
        params = jax.device_put(params, jax.devices()[0])
    batch = jnp.ones((8, 16))
    with session(params, settings, memory(), callbacks=(seen,)) as s:
        params = s.params
        state = optax.adamw(1e-2).init(params)
        params, state = train_with_aligns(s, params, state, step, 4, batch, seen)
        with no_compilation(), jax.transfer_guard("disallow"):
            params, state = train_with_aligns(s, params, state, step, 14, batch, seen)
        assert {leaf.committed for leaf in jax.tree.leaves(params)} == {kind == "committed"}
    assert {event.how for event in seen.of(events.Aligned)} & {"carry", "blend"}


@pytest.mark.parametrize("setting", KEEPING, ids=names)
def test_the_first_alignment_finds_its_programs_compiled(setting):
    seen = Recorder()
    kernels = (kernel.blended, kernel.carried, kernel.copied, kernel.is_finite)
    with session({"w": ramp(0.0)}, half(alignment=setting), memory(), callbacks=(seen,)) as s:
        programs = [cache_size(function) for function in kernels]
        two_calls(s, seen, ramp(-1.0), ramp(-4.0))
        assert [cache_size(function) for function in kernels] == programs
    assert seen.of(events.Aligned)[0].how != "overwrite"


@pytest.mark.parametrize("setting", [blend(0.5), carry()], ids=names)
def test_a_module_that_keeps_what_it_trained_does_not_compile_again(setting):
    seen = Recorder()
    net_, optimizer = net()
    x, y = rows()
    settings = algorithm(fragments=2, alignment=setting)
    with session(net_, settings, memory(), callbacks=(seen,)) as s:

        def until(aligns: int) -> None:
            while len(seen.of(events.Aligned)) < aligns:
                jax.block_until_ready(donating(net_, optimizer, x, y))
                s.step(samples=64)

        until(4)
        with no_compilation():
            until(10)
    assert {event.how for event in seen.of(events.Aligned)} & {"carry", "blend"}


@pytest.mark.parametrize("setting", KEEPING, ids=names)
def test_numpys_arrays_are_mixed_as_well(setting):
    seen = Recorder()
    first, second = (np.asarray(ramp(x)) for x in (-1.0, -4.0))
    with session({"w": np.asarray(ramp(0.0))}, half(alignment=setting), memory(),
                 callbacks=(seen,)) as s:  # fmt: skip
        found = two_calls(s, seen, first, second)["w"]
        wanted = WANTED[type(setting).__name__](second, first, s.params["w"])
        np.testing.assert_array_equal(np.asarray(found), wanted)
        assert isinstance(found, jax.Array)
        assert not found.committed


@pytest.mark.parametrize("setting", KEEPING, ids=names)
def test_leaves_in_other_memory_stay_there(setting):
    """The arithmetic is done on the device; committed and uncommitted leaves keep what they are."""
    seen = Recorder()
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def tree(value: float) -> dict[str, jax.Array]:
        return {"w": jax.device_put(ramp(value), pinned), "free": ramp(value)}

    with session(tree(0.0), half(alignment=setting), memory(), callbacks=(seen,)) as s:
        s.step(tree(-1.0) if s.params else None, samples=16, steps=2)
        seen.wait(events.Committed)
        wait_until(lambda: not node_of(s).to_learner.empty())
        found = s.step(tree(-4.0), samples=24, steps=3)
        assert (found["w"].sharding, found["w"].committed) == (pinned, True)
        assert not found["free"].committed
        wanted = WANTED[type(setting).__name__](ramp(-4.0), ramp(-1.0), s.params["free"])
        for leaf in found.values():
            np.testing.assert_array_equal(np.asarray(leaf), wanted)


def test_a_snapshot_is_held_no_longer_than_its_round():
    seen = Recorder()
    with session({"w": ramp(0.0)}, half(alignment=carry()), memory(), callbacks=(seen,)) as s:
        learner: Any = s._entry.learner
        assert learner._anchors.snapshots == [()]
        two_calls(s, seen, ramp(-1.0), ramp(-4.0))
        assert len(learner._anchors.snapshots[0]) == 1  # Of the second round.
    assert [event.round for event in seen.of(events.Aligned)] == [0, 1]
    assert learner._anchors.snapshots == [()]


def test_parameters_that_were_donated_before_the_end_are_overwritten():
    """What waits when the block ends may be aligned with nothing to read any more."""
    seen = Recorder()
    with session({"w": ramp(0.0)}, half(alignment=carry()), memory(), callbacks=(seen,)) as s:
        params = s.step({"w": ramp(-1.0)} if s.params else None, samples=16, steps=2)
        seen.wait(events.Committed)
        params["w"].delete()
    assert [event.how for event in seen.of(events.Aligned)] == ["overwrite"]


# Whole runs


@pytest.mark.parametrize("setting", [blend(0.5), carry()], ids=names)
def test_every_node_ends_with_what_was_committed_and_not_with_its_own_mixture(setting):
    """B94: stopped after the last commit; the committed bytes, on every node.

    B119: and wherever two nodes hold the same versions on the way, they hold the same bytes.
    """
    each = {"quorum_size": 2, "grace_seconds": 60.0, "in_flight": 1}
    settings = algorithm(sync_every=3, fragments=2, alignment=setting, overlap_steps=2, **each)
    mailbox, meet = memory(), Meeting(2)

    def node(index: int):
        start = {"a": ramp(1.0), "b": ramp(2.0)}
        held = {}
        with session(start, settings, mailbox, f"n{index}", leave_with_run=True) as s:
            params, learner = s.params, s._entry.learner
            assert learner is not None
            meet(s)
            for step in range(30):
                grown = 1 + 0.01 * (index + step)
                params = s.step({name: x * grown - 0.1 for name, x in params.items()}, samples=8)
                versions = tuple(one.version for one in learner.state.fragments)
                held[versions] = digest(s.params)
                time.sleep(0.002)
        return digest(params), digest(s.params), held

    one, two = together(lambda: node(0), lambda: node(1))
    exported = digest(load(mailbox, like={"a": ramp(0.0), "b": ramp(0.0)}))
    assert [one[1], two[1]] == [exported, exported]
    assert exported not in {one[0], two[0]}
    both = one[2].keys() & two[2].keys()
    assert len(both) >= 5
    assert [one[2][versions] for versions in both] == [two[2][versions] for versions in both]


@pytest.mark.parametrize(("setting", "least"), [(carry(), 0.9), (overwrite(), 0.0)], ids=str)
def test_two_nodes_of_unlike_speed_account_for_every_sample(setting, least):
    """B60: speeds 1.0 and 1.9. The ledgers add up at every commit; carrying loses next to none."""
    settings = algorithm(
        sync_every=8, fragments=2, alignment=setting, lease_seconds=10.0, flush_on_close=True
    )
    mailbox, meet = memory(), Meeting(2)
    trained = {"slow": (150, 0.019), "fast": (285, 0.010)}

    def node(name: str):
        seen = Recorder()
        steps, seconds = trained[name]
        start = {"a": ramp(1.0), "b": ramp(2.0)}
        with session(start, settings, mailbox, name, callbacks=(seen,), leave_with_run=True) as s:
            params = s.params
            meet(s)
            for _ in range(steps):
                time.sleep(seconds)
                params = s.step(jax.tree.map(lambda x: x - 0.01, params), samples=8)
        (left,) = seen.of(events.Left)
        return left

    ends = together(lambda: node("slow"), lambda: node("fast"))
    for left, (steps, _) in zip(ends, trained.values(), strict=True):
        assert left.processed == 8 * steps == left.merged + left.dropped + left.pending
    merged: dict[tuple[str, int], int] = {}
    for record in records(mailbox):
        for who in record.participants:
            key = who.node, record.fragment
            assert who.ledger.merged == merged.get(key, 0)
            assert who.ledger.pending == who.counters.samples
            merged[key] = who.ledger.merged + who.counters.samples
    share = sum(left.merged for left in ends) / sum(left.processed for left in ends)
    print(f"{setting}: {share:.1%} merged")
    assert share >= least
