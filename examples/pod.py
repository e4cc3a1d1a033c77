"""A node that is a pod: one program over several hosts, parameters cut over all their devices.

    python pod.py --mailbox runs/pods --rank 0

on every host of a slice or of a Slurm job step, where JAX finds its peers by itself; elsewhere say
who they are, here two processes on one machine:

    for process in 0 1; do
      JAX_NUM_CPU_DEVICES=2 python pod.py --mailbox runs/pods --rank 0 \\
        --coordinator 127.0.0.1:9876 --processes 2 --process $process &
    done

`--rank` is the number of the pod, the same in all its processes, and picks its part of the data. A
second pod, or a single machine (`--processes 1`), takes part under another. Each process moves its
own shards to and from the mailbox. The first process of each pod prints at the end

    pod 0, 2 processes, 4 devices: loss 0.6, of w1 each device holds (32, 16)
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdiloco

ROWS, WIDTH, HIDDEN = 64, 16, 128  # Rows of a step, over all devices of the pod.
optimizer = optax.adam(1e-2)


def loss_of(params, x):
    hidden = jax.nn.relu(x @ params["w1"].T + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - jnp.abs(x).sum(1)) ** 2)


@jax.jit
def train_step(params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def initial(mesh):
    """Parameters where they belong: long axes cut over all devices, short tensors whole on each."""
    keys = jax.random.split(jax.random.key(0))
    where = {"w1": P("fsdp", None), "b1": P("fsdp"), "w2": P("fsdp"), "b2": P()}
    made = {
        "w1": jax.random.normal(keys[0], (HIDDEN, WIDTH)) / WIDTH**0.5,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(keys[1], (HIDDEN,)) / HIDDEN**0.5,
        "b2": jnp.zeros(()),
    }
    return {name: jax.device_put(x, NamedSharding(mesh, where[name])) for name, x in made.items()}


def batch(mesh, rank, number):
    """Rows of this pod for one step; every process draws only its own."""
    rows = ROWS // jax.process_count()
    draw = np.random.default_rng((rank, number, jax.process_index()))
    mine = draw.normal(size=(rows, WIDTH)).astype(np.float32)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("fsdp", None)), mine)


def main(options):
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    algorithm = jdiloco.DiLoCo(
        sync_every=50, fragments=2, overlap_steps=10, outer_momentum=0.5, lease_seconds=30.0
    )
    with jdiloco.Session(
        initial(mesh), algorithm, options.mailbox, node_id=f"pod-{options.rank}", poll_interval=0.2
    ) as session:
        params = session.params
        opt_state, loss = optimizer.init(params), None
        for number in range(session.position, options.steps):
            params, opt_state, loss = train_step(
                params, opt_state, batch(mesh, options.rank, number)
            )
            params = session.step(params, samples=ROWS)
            jax.block_until_ready(params)
    if session.stopped_by is not None:
        sys.exit(143)  # Not finished: whoever started this is to start it again.
    if jax.process_index() == 0 and loss is not None:
        held = params["w1"].addressable_shards[0].data.shape
        print(
            f"pod {options.rank}, {jax.process_count()} processes, {jax.device_count()} devices: "
            f"loss {float(loss):.4f}, of w1 each device holds {held}"
        )


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mailbox", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--coordinator", help="host:port of the first process")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    options = parsed()
    if options.processes != 1:
        # A process that dies takes the others with it after the first of these times, and one that
        # raises after the second; then the pod is started again. Without arguments Slurm, TPU and
        # Kubernetes say who the others are.
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process,
            heartbeat_timeout_seconds=30,
            shutdown_timeout_seconds=30,
        )
    main(options)
