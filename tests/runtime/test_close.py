"""Closing a round: against plain float64 arithmetic, and what must not show in its bytes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdiloco.algo.merges import (
    Merge,
    Rda,
    WeightedMean,
    merge_tree,
    per_row,
    weighted_mean_kernel,
)
from jdiloco.errors import OutOfRange, UsageError
from jdiloco.runtime.close import FragmentCloser
from jdiloco.runtime.close.layout import BLOCK_ROWS_LARGE, BLOCK_ROWS_SMALL, ROW, lay_out
from jdiloco.testing import oracle
from jdiloco.types import TensorSpec

BF16 = np.dtype(ml_dtypes.bfloat16)
RDA = Rda()


def closer_of(
    shapes, merge: Merge = RDA, *, dtype: str | dict[str, str] = "float32", lr=0.7, momentum=0.9
):
    """A closer whose anchor is zero, with a dtype for all or one per name."""
    dtypes = dtype if isinstance(dtype, dict) else dict.fromkeys(shapes, dtype)
    specs = [TensorSpec(name, shape, dtypes[name]) for name, shape in shapes.items()]
    closer = FragmentCloser(specs, merge, outer_lr=lr, outer_momentum=momentum)
    closer.load({s.name: np.zeros(s.shape, s.dtype) for s in specs}, None, None)
    return closer


def merged(deltas, weights, merge: Merge = RDA):
    """The merged delta of one tensor, seen through a round that subtracts it from zero."""
    deltas = [np.asarray(d) for d in deltas]
    closer = closer_of({"w": deltas[0].shape}, merge, lr=1.0, momentum=0.0)
    closed = closer.close([closer.measure({"w": d}) for d in deltas], weights)
    return -closed.anchor["w"]


def error(found, wanted) -> float:
    """Relative, per tensor; 0 where both are zero."""
    distance = oracle.norm(oracle.widen(found) - wanted)
    return 0.0 if distance == 0 else distance / oracle.norm(wanted)


def normal(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def snapshot(closed) -> dict:
    """A copy of everything that a round left."""
    parts = {"anchor": closed.anchor, "momentum": closed.momentum, "master": closed.master}
    return {
        (part, name): value.tobytes()
        for part, values in parts.items()
        for name, value in values.items()
    }


SMALL_INPUTS = [  # deltas, weights, weighted mean, RDA
    (((1, 0), (3, 0)), (1, 1), (2, 0), (2, 0)),
    (((1, 0), (0, 1)), (4, 1), (0.8, 0.2), (4 / math.sqrt(17), 1 / math.sqrt(17))),
    (((3, 0), (0, 1)), (1, 1), (1.5, 0.5), (math.sqrt(2), math.sqrt(2))),
    (((1, 0), (-1, 0)), (2, 1), (1 / 3, 0), (1, 0)),
    (((1, 0), (-1, 0)), (1.001, 1), (0.001 / 2.001, 0), (1, 0)),
    (((1, 0), (-1, 0)), (1, 1), (0, 0), (0, 0)),
    (((0, 0), (1, 0)), (1, 1), (0.5, 0), (0.5, 0)),
]


@pytest.mark.parametrize(("deltas", "weights", "mean", "rda"), SMALL_INPUTS)
def test_small_inputs_merge_to_the_published_numbers(deltas, weights, mean, rda):
    deltas = [np.array(d, np.float32) for d in deltas]
    weights = [float(w) for w in weights]
    np.testing.assert_allclose(merged(deltas, weights, WeightedMean()), mean, rtol=1e-6)
    np.testing.assert_allclose(merged(deltas, weights), rda, rtol=1e-6)


@pytest.mark.parametrize(("count", "mean_length"), [(2, 0.705), (4, 0.498), (8, 0.354)])
def test_independent_directions_keep_their_length_under_rda_alone(count, mean_length):
    deltas = [normal(seed, 100_000) for seed in range(count)]
    deltas = [d / np.float32(oracle.norm(d)) for d in deltas]
    weights = [1.0] * count
    assert oracle.norm(merged(deltas, weights, WeightedMean())) == pytest.approx(
        mean_length, abs=5e-3
    )
    assert oracle.norm(merged(deltas, weights)) == pytest.approx(1.0, rel=1e-6)


def test_embeddings_are_merged_directly_and_the_rest_by_rda():
    shapes = {"mlp/weight": (2,), "tok_embed/weight": (2,)}
    closer = closer_of(shapes, lr=1.0, momentum=0.0)
    closer.load({name: np.ones(2, np.float32) for name in shapes}, None, None)
    deltas = [dict.fromkeys(shapes, np.array(d, np.float32)) for d in ((1, 0), (0, 1))]
    closed = closer.close([closer.measure(d) for d in deltas], [4.0, 1.0])
    np.testing.assert_allclose(closed.anchor["tok_embed/weight"], (0.2, 0.8), rtol=1e-6)
    np.testing.assert_allclose(closed.anchor["mlp/weight"], (0.030, 0.758), atol=1e-3)


@pytest.mark.parametrize("size", [1, 3_000, 700_000])
@pytest.mark.parametrize("merge", [WeightedMean(), Rda("w")])
def test_one_contribution_merged_directly_comes_back_bit_for_bit(merge, size):
    delta = normal(0, size)
    delta[::7] = -0.0
    negated = merged([delta], [3.0], merge)
    np.testing.assert_array_equal(negated, delta)
    assert merged([delta], [3.0], merge).dtype == np.float32


def test_one_contribution_under_rda_comes_back_up_to_rounding():
    delta = normal(0, 50_000)
    assert error(merged([delta], [3.0]), delta) < 1e-7


@pytest.mark.parametrize("size", [2, 100, 100_000, 600_000])
def test_directions_that_cancel_give_exact_zero(size):
    """Weights, signs and orders under which a fused multiply-add leaves rounding."""
    d, e = normal(1, size), normal(2, size)
    for deltas, weights in [
        ([d, -d], [1.0, 1.0]),
        ([d, -2 * d], [1.0, 1.0]),
        ([d, e, -d, -e], [0.1] * 4),
        ([d, d, -d], [1.0, 2.0, 3.0]),
        ([d, -d] * 10, [0.7] * 20),
    ]:
        assert not np.any(merged(deltas, weights))


NEARLY = [1e-1, 1e-2, 1e-3, 1e-4, 1e-5]


@pytest.mark.parametrize("noise", NEARLY)
def test_nearly_cancelling_directions_stay_exact_down_to_the_cut_off(noise):
    d = normal(1, 100_000)
    e = (-d - np.float32(noise) * normal(2, d.size)).astype(np.float32)
    for weights in ([1.0, 1.0], [1.001, 1.0]):
        assert error(merged([d, e], weights), oracle.rda([d, e], weights)) < 1e-6


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e-10, 1e10, 1e19, 1e34])
def test_the_whole_range_of_fp32_is_merged(scale):
    """Squares in fp32 overflow at a norm of 1.8e19 and vanish below 1e-19."""
    deltas = [np.float32(scale) * normal(seed, 3_000) for seed in range(3)]
    weights = [1.0, 2.0, 3.0]
    assert error(merged(deltas, weights), oracle.rda(deltas, weights)) < 1e-6
    mean = merged(deltas, weights, WeightedMean())
    assert error(mean, oracle.weighted_mean(deltas, weights)) < 1e-6


@st.composite
def rounds(draw):
    """A fragment of a few tensors, and contributions that agree, differ or nearly cancel."""
    shapes = draw(
        st.lists(
            st.sampled_from([(), (0, 3), (1,), (5,), (1024,), (31, 33), (2, 3, 700), (40_000,)]),
            min_size=1,
            max_size=4,
        )
    )
    names = [f"{'embed' if draw(st.booleans()) else 'w'}/{i}" for i in range(len(shapes))]
    dtypes = draw(
        st.lists(
            st.sampled_from(["float32", "bfloat16", "float16"]),
            min_size=len(shapes),
            max_size=len(shapes),
        )
    )
    count = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 17]))
    weights = draw(
        st.lists(st.floats(1e-3, 1e12).map(float) | st.just(1.0), min_size=count, max_size=count)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["random", "zeros", "cancelling"]))
    scales = 10.0 ** rng.uniform(-3, 2, count)
    deltas = [{} for _ in range(count)]
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        base = rng.standard_normal(shape)
        for index, scale in enumerate(scales):
            if kind == "random":
                value = rng.standard_normal(shape) * scale
            elif kind == "zeros":
                value = rng.standard_normal(shape) * scale * (index % 2)
            else:
                value = (-1) ** index * base + 0.01 * rng.standard_normal(shape)
            deltas[index][name] = np.asarray(value).astype(dtype)
    return dict(zip(names, shapes, strict=True)), deltas, weights


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.data_too_large])
@given(case=rounds())
def test_any_round_agrees_with_float64(case):
    shapes, deltas, weights = case
    closer = closer_of(shapes)
    anchor = {n: np.asarray(normal(7, math.prod(s)).reshape(s)) for n, s in shapes.items()}
    velocity = {n: np.asarray(normal(8, math.prod(s)).reshape(s)) for n, s in shapes.items()}
    closer.load(anchor, velocity, None)
    closed = closer.close([closer.measure(d) for d in deltas], weights)
    for name in shapes:
        merge = oracle.weighted_mean if "embed" in name else oracle.rda
        delta = merge([d[name] for d in deltas], weights)
        if abs(oracle.mean_direction([d[name] for d in deltas], weights) - 1e-6) < 1e-8:
            continue  # On the cut-off itself, either side is right.
        wanted, wanted_velocity = oracle.outer_step(anchor[name], velocity[name], delta)
        np.testing.assert_array_equal(closed.momentum[name].shape, shapes[name])
        assert error(closed.momentum[name], wanted_velocity) < 1e-6
        assert error(closed.anchor[name], wanted) < 1e-6
    assert -1.0 <= closed.mean_cosine <= 1.0


@pytest.mark.parametrize("count", [1, 3, 8, 11, 64])
def test_deltas_of_any_dtype_and_address_close_alike(count):
    """Narrow deltas are widened exactly, so their fp32 twins at odd addresses give the same."""
    shapes = {"a": (70_000,), "b": (3, 5), "c": (500, 700)}
    dtypes = {"a": "bfloat16", "b": "float16", "c": "float32"}
    narrow, wide = [], []
    for seed in range(count):
        values = {
            n: normal(seed, math.prod(s)).reshape(s).astype(dtypes[n]) for n, s in shapes.items()
        }
        narrow.append(values)
        wide.append({n: _elsewhere(v.astype(np.float32)) for n, v in values.items()})
    weights = [1.0 + k for k in range(count)]
    found = []
    for deltas in (narrow, wide):
        closer = closer_of(shapes)
        found.append(closer.close([closer.measure(d) for d in deltas], weights))
    for name in shapes:
        np.testing.assert_allclose(
            found[0].anchor[name], found[1].anchor[name], rtol=1e-6, atol=1e-12
        )
        wanted = oracle.rda([d[name] for d in narrow], weights)
        assert error(-found[0].anchor[name] / np.float32(1.33), wanted) < 1e-6


def _elsewhere(value: np.ndarray) -> np.ndarray:
    """The same values, read-only, at an address that fits no alignment."""
    return np.frombuffer(b"x" + value.tobytes(), value.dtype, offset=1).reshape(value.shape)


SHAPES = {"embed": (400, 60), "w": (300, 301), "bias": (7,), "none": (0,), "scale": ()}


def contribution(seed: int) -> dict[str, np.ndarray]:
    return {n: normal(seed, math.prod(s)).reshape(s) for n, s in SHAPES.items()}


def test_equal_inputs_give_equal_bytes_in_any_closer_and_at_any_address():
    deltas = [contribution(seed) for seed in range(5)]
    moved = [{n: _elsewhere(v) for n, v in d.items()} for d in deltas]
    weights = [1.0, 2.0, 3.0, 4.0, 5.0]
    used = closer_of(SHAPES)
    used.close([used.measure(contribution(seed)) for seed in range(9)], [1.0] * 9)
    found = []
    for closer, given_deltas in itertools.product((used, closer_of(SHAPES)), (deltas, moved)):
        closer.load({n: np.ones(s, np.float32) for n, s in SHAPES.items()}, None, None)
        found.append(snapshot(closer.close([closer.measure(d) for d in given_deltas], weights)))
    assert all(one == found[0] for one in found)


def test_arguments_are_never_changed():
    deltas = [contribution(seed) for seed in range(2)]
    anchor, momentum = contribution(3), contribution(4)
    arguments = [*deltas, anchor, momentum]
    before = [{n: v.tobytes() for n, v in one.items()} for one in arguments]
    closer = closer_of(SHAPES)
    closer.load(anchor, momentum, None)
    closer.close([closer.measure(d) for d in deltas], [1.0, 2.0])
    assert [{n: v.tobytes() for n, v in one.items()} for one in arguments] == before


def test_what_a_round_leaves_cannot_be_written_to():
    closer = closer_of(SHAPES)
    closed = closer.close([closer.measure(contribution(0))], [1.0])
    with pytest.raises(ValueError, match="read-only"):
        closed.anchor["w"][0] = 1.0


def test_a_view_that_is_still_held_outlives_the_next_round_and_load():
    """It costs a copy, and neither the view nor the round is wrong."""
    holding, dropping = closer_of(SHAPES), closer_of(SHAPES)
    closed = holding.close([holding.measure(contribution(0))], [1.0])
    before = snapshot(closed)
    dropping.close([dropping.measure(contribution(0))], [1.0])
    second = [c.close([c.measure(contribution(1))], [1.0]) for c in (holding, dropping)]
    assert snapshot(second[0]) == snapshot(second[1])
    holding.load({n: np.ones(s, np.float32) for n, s in SHAPES.items()}, None, None)
    assert snapshot(closed) == before


def test_a_final_round_subtracts_the_delta_and_leaves_the_momentum():
    closer = closer_of(SHAPES, WeightedMean())
    anchor, momentum, delta = contribution(1), contribution(2), contribution(3)
    closer.load(anchor, momentum, None)
    closed = closer.close([closer.measure(delta)], [5.0], final=True)
    for name in SHAPES:
        np.testing.assert_array_equal(closed.anchor[name], anchor[name] - delta[name])
        np.testing.assert_array_equal(closed.momentum[name], momentum[name])


def test_momentum_is_carried_by_load():
    """Two rounds in one closer, or the second in another that loads what the first left."""
    first, second = closer_of(SHAPES), closer_of(SHAPES)
    closed = first.close([first.measure(contribution(1))], [1.0])
    second.load(closed.anchor, closed.momentum, closed.master)
    left = [c.close([c.measure(contribution(2))], [1.0]) for c in (first, second)]
    assert snapshot(left[0]) == snapshot(left[1])
    delta = oracle.rda([contribution(1)["w"]], [1])
    anchor, velocity = oracle.outer_step(np.zeros(delta.shape), np.zeros(delta.shape), delta)
    delta = oracle.rda([contribution(2)["w"]], [1])
    anchor, velocity = oracle.outer_step(anchor, velocity, delta)
    assert error(left[0].anchor["w"], anchor) < 1e-6
    assert error(left[0].momentum["w"], velocity) < 1e-6


def test_load_without_momentum_starts_from_rest():
    closer = closer_of(SHAPES)
    fresh = snapshot(closer.close([closer.measure(contribution(1))], [1.0]))
    closer.load({n: np.zeros(s, np.float32) for n, s in SHAPES.items()}, None, None)
    assert snapshot(closer.close([closer.measure(contribution(1))], [1.0])) == fresh


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_below_half_an_ulp_add_up_in_the_master(dtype):
    """A hundred steps of 0.001 from 1.0: a bf16 anchor alone would still be 1.0."""
    closer = closer_of({"w": (4,)}, WeightedMean(), dtype=dtype, lr=1.0, momentum=0.0)
    closer.load({"w": np.ones(4, dtype)}, None, None)
    delta = {"w": np.full(4, -0.001, np.float32)}
    for _ in range(100):
        closed = closer.close([closer.measure(delta)], [1.0])
    np.testing.assert_allclose(closed.master["w"], 1.1, atol=1e-5)
    assert closed.anchor["w"].dtype == np.dtype(dtype)
    if dtype == "bfloat16":
        np.testing.assert_array_equal(closed.anchor["w"].astype(np.float32), 1.1015625)


def test_the_master_is_carried_by_load_and_missing_only_for_fp32():
    shapes, dtypes = {"h": (3,), "w": (3,)}, {"h": "bfloat16", "w": "float32"}
    closer = closer_of(shapes, WeightedMean(), dtype=dtypes, lr=1.0, momentum=0.0)
    values = {"h": np.ones(3, BF16), "w": np.ones(3, np.float32)}
    closer.load(values, None, {"h": np.full(3, 1.0012, np.float32)})
    zero = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
    closed = closer.close([closer.measure(zero)], [1.0])
    assert list(closed.master) == ["h"]
    np.testing.assert_array_equal(closed.master["h"], np.float32(1.0012))
    np.testing.assert_array_equal(closed.anchor["h"], values["h"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_committed_values_are_the_master_rounded_to_nearest_even(dtype):
    size = 100_000
    values = normal(0, size) * 10.0 ** np.random.default_rng(1).uniform(-8, 4, size)
    delta = -np.clip(values, -60_000, 60_000).astype(np.float32)
    closer = closer_of({"w": (size,)}, WeightedMean(), dtype=dtype, lr=1.0, momentum=0.0)
    closed = closer.close([closer.measure({"w": delta})], [1.0])
    np.testing.assert_array_equal(
        closed.anchor["w"].view(np.uint16), closed.master["w"].astype(dtype).view(np.uint16)
    )


def test_an_fp16_parameter_out_of_range_is_an_error_and_needs_a_load():
    closer = closer_of({"w": (3,)}, WeightedMean(), dtype="float16", lr=1.0, momentum=0.0)
    large = closer.measure({"w": np.full(3, 7e4, np.float32)})
    with pytest.raises(UsageError, match="`w` left the range of float16"):
        closer.close([large], [1.0])
    with pytest.raises(AssertionError, match="load"):
        closer.close([large], [1.0])
    closer.load({"w": np.zeros(3, np.float16)}, None, None)
    closer.close([closer.measure({"w": np.ones(3, np.float32)})], [1.0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_element_that_is_not_finite_is_seen(value, dtype):
    closer = closer_of({"a": (5000,), "b": (3,)})
    delta = {"a": np.ones(5000, dtype), "b": np.ones(3, dtype)}
    assert closer.measure(delta).finite
    delta["a"][4097] = value
    assert not closer.measure(delta).finite


def test_norms_are_those_of_whole_tensors_in_float64():
    delta = contribution(0)
    measured = closer_of(SHAPES).measure(delta)
    np.testing.assert_allclose(
        measured.norms, [oracle.norm(delta[name]) for name in SHAPES], rtol=1e-13
    )
    assert measured.norms.dtype == np.float64


def test_mean_cosine_is_one_for_agreement_and_minus_one_for_two_opposites():
    d = normal(0, 1000)
    cosines = []
    for deltas in ([d], [d, 3 * d], [d, -d], [d, 0 * d], [0 * d, 0 * d]):
        closer = closer_of({"w": d.shape})
        measured = [closer.measure({"w": x}) for x in deltas]
        cosines.append(closer.close(measured, [1.0] * len(deltas)).mean_cosine)
    np.testing.assert_allclose(cosines, [1, 1, -1, 1, 1], atol=1e-7)


@pytest.mark.parametrize("name", ["w", "embed"])
def test_mean_cosine_is_the_mean_over_pairs(name):
    deltas = [normal(seed, 50) for seed in range(3)]
    deltas = [d / np.float32(oracle.norm(d)) for d in deltas]
    closer = closer_of({name: (50,)})
    closed = closer.close([closer.measure({name: d}) for d in deltas], [1.0] * 3)
    pairs = [float(np.dot(a, b)) for a, b in itertools.combinations(deltas, 2)]
    assert closed.mean_cosine == pytest.approx(np.mean(pairs), abs=1e-6)


def test_any_number_of_contributions_is_compiled_for_at_most_eight_times(caplog):
    """B107: forty rounds with one to eight contributions; fragments of one size share programs."""
    rng = np.random.default_rng(0)
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for shapes in ({"w": (900,)}, {"a": (50, 50), "b": (7,), "c": (3000,)}, {"embed": ()}):
            closer = closer_of(shapes)
            contributions = [
                closer.measure({n: normal(k, math.prod(s)).reshape(s) for n, s in shapes.items()})
                for k in range(8)
            ]
            for count in rng.permutation(np.tile(np.arange(1, 9), 5)):
                closer.close(contributions[:count], [1.0] * int(count))
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.message]
    assert 0 < len(compiled) <= 8, compiled


def test_the_users_configuration_is_left_alone_and_does_not_matter():
    before = jax.config.values.copy()
    closer = closer_of(SHAPES)
    plain = snapshot(closer.close([closer.measure(contribution(0))], [1.0]))
    assert jax.config.values == before
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.transfer_guard("disallow"),
        jax.debug_nans(True),
        jax.debug_infs(True),
        jax.enable_x64(True),
    ):
        other = closer_of(SHAPES)
        assert snapshot(other.close([other.measure(contribution(0))], [1.0])) == plain
        nan = {**contribution(0), "scale": np.array(np.nan, np.float32)}
        assert not other.measure(nan).finite


def test_a_message_is_read_where_it_is_whatever_tensors_it_holds():
    """Only the last block, which reaches beyond the message, is gathered."""
    sizes = [700_000, 10, 1_500, 500_000, 1, 900_000]
    specs = [TensorSpec(f"w/{i}", (size,), "float32") for i, size in enumerate(sizes)]
    message = b" " * 1240 + normal(0, sum(sizes)).tobytes()
    starts = np.cumsum([0, *sizes]) * 4 + 1240
    delta = {
        spec.name: np.frombuffer(memoryview(message)[start:], np.float32, spec.size)
        for spec, start in zip(specs, starts[:-1], strict=True)
    }
    closer = FragmentCloser(specs, RDA, outer_lr=0.7, outer_momentum=0.9)
    measured = closer.measure(delta)
    assert [shown is not None for shown in measured.windows] == [True, True, False]
    np.testing.assert_allclose(
        measured.norms, [oracle.norm(delta[spec.name]) for spec in specs], rtol=1e-13
    )
    copied = closer.measure({name: value.copy() for name, value in delta.items()})
    np.testing.assert_array_equal(copied.norms, measured.norms)


def test_tensors_of_one_dtype_lie_side_by_side_and_rows_hold_one_tensor():
    specs = [
        TensorSpec("a", (1500,), "float32"),
        TensorSpec("b", (10,), "bfloat16"),
        TensorSpec("c", (BLOCK_ROWS_SMALL * ROW,), "float32"),
        TensorSpec("d", (), "float16"),
    ]
    layout = lay_out(specs)
    order = sorted(range(4), key=lambda index: layout.starts[index])
    assert [specs[index].name for index in order] == ["a", "c", "b", "d"]
    assert all(start % ROW == 0 for start in layout.starts)
    assert len(layout.blocks) == 2
    covered = np.zeros(5, int)
    for block in layout.blocks:
        np.add.at(covered, block.tensor, block.valid)
    assert covered.tolist() == [*(spec.size for spec in specs), 0]


def test_a_state_has_one_of_few_sizes_and_little_to_spare():
    sizes = set()
    for blocks in range(1, 65):
        layout = lay_out([TensorSpec("w", (blocks * BLOCK_ROWS_LARGE * ROW,), "float32")])
        assert len(layout.blocks) == blocks
        assert blocks <= layout.rows / layout.block_rows <= 1.25 * blocks
        sizes.add(layout.rows)
    assert len(sizes) <= 20


def test_wrong_calls_say_what_to_change():
    with pytest.raises(UsageError, match="`w` is float64"):
        lay_out([TensorSpec("w", (2,), "float64")])
    with pytest.raises(UsageError, match=r"`w` has shape \(3,\), not \(2,\)"):
        closer_of({"w": (2,)}).measure({"w": np.zeros(3, np.float32)})


def signs(deltas, weights, sums):
    """A merge of a user's own: each learner votes with its weight on every element's sign."""
    return sums.learners(per_row(weights, deltas) * jnp.sign(deltas))


@dataclasses.dataclass(frozen=True)
class SignMean:
    direct_pattern: str = "embed"

    def kernel(self, *names):
        direct = any(self.direct_pattern in name for name in names)
        return weighted_mean_kernel if direct else signs


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_merge_of_ones_own_closes_rounds_as_it_merges_stacks(count):
    """The same door: what the optax transformation does with it, and our kernels beside it."""
    shapes = {"w": (2000,), "embed": (3, 5)}
    closer = closer_of(shapes, SignMean(), lr=1.0, momentum=0.0)
    deltas = [
        {name: normal(seed, math.prod(shape)).reshape(shape) for name, shape in shapes.items()}
        for seed in range(count)
    ]
    weights = [1.0 + seed for seed in range(count)]
    closed = closer.close([closer.measure(delta) for delta in deltas], weights)
    stacked = {name: np.stack([delta[name] for delta in deltas]) for name in shapes}
    wanted, _ = merge_tree(SignMean(), stacked, jnp.asarray(weights, jnp.float32))
    for name in shapes:
        np.testing.assert_allclose(-closed.anchor[name], wanted[name], rtol=1e-6, atol=1e-6)


def test_a_shared_tensor_is_merged_by_all_its_names():
    """Output weights tied to an embedding are an embedding, under whichever name comes first."""
    spec = TensorSpec("ahead/kernel", (2,), "float32", aliases=("tok_embed/kernel",))
    closer = FragmentCloser([spec], RDA, outer_lr=1.0, outer_momentum=0.0)
    closer.load({spec.name: np.zeros(2, np.float32)}, None, None)
    deltas = [np.array([1, 0], np.float32), np.array([0, 1], np.float32)]
    closed = closer.close([closer.measure({spec.name: d}) for d in deltas], [4.0, 1.0])
    np.testing.assert_allclose(-closed.anchor[spec.name], [0.8, 0.2], rtol=1e-6)


def test_the_state_is_what_was_loaded_before_any_round():
    """A node that has just taken over saves what it read, bfloat16 values and all."""
    closer = closer_of({"a": (3,), "b": (2,)}, dtype={"a": "bfloat16", "b": "float32"})
    values = {"a": np.array([1, -2, 3], BF16), "b": np.array([4, 5], np.float32)}
    momentum = {"a": np.full(3, 6, np.float32), "b": np.full(2, 7, np.float32)}
    master = {"a": np.array([1.001, -2, 3], np.float32)}
    closer.load(values, momentum, master)
    held = closer.state()
    loaded = {"anchor": values, "momentum": momentum, "master": master}
    assert snapshot(held) == {
        (part, name): array.tobytes()
        for part, arrays in loaded.items()
        for name, array in arrays.items()
    }


def test_the_state_is_what_the_last_round_left():
    closer = closer_of({"w": (5,)}, dtype="bfloat16")
    closed = closer.close([closer.measure({"w": np.arange(5, dtype=np.float32)})], [1.0])
    assert snapshot(closer.state()) == snapshot(closed)


@pytest.mark.parametrize(("dtype", "far"), [("float32", 3e38), ("bfloat16", 3e38)])
def test_a_round_that_would_commit_infinity_is_refused(dtype, far):
    """Finite deltas of one node, and momentum on top of them, reach beyond the type."""
    closer = closer_of({"w": (3,), "v": (2,)}, dtype=dtype)
    wild = {"w": np.full(3, far, np.float32), "v": np.zeros(2, np.float32)}
    measured = closer.measure(wild)
    assert measured.finite
    with pytest.raises(OutOfRange, match=f"`w` left the range of {dtype}"):
        closer.close([measured], [1.0])


def test_values_near_the_end_of_the_range_are_looked_at_and_pass():
    """The bound that spares looking is loose; the values decide."""
    closer = closer_of({"w": (4,)}, WeightedMean(), dtype="float16", lr=1.0, momentum=0.0)
    closer.load({"w": np.full(4, 60000, np.float16)}, None, None)
    for _ in range(4):
        for sign in (1, -1):
            delta = {"w": np.full(4, sign * 3000, np.float16)}
            closed = closer.close([closer.measure(delta)], [1.0])
    np.testing.assert_array_equal(closed.anchor["w"], np.full(4, 60000, np.float16))
