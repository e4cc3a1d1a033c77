"""One process of a node: `python -m tests.multiprocess.pod_program FOLDER SETTINGS`.

The settings are JSON (`test_pods.USUAL`). With more than one process the node is a pod. What the
process ends with, and what it measured, goes to a file of its own as JSON. SIGUSR1 makes it print
where its threads are.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import signal
import sys
import time
import tracemalloc
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
from jdiloco.runtime.backends import CPU
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


def initial(seed: int, width: int, task: str) -> dict[str, np.ndarray]:
    if task == "drift":
        return {"w": np.ones((16, width), np.float32)}
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


@jax.jit
def drift(params: dict[str, Any], x: jax.Array) -> Any:
    """Training that takes no more memory than the parameters."""
    return jax.tree.map(lambda p: p * 0.999 + jnp.mean(x).astype(p.dtype) * 1e-3, params)


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
    whole = initial(told["seed"], told["width"], told["task"])
    params = spread(whole, told["layout"], mesh)
    del whole
    kind, *numbers = told["alignment"].split()
    alignment = getattr(jdiloco, kind)(*map(float, numbers))
    journal = (folder / f"journal.{told['name']}.{told['process']}").open("a", buffering=1)

    def tell(event: events.Event) -> None:
        journal.write(json.dumps(event.fields()) + "\n")

    pinned = told["anchors"] == "pinned_host"
    off_the_device = dataclasses.replace(CPU, anchor_memory="pinned_host", copies_ahead=True)
    session = jdiloco.Session(
        params,
        jdiloco.DiLoCo(alignment=alignment, **told["run"]),
        folder / "mailbox",
        role=told["role"],
        node_id=told["name"],
        poll_interval=0.1,
        backend=off_the_device if pinned else CPU,
        callbacks=(tell,),
        leave_with_run=told["leave_with_run"],
    )
    draw = np.random.default_rng(told["data"])
    step = {"learn": train_step, "drift": drift}[told["task"]]
    aligned = []
    tracemalloc.start()
    with session:
        if told["role"] == "syncer":
            session.run()
            return {}
        params = session.params
        first = "" if told["task"] == "drift" else digest(gathered(params))
        for number in range(session.position, told["steps"]):
            x = draw.normal(size=(8, 16)).astype(np.float32)
            rows = x if mesh is None else jax.device_put(x, NamedSharding(mesh, P()))
            params = step(params, rows)
            jax.block_until_ready(params)
            newer = session.step(params, samples=8)
            if newer is not params and told["task"] == "learn":
                aligned.append((number, digest(gathered(newer))))
            params = newer
            (folder / f"step.{told['name']}.{told['process']}").write_text(str(number))
            time.sleep(told["pause"])
    _, peak = tracemalloc.get_traced_memory()
    spent = session._entry.spent_here()
    if told["task"] == "drift":
        return {"peak": peak, "received": spent.received, "sent": spent.sent}
    whole = gathered(session.params)
    assert session._entry.learner is not None
    anchors = [anchor for leaves in session._entry.learner._anchors.of for anchor in leaves]
    return {
        "anchors": sorted({str(anchor.sharding.memory_kind) for anchor in anchors}),
        "first": first,
        "committed": digest(whole),
        "values": {name: np.asarray(x, np.float32).tolist() for name, x in whole.items()},
        "aligned": aligned,
        "position": session.position,
        "stopped_by": session.stopped_by,
    }


if __name__ == "__main__":
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _folder, _told = Path(sys.argv[1]), json.loads(sys.argv[2])
    _found = main(_folder, _told)
    (_folder / f"ended.{_told['name']}.{_told['process']}").write_text(json.dumps(_found))
