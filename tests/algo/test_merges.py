"""The two merges on small inputs, padding, and the door for a merge of one's own."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdiloco.algo import Rda, WeightedMean, contribution_weight, is_direct, merges, rda
from jdiloco.algo import weighted_mean as weighted_mean_merge
from jdiloco.algo.merges import merge_tree
from jdiloco.errors import UsageError
from jdiloco.testing import oracle
from tests.algo.support import distance, fingerprint, length, merged, random_rows, stacked

MEAN = weighted_mean_merge()

SMALL = [
    ([(1, 0), (3, 0)], (1, 1), (2, 0), (2, 0)),
    ([(1, 0), (0, 1)], (4, 1), (0.8, 0.2), (0.970143, 0.242536)),
    ([(3, 0), (0, 1)], (1, 1), (1.5, 0.5), (math.sqrt(2), math.sqrt(2))),
    ([(1, 0), (-1, 0)], (2, 1), (1 / 3, 0), (1, 0)),
    ([(1, 0), (-1, 0)], (1.001, 1), (0.0005, 0), (1, 0)),
    ([(1, 0), (-1, 0)], (1, 1), (0, 0), (0, 0)),
    ([(0, 0), (1, 0)], (1, 1), (0.5, 0), (0.5, 0)),
    # Reported faults: zero vectors, opposite vectors, lengths that differ.
    ([(3, 0), (0, 4)], (1, 1), (1.5, 2.0), (2.474874, 2.474874)),
    ([(3, 0), (0, 4)], (1, 3), (0.75, 3.0), (1.185854, 3.557562)),
    ([(1, 0), (-3, 0)], (1, 2), (-5 / 3, 0), (-7 / 3, 0)),
    ([(2, 0), (0, 0)], (1, 1), (1, 0), (1, 0)),
    ([(0, 0), (0, 0)], (1, 1), (0, 0), (0, 0)),
]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("rows", "weights", "mean", "radial"), SMALL)
def test_small_inputs_come_out_as_in_the_tables(rows, weights, mean, radial, jit):
    for merge, want, plain in [
        (MEAN, mean, oracle.weighted_mean(rows, weights)),
        (rda(), radial, oracle.rda(rows, weights)),
    ]:
        np.testing.assert_allclose(merged(merge, rows, weights, jit=jit), want, atol=1e-6)
        np.testing.assert_allclose(plain, want, atol=1e-6)


def test_opposite_directions_of_equal_weight_leave_no_direction_whatever_their_lengths():
    """The formula of RDA: (1, 0) and (-3, 0) have opposite unit vectors, which cancel."""
    np.testing.assert_array_equal(merged(rda(), [(1, 0), (-3, 0)], (1, 1)), (0, 0))


@pytest.mark.parametrize(("merge", "want"), [(MEAN, 0.825), (rda(), 1.0)])
def test_disagreement_shortens_the_mean_and_not_rda(merge, want):
    assert length(merged(merge, [(1, 0), (0, 1)], (4, 1))) == pytest.approx(want, abs=5e-4)


def test_the_longer_delta_pulls_the_mean_and_not_rda():
    angles = [
        math.degrees(math.atan2(*merged(merge, [(3, 0), (0, 1)], (1, 1))[::-1]))
        for merge in (MEAN, rda())
    ]
    assert angles == pytest.approx([18.4, 45.0], abs=0.05)


def test_forty_degrees_either_side_leave_the_mean_their_cosine_and_rda_length_one():
    a = math.radians(40)
    rows = [(math.cos(a), math.sin(a)), (math.cos(a), -math.sin(a))]
    np.testing.assert_allclose(merged(MEAN, rows, (1, 1)), (0.766, 0), atol=5e-4)
    np.testing.assert_allclose(merged(rda(), rows, (1, 1)), (1, 0), atol=1e-6)


@pytest.mark.parametrize(("count", "shrunk"), [(2, 0.705), (4, 0.498), (8, 0.354)])
def test_independent_directions_shrink_the_mean_by_the_root_of_their_number(count, shrunk):
    rows = random_rows(count, count, (100_000,))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    ones = np.ones(count)
    assert length(merged(MEAN, rows, ones)) == pytest.approx(shrunk, abs=0.006)
    assert length(merged(rda(), rows, ones)) == pytest.approx(1, abs=1e-6)


def test_eight_orthogonal_deltas_of_length_five_keep_length_five():
    rows = 5 * np.eye(8)
    assert length(merged(rda(), rows, np.ones(8))) == pytest.approx(5, abs=1e-5)
    assert length(merged(MEAN, rows, np.ones(8))) == pytest.approx(1.7678, abs=1e-4)


@pytest.mark.parametrize("merge", [MEAN, rda()])
def test_the_order_of_contributions_does_not_matter(merge):
    rows, weights = random_rows(0, 5), np.array([1.0, 5, 2, 7, 3])
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        again = merged(merge, rows[order], weights[order])
        assert distance(again, merged(merge, rows, weights)) < 1e-6


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("weight", [1.0, 3.0, 786_432.0, 1e-7, 1e20])
def test_one_contribution_comes_back_bit_for_bit_from_the_mean(weight, jit):
    rows = random_rows(1, 1)
    rows[0, 0] = -0.0
    assert merged(MEAN, rows, [weight], jit=jit).tobytes() == rows[0].tobytes()
    assert distance(merged(rda(), rows, [weight], jit=jit), rows[0]) < 2e-7


def test_one_contribution_in_a_padded_stack_comes_back_unchanged_from_the_mean():
    rows = np.concatenate([random_rows(1, 1), np.zeros((3, 50), np.float32)])
    np.testing.assert_array_equal(merged(MEAN, rows, [7, 0, 0, 0]), rows[0])


def test_rda_of_identical_deltas_is_that_delta_whatever_the_weights():
    rows = np.repeat(random_rows(2, 1), 4, axis=0)
    assert distance(merged(rda(), rows, [1, 1000, 3, 7]), rows[0]) < 2e-7


def test_a_zero_delta_lowers_the_length_and_leaves_the_direction():
    d = random_rows(3, 1)[0]
    assert distance(merged(rda(), [d, 0 * d], [1, 3]), d / 4) < 2e-7


CANCELLING = [((1, -1), (1, 1)), ((1, -2), (1, 1)), ((1, 1, -1), (1, 2, 3)), ((2, -5), (7, 7))]


@pytest.mark.parametrize("size", [2, 1000])
@pytest.mark.parametrize(("factors", "weights"), CANCELLING)
def test_random_directions_that_cancel_give_exact_zeros_under_jit_too(factors, weights, size):
    """(1, 0) and (-1, 0) cannot show it: their arithmetic is exact."""
    d = random_rows(size, 1, (size,))[0]
    for jit in (False, True):
        assert not merged(rda(), [f * d for f in factors], weights, jit=jit).any()


@pytest.mark.parametrize("size", [2, 1000])
def test_four_directions_that_cancel_crosswise_give_exact_zeros(size):
    d, e = random_rows(size, 2, (size,))
    for jit in (False, True):
        assert not merged(rda(), [d, e, -d, -e], (1, 1, 1, 1), jit=jit).any()


@pytest.mark.parametrize("jit", [False, True])
def test_weights_that_differ_by_a_thousandth_keep_opposite_deltas_at_full_length(jit):
    d = random_rows(4, 1, (1000,))[0]
    d /= np.linalg.norm(d)
    result = merged(rda(), [d, -d], (1.001, 1), jit=jit)
    assert length(result) == pytest.approx(1, abs=1e-6)
    assert distance(result, d) < 3e-4  # 1e-7 over the mean direction's length of 5e-4.


def test_tensors_of_zeros_merge_to_exact_zeros_in_every_type():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        tree, _ = merge_tree(rda(), {"w": jnp.zeros((3, 1000), dtype)}, jnp.ones(3))
        assert tree["w"].dtype == jnp.float32
        assert not tree["w"].any()


def test_narrow_deltas_are_widened_before_their_length_is_taken():
    """Squares of 300 overflow fp16, and a bf16 sum of squares is off by a thousandth."""
    for dtype in (jnp.float16, jnp.bfloat16):
        rows = jnp.full((2, 5000), 300, dtype)
        tree, _ = merge_tree(rda(), {"w": rows}, jnp.ones(2))
        np.testing.assert_allclose(tree["w"], 300, rtol=1e-6)


# --- Rows that take no part.


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("merge", [MEAN, rda()])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_weight_is_harmless_whatever_it_holds(merge, bad, jit):
    assert merged(merge, [[bad], [2.0]], [0, 10], jit=jit) == 2
    assert merged(merge, [[bad], [2.0]], [-1, 10], jit=jit) == 2


@pytest.mark.parametrize("merge", [MEAN, rda()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_left_out_and_counted(merge, bad):
    tree, turnout = merge_tree(merge, {"w": stacked([1.0], [bad], [3.0])}, jnp.ones(3))
    assert tree["w"] == 2
    assert (turnout.merged, turnout.nonfinite) == (2, 1)


def test_a_weight_that_is_not_finite_takes_its_row_out():
    assert merged(MEAN, [[1.0], [5.0], [3.0]], [1, math.nan, 1]) == 2
    assert merged(MEAN, [[1.0], [5.0], [3.0]], [1, math.inf, 1]) == 2


def test_a_row_that_is_not_finite_in_one_tensor_takes_part_in_none():
    """Otherwise the tensors of one model would come from different learners."""
    tree = {"a": stacked([1.0], [math.nan]), "b": stacked([1.0], [7.0])}
    result, _ = merge_tree(MEAN, tree, jnp.ones(2))
    assert (result["a"], result["b"]) == (1, 1)


@pytest.mark.parametrize("merge", [MEAN, rda()])
def test_when_nobody_takes_part_the_merged_delta_is_zero(merge):
    for rows, weights in [([[1.0], [5.0]], [0, 0]), ([[math.nan], [math.inf]], [1, 1])]:
        tree, turnout = merge_tree(merge, {"w": stacked(*rows)}, jnp.asarray(weights, jnp.float32))
        assert tree["w"] == 0
        assert turnout.merged == 0


@pytest.mark.parametrize("merge", [MEAN, rda()])
def test_padding_changes_a_merge_by_rounding_only(merge):
    rows, weights = random_rows(5, 3), np.array([2.0, 3, 5])
    padded = np.concatenate([rows, np.full((5, 50), math.nan, np.float32)])
    result = merged(merge, padded, np.concatenate([weights, np.zeros(5)]))
    assert distance(result, merged(merge, rows, weights)) < 3e-7


def test_a_padded_stack_compiles_once_however_many_rows_are_real():
    run = jax.jit(lambda merge, *rest: merge_tree(merge, *rest), static_argnums=0)
    rows = jnp.asarray(random_rows(6, 8, (11,)))
    for real in (1, 5, 8, 2, 7, 3, 4, 6, 0):
        run(rda(), {"w": rows}, jnp.where(jnp.arange(8) < real, 1.0, 0.0))
    assert run._cache_size() == 1


def test_a_merge_leaves_its_inputs_as_they_were():
    tree = {"a": jnp.asarray(random_rows(7, 3)), "b": jnp.asarray(random_rows(8, 3), jnp.bfloat16)}
    weights = jnp.array([1.0, 2, 3])
    before = fingerprint((tree, weights))
    merge_tree(rda(), tree, weights)
    assert fingerprint((tree, weights)) == before


def test_wide_deltas_stay_wide_and_narrow_ones_do_not_grow_under_x64():
    with jax.enable_x64(True):
        tree = {"a": jnp.ones((2, 3), jnp.float64), "b": jnp.ones((2, 3), jnp.float32)}
        result, _ = merge_tree(rda(), tree, jnp.ones(2))
    assert {name: leaf.dtype.name for name, leaf in result.items()} == {
        "a": "float64",
        "b": "float32",
    }


# --- Embeddings.


@pytest.mark.parametrize(
    ("name", "direct"),
    [
        ("gpt_neox.embed_in.weight", True),
        ("embed_out.weight", True),
        ("tok_embed/weight", True),
        ("Embed_0/embedding", True),
        ("mlp.weight", False),
        ("wte.weight", False),
        ("wpe.weight", False),
        ("patch_EMBED/kernel", True),
    ],
)
def test_a_name_that_contains_embed_in_any_case_is_merged_directly(name, direct):
    assert is_direct(rda(), name) is direct
    assert is_direct(MEAN, name)


def test_the_pattern_is_tried_on_every_name_of_a_shared_tensor():
    assert is_direct(rda(), "ahead", "zembed/embedding")
    assert not is_direct(rda(), "ahead")


def test_a_pattern_of_ones_own_replaces_the_default():
    merge = rda(direct_pattern="tok_embeddings")
    assert is_direct(merge, "tok_embeddings/w")
    assert not is_direct(merge, "embed/w")


def test_a_pattern_with_capitals_warns_and_matches_nothing():
    with pytest.warns(UserWarning, match="matches nothing. Write 'embed'"):
        merge = rda(direct_pattern="Embed")
    assert not is_direct(merge, "Embed_0/embedding")


def test_a_pattern_must_be_a_string():
    with pytest.raises(UsageError, match="must be a string, got 3"):
        rda(3)


def test_an_embedding_is_averaged_where_another_tensor_is_not():
    tree = {"mlp": stacked((3, 0), (0, 4)), "embed": stacked((3, 0), (0, 4))}
    result, _ = merge_tree(rda(), tree, jnp.ones(2))
    np.testing.assert_allclose(result["embed"], (1.5, 2.0))
    np.testing.assert_allclose(result["mlp"], (2.474874, 2.474874), rtol=1e-6)


# --- As values: in a manifest, in a cache, in optax.


def test_merges_are_written_as_the_manifest_wants_them():
    assert merges.to_json(rda()) == {"kind": "rda", "direct_pattern": "embed"}
    assert merges.to_json(MEAN) == {"kind": "weighted_mean"}


@pytest.mark.parametrize("merge", [rda(), rda("tok"), MEAN])
def test_a_merge_survives_its_manifest(merge):
    assert merges.from_json(merges.to_json(merge)) == merge


def test_reading_a_pattern_back_does_not_warn_again():
    assert merges.from_json({"kind": "rda", "direct_pattern": "Embed"}) == Rda("Embed")


@pytest.mark.parametrize("value", [{"kind": "median"}, {}, {"kind": "os:system"}])
def test_an_unknown_kind_is_refused_with_those_there_are(value):
    with pytest.raises(UsageError, match="not one of rda, weighted_mean"):
        merges.from_json(value)


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(UsageError, match="has no field floor; it has direct_pattern"):
        merges.from_json({"kind": "rda", "floor": 1})


def test_merges_are_frozen_hashable_and_not_callable():
    for merge in (rda(), MEAN):
        assert hash(merge) == hash(dataclasses.replace(merge))
        assert not callable(merge)
    assert rda() == Rda("embed")
    assert WeightedMean() == MEAN


@dataclasses.dataclass(frozen=True)
class SignMean:
    """A merge of one's own: the weighted mean of signs, at a fixed size."""

    size: float = 1.0

    def kernel(self, *names):
        return merges.weighted_mean_kernel if "embed" in names[0] else sign_mean_kernel


