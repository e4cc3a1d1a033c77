"""DiLoCo written by hand, with something of your own between merge and outer step. About 10 s.

Three learners with bf16 parameters on one device. `diloco_outer()` is a chain of three links. What
clips, decays or wraps goes after the merge, where there is one delta in the shapes of the model,
and before the fp32 master, which must see every change. You should see the length of the merged
delta shrink below the clip, and the loss with it:

    round  0   merged delta 2.48   loss 4.3
    ...
    round 29   merged delta 0.00   loss 0.00033
"""

import jax
import jax.numpy as jnp
import optax

import jdiloco

LEARNERS, ROUNDS, STEPS, ROWS = 3, 30, 25, 32
CLIP = 1.0
TRUTH = jnp.arange(8.0) / 4
inner = optax.adam(0.05)
merge = jdiloco.merge_deltas(jdiloco.rda())
outer = optax.chain(
    merge,
    optax.clip_by_global_norm(CLIP),
    jdiloco.outer_nesterov(outer_lr=0.7, outer_momentum=0.5),
    jdiloco.fp32_master(),
)


def loss_of(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - x @ TRUTH - 1) ** 2)


def train(params, state, batches):
    """One learner for one round."""

    def step(carry, x):
        params, state = carry
        updates, state = inner.update(jax.grad(loss_of)(params, x), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), batches)[0]


@jax.jit
def one_round(anchor, outer_state, inner_states, batches, weights):
    params, inner_states = jax.vmap(train, in_axes=(None, 0, 0))(anchor, inner_states, batches)
    # Subtract what the learners would see: XLA would skip the rounding to bf16 inside one program.
    params = jax.lax.optimization_barrier(params)
    deltas = jax.tree.map(lambda a, p: a.astype(jnp.float32) - p, anchor, params)
    merged, _ = merge.update(deltas, merge.init(anchor), weights=weights)  # Only to look at.
    updates, outer_state = outer.update(deltas, outer_state, anchor, weights=weights)
    anchor = optax.apply_updates(anchor, updates)
    return anchor, outer_state, inner_states, optax.global_norm(merged)


anchor = {"w": jnp.zeros(8, jnp.bfloat16), "b": jnp.zeros((), jnp.bfloat16)}
outer_state = outer.init(anchor)
inner_states = jax.tree.map(lambda x: jnp.stack([x] * LEARNERS), inner.init(anchor))
weights = [jdiloco.contribution_weight(samples=STEPS * ROWS, steps=STEPS)] * LEARNERS
held_out = jax.random.normal(jax.random.key(1), (512, 8))
for number, key in enumerate(jax.random.split(jax.random.key(0), ROUNDS)):
    batches = jax.random.normal(key, (LEARNERS, STEPS, ROWS, 8), jnp.bfloat16)
    anchor, outer_state, inner_states, length = one_round(
        anchor, outer_state, inner_states, batches, weights
    )
    loss = loss_of(anchor, held_out)
    print(f"round {number:2}   merged delta {length:.2f}   loss {loss:.2g}")
