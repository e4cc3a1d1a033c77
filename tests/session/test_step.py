"""What `Session.step` promises the loop that calls it."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdiloco import events
from jdiloco.algo.merges import weighted_mean
from jdiloco.errors import UsageError
from jdiloco.runtime.parameters import placed
from jdiloco.session import _count

from .nodes import (
    Recorder,
    algorithm,
    digest,
    memory,
    node_of,
    records,
    run_script,
    session,
    vector,
    wait_until,
)

COMPILED = "/jax/core/compile/backend_compile_duration"
_compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **more: _compilations.append(event) if event == COMPILED else None
)


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """XLA compiles nothing in this thread's block, nor in any other's meanwhile."""
    before = len(_compilations)
    yield
    assert len(_compilations) == before


def model(dtype=jnp.float32) -> dict[str, jax.Array]:
    return {"w": jnp.ones((16, 4), dtype), "b": jnp.zeros(4, dtype), "e/embed": jnp.ones(8, dtype)}


optimizer = optax.adamw(1e-2)


def make_step(donate: bool = True):
    def loss(params, batch):
        hidden = batch @ params["w"] + params["b"]
        return jnp.mean(hidden**2) + jnp.sum(params["e/embed"] ** 2)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1) if donate else ())


def cache_size(step: Any) -> int:
    """Programs that a jitted function has."""
    return step._cache_size()


def train_with_aligns(s, params, state, step, aligns: int, batch, seen: Recorder):
    """Trains until so many commits have been taken up."""
    deadline = time.monotonic() + 60
    while len(seen.of(events.Aligned)) < aligns:
        assert time.monotonic() < deadline
        params, state, loss = step(params, state, batch)
        params = s.step(params, samples=8)
        jax.block_until_ready(loss)
    return params, state


def placed_model(kind: str):
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(kind, jnp.float32)
    params = model(dtype)
    return jax.device_put(params, jax.devices()[0]) if kind == "committed" else params


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "committed"])
def test_no_align_makes_a_donating_step_compile_again(kind):
    """AdamW under jit that donates parameters and state; nothing at all is compiled by an align."""
    settings, seen, step = algorithm(fragments=3, sync_every=6), Recorder(), make_step()
    batch = jnp.ones((8, 16), jnp.float32)
    with session(placed_model(kind), settings, memory(), callbacks=(seen,)) as s:
        params = s.params
        state = optimizer.init(params)
        params, state = train_with_aligns(s, params, state, step, 6, batch, seen)
        with no_compilation():
            params, state = train_with_aligns(s, params, state, step, 30, batch, seen)
        assert np.isfinite(np.asarray(params["w"], np.float32)).all()
        committed = kind == "committed"
        assert {leaf.committed for leaf in jax.tree.leaves(params)} == {committed}


def test_the_very_first_align_compiles_nothing_either():
    """The session compiles at its start what rounds need."""
    settings, seen, step = algorithm(sync_every=40), Recorder(), make_step()
    batch = jnp.ones((8, 16))
    with session(model(), settings, memory(), callbacks=(seen,)) as s:
        params = s.params
        state = optimizer.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, batch)
            params = s.step(params, samples=8)
        programs = cache_size(step)
        params, state = train_with_aligns(s, params, state, step, 1, batch, seen)
        assert cache_size(step) == programs


def test_a_step_where_nothing_is_due_returns_the_very_object():
    with session(model(), algorithm(sync_every=1000), memory()) as s:
        params = s.params
        for _ in range(5):
            params = jax.tree.map(lambda x: x + 1, params)
            assert s.step(params, samples=1) is params


COST = """
    import time

    from tests.session.nodes import algorithm, memory, session, vector

    def nothing(params, *, samples, steps=1):
        return params

    def seconds(call, params):
        def once():
            began = time.perf_counter()
            for _ in range(1000):
                call(params, samples=8)
            return (time.perf_counter() - began) / 1000
        return min(once() for _ in range(20))

    with session(vector(1.0), algorithm(sync_every=10**7), memory()) as s:
        params = s.params
        print(seconds(s.step, params), seconds(nothing, params))
