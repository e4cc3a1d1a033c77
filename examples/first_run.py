"""A node in twenty lines. Start it in two terminals at once: both train one model. About 10 s.

You should see one line for each event, and at the end the same small loss from both:

    loss of the run's newest values: 0.0000
"""

import zlib

import jax
import jax.numpy as jnp
import optax

import jdiloco

TRUTH = jnp.arange(8.0)
optimizer = optax.adam(0.05)


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - x @ TRUTH - 1) ** 2)


@jax.jit
def train_step(params, opt_state, key):
    grads = jax.grad(loss)(params, jax.random.normal(key, (32, 8)))
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


params = {"w": jnp.zeros(8), "b": jnp.zeros(())}
algorithm = jdiloco.DiLoCo(
    sync_every=50, fragments=2, overlap_steps=5, quorum_size=2, outer_momentum=0.5
)
with jdiloco.Session(
    params, algorithm, mailbox="runs/first", poll_interval=0.1, leave_with_run=True
) as session:
    params, opt_state = session.params, optimizer.init(params)
    seed = zlib.crc32(session.node_id.encode())  # Each node draws data of its own.
    for key in jax.random.split(jax.random.key(seed), 1000):
        params, opt_state = train_step(params, opt_state, key)
        params = session.step(params, samples=32)
held_out = jax.random.normal(jax.random.key(0), (512, 8))
print(f"loss of the run's newest values: {loss(session.params, held_out):.4f}")
