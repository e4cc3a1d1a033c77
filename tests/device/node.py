"""A lone node that trains on a device, and its commits once more on the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax

import jdiloco
from jdiloco import events
from jdiloco.algo.partition import by_bytes, plan
from jdiloco.algo.paths import named_leaves
from jdiloco.testing import oracle
from tests.device.place import EXACT, Place, distance, hold

COMPILED = "/jax/core/compile/backend_compile_duration"
SYNC_EVERY, FRAGMENTS, MOMENTUM = 6, 2, 0.5


def model(place: Place) -> tuple[Any, Callable[..., Any], Any]:
    """Parameters, a donating step of AdamW and its state: a few matrices, one of them bf16."""
    width = 64 if place.small else 2048
    rng = np.random.default_rng(0)
    scale = np.float32(1 / math.sqrt(width))
    matrices = [rng.standard_normal((width, width), np.float32) * scale for _ in range(4)]
    params = place.put(
        {f"layer{i}": m for i, m in enumerate(matrices)}
        | {"head": (matrices[0] * 0.5).astype(jnp.bfloat16), "scale": np.float32(1.0)}
    )
    optimizer = optax.adamw(1e-3)

    def loss_of(params, batch):
        for i in range(4):
            batch = jax.nn.relu(batch @ params[f"layer{i}"]) + batch
        out = (batch.astype(jnp.bfloat16) @ params["head"]).astype(jnp.float32)
        return jnp.mean((params["scale"] * out - 1.0) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return params, step, optimizer.init(params)


class Replayed:
    """The commits of a lone node once more, in float64 on the host."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.names = plan(by_bytes(), named_leaves(params).specs, FRAGMENTS)
        self.anchor = jax.device_get(dict(params))
        self.master = {name: oracle.widen(value) for name, value in self.anchor.items()}
        self.momentum = {name: np.zeros(np.shape(value)) for name, value in self.anchor.items()}

    def commit(self, fragment: int, params: Mapping[str, Any]) -> None:
        """A round that merges `params` alone: RDA of one delta is that delta."""
        for name in self.names[fragment]:
            dtype = self.anchor[name].dtype
            delta = oracle.narrow(oracle.delta(self.anchor[name], params[name]), dtype)
            self.master[name], self.momentum[name] = oracle.outer_step(
                self.master[name], self.momentum[name], delta, outer_momentum=MOMENTUM
            )
            self.anchor[name] = oracle.narrow(self.master[name], dtype)


def session(place: Place) -> Iterator[str]:
    params, step, state = model(place)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    batch = place.put(
        np.random.default_rng(1).standard_normal((64, len(params["layer0"])), np.float32)
    )
    aligned: list[events.Aligned] = []
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **more: compiled.append(event) if event == COMPILED else None
    )
    settings = jdiloco.DiLoCo(
        sync_every=SYNC_EVERY, fragments=FRAGMENTS, overlap_steps=0, outer_momentum=MOMENTUM
    )
    replayed = Replayed(params)

    def note(event: events.Event) -> None:
        if isinstance(event, events.Aligned):
            aligned.append(event)

    node = jdiloco.Session(
        params, settings, "memory://check-gpu", poll_interval=0.02, backend=place.backend,
        callbacks=(note,),
    )  # fmt: skip
    warm = 0
    with node as s:
        params = s.params
        for number in range(12 * SYNC_EVERY):
            if number == 4 * SYNC_EVERY:
                warm = len(compiled)
            params, state, _ = step(params, state, batch)
            seen, trained = len(aligned), jax.device_get(params)
            params = s.step(params, samples=64)
            for event in aligned[seen:]:
                replayed.commit(event.fragment, trained)
        hold(len(compiled) == warm, f"{len(compiled) - warm} compilations once it was warm")
        _check_places(place, s, params)
        committed = jax.device_get(s.params)
    hold(len(aligned) >= 12 * FRAGMENTS, f"only {len(aligned)} commits were aligned with")
    for name, value in committed.items():
        want = replayed.anchor[name]
        off = distance(value, want)
        allowed = EXACT if value.dtype == np.float32 else 4e-3  # bf16: one rounding the other way.
        hold(off <= allowed, f"{name} was committed {off:.1e} from what the host computes")
    yield (
        f"{len(aligned)} commits of {size / 2**20:.0f} MiB of parameters as the host computes "
        f"them; backend {node._entry.backend.name}, no compilation in the last "
        f"{8 * SYNC_EVERY} steps"
    )


def _check_places(place: Place, s: jdiloco.Session, params: Any) -> None:
    assert s._entry.learner is not None
    anchors = [anchor for leaves in s._entry.learner._anchors.of for anchor in leaves]
    kinds = {anchor.sharding.memory_kind for anchor in anchors}
    hold(kinds == {"pinned_host"}, f"anchors are in {kinds}")
    found = {(leaf.sharding.memory_kind, *leaf.sharding.device_set) for leaf in params.values()}
    hold(found == {("device", place.device)}, f"parameters are in {found}")
