"""What a pod cannot do, asked for by both of its processes: `… FOLDER PORT PROCESS`.

Prints a line for everything that was refused, `what: the beginning of the message`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdiloco
from jdiloco.errors import ClosingFailed, UsageError
from jdiloco.store import MemoryStore
from tests.multiprocess.node import die_with_parent
from tests.session.nodes import digest


@contextlib.contextmanager
def refused(what: str, *kinds: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except (UsageError, *kinds) as error:
        print(f"{what}: {error}"[:200], flush=True)
    else:
        raise AssertionError(f"{what} was not refused")


def main(folder: Path, port: str, process: int) -> None:
    jax.distributed.initialize(
        f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20
    )
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,))
    cut = NamedSharding(mesh, P("a"))
    params = {"w": jax.device_put(jnp.arange(8.0), cut)}
    settings = {
        "sync_every": 4,
        "fragments": 1,
        "outer_momentum": 0.0,
        "beat_seconds": 0.5,
        "lease_seconds": 8.0,
    }
    algorithm = jdiloco.DiLoCo(overlap_steps=0, global_batch_size=24, **settings)
    small = jdiloco.DiLoCo(delta_dtype="float8_e4m3fn", **settings)

    def session(given: Any = params, by: jdiloco.DiLoCo = algorithm, **more: Any):
        usual = {"mailbox": folder / "mailbox", "poll_interval": 0.1, "callbacks": ()}
        return jdiloco.Session(given, by, **{**usual, **more})

    for role in ("syncer", "either"):
        with refused(role), session(role=role):
            pass
    with refused("ranks"), session(ranks=2):
        pass
    with refused("small"), session(by=small):
        pass
    with refused("memory"), session(mailbox=MemoryStore("alone")):
        pass
    with refused("local"), session({"w": jnp.arange(8.0)}):
        pass
    with refused("numpy"), session({"w": np.arange(8.0, dtype=np.float32)}):
        pass
    here = cut if process == 0 else NamedSharding(mesh, P())
    values = np.arange(8.0, dtype=np.float32)
    unlike = jax.make_array_from_callback((8,), here, lambda index: values[index])
    with refused("cut otherwise"), session({"w": unlike}):
        pass
    with refused("unlike"), session(leave_with_run=process == 0):
        pass
    elsewhere = folder / ("mailbox" if process == 0 else "elsewhere")
    with refused("elsewhere", ClosingFailed), session(mailbox=elsewhere, node_id="a"):
        pass

    with jax.set_mesh(mesh), session(node_id="a") as s:  # As programs with explicit axes do.
        held = s.params
        with refused("queue"):
            s.run(lambda p, item: (p, 1), jdiloco.SharedQueue(2, batches=lambda unit: range(2)))
        with refused("barrier"):
            s.wait_at(jdiloco.Barrier("b", nodes=1), held)
        with refused("save"):
            s.save(folder / f"save.{process}", extra=held)
        if process:
            with refused("status"):
                print(s.status)
        assert s.batch_size == 24
        assert s.node_id == "a"
        for _ in range(12):
            held = s.step(jax.tree.map(lambda x: x - 1.0, held), samples=4)
        assert held["w"].sharding == cut
        assert s.position == 12
    assert len({digest(shard.data) for shard in s.params["w"].addressable_shards}) == 2

    with (
        refused("samples", ClosingFailed),
        session(node_id="b", mailbox=folder / "unlike samples") as s,
    ):
        held = s.params
        for _ in range(12):
            held = s.step(held, samples=4 + process)

    # A module is trained in place, and a node that is a pod may move its parameters.
    auto = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    module = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    module.kernel = nnx.Param(jax.device_put(module.kernel[...], NamedSharding(auto, P(None, "a"))))
    assert module.bias is not None
    module.bias = nnx.Param(jax.device_put(module.bias[...], NamedSharding(auto, P("a"))))
    by = jdiloco.DiLoCo(overlap_steps=0, alignment=jdiloco.blend(0.5), **settings)
    with session(module, by, node_id="m", mailbox=folder / "module") as s:
        for number in range(12):
            module.kernel.set_value(module.kernel[...] * 0.9)
            if number == 5:
                moved = NamedSharding(auto, P("a", None))
                module.kernel.set_value(jax.device_put(module.kernel[...], moved))
            s.step(samples=4)
        assert module.kernel[...].sharding == moved
    print("done", flush=True)


if __name__ == "__main__":
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