"""


def test_a_step_where_nothing_is_due_costs_microseconds():
    """Held against an empty function in the same run: a hundred of those at most."""
    step, empty = map(float, run_script(COST).split())
    print(f"step: {step * 1e6:.2f} us, {step / empty:.0f} empty calls")
    assert step < 100 * empty


def test_training_runs_under_a_transfer_guard():
    """Explicit transfers alone, in publishing and in aligning."""
    settings, seen, step = algorithm(fragments=2), Recorder(), make_step()
    batch = jnp.ones((8, 16))
    with session(model(), settings, memory(), callbacks=(seen,)) as s:
        params = s.params
        state = optimizer.init(params)
        with jax.transfer_guard("disallow"):
            train_with_aligns(s, params, state, step, 4, batch, seen)


def test_a_session_opens_and_ends_under_a_transfer_guard():
    params = model()
    with jax.transfer_guard("disallow"):
        with session(params, algorithm(sync_every=1, flush_on_close=True), memory()) as s:
            s.step(s.params, samples=1)
        jax.block_until_ready(s.params)


# Calls that are wrong.


def opened(**settings):
    return session(model(), algorithm(**settings), memory())


def test_a_step_inside_jit_is_refused():
    with opened() as s:
        params = s.params
        with pytest.raises(UsageError, match=r"being traced: `session.step` was called inside jit"):
            jax.jit(lambda p: s.step(p, samples=1))(params)
        assert s.step(params, samples=1) is params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"w": p["w"]}, "have the structure"),
        (lambda p: {**p, "w": p["w"][:2]}, r"'w' is float32\[2, 4\].*float32\[16, 4\]"),
        (lambda p: {**p, "w": p["w"].astype(jnp.float16)}, r"'w' is float16\[16, 4\]"),
        (lambda p: {**p, "b": 3.0}, "'b' is a float"),
        (lambda p: {**p, "b": None}, "have the structure"),
        (lambda p: None, "Pass the parameters"),
    ],
)
def test_other_parameters_are_refused_and_the_session_goes_on(change, message):
    """Whether the call is the first or one where something is due; nothing of it counts."""
    with opened(sync_every=2, overlap_steps=0) as s:
        params = s.params
        with pytest.raises(UsageError, match=message):
            s.step(change(params), samples=100)
        params = s.step(params, samples=1)
        with pytest.raises(UsageError, match=message):
            s.step(change(params), samples=100)
        s.step(params, samples=1)
        assert node_of(s).state.chain.read == 0
    assert records_of(s)[0].participants[0].counters.samples == 2


def records_of(s):
    return records(s._settings.mailbox)


def test_a_donated_array_is_refused_and_says_so():
    with opened(sync_every=2) as s:
        params = s.params
        s.step(params, samples=1)
        jax.jit(lambda p: p["w"] * 2, donate_argnums=0).lower(params)
        params["b"].delete()
        with pytest.raises(UsageError, match=r"'b' was donated or deleted. Pass what the step"):
            s.step(params, samples=1)


@pytest.mark.parametrize("value", [1.5, -1, "8", None])
def test_counts_are_whole_numbers(value):
    with pytest.raises(UsageError, match="`samples` counts something"):
        _count("samples", value)


def test_counts_may_be_numpys():
    with opened(sync_every=2, overlap_steps=0) as s:
        with pytest.raises(UsageError, match="`steps` counts something"):
            s.step(s.params, samples=1, steps=-1)
        s.step(s.params, samples=np.int64(3), steps=np.uint8(2))
    assert records_of(s)[0].participants[0].counters.samples == 3


def test_a_loop_that_forgets_to_take_the_runs_values_is_told():
    """It would train its own and publish the difference to the run's."""
    with opened() as s, pytest.raises(UsageError, match=r"Begin with `params = session.params`"):
        s.step(model(), samples=1)


def test_a_session_outside_its_block_is_told():
    s = opened()
    with pytest.raises(UsageError, match="has not been entered"):
        s.step(model(), samples=1)
    with pytest.raises(UsageError, match="has not been entered"):
        _ = s.params
    with s:
        pass
    with pytest.raises(UsageError, match="entered before"), s:
        pass


def test_a_beat_needs_four_polls():
    with pytest.raises(UsageError, match=r"`poll_interval` is 0.05 s.*`beat_seconds` 0.1"):
        session(model(), algorithm(beat_seconds=0.1), memory(), poll_interval=0.05)
    with pytest.raises(UsageError, match="above 0 seconds"):
        session(model(), algorithm(), memory(), poll_interval=0.0)


@pytest.mark.parametrize("name", ["../../x", "UPPER", "", "a" * 41, "a.b", "a/b"])
def test_a_node_id_that_is_no_name_is_refused(name):
    with pytest.raises(UsageError):
        session(model(), algorithm(), memory(), name)


# Parameters of other kinds.


def test_numpy_parameters_work_from_first_to_last():
    settings = algorithm(sync_every=2, overlap_steps=0)
    params = {"w": np.ones(4, np.float32), "n": np.int64(3)}
    with session(params, settings, memory()) as s:
        assert isinstance(s.params["w"], jax.Array)
        mine = {"w": np.ones(4, np.float32) * 2, "n": np.int64(3)}
        for _ in range(4):
            mine = s.step({"w": np.asarray(mine["w"]) - 1, "n": mine["n"]}, samples=1)
        assert s.params["n"] == 3
    assert [r.version for r in records_of(s)] == [1, 2]


