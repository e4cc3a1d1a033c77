"""One node with several devices. Its loop is the same however the step uses them:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/node_of_devices.py

    fsdp       loss 0.0102   of w, each device holds (8, 64)
    shard_map  loss 0.0102   of w, each device holds (64, 64)
    pmap       loss 0.0102   of w, each device holds (64, 64)

`session.step` takes the parameters as the step leaves them and hands them back where they were:
what was cut over devices stays cut, and no step compiles again. Each run here has one node, so that
all three must come to one loss. With a folder as the mailbox, other nodes may take part in a run
with other steps on other numbers of devices: it knows shapes, not places.

`pmap` is asked for parameters without a leading axis for devices (`in_axes` and `out_axes` None).
A program that keeps that axis passes one replica and spreads what comes back if it is another
object; docs/several-devices.md shows how.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdiloco

ROWS, WIDTH, STEPS = 64, 64, 100
optimizer = optax.adam(1e-2)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def loss_of(params, x):
    """The sine of a sum of eight numbers is to be learnt."""
    hidden = jnp.tanh(x @ params["v"] + params["b"])
    guess = jnp.tanh(hidden @ params["w"]) @ params["u"]
    return jnp.mean((guess - jnp.sin(x.sum(axis=1) / 2)) ** 2)


def step(params, opt_state, x, mean=lambda tree: tree):
    """One step; `mean` is taken over the devices where each sees its own rows alone."""
    loss, grads = mean(jax.value_and_grad(loss_of)(params, x))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def fsdp(params, opt_state):
    """Parameters and optimiser state are cut over the devices, as the rows of a batch are."""

    def lies(leaf):
        return NamedSharding(mesh, P("data") if jnp.ndim(leaf) else P())

    state = jax.tree.map(lambda leaf: jax.device_put(leaf, lies(leaf)), (params, opt_state))
    shardings = jax.tree.map(lies, state)
    program = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
    rows = NamedSharding(mesh, P("data"))
    return *state, lambda params, opt_state, x: program(params, opt_state, jax.device_put(x, rows))


def shard_map(params, opt_state):
    """Parameters are whole on every device; what crosses devices is written out."""

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False
    )
    def program(params, opt_state, x):
        return step(params, opt_state, x, lambda tree: jax.lax.pmean(tree, "data"))

    state = jax.device_put((params, opt_state), NamedSharding(mesh, P()))
    return *state, program


def pmap(params, opt_state):
    """The same in the old style, without a leading axis on parameters and optimiser state."""

    @functools.partial(
        jax.pmap, axis_name="data", in_axes=(None, None, 0), out_axes=(None, None, None)
    )
    def program(params, opt_state, x):
        return step(params, opt_state, x, lambda tree: jax.lax.pmean(tree, "data"))

    def each(x):
        return x.reshape(jax.device_count(), -1, *x.shape[1:])

    return params, opt_state, lambda params, opt_state, x: program(params, opt_state, each(x))


def train(name, setup):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"v": (8, WIDTH), "b": (WIDTH,), "w": (WIDTH, WIDTH), "u": (WIDTH,)}
    params = {
        n: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (n, shape) in zip(keys, shapes.items(), strict=True)
    }
    params, opt_state, program = setup(params, optimizer.init(params))
    algorithm = jdiloco.DiLoCo(sync_every=20, fragments=2, overlap_steps=0, outer_momentum=0.5)
    with jdiloco.Session(
        params, algorithm, mailbox=f"memory://{name}", poll_interval=0.02, callbacks=()
    ) as session:
        params = session.params
        for key in jax.random.split(jax.random.key(1), STEPS):
            x = jax.random.normal(key, (ROWS, 8))
            params, opt_state, loss = program(params, opt_state, x)
            params = session.step(params, samples=ROWS)  # The rows of all its devices.
            # On the CPU JAX 0.10 may hang where steps that span devices pile up.
            loss.block_until_ready()
    held = session.params["w"].addressable_shards[0].data.shape
    loss = loss_of(jax.device_get(session.params), jax.random.normal(jax.random.key(2), (2000, 8)))
    print(f"{name:9}  loss {loss:.4f}   of w, each device holds {held}")


for setup in (fsdp, shard_map, pmap):
    train(setup.__name__, setup)
