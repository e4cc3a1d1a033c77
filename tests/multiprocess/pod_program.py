"""One process of a node: `python -m tests.multiprocess.pod_program FOLDER SETTINGS`.

The settings are JSON (`test_pods.USUAL`). With more than one process the node is a pod. What the
process ends with, and what it measured, goes to a file of its own as JSON. SIGUSR1 makes it print
where its threads are.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdiloco
from jdiloco import events
from tests.multiprocess.node import die_with_parent
from tests.session.nodes import digest

optimizer = optax.sgd(0.05)

LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, P]]] = {
    "rows": (("a",), {"w": P("a", None), "v": P("a"), "b": P()}),
    "mixed": (("a", "r"), {"w": P(None, "a"), "v": P("a", "r"), "b": P("r")}),
    "plain": ((), {}),
}
"""Mesh axes, and along which of them each tensor is cut; what is not named is held by all."""


def mesh_of(layout: str) -> Mesh | None:
    axes, _ = LAYOUTS[layout]
    if not axes:
        return None
    shape = (jax.device_count(),) if len(axes) == 1 else (jax.process_count(), -1)
    devices = np.array(jax.devices()).reshape(shape)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def spread(tree: dict[str, Any], layout: str, mesh: Mesh | None) -> dict[str, Any]:
    if mesh is None:
        return {name: jnp.asarray(value) for name, value in tree.items()}
    specs = LAYOUTS[layout][1]
    return {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in tree.items()}


def initial(seed: int, width: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "w": draw.normal(size=(16, width)).astype(np.float32),
        "v": draw.normal(size=(width, 4)).astype("bfloat16"),
        "b": draw.normal(size=(4,)).astype(np.float32),
        "s": np.asarray(draw.normal(), np.float32),
    }


def loss_of(params: dict[str, Any], x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w"])
    out = hidden @ params["v"].astype(jnp.float32) + params["b"] + params["s"]
    return jnp.mean((out - x[:, :4]) ** 2)


@jax.jit
def train_step(params: dict[str, Any], x: jax.Array) -> Any:
    grads = jax.grad(loss_of)(params, x)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


def gathered(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor as a whole, for the test alone."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    mesh = next(iter(tree.values())).sharding.mesh
    whole = jax.jit(lambda t: t, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data), whole)


def main(folder: Path, told: dict[str, Any]) -> dict[str, Any]:
    if told["processes"] > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{told['port']}",
            told["processes"],
            told["process"],
            initialization_timeout=60,
            heartbeat_timeout_seconds=10,
            shutdown_timeout_seconds=10,
        )
    mesh = mesh_of(told["layout"])
    params = spread(initial(told["seed"], told["width"]), told["layout"], mesh)
    journal = (folder / f"journal.{told['name']}.{told['process']}").open("a", buffering=1)

    def tell(event: events.Event) -> None:
        journal.write(json.dumps(event.fields()) + "\n")

    session = jdiloco.Session(
        params,
        jdiloco.DiLoCo(**told["run"]),
        folder / "mailbox",
        role=told["role"],
        node_id=told["name"],
        poll_interval=0.1,
        callbacks=(tell,),
        leave_with_run=told["leave_with_run"],
    )
    draw = np.random.default_rng(told["data"])
    with session:
        params = session.params
        first = digest(gathered(params))
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(session.position, told["steps"]):
            x = draw.normal(size=(8, 16)).astype(np.float32)
            rows = x if mesh is None else jax.device_put(x, NamedSharding(mesh, P()))
            params = train_step(params, rows)
            jax.block_until_ready(params)
            params = session.step(params, samples=8)
            (folder / f"step.{told['name']}.{told['process']}").write_text(str(number))
            time.sleep(told["pause"])
    whole = gathered(session.params)
    return {
        "first": first,
        "committed": digest(whole),
        "values": {name: np.asarray(x, np.float32).tolist() for name, x in whole.items()}
        if told["width"] < 100
        else {},
        "stopped_by": session.stopped_by,
        "begun_kib": begun,
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


if __name__ == "__main__":
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _folder, _told = Path(sys.argv[1]), json.loads(sys.argv[2])
    _found = main(_folder, _told)
    (_folder / f"ended.{_told['name']}.{_told['process']}").write_text(json.dumps(_found))
