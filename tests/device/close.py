"""How long a round takes, over what a plain copy takes."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdiloco import diloco_outer, rda
from jdiloco.runtime.anchors import _subtracted
from jdiloco.runtime.close import FragmentCloser
from jdiloco.types import TensorSpec
from tests.device.place import Place, hold, take_round_in_place

RATIO_MAX = 4.0
"""Copies' worth of time that a round in one program may take, over the least it can. Three passes
over the contributions where two would do make 1.6."""


def seconds(work: Callable[[], Any], times: int) -> float:
    """The median, once what it compiles is compiled."""
    jax.block_until_ready(work())
    found = []
    for _ in range(times):
        began = time.perf_counter()
        jax.block_until_ready(work())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


CONTRIBUTIONS = 8
TENSORS = 8


def fragment_bytes(place: Place) -> int:
    """1 GiB, or what is left of it where the device cannot hold 24 of them."""
    size = 2**22 if place.small else 2**30
    room = (place.device.memory_stats() or {}).get("bytes_limit", 0)
    while room and 24 * size > room:
        size //= 2
    return size


def close(place: Place) -> Iterator[str]:
    size = fragment_bytes(place)
    shape = (size // 4 // TENSORS // 1024, 1024)
    names = [f"layer{i}/w" for i in range(TENSORS)]
    copy = copy_seconds(place, size)
    floor = (CONTRIBUTIONS + 2) * copy
    yield f"a copy of {size / 2**20:.0f} MiB on the device: {2 * size / copy / 2**30:.1f} GiB/s"
    taken = close_seconds(place, names, shape)
    yield (
        f"a round of {CONTRIBUTIONS} in one program: {taken * 1e3:.2f} ms, {taken / floor:.2f} of "
        "the least, which is to read contributions twice, and anchor and momentum both ways"
    )
    hold(taken <= RATIO_MAX * floor or place.small, f"more than {RATIO_MAX} of the least")
    for kind in ("device", "pinned_host"):
        taken = subtraction_seconds(place, names, shape, kind)
        yield f"subtracting {size / 2**20:.0f} MiB, anchors in {kind}: {taken * 1e3:.2f} ms"
    yield mailbox_close(names, shape, floor)


def close_seconds(place: Place, names: Sequence[str], shape: tuple[int, ...]) -> float:
    """A round of the transformation over its own anchor and momentum."""

    def draw(key: Any) -> Any:
        keys = jax.random.split(key, len(names))
        stack = (CONTRIBUTIONS, *shape)
        return {n: jax.random.normal(k, stack) for n, k in zip(names, keys, strict=True)}

    deltas = jax.jit(draw)(place.put(jax.random.key(0)))
    weights = place.put(np.arange(1.0, CONTRIBUTIONS + 1, dtype=np.float32))
    held: list[Any] = [place.put({name: np.zeros(shape, np.float32) for name in names})]
    held.append(diloco_outer().init(held[0]))

    def once() -> Any:
        held[:] = take_round_in_place((rda(), 0.7, 0.9), deltas, held[1], held[0], weights)
        return held

    return seconds(once, 3 if place.small else 9)


def copy_seconds(place: Place, size: int) -> float:
    source = place.put(np.ones(size // 4, np.float32))
    copied = jax.jit(jnp.copy)
    return seconds(lambda: copied(source), 3 if place.small else 9)


def subtraction_seconds(
    place: Place, names: Sequence[str], shape: tuple[int, ...], kind: str
) -> float:
    """What a round costs a learner's device, by where anchors are."""
    leaves = tuple(place.put(np.ones(shape, np.float32)) for _ in names)
    where = leaves[0].sharding.with_memory_kind(kind)
    anchors = tuple(jax.device_put(np.ones(shape, np.float32), where) for _ in names)
    return seconds(functools.partial(_subtracted, anchors, leaves, dtype=None), 5)


def mailbox_close(names: Sequence[str], shape: tuple[int, ...], floor: float) -> str:
    """A round as nodes close it: on the host, from received memory."""
    elements = math.prod(shape)
    received = np.random.default_rng(0).standard_normal(
        elements * TENSORS + 1024 * CONTRIBUTIONS, np.float32
    )  # Contributions overlap, so that there need not be memory for eight.
    specs = [TensorSpec(name, shape, "float32") for name in names]
    closer = FragmentCloser(specs, rda(), outer_lr=0.7, outer_momentum=0.9)
    closer.load({name: np.zeros(shape, np.float32) for name in names}, None, None)

    def contribution(number: int) -> dict[str, np.ndarray]:
        mine = received[1024 * number :][: elements * TENSORS].reshape(TENSORS, *shape)
        return dict(zip(names, mine, strict=True))

    def once() -> None:
        measured = [closer.measure(contribution(k)) for k in range(CONTRIBUTIONS)]
        closer.close(measured, [float(k + 1) for k in range(CONTRIBUTIONS)])

    def copies() -> None:
        for k in range(CONTRIBUTIONS + 2):
            np.copyto(target, received[1024 * (k % CONTRIBUTIONS) :][: elements * TENSORS])

    target = np.zeros(elements * TENSORS, np.float32)
    taken, plain = seconds(once, 2), seconds(copies, 2)
    return (
        f"the same on the host, as nodes close it: {taken:.2f} s, {taken / plain:.2f} of its own "
        f"floors and {taken / floor:.1f} of the device's"
    )