def sign_mean_kernel(deltas, weights, sums):
    return sums.learners(merges.per_row(weights, deltas) * jnp.sign(deltas))


def test_a_merge_of_ones_own_goes_through_the_same_door():
    tree = {"w": stacked((3, 0), (-9, 4), (1, 1)), "embed": stacked((3, 0), (0, 4), (0, 2))}
    result, _ = merge_tree(SignMean(), tree, jnp.array([2.0, 1, 1]))
    np.testing.assert_allclose(result["w"], (0.5, 0.5))
    np.testing.assert_allclose(result["embed"], (1.5, 1.5))
    value = merges.to_json(SignMean(2.0))
    assert value["size"] == 2.0
    assert merges.from_json(value, known=[SignMean]) == SignMean(2.0)


@dataclasses.dataclass(frozen=True)
class Callable_:
    def kernel(self, *names):
        return merges.rda_kernel

    def __call__(self):
        return None


@pytest.mark.parametrize("bad", [lambda d: d, "rda", Rda, None])
def test_what_is_no_merge_is_refused(bad):
    with pytest.raises(UsageError, match="frozen dataclass with a method `kernel`"):
        merges.check_merge(bad)


def test_a_merge_with_call_is_refused_because_optax_would_take_it_for_a_schedule():
    with pytest.raises(UsageError, match="`__call__`"):
        merges.check_merge(Callable_())


def test_the_weights_of_two_samples_and_one_are_four_and_one():
    weights = [contribution_weight(steps=1, samples=s) for s in (2, 1)]
    np.testing.assert_allclose(merged(rda(), [(1, 0), (0, 1)], weights), (0.970, 0.243), atol=5e-4)
