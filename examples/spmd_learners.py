"""Four learners in one program. Run it as it is, or pretend eight devices:

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/spmd_learners.py
"""

import jax
import jax.numpy as jnp
import optax

import jdiloco
from jdiloco import spmd

LEARNERS, BATCH = 4, 32
TRUTH = jnp.arange(8.0)
optimizer = optax.adam(0.05)
algorithm = jdiloco.DiLoCo(sync_every=25, fragments=1, outer_momentum=0.5)


def loss(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - x @ TRUTH - 1) ** 2)


def step(params, opt_state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, value


mesh = None
if len(jax.devices()) % LEARNERS == 0:
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((LEARNERS, len(jax.devices()) // LEARNERS), ("learner", "model"), auto)
params = {"w": jnp.zeros(8), "b": jnp.zeros(())}
state = spmd.init(algorithm, params, optimizer.init(params), learners=LEARNERS, mesh=mesh)
for key in jax.random.split(jax.random.key(0), 20):
    batches = jax.random.normal(key, (LEARNERS, spmd.steps_of(algorithm, 0), BATCH, 8))
    state, losses = spmd.round(algorithm, step, state, batches, samples=BATCH, mesh=mesh)
    losses.block_until_ready()
held_out = jax.random.normal(jax.random.key(1), (512, 8))
print(f"{len(jax.devices())} devices, loss {loss(state.anchor, held_out):.4f}")
