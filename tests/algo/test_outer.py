"""Nesterov over rounds and the fp32 master: reported faults, and numbers to check by hand."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdiloco.algo import diloco_outer, fp32_master, merge_deltas, outer_nesterov, rda
from jdiloco.algo import weighted_mean as weighted_mean_merge
from jdiloco.errors import UsageError
from jdiloco.testing import oracle
from tests.algo.support import fingerprint, random_rows

MEAN = weighted_mean_merge()
NESTEROV = [-1.33, -3.227, -5.6343, -8.50087]


def play(tx, anchor, rounds, *, weights=None, jit=False):
    """The anchor after each round; a round is the list of its deltas."""
    update = jax.jit(tx.update) if jit else tx.update
    params, state, seen = {"w": anchor}, tx.init({"w": anchor}), []
    for deltas in rounds:
        stack = {"w": jnp.stack([jnp.asarray(d, jnp.float32) for d in deltas])}
        w = jnp.ones(len(deltas)) if weights is None else weights
        updates, state = update(stack, state, params, weights=w)
        params = optax.apply_updates(params, updates)
        seen.append(params["w"])
    return seen, state


def test_a_round_moves_towards_the_learners():
    anchor = jnp.array(1.0)
    tx = diloco_outer(MEAN, outer_lr=1, outer_momentum=0)
    (first,), state = play(tx, anchor, [[1.0 - 0.8, 1.0 - 0.6]])
    assert first == pytest.approx(0.7)
    updates, _ = tx.update(
        {"w": jnp.stack([first - 0.5, first - 0.3])}, state, {"w": first}, weights=[1.0, 1.0]
    )
    assert first + updates["w"] == pytest.approx(0.4)


def test_local_sgd_lands_on_the_weighted_average_of_the_learners():
    anchor, learners, weights = random_rows(0, 1)[0], random_rows(1, 3), [1.0, 2.0, 5.0]
    tx = diloco_outer(MEAN, outer_lr=1, outer_momentum=0)
    (after,), _ = play(tx, jnp.asarray(anchor), [anchor - learners], weights=weights)
    np.testing.assert_allclose(after, np.average(learners, 0, weights), atol=1e-6)


def test_a_lone_learner_with_unit_rate_is_the_inner_optimiser_to_half_an_ulp():
    anchor = random_rows(2, 1, (10_000,))[0]
    trained = anchor + random_rows(3, 1, (10_000,))[0] * np.float32(1e-2)
    tx = diloco_outer(MEAN, outer_lr=1, outer_momentum=0)
    (after,), _ = play(tx, jnp.asarray(anchor), [[anchor - trained]])
    assert (abs(np.asarray(after) - trained) <= np.spacing(abs(anchor)) / 2).all()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("merge", [rda(), MEAN])
def test_four_rounds_of_one_walk_the_nesterov_list(merge, jit):
    seen, state = play(diloco_outer(merge), jnp.array(0.0), [[1.0]] * 4, jit=jit)
    np.testing.assert_allclose(seen, NESTEROV, atol=1e-6)
    assert state[1].round == 4


def test_the_oracle_walks_the_same_list():
    anchor, momentum, seen = np.array(0.0), np.array(0.0), []
    for _ in range(4):
        anchor, momentum = oracle.outer_step(anchor, momentum, 1.0)
        seen.append(float(anchor))
    np.testing.assert_allclose(seen, NESTEROV, atol=1e-12)


def test_optax_sgd_with_nesterov_walks_the_same_list():
    """So the form is the one optax users expect."""
    tx, params, seen = optax.sgd(0.7, momentum=0.9, nesterov=True), jnp.array(0.0), []
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(jnp.array(1.0), state, params)
        params = params + updates
        seen.append(float(params))
    np.testing.assert_allclose(seen, NESTEROV, atol=1e-6)


def test_a_constant_delta_gains_from_nearly_two_to_ten_and_steps_of_seven():
    seen, _ = play(diloco_outer(), jnp.array(0.0), [[1.0]] * 100, jit=True)
    steps = -np.diff([0.0, *map(float, seen)])
    assert steps[0] / 0.7 == pytest.approx(1.9, abs=1e-5)
    assert steps[-1] / 0.7 == pytest.approx(10.0, abs=0.01)
    assert steps[-1] == pytest.approx(7.0, abs=0.01)


def test_the_first_step_is_a_third_longer_than_the_merged_delta():
    (after,), _ = play(diloco_outer(), jnp.zeros(2), [[(3.0, 4.0)]])
    np.testing.assert_allclose(after, (-1.33 * 3, -1.33 * 4), rtol=1e-6)


def test_embeddings_take_the_mean_and_others_rda_in_one_commit():
    anchor = {"mlp.weight": jnp.ones(2), "tok_embed.weight": jnp.ones(2)}
    deltas = {name: jnp.array([(1.0, 0), (0, 1)]) for name in anchor}
    tx = diloco_outer(outer_lr=1, outer_momentum=0)
    updates, _ = tx.update(deltas, tx.init(anchor), anchor, weights=[4.0, 1.0])
    commit = optax.apply_updates(anchor, updates)
    np.testing.assert_allclose(commit["tok_embed.weight"], (0.2, 0.8), atol=1e-6)
    np.testing.assert_allclose(commit["mlp.weight"], (0.030, 0.758), atol=6e-4)


def test_momentum_belongs_to_its_fragment():
    tx = diloco_outer()
    anchors = [{"w": jnp.array(0.0)}, {"w": jnp.array(0.0)}]
    states = [tx.init(anchor) for anchor in anchors]
    before = fingerprint((anchors[1], states[1]))
    for _ in range(3):
        updates, states[0] = tx.update({"w": jnp.ones(1)}, states[0], anchors[0], weights=[1.0])
        anchors[0] = optax.apply_updates(anchors[0], updates)
    assert anchors[0]["w"] == pytest.approx(-5.6343, abs=1e-5)
    assert states[1][1].momentum["w"] == 0
    assert fingerprint((anchors[1], states[1])) == before


def test_a_schedule_is_asked_with_the_number_of_rounds_before():
    tx = diloco_outer(MEAN, outer_lr=lambda r: jnp.where(r < 2, 1.0, 0.5), outer_momentum=0)
    seen, _ = play(tx, jnp.array(0.0), [[1.0]] * 4)
    np.testing.assert_allclose(seen, [-1, -2, -2.5, -3])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rows", "weights"), [([1.0, 5.0], (0.0, 0.0)), ([np.nan, np.inf], (1.0, 1.0))]
)
def test_a_round_that_nobody_takes_part_in_changes_nothing(rows, weights, dtype, jit):
    tx = diloco_outer()
    params = {"w": jnp.asarray([1.0, -2.0], dtype)}
    _, state = tx.update({"w": jnp.ones((1, 2))}, tx.init(params), params, weights=[1.0])
    before = fingerprint((params, state[1:]))
    stack = {"w": jnp.stack([jnp.full(2, row) for row in rows])}
    update = jax.jit(tx.update) if jit else tx.update
    updates, state = update(stack, state, params, weights=jnp.array(weights))
    assert fingerprint((optax.apply_updates(params, updates), state[1:])) == before
    assert state[0].turnout.merged == 0


def test_the_state_tells_how_many_were_left_out_as_not_finite():
    _, state = play(diloco_outer(), jnp.zeros(()), [[1.0, np.nan, 3.0]])
    assert (state[0].turnout.merged, state[0].turnout.nonfinite) == (2, 1)


def test_an_update_leaves_every_input_as_it_was():
    tx = diloco_outer()
    params = {"a": jnp.ones((3,), jnp.bfloat16), "b": jnp.ones((2, 2))}
    deltas = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones((2, 2, 2))}
    state, weights = tx.init(params), jnp.ones(2)
    before = fingerprint((params, deltas, state, weights))
    for update in (tx.update, jax.jit(tx.update)):
        update(deltas, state, params, weights=weights)
    assert fingerprint((params, deltas, state, weights)) == before


@pytest.mark.parametrize("x64", [False, True])
def test_parameters_keep_their_types(x64):
    with jax.enable_x64(x64):
        params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2), "c": jnp.ones(2, jnp.float16)}
        params["b"] = params["b"].astype(jnp.float32)
        deltas = jax.tree.map(lambda p: jnp.stack([p, p]), params)
        tx = diloco_outer()
        updates, state = tx.update(deltas, tx.init(params), params, weights=[1, 1])
        after = optax.apply_updates(params, updates)
    assert all(u.dtype == jnp.float32 for u in jax.tree.leaves((updates, state[1].momentum)))
    assert {n: p.dtype for n, p in after.items()} == {n: p.dtype for n, p in params.items()}


def test_wide_parameters_step_wide_under_x64():
    with jax.enable_x64(True):
        params = {"w": jnp.zeros((), jnp.float64)}
        tx = diloco_outer()
        updates, _ = tx.update(
            {"w": jnp.ones(1, jnp.float64)}, tx.init(params), params, weights=[1]
        )
        assert updates["w"].dtype == jnp.float64
        assert updates["w"] == pytest.approx(-1.33, abs=1e-15)


# --- The master.


@pytest.mark.parametrize("jit", [False, True])
def test_a_hundred_steps_below_half_an_ulp_add_up(jit):
    tx = diloco_outer(outer_lr=1, outer_momentum=0)
    seen, state = play(tx, jnp.array(1.0, jnp.bfloat16), [[-0.001]] * 100, jit=jit)
    assert float(state[2].master["w"]) == pytest.approx(1.1, abs=1e-5)
    assert float(seen[-1]) == 1.1015625


def test_a_delta_is_subtracted_before_it_is_narrowed():
    d = oracle.delta(np.float32(1.0), np.float32(1.001))
    assert float(oracle.narrow(-d, "bfloat16")) == pytest.approx(0.00099945, abs=1e-6)
    assert oracle.delta(*(oracle.narrow(x, "bfloat16") for x in (1.0, 1.001))) == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_params_are_the_rounding_of_the_master_for_fifty_rounds(dtype):
    anchor = jnp.asarray(random_rows(4, 1, (1000,))[0], dtype)
    rounds = [random_rows(i, 2, (1000,)) * np.float32(1e-3) for i in range(50)]
    seen, state = play(diloco_outer(), anchor, rounds, jit=True)
    np.testing.assert_array_equal(seen[-1], state[2].master["w"].astype(dtype))
    with pytest.raises(AssertionError):  # And the master is more than they are.
        np.testing.assert_array_equal(seen[-1].astype(jnp.float32), state[2].master["w"])


@pytest.mark.parametrize("jit", [False, True])
def test_parameters_that_were_replaced_are_where_the_next_round_starts(jit):
    tx = diloco_outer(outer_lr=1, outer_momentum=0)
    _, state = play(tx, jnp.ones(2, jnp.bfloat16), [[(0.0005, 0.0005)]] * 3)
    params = {"w": jnp.array([1.0, 5.0], jnp.bfloat16)}  # The first is the rounding of its master.
    update = jax.jit(tx.update) if jit else tx.update
    _, state = update({"w": jnp.full((1, 2), 0.0005)}, state, params, weights=jnp.ones(1))
    np.testing.assert_allclose(state[2].master["w"], (0.998, 4.9995), atol=1e-6)


def test_a_transformation_after_the_master_does_not_make_it_drift():
    """Each round starts from the parameters that the clipped updates really gave."""
    tx = optax.chain(diloco_outer(outer_lr=1, outer_momentum=0), optax.clip(0.25))
    seen, _ = play(tx, jnp.ones((), jnp.bfloat16), [[1.0]] * 3)
    np.testing.assert_array_equal(np.asarray(seen, np.float32), (0.75, 0.5, 0.25))


def test_a_master_beyond_fp16_leaves_its_parameter_finite():
    tx = diloco_outer(outer_lr=1, outer_momentum=0)
    seen, state = play(tx, jnp.array(60_000.0, jnp.float16), [[-9_000.0], [0.0], [9_000.0]])
    np.testing.assert_array_equal(np.asarray(seen, np.float32), (65_504, 65_504, 60_000))
    assert state[2].master["w"] == 60_000


def test_tiny_fp16_values_keep_their_subnormal_bits():
    anchor = jnp.asarray([1e-7, 3e-6, -2e-5], jnp.float16)
    seen, _ = play(diloco_outer(), anchor, [[np.zeros(3)]], jit=True)
    np.testing.assert_array_equal(seen[0], anchor)


def test_wide_parameters_have_no_master_and_need_no_params():
    tx = diloco_outer()
    state = tx.init({"w": jnp.zeros(2)})
    assert state[2].master == {"w": None}
    updates, _ = tx.update({"w": jnp.ones((1, 2))}, state, weights=[1.0])
    np.testing.assert_allclose(updates["w"], -1.33, rtol=1e-6)


def test_a_master_without_params_raises_the_sentence_of_optax():
    tx = fp32_master()
    state = tx.init({"w": jnp.zeros(2, jnp.bfloat16)})
    with pytest.raises(ValueError, match="but you are not passing `params` when calling `update`"):
        tx.update({"w": jnp.zeros(2)}, state)


# --- What is refused.

CHAIN = r"optax.chain\(merge_deltas\(rda\(\)\), optax.clip_by_global_norm\(1.0\), outer_nesterov"
P = {"a": jnp.ones((4, 5)), "b": jnp.ones(3)}
D = {"a": jnp.ones((3, 4, 5)), "b": jnp.ones((3, 3))}


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        (P, r"'a' has shape \(4, 5\), wanted \(3, 4, 5\)"),
        ({**D, "b": jnp.ones(3)}, r"'b' has shape \(3,\), wanted \(3, 3\)"),
        ({**D, "b": jnp.ones((2, 3))}, r"'b' has shape \(2, 3\), wanted \(3, 3\)"),
        ({**D, "b": jnp.ones((3, 1, 3))}, r"'b' has shape \(3, 1, 3\), wanted \(3, 3\)"),
        ({"a": D["a"]}, "only in the other 'b'"),
        ({**D, "c": jnp.ones(3)}, "only in the deltas 'c'"),
        ([P, P, P], "only in the deltas '0/a', '0/b', '1/a'"),
    ],
)
def test_deltas_of_another_shape_are_refused_with_the_chain_that_works(deltas, message):
    tx = diloco_outer()
    with pytest.raises(UsageError, match=f"(?s){message}.*{CHAIN}"):
        tx.update(deltas, tx.init(P), P, weights=[1.0, 1.0, 1.0])


def test_the_momentum_sees_a_missing_axis_where_no_params_are_given():
    """A leaf of length 3 looks like three contributions of a scalar."""
    tx = diloco_outer()
    with pytest.raises(UsageError, match=rf"'b' has shape \(\), its momentum has \(3,\).*{CHAIN}"):
        tx.update({**D, "b": jnp.ones(3)}, tx.init(P), weights=[1.0, 1.0, 1.0])


def test_an_iterator_is_no_tree_of_deltas():
    tx = diloco_outer()
    with pytest.raises(UsageError, match="not an iterator"):
        tx.update(iter([P]), tx.init(P), P, weights=[1.0])


@pytest.mark.parametrize("weights", [1.0, [], jnp.ones((2, 2)), "ab"])
def test_weights_are_one_number_for_each_contribution(weights):
    tx = diloco_outer()
    with pytest.raises(UsageError, match="`weights` must hold one number for each contribution"):
        tx.update(D, tx.init(P), P, weights=weights)


@pytest.mark.parametrize("weight", [3e38, 1e-39])
def test_weights_whose_sum_leaves_float32_merge_nothing_and_say_so(weight):
    """Sums to infinity, or of subnormal numbers: no row takes part, and the round is void."""
    tx = merge_deltas(MEAN)
    deltas = {"w": jnp.ones((2, 3))}
    merged, state = tx.update(deltas, tx.init({"w": jnp.ones(3)}), weights=[weight, weight])
    assert int(state.turnout.merged) == 0
    assert not np.asarray(merged["w"]).any()


def test_weights_are_required():
    tx = diloco_outer()
    with pytest.raises(UsageError, match=r"got None. Pass `update\(deltas"):
        tx.update(D, tx.init(P), P)


@pytest.mark.parametrize(
    "weights",
    [
        [1, 2, 5],
        (1.0, 2.0, 5.0),
        np.array([1, 2, 5]),
        jnp.array([1, 2, 5]),
        [10**9, 2 * 10**9, 5 * 10**9],
    ],
    ids=["list", "tuple", "numpy", "jax", "beyond 32 bits"],
)
def test_weights_come_in_any_spelling(weights):
    tx = merge_deltas(MEAN)
    merged, _ = tx.update({"w": jnp.array([1.0, 2, 3])}, tx.init({"w": 0.0}), weights=weights)
    assert merged["w"] == pytest.approx(2.5)


@pytest.mark.parametrize(
    "leaf", [jnp.arange(3), jnp.ones(3, bool), jax.random.key(0), jnp.ones(3, complex)]
)
def test_leaves_that_are_not_floating_point_are_refused_by_name(leaf):
    for tx in (diloco_outer(), merge_deltas(rda()), outer_nesterov(), fp32_master()):
        with pytest.raises(UsageError, match=r"The parameter 'n/i' is .*, wanted float32"):
            tx.init({"n": {"i": leaf}})
    tx = merge_deltas(rda())
    with pytest.raises(UsageError, match="The delta 'i' is"):
        tx.update({"i": leaf}, tx.init({"i": 1.0}), weights=[1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "settings",
    [
        {"outer_lr": -0.1},
        {"outer_lr": float("nan")},
        {"outer_momentum": 1.0},
        {"outer_momentum": -1},
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings):
    (name,) = settings
    with pytest.raises(UsageError, match=f"`{name}` must be at least 0"):
        diloco_outer(**settings)


@pytest.mark.parametrize("jit", [False, True])
def test_a_stack_of_no_contributions_is_refused(jit):
    tx = diloco_outer()
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(UsageError, match="at least one"):
        update({"w": jnp.ones((0, 2))}, tx.init({"w": jnp.ones(2)}), weights=jnp.ones(0))


@pytest.mark.parametrize("make", [list, np.asarray, jnp.asarray])
def test_a_weight_below_zero_is_a_slip_unless_it_is_traced(make):
    """Zeros are padding. Inside `jit` nobody can look, and what is not positive is left out."""
    tx, params = diloco_outer(MEAN, 1.0, 0.0), {"w": jnp.zeros(2)}
    deltas = {"w": jnp.array([[1.0, 2.0], [5.0, 5.0]])}
    state, weights = tx.init(params), make([1.0, -1.0])
    with pytest.raises(UsageError, match=r"`weights` holds -1.0: a weight is at least 0"):
        tx.update(deltas, state, params, weights=weights)
    updates, _ = jax.jit(tx.update)(deltas, state, params, weights=jnp.asarray(weights))
    np.testing.assert_array_equal(updates["w"], [-1.0, -2.0])
    tx.update(deltas, state, params, weights=make([1.0, 0.0]))
