"""What a user reads before training: which tensor is merged how."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jdiloco.algo import explain_routing, rda, weighted_mean
from jdiloco.errors import UsageError
from tests.algo.test_merges import SignMean
from tests.algo.test_paths import Tied

PYTHIA = {"gpt_neox": {"embed_in": {"weight": 0}, "mlp": {"weight": 0}}, "embed_out": {"weight": 0}}
GPT2 = {"wte": {"weight": 0}, "wpe": {"weight": 0}, "h": [{"mlp": {"weight": 0}}]}


def arrays(tree):
    return jax.tree.map(lambda _: jnp.ones((2, 2)), tree)


def routes(tree, merge):
    return {route.name: route.route for route in explain_routing(tree, merge)}


def test_the_table_shows_name_shape_type_and_route():
    tree = {
        "mlp": {"w": jnp.ones((4, 4))},
        "tok_embed": {"w": jnp.ones((8, 4))},
        "n": jnp.arange(2),
    }
    assert str(explain_routing(tree, rda())) == "\n".join(
        [
            "name         shape   dtype    route",
            "mlp/w        (4, 4)  float32  rda",
            "n            (2,)    int32    left alone",
            "tok_embed/w  (8, 4)  float32  weighted_mean",
            "",
            "Rda(direct_pattern='embed'): 1 of 2 tensors by weighted mean.",
        ]
    )


def test_both_embeddings_of_pythia_match_and_its_layers_do_not():
    assert routes(arrays(PYTHIA), rda()) == {
        "embed_out/weight": "weighted_mean",
        "gpt_neox/embed_in/weight": "weighted_mean",
        "gpt_neox/mlp/weight": "rda",
    }


def test_the_embeddings_of_gpt2_do_not_match_and_the_table_says_so():
    table = explain_routing(arrays(GPT2), rda())
    assert {route.route for route in table} == {"rda"}
    assert str(table).endswith("No name contains 'embed'.")
    assert routes(arrays(GPT2), rda("wte"))["wte/weight"] == "weighted_mean"


def test_the_weighted_mean_takes_every_tensor():
    assert set(routes(arrays(GPT2), weighted_mean()).values()) == {"weighted_mean"}


def test_a_merge_of_ones_own_shows_the_name_of_its_kernel():
    assert routes({"w": jnp.ones(2), "embed": jnp.ones(2)}, SignMean()) == {
        "embed": "weighted_mean",
        "w": "sign_mean",
    }


def test_a_shared_tensor_shows_all_its_names():
    table = explain_routing(Tied(nnx.Rngs(0)), rda())
    assert "ahead = zembed/embedding  (3, 2)  float32  weighted_mean" in str(table)


def test_shapes_are_enough():
    assert routes(jax.eval_shape(lambda: arrays(PYTHIA)), rda()) == routes(arrays(PYTHIA), rda())


def test_what_is_no_merge_is_refused():
    with pytest.raises(UsageError, match="A merge is a frozen dataclass"):
        explain_routing({"w": jnp.ones(2)}, "rda")
