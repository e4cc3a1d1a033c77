"""Commits in few bits: what goes out, what everybody arrives at, and that nothing is lost."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdiloco.algo.merges import Rda, WeightedMean
from jdiloco.algo.wire import BITS
from jdiloco.errors import FormatError, OutOfRange
from jdiloco.runtime import messages, payloads, updates
from jdiloco.runtime.close import FragmentCloser
from jdiloco.runtime.precision import Precision
from jdiloco.testing import oracle
from jdiloco.types import TensorSpec

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SPECS = (
    TensorSpec("empty", (0, 3), "float32"),
    TensorSpec("half", (70,), "float16"),
    TensorSpec("narrow", (5, 9), "bfloat16"),
    TensorSpec("one", (), "float32"),
    TensorSpec("values/one", (3,), "float32"),  # Named as if to collide.
    TensorSpec("wide", (4, 40), "float32"),
)
NARROW = tuple(dtype for dtype in BITS if dtype != "float32")


def closer_of(precision, *, specs=SPECS, lr=0.7, momentum=0.9, values=None, merge=None):
    closer = FragmentCloser(
        specs,
        merge or WeightedMean(),
        outer_lr=lr,
        outer_momentum=momentum,
        precision=precision,
    )
    closer.load(values or {s.name: np.zeros(s.shape, s.dtype) for s in specs}, None, None)
    return closer


def model(seed: int, specs=SPECS, scale=1.0):
    rng = np.random.default_rng(seed)
    return {s.name: np.asarray(rng.normal(size=s.shape) * scale).astype(s.dtype) for s in specs}


def deltas(seed: int, scale=1e-2, specs=SPECS):
    rng = np.random.default_rng(seed)
    return {s.name: np.asarray(rng.normal(size=s.shape) * scale, np.float32) for s in specs}


def closed_over(closer, delta, **how):
    """A round of one contribution, as copies."""
    closed = closer.close([closer.measure(delta)], [1.0], **how)
    parts = {"anchor": closed.anchor, "master": closed.master, "momentum": closed.momentum}
    copies = {part: {n: a.copy() for n, a in held.items()} for part, held in parts.items()}
    return copies, {name: array.copy() for name, array in closed.update.items()}


def received(update):
    """What comes out of the mailbox."""
    return messages.decode(b"".join(map(bytes, payloads.encode_update(update)))).tensors


def assert_same_bytes(found, wanted):
    assert list(found) == list(wanted)
    for name, array in found.items():
        assert (array.dtype, array.shape) == (wanted[name].dtype, wanted[name].shape), name
        assert array.tobytes() == wanted[name].tobytes(), name


@pytest.mark.parametrize("dtype", NARROW)
@few
@given(seed=st.integers(0, 10**6), power=st.integers(-30, 14))
def test_who_follows_by_updates_holds_the_bytes_that_are_committed(dtype, seed, power):
    """So does who reads the whole anchor: it is the one that the closer rebuilt."""
    precision = Precision(commit_dtype=dtype)
    held = model(seed)
    closer = closer_of(precision, values=held)
    for round in range(4):
        scale = 10.0 ** (power / 10)
        closed, update = closed_over(closer, deltas(seed + round, scale=scale / 20))
        held = updates.rebuilt(SPECS, precision, held, received(update))
        assert_same_bytes(held, closed["anchor"])


@pytest.mark.parametrize("dtype", NARROW)
def test_twenty_rounds_commit_what_the_oracle_does(dtype):
    """The wire's steps are the oracle's, element by element, but where fp32 decides a tie."""
    precision = Precision(commit_dtype=dtype)
    anchors = model(0)
    closer = closer_of(precision, values=anchors)
    masters = {name: oracle.widen(array) for name, array in anchors.items()}
    momenta = {name: np.zeros(array.shape) for name, array in anchors.items()}
    for round in range(20):
        closed, _ = closed_over(closer, deltas(round))
        for spec in SPECS:
            name = spec.name
            masters[name], momenta[name] = oracle.outer_step(
                masters[name], momenta[name], deltas(round)[name]
            )
            if precision.narrows(spec):
                sent = oracle.on_wire(closed["master"][name] - oracle.widen(anchors[name]), dtype)
                wanted = oracle.rebuilt(anchors[name], sent)
            else:
                wanted = closed["master"].get(name, closed["anchor"][name]).astype(spec.dtype)
            assert closed["anchor"][name].tobytes() == wanted.tobytes(), name
            anchors[name] = wanted
            found = closed["master"].get(name, wanted)
            np.testing.assert_allclose(found, masters[name], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", NARROW)
@few
@given(seed=st.integers(0, 10**6))
def test_updates_and_the_rest_in_the_master_add_up_to_the_exact_steps(dtype, seed):
    """What an update rounds away comes with later ones, until an ulp is left, in four bits that of
    the largest element: its own rounding keeps the scale up."""
    closer = closer_of(Precision(dtype), values=model(seed), lr=1.0, momentum=0.0)
    start = {name: oracle.widen(array) for name, array in model(seed).items()}
    total = {name: np.zeros(array.shape) for name, array in start.items()}
    for round in range(6):
        closed, _ = closed_over(closer, deltas(seed + round))
        total = {n: t - oracle.widen(deltas(seed + round)[n]) for n, t in total.items()}
        for name, master in closed["master"].items():
            np.testing.assert_allclose(master, start[name] + total[name], rtol=2e-6, atol=2e-6)
    nothing = {spec.name: np.zeros(spec.shape, np.float32) for spec in SPECS}
    for _ in range(12):
        closed, _ = closed_over(closer, nothing)
    for spec in SPECS:
        exact = closed["master"].get(spec.name, closed["anchor"][spec.name])
        gap = np.abs(oracle.widen(closed["anchor"][spec.name]) - oracle.widen(exact))
        ulp = np.abs(oracle.widen(exact)) * float(ml_dtypes.finfo(spec.dtype).eps)
        allowed = np.max(ulp, initial=0.0) if dtype == "float4_e2m1fn" else ulp
        assert np.all(gap <= allowed + 1e-6), spec.name


def test_a_tensor_without_more_bits_than_a_commit_goes_out_as_it_is():
    """bfloat16 commits narrow float32 tensors; what has 16 bits is rounded from its master."""
    closer = closer_of(Precision("bfloat16"), values=model(1))
    closed, update = closed_over(closer, deltas(1))
    for spec in SPECS:
        if spec.dtype == "float32":
            assert update[spec.name].dtype == ml_dtypes.bfloat16
        else:
            assert update[spec.name].tobytes() == closed["anchor"][spec.name].tobytes()
            wanted = closed["master"][spec.name].astype(spec.dtype)
            assert closed["anchor"][spec.name].tobytes() == wanted.tobytes()


def test_without_a_narrow_commit_there_is_no_update_and_no_further_master():
    found = []
    for dtype in (None, "float32"):
        closed, update = closed_over(closer_of(Precision(dtype), values=model(1)), deltas(1))
        assert update == {}
        assert sorted(closed["master"]) == ["half", "narrow"]
        found.append(closed)
    assert_same_bytes(found[0]["anchor"], found[1]["anchor"])


def test_a_final_round_commits_the_master_itself():
    """There may be no later round that the rest could go out with."""
    closer = closer_of(Precision("float4_e2m1fn"), values=model(2))
    closed_over(closer, deltas(2))
    closed, update = closed_over(closer, deltas(3), final=True)
    assert update == {}
    for spec in SPECS:
        wanted = closed["master"][spec.name].astype(spec.dtype)
        assert closed["anchor"][spec.name].tobytes() == wanted.tobytes()


def test_a_closer_that_loads_goes_on_to_the_bit():
    """Another node takes over from what the mailbox holds: same anchor, update, rest, momentum."""
    precision = Precision("float8_e4m3fn", "bfloat16")
    first, second = (closer_of(precision, values=model(3), merge=Rda()) for _ in range(2))
    closed, _ = closed_over(first, deltas(3))
    assert all(array.dtype == ml_dtypes.bfloat16 for array in closed["momentum"].values())
    outer = b"".join(map(bytes, payloads.encode_outer(closed["momentum"], closed["master"])))
    second.load(closed["anchor"], *payloads.decode_outer(outer, SPECS, precision))
    for seed in (4, 5):
        left, right = (closed_over(c, deltas(seed)) for c in (first, second))
        for part in left[0]:
            assert_same_bytes(left[0][part], right[0][part])
        assert_same_bytes(left[1], right[1])


def test_momentum_at_rest_is_the_computed_one_rounded_to_nearest():
    """And the step is taken with what is kept, so it is in no closer's memory alone."""
    closer = closer_of(Precision(momentum_dtype="bfloat16"), values=model(5))
    momenta = {spec.name: np.zeros(spec.shape, np.float32) for spec in SPECS}
    exact = {name: oracle.widen(array) for name, array in model(5).items()}
    for round in range(10):
        delta = deltas(round)
        closed, _ = closed_over(closer, delta)
        for name, before in momenta.items():
            kept = oracle.narrow(0.9 * oracle.widen(before) + oracle.widen(delta[name]), "bfloat16")
            assert closed["momentum"][name].tobytes() == kept.tobytes(), name
            momenta[name] = kept
            exact[name] = exact[name] - 0.7 * (delta[name] + 0.9 * oracle.widen(kept))
            found = closed["master"].get(name, closed["anchor"][name])
            np.testing.assert_allclose(found, exact[name], rtol=2e-6, atol=2e-6)