def test_leaves_that_are_no_floats_stay_the_nodes_own():
    """B101: integers, flags, random keys and None are left alone, and nothing raises."""
    params = {
        "w": jnp.ones(4),
        "step": jnp.int32(5),
        "flag": True,
        "key": jax.random.key(0),
        "none": None,
    }
    settings = algorithm(sync_every=1, overlap_steps=0, outer_lr=1.0, outer_momentum=0.0)
    with session(params, settings, memory()) as s:
        mine = s.params
        mine = s.step({**mine, "w": mine["w"] - 0.5, "step": jnp.int32(7)}, samples=1)
        assert mine["step"] == 7
        assert mine["flag"] is True
        assert mine["none"] is None
        assert jnp.array_equal(jax.random.key_data(mine["key"]), jax.random.key_data(params["key"]))
        np.testing.assert_array_equal(mine["w"], 0.5)
    assert s.params["step"] == 7


def test_a_model_without_floats_is_refused():
    with pytest.raises(UsageError, match="no floating-point tensor"):
        session({"n": jnp.int32(1)}, algorithm(), memory())
    with pytest.raises(UsageError, match="'w' is float64"):
        session({"w": np.ones(3)}, algorithm(), memory())


# Counting.


def test_one_call_may_owe_several_rounds():
    """A scan over 12 steps with H=4, P=2 and two rounds in flight publishes two at once."""
    seen = Recorder()
    settings = algorithm(sync_every=4, fragments=2, in_flight=2, keep_rounds=99)
    with session({"a": jnp.ones(3), "b": jnp.ones(3)}, settings, memory(), callbacks=(seen,)) as s:
        params = jax.tree.map(lambda x: x - 0.1, s.params)
        s.step(params, samples=96, steps=12)
        seen.wait(events.Published, 2)
        seen.wait(events.Committed, 2)
    assert [(e.round, e.steps, e.samples) for e in seen.of(events.Published)][:2] == [
        (0, 12, 96),
        (1, 12, 96),
    ]


def test_steps_beyond_a_due_round_count_for_the_next():
    """Calls of 3 steps with H=4: rounds at 4, 8, 12 are taken at 6, 9, 12."""
    seen = Recorder()
    settings = algorithm(sync_every=4, overlap_steps=0)
    with session(vector(1.0), settings, memory(), callbacks=(seen,)) as s:
        params, at = s.params, []
        for call in range(1, 5):
            params = s.step(jax.tree.map(lambda x: x - 0.1, params), samples=3, steps=3)
            at += [3 * call] * (len(seen.of(events.Aligned)) - len(at))
    assert at == [6, 9, 12]


# Memory that is not shared.


def test_nothing_the_user_does_to_his_arrays_reaches_the_session():
    """B84, B02: values that were passed in, or handed out, may be deleted or written over."""
    settings = algorithm(sync_every=1, overlap_steps=0, outer_lr=1.0, outer_momentum=0.0)
    mine = {"w": np.full(1024, 1.0, np.float32)}
    with session(mine, settings, memory()) as s:
        mine["w"][:] = 99.0
        first = s.params
        np.testing.assert_array_equal(first["w"], 1.0)
        handed = s.step({"w": first["w"] - 0.5}, samples=1)
        handed["w"].delete()
        first["w"].delete()
        np.testing.assert_array_equal(s.params["w"], 0.5)
        again = s.step({"w": s.params["w"] - 0.25}, samples=1)
        np.testing.assert_array_equal(again["w"], 0.25)  # The anchor was 0.5.


def aligned_to_64_bytes(size: int) -> np.ndarray:
    """Memory of the kind that `device_put` takes over instead of copying."""
    raw = np.zeros(size * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * 4].view(np.float32)


def test_donating_an_aligned_leaf_changes_neither_anchor_nor_committed_values():
    """Where JAX takes the host's memory for its own, a donating step must still not write to it."""
    value = aligned_to_64_bytes(4096)
    value[:] = 1.0
    anchor, handed = placed(value, None), placed(value, None)
    step = jax.jit(lambda x: x * 3, donate_argnums=0)
    for _ in range(3):
        handed = step(handed)
    jax.block_until_ready(handed)
    np.testing.assert_array_equal(anchor, 1.0)
    np.testing.assert_array_equal(value, 1.0)


