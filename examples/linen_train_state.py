"""A Flax Linen model in a `TrainState`, with batch statistics. Start it in two terminals at once.

Only `state.params` is the run's. Batch statistics, optimiser state and step count stay the node's
own: statistics averaged with an outer step can turn a variance negative. So they are those of the
last steps before the block ended, and a few batches bring them up to the committed parameters.

You should see the same small error from both, after about 20 s:

    wrong side of the spiral: 0.0 %
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

import jdiloco

ROWS = 128


class Spirals(nn.Module):
    """On which of two spirals that wind round each other does a point lie?"""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(64)(x)))
        return nn.Dense(1)(x)[:, 0]


class TrainState(train_state.TrainState):
    batch_stats: Any


def points(key: jax.Array, rows: int = ROWS) -> tuple[jax.Array, jax.Array]:
    """Points on the spirals, and which spiral each is on: 0 or 1."""
    far, which, noise = jax.random.split(key, 3)
    radius = jax.random.uniform(far, (rows,), minval=0.2)
    label = jax.random.bernoulli(which, shape=(rows,))
    angle = 9 * radius + jnp.pi * label
    place = radius[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    return place + 0.01 * jax.random.normal(noise, (rows, 2)), label.astype(jnp.float32)


def loss_of(params: Any, state: TrainState, batch: tuple[jax.Array, jax.Array]) -> Any:
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, new = state.apply_fn(variables, batch[0], train=True, mutable=["batch_stats"])
    return optax.sigmoid_binary_cross_entropy(logits, batch[1]).mean(), new["batch_stats"]


@jax.jit
def train_step(state: TrainState, key: jax.Array) -> TrainState:
    grads, stats = jax.grad(loss_of, has_aux=True)(state.params, state, points(key))
    return state.apply_gradients(grads=grads, batch_stats=stats)


@jax.jit
def refresh(state: TrainState, key: jax.Array) -> TrainState:
    """Batch statistics come closer to those of the parameters as they are now."""
    return state.replace(batch_stats=loss_of(state.params, state, points(key))[1])


model = Spirals()
variables = model.init(jax.random.key(0), jnp.zeros((1, 2)), train=False)
state = TrainState.create(apply_fn=model.apply, tx=optax.adam(3e-3), **variables)
algorithm = jdiloco.DiLoCo(
    sync_every=50, fragments=2, overlap_steps=5, quorum_size=2, outer_momentum=0.5
)
with jdiloco.Session(
    state.params, algorithm, mailbox="runs/spirals", poll_interval=0.1, leave_with_run=True
) as session:
    state = state.replace(params=session.params)
    seed = zlib.crc32(session.node_id.encode())  # Each node draws data of its own.
    for key in jax.random.split(jax.random.key(seed), 600):
        state = train_step(state, key)
        state = state.replace(params=session.step(state.params, samples=ROWS))

state = state.replace(params=session.params)  # The newest committed.
for key in jax.random.split(jax.random.key(1), 50):
    state = refresh(state, key)
x, label = points(jax.random.key(2), 4000)
variables = {"params": state.params, "batch_stats": state.batch_stats}
wrong = jnp.mean((state.apply_fn(variables, x, train=False) > 0) != label)
print(f"wrong side of the spiral: {100 * wrong:.1f} %")
