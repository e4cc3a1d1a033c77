"""What the programs of a round become on a GPU and on a TPU, read from what they are lowered to.

JAX lowers for platforms that are not here; compiling would need them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import jdiloco
import jdiloco.algo
from jdiloco import diloco_outer, spmd
from jdiloco.algo import alignment, merges, narrowing, outer, wire
from jdiloco.algo.sums import HERE, STACKED
from jdiloco.runtime.anchors import _subtracted

PLATFORMS = ("tpu", "cuda", "rocm")


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


TENSOR, STACK, WEIGHTS = shape(64, 32), shape(4, 64, 32), shape(4)
NARROW = shape(64, 32, dtype=jnp.bfloat16)
ROWS, FLAG, NUMBER = shape(4, dtype=jnp.bool_), shape(dtype=jnp.bool_), shape()
PAIR = ({"w": TENSOR, "e": NARROW},) * 2

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def small(dtype: str) -> Any:
    return jax.eval_shape(lambda x: wire.encode(x, dtype), jnp.ones((64, 32)))


KERNELS: dict[str, Call] = {
    "finite_rows": (merges.finite_rows, (STACK, ROWS), {}),
    "_shares": (merges._shares, (WEIGHTS, ROWS), {"where": HERE}),
    "merge_tensor": (
        merges.merge_tensor, (STACK, WEIGHTS), {"kernel": merges.rda_kernel, "sums": STACKED}
    ),
    "zeros": (narrowing.zeros, (NARROW,), {}),
    "_widen": (narrowing._widen, (NARROW,), {}),
    "_nesterov": (outer._nesterov, (TENSOR, TENSOR, NUMBER, NUMBER), {}),
    "_advance": (narrowing._advance, (TENSOR, NARROW, TENSOR), {}),
    "_let_out": (narrowing._let_out, (TENSOR, NARROW, TENSOR), {"dtype": "float8_e4m3fn"}),
    "_choose": (outer._choose, (FLAG, TENSOR, TENSOR), {}),
    "blended": (alignment.blended, PAIR, {"mixing": 0.5}),
    "carried": (alignment.carried, (*PAIR, PAIR[0]), {}),
    "is_finite": (alignment.is_finite, PAIR, {}),
    "copied": (alignment.copied, PAIR[:1], {}),
    "_encode8": (wire._encode8, (NARROW,), {}),
    "_encode4": (wire._encode4, (TENSOR,), {}),
    "_decode8": (wire._decode8, (small("float8_e4m3fn"),), {}),
    "_decode4": (wire._decode4, (small("float4_e2m1fn"),), {"shape": (64, 32)}),
}  # fmt: skip


def jitted(module: Any) -> set[str]:
    """Names of the compiled functions that a module makes."""
    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, jax.stages.Wrapped) and value.__module__ == module.__name__
    }


def test_every_kernel_of_the_arithmetic_is_looked_at_here():
    package = jdiloco.algo
    parts = [part.name for part in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    found = set().union(*(jitted(importlib.import_module(part)) for part in parts))
    assert found == KERNELS.keys()


def lowered(function: Any, *arguments: Any, platform: str, **static: Any) -> str:
    return function.trace(*arguments, **static).lower(lowering_platforms=(platform,)).as_text()


def check(text: str) -> None:
    """Nothing in it depends on a precision, and nothing has 64 bits that a TPU lacks."""
    for unwanted in ("dot_general", "stablehlo.dot", "convolution", "f64"):
        assert unwanted not in text, unwanted


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_no_kernel_holds_a_matrix_product_or_float64(name, platform):
    """bf16 passes of a TPU and tf32 of a GPU are for products: norms stay what fp32 gives."""
    function, arguments, static = KERNELS[name]
    check(lowered(function, *arguments, platform=platform, **static))


def whole_round(axis_name: str | None = None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The transformation and `optax.apply_updates`, and what they take."""
    tx = diloco_outer(axis_name=axis_name)
    params = {"w": TENSOR, "b": shape(64, dtype=jnp.bfloat16), "embed": NARROW}
    deltas = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), params)

    def round(deltas, state, params, weights):
        updates, state = tx.update(deltas, state, params, weights=weights)
        return optax.apply_updates(params, updates), state

    return round, (deltas, jax.eval_shape(tx.init, params), params, WEIGHTS)


def test_a_product_would_be_noticed():
    text = lowered(jax.jit(lambda x: jnp.sum(x @ x.T)), TENSOR, platform="tpu")
    with pytest.raises(AssertionError, match="dot_general"):
        check(text)


@pytest.mark.parametrize("precision", ["bfloat16", "tensorfloat32"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_precision_that_a_user_asks_for_reaches_a_round(platform, precision):
    function, arguments = whole_round()
    plain = lowered(jax.jit(function), *arguments, platform=platform)
    check(plain)
    with jax.default_matmul_precision(precision):
        assert lowered(jax.jit(function), *arguments, platform=platform) == plain


@pytest.mark.parametrize("platform", PLATFORMS)
def test_over_a_mesh_a_round_is_sums_and_all_reduces(platform):
    """Learners on one axis, tensors on the other; the devices need not be here."""
    mesh = AbstractMesh((4, 2), ("learner", "model"), axis_types=(AxisType.Auto,) * 2)
    function, arguments = whole_round("learner")
    learners, whole = PartitionSpec("learner"), PartitionSpec()
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(learners, whole, whole, learners), out_specs=whole,
        check_vma=False,
    )  # fmt: skip
    text = lowered(jax.jit(mapped), *arguments, platform=platform)
    check(text)
    assert "all_reduce" in text


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("place", ["device", "pinned_host"])
def test_the_subtraction_brings_pinned_anchors_in_by_itself(platform, dtype, place):
    """It copies what is in pinned memory, and only that."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=place)
    anchors = tuple(jax.device_put(jnp.ones((8, 4), t), sharding) for t in ("float32", "bfloat16"))
    leaves = tuple(jnp.ones((8, 4), t) for t in ("float32", "bfloat16"))
    text = lowered(_subtracted, anchors, leaves, platform=platform, dtype=dtype)
    check(text)
    assert text.count("@annotate_device_placement") == (2 if place == "pinned_host" else 0)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_round_of_learners_in_one_program_adds_no_product_to_the_users_step(platform):
    settings = jdiloco.DiLoCo(sync_every=2, fragments=1, outer_momentum=0.5)
    state = spmd.init(settings, {"w": jnp.ones(8)}, {"n": jnp.zeros(())}, learners=4)

    def step(params, rest, batch):
        return jax.tree.map(lambda x: x - 0.1 * batch, params), {"n": rest["n"] + 1}, None

    def run(state, batches):
        return spmd.round(settings, step, state, batches, samples=8)

    check(lowered(jax.jit(run), state, jnp.ones((4, 2)), platform=platform))
