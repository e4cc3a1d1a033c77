"""The model of the demo: a byte-level transformer of about a million parameters, in Flax NNX.

An ordinary program for one machine: nothing in this file knows of jdiloco. It is meant to be
copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

VOCABULARY = 256  # Text is read as bytes.
CONTEXT = 96
WIDTH = 192
HEADS = 6
BLOCKS = 2  # Wide and shallow: large products use a CPU better, and there is less to compile.

Tokens = Int[Array, " batch length"]
"""Bytes as integers. A row of a batch has one more than the model reads: the last is a target."""


class Attention(nnx.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.heads = heads
        self.query_key_value = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(
        self, x: Float[Array, " batch length width"]
    ) -> Float[Array, " batch length width"]:
        batch, length, width = x.shape
        heads = self.query_key_value(x).reshape(batch, length, 3, self.heads, -1)
        query, key, value = jnp.unstack(heads, axis=2)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.reshape(batch, length, width))


class Block(nnx.Module):
    """Attention and a perceptron, each on a normalised copy of what it adds to (pre-norm)."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, heads, rngs=rngs)
        self.perceptron_norm = nnx.RMSNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(
        self, x: Float[Array, " batch length width"]
    ) -> Float[Array, " batch length width"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(nnx.gelu(self.widen(self.perceptron_norm(x))))


class ByteTransformer(nnx.Module):
    """Predicts the next byte of a text from those before it."""

    def __init__(
        self,
        *,
        rngs: nnx.Rngs,
        context: int = CONTEXT,
        width: int = WIDTH,
        heads: int = HEADS,
        blocks: int = BLOCKS,
    ):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.position_embed = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(blocks)])
        self.out_norm = nnx.RMSNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Tokens) -> Float[Array, " batch length 256"]:
        x = self.embed(tokens) + self.position_embed(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(self.out_norm(x))


def loss_of(model: ByteTransformer, tokens: Tokens) -> Float[Array, ""]:
    """Mean cross-entropy of the next byte, in nats. A model that knows nothing has ln 256 = 5.5."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(
    model: ByteTransformer, optimizer: nnx.Optimizer, tokens: Tokens
) -> Float[Array, ""]:
    """One step on one batch, in place. Returns the loss before it."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, gradients)
    return loss


evaluate = nnx.jit(loss_of)
"""The loss of one batch, without training on it."""


def inner_optimizer(
    model: ByteTransformer, steps: int, peak: float = 1e-3, *, first_step: int = 0
) -> nnx.Optimizer:
    """AdamW whose learning rate rises for a twentieth of `steps` and then falls to nothing.

    One that starts at `first_step` takes the schedule up there.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, max(steps // 20, 1), max(steps, 2))
    transform = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(lambda count: rate(count + first_step), weight_decay=0.1),
    )
    return nnx.Optimizer(model, transform, wrt=nnx.Param)


def parameter_count(model: nnx.Module) -> int:
    """Number of trained elements."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
