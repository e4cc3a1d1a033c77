"""Nodes divide files of data among themselves. Start it in two or three terminals. About 20 s.

Kill one of them while it trains: the others go on with its file where what it had published ends.
Start it again, or another: it takes the next free file. Each prints which files it trained on, and
together they trained on every file once:

    trained on files 0 3 5 6; loss of the run's newest values: 0.0000
"""

import jax
import jax.numpy as jnp
import optax

import jdiloco

FILES = 12
TRUTH = jnp.arange(8.0)
optimizer = optax.adam(0.1)
mine = []


def loss(params, x):
    return jnp.mean((x @ params["w"] - x @ TRUTH) ** 2)


@jax.jit
def update(params, opt_state, x):
    updates, opt_state = optimizer.update(jax.grad(loss)(params, x), opt_state)
    return optax.apply_updates(params, updates), opt_state


def read_batches(file):
    """Stands for reading: the same batches of a file, on whichever node."""
    mine.append(file)
    for key in jax.random.split(jax.random.key(file), 100):
        yield jax.random.normal(key, (32, 8))


def train_step(params, x):
    global opt_state
    params, opt_state = update(params, opt_state, x)
    return params, len(x)


params = {"w": jnp.zeros(8)}
algorithm = jdiloco.DiLoCo(sync_every=50, fragments=1, overlap_steps=5, outer_momentum=0.5)
with jdiloco.Session(params, algorithm, mailbox="runs/files", poll_interval=0.1) as session:
    opt_state = optimizer.init(session.params)
    session.run(train_step, jdiloco.SharedQueue(FILES, batches=read_batches))
held_out = jax.random.normal(jax.random.key(99), (512, 8))
found = loss(session.params, held_out)
print(f"trained on files {' '.join(map(str, mine))}; loss of the run's newest values: {found:.4f}")
