"""The demo's model: about a million parameters, causal, and it learns."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdiloco.cli.demo_model import (
    ByteTransformer,
    evaluate,
    inner_optimizer,
    parameter_count,
    train_step,
)


@pytest.fixture
def small():
    return ByteTransformer(rngs=nnx.Rngs(0), context=16, width=32, heads=2, blocks=1)


def test_the_default_model_has_about_a_million_parameters():
    model = nnx.eval_shape(lambda: ByteTransformer(rngs=nnx.Rngs(0)))
    assert 900_000 < parameter_count(model) < 1_100_000


def test_a_byte_is_predicted_from_those_before_it_alone(small):
    """Other bytes from position 8 on change no prediction before it."""
    tokens = jnp.arange(16)[None]
    other = tokens.at[0, 8:].set(7)
    before, after = small(tokens), small(other)
    np.testing.assert_allclose(before[0, :8], after[0, :8], atol=1e-5)
    assert not np.allclose(before[0, 8], after[0, 8])


def test_the_loss_falls_on_text_that_repeats(small):
    optimizer = inner_optimizer(small, 60, peak=1e-2)
    rows = jnp.asarray(np.arange(17)[None] + np.arange(4)[:, None], jnp.int32)
    first = float(evaluate(small, rows))
    for _ in range(60):
        train_step(small, optimizer, rows)
    assert first > 4
    assert float(evaluate(small, rows)) < first / 4


def test_two_models_of_one_seed_are_equal():
    """All nodes begin at the same point, so the lone one is a fair comparison."""
    one, other = (
        ByteTransformer(rngs=nnx.Rngs(3), context=8, width=16, heads=2, blocks=1) for _ in range(2)
    )
    tokens = jnp.zeros((1, 8), jnp.int32)
    np.testing.assert_array_equal(one(tokens), other(tokens))
