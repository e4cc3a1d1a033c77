"""Every device is a learner of its own, in one `pmap`. Run it as it is, or pretend eight devices:

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/pmap_learners.py

Old-style replicated training averages gradients over the axis in every step. Here nothing crosses
devices for 25 steps; then each hands its delta to `diloco_outer`, which merges over the same axis.
Each replica ends a round with the same anchor and outer state, so both come without a leading axis
(`out_axes=None`); only the optimiser state is each learner's own.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import jdiloco

LEARNERS, ROUNDS, STEPS, ROWS = jax.device_count(), 20, 25, 32
TRUTH = jnp.arange(8.0)
inner = optax.adam(0.05)
outer = jdiloco.diloco_outer(outer_momentum=0.5, axis_name="learner")


def loss_of(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - x @ TRUTH - 1) ** 2)


@functools.partial(
    jax.pmap, axis_name="learner", in_axes=(None, None, 0, 0), out_axes=(None, None, 0, 0)
)
def one_round(anchor, outer_state, inner_state, batches):
    def step(carry, x):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, state = inner.update(grads, state)
        return (optax.apply_updates(params, updates), state), loss

    (params, inner_state), losses = jax.lax.scan(step, (anchor, inner_state), batches)
    delta = jax.tree.map(jnp.subtract, anchor, params)  # Against the training, like a gradient.
    weight = jdiloco.contribution_weight(samples=STEPS * ROWS, steps=STEPS)
    updates, outer_state = outer.update(delta, outer_state, anchor, weights=weight)
    return optax.apply_updates(anchor, updates), outer_state, inner_state, losses


anchor = {"w": jnp.zeros(8), "b": jnp.zeros(())}
outer_state = outer.init(anchor)
inner_state = jax.tree.map(lambda x: jnp.stack([x] * LEARNERS), inner.init(anchor))
for key in jax.random.split(jax.random.key(0), ROUNDS):
    batches = jax.random.normal(key, (LEARNERS, STEPS, ROWS, 8))
    anchor, outer_state, inner_state, losses = one_round(anchor, outer_state, inner_state, batches)
    losses.block_until_ready()
held_out = jax.random.normal(jax.random.key(1), (512, 8))
print(f"{LEARNERS} learners, loss {loss_of(anchor, held_out):.4f}")
