"""K learners in one program: the numbers of a mailbox run and of the oracle."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jdiloco
from jdiloco import spmd
from jdiloco.algo.wire import narrows
from jdiloco.errors import UsageError
from jdiloco.protocol.schedule import fragment_of
from jdiloco.runtime.schema import Schema
from jdiloco.testing import oracle
from tests.algo.support import distance, length
from tests.algo.test_sharded import on_eight_devices
from tests.session.nodes import Meeting, lock_step, memory, session, together
from tests.session.test_step import no_compilation

LEARNERS = 4
ROUNDS = 20
SAMPLES = (8, 8, 4, 16)  # A step's rows, unequal on purpose.
SHAPES = {"embed": (6, 3), "mlp/w": (8, 5), "mlp/b": (5,)}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def walk(params, inner, batch):
    """One rounding a step, the same everywhere: whatever differs then differs in the rounds."""
    return jax.tree.map(jnp.add, params, batch), inner, jnp.zeros(())


def initial(dtype):
    rng = np.random.default_rng(7)
    return {k: rng.normal(size=shape).astype(DTYPES[dtype]) for k, shape in SHAPES.items()}


@functools.cache
def steps_of_all(dtype, steps):
    """What each learner adds in each step: `(K, steps, *leaf)`, alike for all learners in part."""
    rng = np.random.default_rng(3)
    return {
        k: (
            0.1 * rng.normal(size=(1, steps, *shape))
            + 0.1 * rng.normal(size=(LEARNERS, steps, *shape))
        ).astype(DTYPES[dtype])
        for k, shape in SHAPES.items()
    }


def rounds_of(algorithm):
    """Where each round begins and ends, in steps."""
    ends = np.cumsum([spmd.steps_of(algorithm, round) for round in range(ROUNDS)])
    return list(zip([0, *ends[:-1]], ends, strict=True))


def by_spmd(algorithm, dtype, **where):
    params = jax.tree.map(jnp.asarray, initial(dtype))
    state = spmd.init(algorithm, params, learners=LEARNERS, **where)
    spans = rounds_of(algorithm)
    data = steps_of_all(dtype, spans[-1][1])
    for start, end in spans:
        batches = {k: x[:, start:end] for k, x in data.items()}
        state, _ = spmd.round(algorithm, walk, state, batches, samples=SAMPLES, **where)
    return state.anchor


def by_nodes(algorithm, dtype):
    """Four sessions on one mailbox, in lock step; the first creates the run."""
    store, meet = memory(), Meeting(LEARNERS)
    spans = rounds_of(algorithm)
    data = steps_of_all(dtype, spans[-1][1])
    add = jax.jit(lambda params, batch: walk(params, (), batch)[0])

    def train(learner):
        params = jax.tree.map(jnp.asarray, initial(dtype))
        with session(params, algorithm, store, f"n{learner}", leave_with_run=True) as s:
            params = s.params
            meet(s)
            for step in range(spans[-1][1]):
                params = add(params, {k: x[learner, step] for k, x in data.items()})
                params = s.step(params, samples=SAMPLES[learner])
        return s.params

    found = together(*(functools.partial(train, learner) for learner in range(LEARNERS)))
    return found[0]


def sent(algorithm, anchor, params, dtype):
    delta = oracle.delta(anchor, params)
    if algorithm.delta_dtype is None:
        return delta.astype(DTYPES[dtype])
    return oracle.on_wire(delta, algorithm.delta_dtype)


KEPT = {"float32": "float64", "bfloat16": "bfloat16"}  # The oracle has no reason to round to fp32.


def committed(algorithm, anchor, master):
    """The next anchor, of a parameter that has more bits than a commit or not."""
    if not narrows(algorithm.commit_dtype, anchor.dtype.name):
        return oracle.narrow(master, anchor.dtype)
    update = oracle.on_wire(master - oracle.widen(anchor), algorithm.commit_dtype)
    return oracle.rebuilt(anchor, update)


def by_oracle(algorithm, dtype):
    params = initial(dtype)
    plan = Schema.of(jdiloco.algo.specs(params), algorithm).plan
    theirs = [dict(params) for _ in range(LEARNERS)]
    masters = {k: oracle.widen(x) for k, x in params.items()}
    momenta = {k: np.zeros(np.shape(x)) for k, x in params.items()}
    trained = np.zeros((LEARNERS, len(plan)), int)
    spans = rounds_of(algorithm)
    data = steps_of_all(dtype, spans[-1][1])
    for round, (start, end) in enumerate(spans):
        for learner, mine in enumerate(theirs):
            for step in range(start, end):
                mine |= {k: mine[k] + x[learner, step] for k, x in data.items()}
        trained += end - start
        index = fragment_of(round, len(plan))
        weights = [
            oracle.weight(int(k), int(k) * rows)
            for k, rows in zip(trained[:, index], SAMPLES, strict=True)
        ]
        for name in plan[index]:
            deltas = [sent(algorithm, params[name], mine[name], dtype) for mine in theirs]
            direct = algorithm.merge == jdiloco.weighted_mean() or "embed" in name
            merged = (oracle.weighted_mean if direct else oracle.rda)(deltas, weights)
            masters[name], momenta[name] = oracle.outer_step(
                masters[name],
                momenta[name],
                merged,
                outer_lr=algorithm.outer_lr,
                outer_momentum=algorithm.outer_momentum,
                momentum_dtype=KEPT[algorithm.momentum_dtype],
            )
            params[name] = committed(algorithm, params[name], masters[name])
            for mine in theirs:
                mine[name] = params[name]
        trained[:, index] = 0
    return params


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("merge", [jdiloco.rda(), jdiloco.weighted_mean()], ids=["rda", "mean"])
@pytest.mark.parametrize("fragments", [1, 3])
def test_one_program_four_nodes_and_the_oracle_give_the_same_numbers(dtype, merge, fragments):
    """Over 20 rounds, to 1e-6 in fp32; in bf16 to the roundings that fall the other way."""
    algorithm = lock_step(LEARNERS, fragments=fragments, sync_every=6, merge=merge, in_flight=1)
    program, nodes, want = (by(algorithm, dtype) for by in (by_spmd, by_nodes, by_oracle))
    for name in SHAPES:
        for found in (program, nodes):
            if dtype == "float32":
                assert distance(found[name], want[name]) <= 1e-6, name
            else:
                a, b = (np.asarray(x[name], np.float64) for x in (found, want))
                off = np.abs(a - b) > 0
                assert off.mean() <= 0.02, (name, off.mean())
                assert np.all(np.abs(a - b) <= 2.0**-7 * np.abs(b)), name


@pytest.mark.parametrize("wire", ["float8_e4m3fn", "float4_e2m1fn"])
def test_deltas_in_a_small_format_give_the_same_numbers_everywhere(wire):
    algorithm = lock_step(LEARNERS, fragments=3, sync_every=6, in_flight=1, delta_dtype=wire)
    want = by_oracle(algorithm, "float32")
    for found in (by_spmd(algorithm, "float32"), by_nodes(algorithm, "float32")):
        for name in SHAPES:
            assert distance(found[name], want[name]) <= 2e-6, name


@pytest.mark.parametrize(
    ("wire", "dtype"),
    [
        ("bfloat16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float8_e4m3fn", "bfloat16"),
        ("float4_e2m1fn", "float32"),
    ],
)
def test_narrow_commits_give_the_same_numbers_everywhere(wire, dtype):
    """With momentum that rests in bfloat16 too."""
    algorithm = lock_step(
        LEARNERS, fragments=3, sync_every=6, in_flight=1, commit_dtype=wire,
        momentum_dtype="bfloat16",
    )  # fmt: skip
    want = by_oracle(algorithm, dtype)
    for found in (by_spmd(algorithm, dtype), by_nodes(algorithm, dtype)):
        for name in SHAPES:
            assert distance(found[name], want[name]) <= 1e-6, name


def test_one_learner_that_syncs_every_step_is_the_inner_optimiser():
    """To half an ulp of the anchor in each step."""
    algorithm = jdiloco.DiLoCo(
        sync_every=1, fragments=1, outer_lr=1.0, outer_momentum=0.0, merge=jdiloco.weighted_mean()
    )
    params = jax.tree.map(jnp.asarray, initial("float32"))
    steps = steps_of_all("float32", 30)
    state = spmd.init(algorithm, params, learners=1)
    for i in range(30):
        batch = {k: x[:1, i : i + 1] for k, x in steps.items()}
        params = walk(params, (), {k: x[0, i] for k, x in steps.items()})[0]
        before = state.anchor
        bounds = {k: (i + 1) * 2.0**-24 * np.abs(x).max() for k, x in before.items()}
        state, _ = spmd.round(algorithm, walk, state, batch, samples=1)
        for name, value in params.items():
            assert np.abs(state.anchor[name] - value).max() <= bounds[name] + 2.0**-23


@pytest.fixture
def algorithm():
    return jdiloco.DiLoCo(sync_every=4, fragments=2, overlap_steps=0, outer_momentum=0.5)


def batches(steps, learners=LEARNERS):
    return {k: x[:learners, :steps] for k, x in steps_of_all("float32", 40).items()}


def begun(algorithm, inner=(), learners=LEARNERS):
    params = jax.tree.map(jnp.asarray, initial("float32"))
    return spmd.init(algorithm, params, inner, learners=learners)


def test_a_round_traces_the_users_step_once_for_the_whole_run(algorithm):
    traces = []

    def step(params, inner, batch):
        traces.append(1)
        return walk(params, inner, batch)

    state = begun(algorithm)
    state, _ = spmd.round(algorithm, step, state, batches(2), samples=1)
    first = len(traces)
    for samples in (1, 2, (1, 2, 3, 4)):
        state, _ = spmd.round(algorithm, step, state, batches(2), samples=samples)
    assert len(traces) == first


def test_however_many_learners_take_part_one_program_serves_all_rounds(algorithm):
    """B107: one to four of four are finite, in any order, and their samples change."""
    rng = np.random.default_rng(0)
    state = begun(algorithm)
    for turn, count in enumerate(rng.permutation(np.tile(np.arange(1, 5), 10))):
        data = {k: np.array(x) for k, x in batches(2).items()}
        for name in data:
            data[name][rng.permutation(LEARNERS)[count:]] = np.nan
        samples = rng.integers(1, 9, LEARNERS)
        warm = no_compilation() if turn else contextlib.nullcontext()
        with warm:
            state, _ = spmd.round(algorithm, walk, state, data, samples=samples)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.anchor))


def test_only_the_fragment_whose_turn_it_is_changes(algorithm):
    state = begun(algorithm)
    first, second = Schema.of(jdiloco.algo.specs(state.anchor), algorithm).plan
    before = jax.tree.map(np.asarray, state.anchor)
    state, _ = spmd.round(algorithm, walk, state, batches(2), samples=1)
    for names, changed in ((first, True), (second, False)):
        assert all((np.asarray(state.anchor[n]) != before[n]).any() == changed for n in names)
    for name in first:
        assert all((row == state.anchor[name]).all() for row in state.params[name])
    for name in second:
        assert (state.params[name][0] != state.params[name][1]).any()


def test_every_learner_draws_from_a_key_of_its_own(algorithm):
    def step(params, key, batch):
        key, sub = jax.random.split(key)
        return params, key, jax.random.normal(sub)

    state = begun(algorithm, jax.random.key(0))
    state, first = spmd.round(algorithm, step, state, batches(2), samples=1)
    state, second = spmd.round(algorithm, step, state, batches(2), samples=1)
    drawn = np.concatenate([np.ravel(first), np.ravel(second)])
    assert len(set(drawn.tolist())) == 4 * LEARNERS


def test_optimiser_state_stays_each_learners_own_over_a_sync():
    """B86: moments and step counts go on."""
    algorithm = jdiloco.DiLoCo(sync_every=3, fragments=1, outer_momentum=0.0)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 100))

    def step(params, inner, batch):
        updates, inner = optimizer.update(batch, inner, params)
        return optax.apply_updates(params, updates), inner, None

    params = jax.tree.map(jnp.asarray, initial("float32"))
    state = spmd.init(algorithm, params, optimizer.init(params), learners=LEARNERS)
    for _ in range(2):
        state, _ = spmd.round(algorithm, step, state, batches(3), samples=1)
    assert state.inner[0].count.tolist() == [6] * LEARNERS
    moments = state.inner[0].mu["mlp/w"]
    assert (moments[0] != moments[1]).any()


WHOLE = jdiloco.DiLoCo(sync_every=2, fragments=1, outer_momentum=0.5)


def test_a_learner_that_is_not_finite_takes_no_part_and_goes_back_to_the_anchor():
    data = {k: np.array(x) for k, x in batches(2).items()}
    data["mlp/b"][1, 0, 0] = np.nan
    state, _ = spmd.round(WHOLE, walk, begun(WHOLE), data, samples=1)
    assert state.outer[0][0].turnout == (3, 1)
    healthy = {k: np.delete(x, 1, axis=0) for k, x in data.items()}
    want, _ = spmd.round(WHOLE, walk, begun(WHOLE, learners=3), healthy, samples=1)
    for name, value in want.anchor.items():
        assert distance(state.anchor[name], value) <= 1e-6
        assert (state.params[name][1] == state.anchor[name]).all()


def test_what_is_not_finite_in_one_fragment_reverts_the_others_too(algorithm):
    """One step spreads it; the other fragment of that learner would only be rejected later."""
    first, second = Schema.of(jdiloco.algo.specs(initial("float32")), algorithm).plan
    data = {k: np.array(x) for k, x in batches(2).items()}
    data[first[0]][1, 0] = np.inf
    state, _ = spmd.round(algorithm, walk, begun(algorithm), data, samples=1)
    for name in second:
        assert (state.params[name][1] == state.anchor[name]).all()
        assert (state.params[name][0] != state.anchor[name]).any()
    assert state.steps.tolist() == [[0, 2], [0, 0], [0, 2], [0, 2]]


def test_where_everybody_is_not_finite_the_version_stays():
    data = {k: np.full_like(x, np.nan) for k, x in batches(2).items()}
    state, _ = spmd.round(WHOLE, walk, begun(WHOLE), data, samples=1)
    for name, value in initial("float32").items():
        np.testing.assert_array_equal(state.anchor[name], value)
        assert all((row == value).all() for row in state.params[name])
    assert int(state.outer[0][1].round) == 0


def test_with_two_rounds_in_flight_a_commit_is_taken_a_round_later():
    """Until then its learners train on from where they were, and that training is overwritten."""
    algorithm = jdiloco.DiLoCo(sync_every=4, fragments=2, in_flight=2, outer_momentum=0.5)
    first, second = Schema.of(jdiloco.algo.specs(initial("float32")), algorithm).plan
    state, _ = spmd.round(algorithm, walk, begun(algorithm), batches(2), samples=1)
    committed = {n: np.asarray(state.anchor[n]) for n in first}
    for name in first:
        assert (state.params[name][0] != committed[name]).any()
    state, _ = spmd.round(algorithm, walk, state, batches(2), samples=1)
    for name in first:
        assert all((row == committed[name]).all() for row in state.params[name])
    for name in second:
        assert (state.params[name][0] != state.anchor[name]).any()
    assert state.steps.tolist() == [[0, 0]] * LEARNERS


def in_flight(alignment):
    return jdiloco.DiLoCo(
        sync_every=4, fragments=2, in_flight=2, outer_momentum=0.5, alignment=alignment
    )


def two_rounds(alignment):
    """The state after the second round, and what happened to one tensor of the first fragment:
    what it was at its snapshot, at its alignment, and what was committed for it."""
    algorithm = in_flight(alignment)
    name = Schema.of(jdiloco.algo.specs(initial("float32")), algorithm).plan[0][0]
    state, _ = spmd.round(algorithm, walk, begun(algorithm), batches(2), samples=4)
    then, committed = np.asarray(state.params[name]), np.asarray(state.anchor[name])
    state, _ = spmd.round(algorithm, walk, state, batches(2), samples=4)
    now = then + np.asarray(batches(2)[name]).sum(1)
    return state, np.asarray(state.params[name]), then, now, committed


def test_carry_adds_what_was_trained_since_the_snapshot_to_the_commit():
    state, found, then, now, committed = two_rounds(jdiloco.carry())
    np.testing.assert_allclose(found, committed + (now - then), atol=1e-6)
    assert state.steps.tolist() == [[2, 0]] * LEARNERS
    assert state.samples.tolist() == [[8.0, 0.0]] * LEARNERS


def test_blend_moves_part_of_the_way_and_counters_keep_that_share():
    state, found, _, now, committed = two_rounds(jdiloco.blend(0.5))
    np.testing.assert_allclose(found, 0.5 * now + 0.5 * committed, atol=1e-6)
    assert state.steps.tolist() == [[1, 0]] * LEARNERS
    assert state.samples.tolist() == [[4.0, 0.0]] * LEARNERS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"overlap_steps": 1},
            "`overlap_steps` is 1: here a commit is taken",
        ),
        ({"alignment": jdiloco.adaptive()}, r"`adaptive\(\)` decides by the record of a round"),
    ],
)
def test_settings_that_lock_step_cannot_have_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        begun(jdiloco.DiLoCo(sync_every=4, fragments=2, outer_momentum=0.5, **settings))


@pytest.mark.long
@pytest.mark.multiprocess
def test_learners_along_a_mesh_axis_give_what_they_give_on_one_device():
    """One or two learners a device, automatic and explicit axes, a model sharded over another.

    B100: to 1e-6 where the training itself is the same, blended with commits.
    """
    assert "agreed" in on_eight_devices("tests.spmd_program")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": (1, 2)}, r"`samples` has shape \(2,\), wanted one number or 4"),
        ({"samples": -1}, r"`samples` is -1.0: a step trains on 0 rows or more"),
        ({"samples": (1, 2, 3, float("nan"))}, "a step trains on 0 rows or more"),
        ({"samples": "many"}, "`samples` is 'many', wanted numbers"),
        ({"batches": {}}, "`batches` holds no array"),
        ({"batches": batches(3)}, r"wanted \(4, 2\): learners, then the steps of the round"),
        ({"batches": batches(2, learners=2)}, r"begin with \[\(2, 2\)\], wanted \(4, 2\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_wanted(algorithm, change, message):
    call = {"batches": batches(2), "samples": 1, **change}
    given = call.pop("batches")
    with pytest.raises(UsageError, match=message):
        spmd.round(algorithm, walk, begun(algorithm), given, **call)


def test_settings_with_other_fragments_than_the_state_has_are_refused(algorithm):
    other = dataclasses.replace(algorithm, fragments=1, sync_every=2)
    with pytest.raises(UsageError, match="Pass the settings that"):
        spmd.round(other, walk, begun(algorithm), batches(2), samples=1)


def test_a_leaf_that_is_cut_over_the_learners_axis_is_refused(algorithm):
    mesh = jax.make_mesh((1,), ("learner",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("learner"))
    params = {name: jax.device_put(x, cut) for name, x in initial("float32").items()}
    with pytest.raises(UsageError, match="A leaf is cut over 'learner'"):
        spmd.init(algorithm, params, learners=2, mesh=mesh)


def test_learners_that_do_not_divide_over_the_axis_are_refused(algorithm):
    mesh = jax.make_mesh((1,), ("learner",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.tree.map(jnp.asarray, initial("float32"))
    with pytest.raises(UsageError, match="the mesh has 'learner'"):
        spmd.init(algorithm, params, learners=2, mesh=mesh, axis_name="model")


def test_fewer_steps_than_fragments_divide_take_two_programs():
    """`sync_every=5, fragments=2`: rounds of 2 and of 3 steps, and every step is merged once."""
    algorithm = jdiloco.DiLoCo(sync_every=5, fragments=2, overlap_steps=0, outer_momentum=0.5)
    state = begun(algorithm)
    assert [spmd.steps_of(algorithm, round) for round in range(4)] == [2, 3, 2, 3]
    for round in range(4):
        data = batches(spmd.steps_of(algorithm, round))
        state, _ = spmd.round(algorithm, walk, state, data, samples=1)
    assert [int(outer[1].round) for outer in state.outer] == [2, 2]
    assert length(state.anchor["mlp/b"]) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learners": 0}, "`learners` must be an integer of at least 1, got 0"),
        ({"learners": 2.0}, "got 2.0"),
        ({"axis_name": 3}, "`axis_name` is the name of one axis of the mesh, not 3"),
    ],
)
def test_numbers_and_names_that_are_none_are_refused(algorithm, change, message):
    params = jax.tree.map(jnp.asarray, initial("float32"))
    with pytest.raises(UsageError, match=message):
        spmd.init(algorithm, params, **{"learners": 2, **change})


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (lambda params, inner, batch: (params, inner), "2 values"),
        (lambda params, inner, batch: params, "a dict"),
        (lambda params, inner, batch: None, "a NoneType"),
    ],
)
def test_a_step_that_returns_something_else_is_told_what_is_wanted(algorithm, step, found):
    with pytest.raises(UsageError, match=f"returned {found}, wanted three: `.params, inner, aux"):
        spmd.round(algorithm, step, begun(algorithm), batches(2), samples=1)