HUGE = (TensorSpec("w", (2, 32), "float32"),)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 1.5e38])
def test_the_tiny_and_the_huge_are_followed_too(dtype, size):
    """Beyond a format's reach an update is cut off, below it is zero; the rest stays owed."""
    precision = Precision(dtype)
    held = {"w": np.zeros((2, 32), np.float32)}
    closer = closer_of(precision, specs=HUGE, values=held, lr=1.0, momentum=0.0)
    delta = {"w": np.linspace(-size, size, 64).astype(np.float32).reshape(2, 32)}
    for _ in range(2):
        closed, update = closed_over(closer, delta)
        held = updates.rebuilt(HUGE, precision, held, received(update))
        assert_same_bytes(held, closed["anchor"])
        assert np.isfinite(held["w"]).all()


def test_a_master_beyond_its_parameters_type_is_noticed_though_its_anchor_is_cut():
    specs = (TensorSpec("w", (4,), "float16"),)
    closer = closer_of(Precision("float8_e4m3fn"), specs=specs, lr=1.0, momentum=0.0)
    with pytest.raises(OutOfRange, match="`w` left the range of float16"):
        closed_over(closer, {"w": np.full(4, 7e4, np.float32)})


def test_a_sum_beyond_the_type_stays_at_its_end():
    """An update rounds up where the master has just enough room."""
    specs = (TensorSpec("w", (2,), "float16"),)
    precision = Precision("float8_e4m3fn")
    held = {"w": np.array([0, 60000], np.float16)}
    sent, moved = updates.made(specs, precision, held, {"w": np.array([0.0, 65504], np.float32)})
    np.testing.assert_array_equal(moved["w"], np.array([0, 65504], np.float16))
    assert_same_bytes(updates.rebuilt(specs, precision, held, received(sent)), moved)


@pytest.mark.parametrize("dtype", NARROW)
def test_an_update_of_another_run_is_refused_by_name(dtype):
    precision = Precision(dtype)
    closer = closer_of(precision, values=model(6))
    _, update = closed_over(closer, deltas(6))
    with pytest.raises(FormatError, match="absent"):
        updates.rebuilt(SPECS[:-1], precision, model(6), received(update))
    update.pop(next(name for name in update if name.endswith("wide")))
    with pytest.raises(FormatError, match="wide` is absent"):
        updates.rebuilt(SPECS, precision, model(6), received(update))


@pytest.mark.parametrize(
    ("dtype", "bits"), [("bfloat16", 16), ("float8_e4m3fn", 8), ("float4_e2m1fn", 4.25)]
)
def test_an_update_of_a_large_tensor_takes_so_many_bits_an_element(dtype, bits):
    specs = (TensorSpec("w", (200, 320), "float32"),)
    _, update = closed_over(closer_of(Precision(dtype), specs=specs), deltas(1, specs=specs))
    size = sum(array.nbytes for array in update.values())
    assert 8 * size / specs[0].size == pytest.approx(bits, rel=1e-3)
