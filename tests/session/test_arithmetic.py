"""What a run commits is what the papers' formulas say, by plain NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdiloco.algo.merges import rda, weighted_mean
from jdiloco.algo.paths import specs
from jdiloco.runtime.payloads import read_outer
from jdiloco.runtime.schema import Schema
from jdiloco.testing import oracle
from jdiloco.types import TensorSpec

from .nodes import Meeting, algorithm, digest, lock_step, memory, records, session, together, vector

SHAPES = {"body/a": (5, 7), "body/b": (33,), "embed/table": (11, 3), "head": ()}


def drift(node: int, round: int, name: str, index: int) -> np.ndarray:
    """What a step of a node adds: never the same twice, the same for everybody who asks."""
    seed = [node, round, index, len(name)]
    return np.random.default_rng(seed).normal(size=SHAPES[name]).astype(np.float32) / 8


def plant(dtype) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def train(params, node: int, step: int):
    """One step: the same function for the run and for the reference."""
    moved = {}
    for name, leaf in params.items():
        wide = np.asarray(leaf).astype(np.float32) + drift(node, step, name, step % 3)
        moved[name] = jnp.asarray(wide.astype(leaf.dtype))
    return moved


def reference(settings, nodes: int, rounds: int, plan, dtype) -> dict[str, np.ndarray]:
    """The same run without threads, stores or JAX: three nodes that wait for each other."""
    merge = oracle.rda if settings.merge == rda() else oracle.weighted_mean
    anchors = {name: np.asarray(leaf) for name, leaf in plant(dtype).items()}
    masters = {name: oracle.widen(a) for name, a in anchors.items()}
    momenta = {name: np.zeros(a.shape) for name, a in anchors.items()}
    locals_ = [dict(plant(dtype)) for _ in range(nodes)]
    counts = [[0] * len(plan) for _ in range(nodes)]
    step, due = 0, settings.sync_every / len(plan)
    for round in range(rounds):
        fragment = round % len(plan)
        until = int((round + 1) * due)
        for _ in range(until - step):
            for node in range(nodes):
                locals_[node] = train(locals_[node], node, step)
                counts[node] = [count + 1 for count in counts[node]]
            step += 1
        for name in plan[fragment]:
            deltas = [
                oracle.narrow(oracle.delta(anchors[name], mine[name]), dtype) for mine in locals_
            ]
            weights = [
                oracle.weight(counts[node][fragment], counts[node][fragment] * (node + 1))
                for node in range(nodes)
            ]
            direct = merge is oracle.rda and "embed" in name
            merged = (oracle.weighted_mean if direct else merge)(deltas, weights)
            masters[name], momenta[name] = oracle.outer_step(
                masters[name],
                momenta[name],
                merged,
                outer_lr=settings.outer_lr,
                outer_momentum=settings.outer_momentum,
            )
            anchors[name] = oracle.narrow(masters[name], dtype)
            for mine in locals_:
                mine[name] = jnp.asarray(anchors[name])
        for node in range(nodes):
            counts[node][fragment] = 0
    return anchors


def run_in_lock_step(settings, nodes: int, rounds: int, dtype, mailbox):
    steps = rounds * settings.sync_every // settings.fragments
    meet = Meeting(nodes)

    def node(index: int):
        hashes = []
        with session(plant(dtype), settings, mailbox, f"n{index}") as s:
            params = s.params
            meet(s)
            for step in range(steps):
                params = s.step(train(params, index, step), samples=index + 1)
                hashes.append(digest(s.params))
        return s.params, hashes

    return together(*(lambda i=i: node(i) for i in range(nodes)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("merge", [rda(), weighted_mean()])
def test_three_nodes_in_lock_step_commit_what_the_oracle_does(merge, fragments, dtype):
    """Standard DiLoCo over several rounds, per tensor to 1e-6; B119: equal hashes after each."""
    settings = lock_step(
        3, merge=merge, fragments=fragments, in_flight=1, sync_every=3, outer_momentum=0.75
    )
    mailbox, rounds = memory(), 4 * fragments
    found = run_in_lock_step(settings, 3, rounds, dtype, mailbox)

    log = records(mailbox)
    assert [len(record.participants) for record in log] == [3] * rounds
    wanted = reference(settings, 3, rounds, Schema.of(specs(plant(dtype)), settings).plan, dtype)
    for name, value in found[0][0].items():
        close = 1e-6 if dtype == jnp.float32 else 2**-8  # Half an ulp decides the last bit.
        error = oracle.norm(oracle.widen(value) - oracle.widen(wanted[name]))
        assert error <= close * oracle.norm(wanted[name]), name
    hashes = [hashes for _, hashes in found]
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes[0])) >= rounds, "each round moved something"


def test_local_sgd_commits_the_weighted_average_of_the_parameters():
    """outer_lr=1 and no momentum: B01. Samples² / steps weigh: 1:4 for twice the rows."""
    settings = lock_step(2, outer_lr=1.0, outer_momentum=0.0, merge=weighted_mean(), sync_every=2)
    mailbox, meet = memory(), Meeting(2)

    def node(index: int):
        with session(vector(1.0), settings, mailbox, f"n{index}") as s:
            params = s.params
            meet(s)
            for _ in range(2):
                params = s.step({"w": params["w"] - 0.1 * (index + 1)}, samples=index + 1)
            return params, s.params

    for local, committed in together(lambda: node(0), lambda: node(1)):
        np.testing.assert_allclose(committed["w"], (0.8 + 4 * 0.6) / 5, rtol=1e-6)
        np.testing.assert_array_equal(local["w"], committed["w"])


def test_a_lone_node_averages_with_itself():
    """B15: one node, quorum 1; 0.8 stays 0.8, and B01's second round goes on from there."""
    settings = algorithm(outer_lr=1.0, outer_momentum=0.0, overlap_steps=0, sync_every=1)
    with session(vector(1.0), settings, memory(), "alone") as s:
        for wanted in (0.8, 0.5):
            params = s.step(vector(wanted) if s.params is not None else None, samples=1)
            np.testing.assert_allclose(params["w"], wanted, rtol=1e-6)


def test_momentum_of_one_fragment_never_reaches_another():
    """B25: fragment 0 moves by the Nesterov list, fragment 1 has no delta and stays."""
    settings = algorithm(
        fragments=2, sync_every=10, in_flight=1, outer_lr=0.7, outer_momentum=0.9, overlap_steps=0,
        merge=weighted_mean(), keep_rounds=99,
    )  # fmt: skip
    mailbox = memory()
    with session({"a": jnp.zeros(4), "b": jnp.zeros(4)}, settings, mailbox, "n") as s:
        params = s.params
        (first,), (other,) = s._entry.schema.plan
        for _ in range(6):  # Each cycle one delta of 1, wherever the anchor is.
            params = s.step({**params, first: s.params[first] - 1.0}, samples=1, steps=5)
        np.testing.assert_allclose(s.params[first], np.full(4, -5.6343), rtol=1e-6)
        assert not np.asarray(s.params[other]).any()
    newest = [record for record in records(mailbox) if record.fragment == 1][-1]
    outer = read_outer(mailbox, newest, [TensorSpec(other, (4,), "float32")])
    assert outer is not None
    assert newest.version == 3
    assert not outer[0][other].any()