def test_a_snapshot_is_right_though_the_next_step_donates_at_once():
    """The subtraction is dispatched before `step` returns; 40 deltas, none of them wrong."""
    settings = algorithm(
        sync_every=1, outer_lr=1.0, outer_momentum=0.0, merge=weighted_mean(), overlap_steps=0
    )
    down = jax.jit(lambda p: {"w": p["w"] - 1.0}, donate_argnums=0)
    with session(vector(0.0, size=50_000), settings, memory()) as s:
        params = s.params
        for round in range(40):
            params = s.step(down(params), samples=1)
            np.testing.assert_array_equal(np.array(params["w"][:5]), -1.0 - round)


def test_the_session_keeps_no_array_of_the_user_alive():
    settings = algorithm(sync_every=1, overlap_steps=0)
    with session(vector(1.0, size=10_007), settings, memory()) as s:
        params = s.params
        for _ in range(3):
            params = s.step({"w": params["w"] - 0.1}, samples=1)
        wait_until(lambda: not node_of(s)._fetches and not node_of(s)._ready)
        gc.collect()
        held = [a for a in jax.live_arrays() if a.shape == (10_007,) and a is not params["w"]]
        assert len(held) == 1, "the anchor"


def test_params_are_copies_and_the_same_bits_each_time():
    with opened() as s:
        one, two = s.params, s.params
        assert one["w"] is not two["w"]
        assert digest(one) == digest(two) == digest(model())


@pytest.mark.parametrize(("fragments", "in_flight"), [(1, 1), (2, 2)])
def test_a_learner_trains_no_further_past_a_round_than_overlap_steps(fragments, in_flight):
    """Nor does it where no further round can be published, and nothing else is due."""
    seen = Recorder()
    settings = algorithm(
        sync_every=10, fragments=fragments, in_flight=in_flight, overlap_steps=3, follow=0
    )
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    with session(params, settings, memory(), "a", callbacks=(seen,)) as s:
        params = s.params
        for _ in range(200):
            params = s.step(jax.tree.map(lambda leaf: leaf + 1, params), samples=1)
    assert seen.of(events.Waiting)
    dropped = [e.steps for e in seen.of(events.Dropped) if e.reason == "overwritten"]
    assert max(dropped, default=0) <= 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"w": jnp.ones(3), "x": jnp.ones(3, "float8_e4m3fn")},
            "'x' is float8_e4m3fn; a run holds",
        ),
        ({"w": jnp.ones(3), "x": jnp.ones(3, "complex64")}, "'x' is complex64; a run holds"),
        ({"w": np.ones(3, np.longdouble)}, "'w' is (float128|longdouble)"),
        ({"w": jax.ShapeDtypeStruct((3,), "float32")}, "'w' is a description without values"),
        ({"\ud800": jnp.ones(3)}, "lone surrogate"),
    ],
    ids=["float8", "complex", "longdouble", "description", "surrogate"],
)
def test_parameters_that_no_run_can_hold_are_refused_before_anything_is_written(params, message):
    """Left out in silence, each node would drift apart there."""
    mailbox = memory()
    with pytest.raises(UsageError, match=message), session(params, algorithm(), mailbox):
        pass
    assert mailbox.list("") == []


def test_numbers_in_names_may_have_any_length():
    long = "9" * 5000
    with session({f"a{long}": jnp.ones(1), "a10": jnp.ones(1)}, algorithm(), memory()) as s:
        assert [spec.name[:4] for spec in s._entry.schema.tensors] == ["a10", "a999"]


SLIPS = """
import jax.numpy as jnp
import jdiloco

params, settings = {"w": jnp.ones(3)}, {"sync_every": 20, "fragments": 1}
for slip in (
    lambda: jdiloco.Session(params, jdiloco.DiLoCo(**settings), "runs/x", node_id=1),
    lambda: jdiloco.DiLoCo(**settings, partition="strided"),
    lambda: jdiloco.Session(params, jdiloco.DiLoCo(**settings), 5).__enter__(),
):
    try:
        slip()
    except jdiloco.errors.UsageError as error:
        print(error)
"""


@pytest.mark.multiprocess
def test_slips_of_the_hand_are_named():
    """In a process of its own: tests check types before the library can."""
    said = run_script(SLIPS)
    assert "Node id 1 cannot be part of an object's name" in said
    assert "`partition` must be `by_bytes()` or `strided(block_pattern)`, got 'strided'" in said
    assert "A mailbox is a folder, a URL or a `Store`, not 5" in said


def test_a_step_that_returns_no_samples_is_told_what_run_wants():
    with (
        session(vector(1.0), algorithm(), memory(), "n") as s,
        pytest.raises(UsageError, match=r"wants `\(params, samples\)`"),
    ):
        s.run(lambda params, item: params, [1])
