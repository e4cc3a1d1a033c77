"""One model has the same names and order in every container."""

# optax types states and updates as `ArrayTree`, which knows no fields, keys or operators.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import ast
import pathlib

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict
from hypothesis import given
from hypothesis import strategies as st

import jdiloco.algo
from jdiloco.algo import diloco_outer, named_leaves, path_names, rda, specs
from jdiloco.algo.merges import merge_tree
from jdiloco.algo.paths import natural_order
from jdiloco.errors import UsageError
from tests.algo.support import more


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(3, 2, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(11)])


MODEL = Model(nnx.Rngs(0))
STATE = nnx.state(MODEL, nnx.Param)
PURE = nnx.to_pure_dict(STATE)
NAMES = [
    "embed/embedding",
    *(f"layers/{i}/linear/{part}" for i in range(11) for part in ("bias", "kernel")),
]


def text_keys(tree):
    return {str(k): text_keys(v) if isinstance(v, dict) else v for k, v in tree.items()}


def train_state(params):
    return TrainState.create(apply_fn=lambda x: x, params=params, tx=optax.sgd(1.0))


CONTAINERS = {
    "module": MODEL,
    "State": STATE,
    "split": nnx.split(MODEL, nnx.Param)[1],
    "flat state": nnx.to_flat_state(STATE),
    "pure dict": PURE,
    "text keys": text_keys(PURE),
    "FrozenDict": freeze(text_keys(PURE)),
    "variables": {"params": text_keys(PURE)},
    "TrainState.params": train_state(text_keys(PURE)).params,
    "tuple keys": flatten_dict(PURE),
    "shapes": jax.eval_shape(lambda: PURE),
    "Linen boxes": jax.tree.map(lambda x: linen.Partitioned(x, (None,) * x.ndim), text_keys(PURE)),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_one_model_has_the_same_names_in_every_container(container):
    assert path_names(CONTAINERS[container]) == NAMES


@pytest.mark.parametrize("container", CONTAINERS)
def test_one_model_has_the_same_specs_in_every_container(container):
    assert specs(CONTAINERS[container]) == specs(PURE)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_tree_comes_back_from_its_leaves_in_canonical_order(container):
    tree = CONTAINERS[container]
    named = named_leaves(tree)
    again = named.rebuild([leaf.leaf for leaf in named.leaves])
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
        assert a is b


def test_rebuilding_puts_each_value_at_its_name():
    named = named_leaves({"b": {10: jnp.ones(1), 9: jnp.ones(1)}, "a": jnp.ones(1)})
    assert named.rebuild(["first", "second", "third"]) == {
        "a": "first",
        "b": {9: "second", 10: "third"},
    }
    with pytest.raises(UsageError, match="Got 2 values for a tree of 3 leaves"):
        named.rebuild([0, 0])


def test_linen_variables_are_named_without_their_collection():
    variables = linen.Dense(2).init(jax.random.key(0), jnp.ones((1, 2)))
    assert path_names(variables) == ["bias", "kernel"]


def test_other_collections_keep_the_names_apart():
    variables = linen.BatchNorm(use_running_average=True).init(jax.random.key(0), jnp.ones((1, 2)))
    assert path_names(variables)[:2] == ["batch_stats/mean", "batch_stats/var"]


def test_attributes_and_indices_are_parts_of_a_name():
    state = optax.EmaState(count=jnp.ones(2), ema=[jnp.ones(1), (jnp.ones(1),)])
    assert path_names(state) == ["count", "ema/0", "ema/1/0"]


def test_a_users_own_field_called_value_is_a_part():
    assert path_names({"a": {"value": jnp.ones(1)}}) == ["a/value"]


def test_a_lone_array_called_params_keeps_its_name():
    assert path_names({"params": jnp.ones(1)}) == ["params"]


def test_numbers_in_names_are_compared_as_numbers():
    ordered = ["a", "l2", "l2b9", "l2b10", "l10", "l/2/w", "l/10/w"]
    assert path_names({name: jnp.ones(1) for name in ordered}) == ordered


@more
@given(st.sets(st.text("ab/01", min_size=1), min_size=2), st.randoms())
def test_the_order_depends_on_the_names_alone(names, shuffler):
    shuffled = sorted(names)
    shuffler.shuffle(shuffled)
    assert sorted(shuffled, key=natural_order) == sorted(sorted(names), key=natural_order)


# --- Shared Variables.


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.zembed = nnx.Embed(3, 2, rngs=rngs)
        self.ahead = self.zembed.embedding


def test_a_shared_variable_counts_once_under_its_first_path():
    model = Tied(nnx.Rngs(0))
    (leaf,) = named_leaves(model).leaves
    assert (leaf.name, leaf.aliases) == ("ahead", ("zembed/embedding",))
    assert path_names(nnx.state(model)) == ["ahead"]
    rebuilt = named_leaves(model).rebuild([jnp.zeros((3, 2))])
    assert not rebuilt.zembed.embedding[...].any()
    assert not rebuilt.ahead[...].any()


def test_the_pattern_finds_a_shared_variable_under_any_of_its_paths():
    """In a module; a State knows the first path only."""
    stack = jax.tree.map(lambda x: jnp.stack([x, -2 * x, 7 * x]), Tied(nnx.Rngs(0)))
    result, _ = merge_tree(rda(), stack, jnp.ones(3))
    original = Tied(nnx.Rngs(0)).ahead[...]
    # jax.tree.map has made two Variables of one, so only the second is called an embedding.
    np.testing.assert_allclose(result.zembed.embedding[...], 2 * original, rtol=1e-5)

    stack = Tied(nnx.Rngs(0))
    stack.ahead.set_value(jnp.stack([original, -2 * original, 7 * original]))
    result, _ = merge_tree(rda(), stack, jnp.ones(3))
    np.testing.assert_allclose(result.ahead[...], 2 * original, rtol=1e-5)


def test_an_array_that_sits_twice_in_a_dict_is_two_tensors():
    x = jnp.ones(2)
    assert path_names({"a": x, "b": x}) == ["a", "b"]


# --- What a run holds.


def test_specs_list_floating_leaves_and_name_the_others():
    tree = {
        "w": jnp.ones((2, 3), jnp.bfloat16),
        "step": jnp.array(5),
        "flag": True,
        "key": jax.random.key(0),
        "none": None,
        "text": "x",
        "eps": 1e-6,
    }
    named = named_leaves(tree)
    assert [(s.name, s.shape, s.dtype) for s in named.specs] == [("w", (2, 3), "bfloat16")]
    assert named.skipped == ("eps", "flag", "key", "step", "text")


# --- What is refused.


def test_two_leaves_of_one_name_are_refused_with_both_key_paths():
    tree = {"a/b": {"c": jnp.ones(1)}, "a": {"b/c": jnp.ones(1)}}
    with pytest.raises(UsageError, match=r"'a/b/c': \['a'\]\['b/c'\] and \['a/b'\]\['c'\]"):
        path_names(tree)


@pytest.mark.parametrize("tree", [jnp.ones(3), {"": jnp.ones(3)}])
def test_a_leaf_without_a_name_is_refused(tree):
    with pytest.raises(UsageError, match=r"empty name.*\{\"w\": array\}"):
        path_names(tree)


def test_a_transformation_takes_a_bare_array_all_the_same():
    tx = diloco_outer()
    updates, _ = tx.update(jnp.ones((2, 3)), tx.init(jnp.ones(3)), weights=[1.0, 1.0])
    np.testing.assert_allclose(updates, -1.33, rtol=1e-6)


def test_a_whole_train_state_is_refused_with_the_way_out():
    state = train_state({"w": jnp.ones(1)})
    for refuse in (path_names, specs, diloco_outer().init):
        with pytest.raises(UsageError, match=r"whole `TrainState`.*`state\.params`"):
            refuse(state)


def test_algo_imports_neither_flax_nor_the_outside_world():
    allowed = {"jax", "optax", "numpy", "ml_dtypes", "jaxtyping", "jdiloco"}
    allowed |= {"__future__", "collections", "dataclasses", "functools", "math", "operator", "re"}
    allowed |= {"sys", "typing", "warnings"}
    for file in pathlib.Path(jdiloco.algo.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] in allowed, file
            elif isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, file
