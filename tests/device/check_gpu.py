"""What the library promises, on a GPU. One script, under five minutes:

    python -m tests.device.check_gpu

from a checkout, where jdiloco and a JAX that sees the GPU are installed (`pip install -e .
"jax[cuda13]"`); it needs nothing of the tests beside it. Without a GPU it refuses. The same on what
every machine has, in half a minute, to try the script and not the device:

    python -m tests.device.check_gpu --platform cpu --scale small

    tables      every table of the merges: weights, small inputs, lengths, embeddings
    agreement   the device, the host's CPU, float64 and the close of a mailbox give one result
    repeated    equal inputs give equal bytes, also after compiling again
    session     a node trains with its anchors in pinned memory of the host: what it commits is what
                the host computes, and nothing compiles again
    close       a fragment of 1 GiB with 8 contributions, over the speed of a plain copy

Exits with 0 if all of it holds, 1 if not, and 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax

import jdiloco
from jdiloco import contribution_weight, diloco_outer, events, rda, weighted_mean
from jdiloco.algo.partition import by_bytes, plan
from jdiloco.algo.paths import named_leaves
from jdiloco.errors import UsageError
from jdiloco.runtime.backends import BACKENDS, CPU, Backend, host_device
from jdiloco.runtime.close import FragmentCloser
from jdiloco.runtime.learner import _subtracted
from jdiloco.testing import oracle
from jdiloco.types import TensorSpec

SECONDS_MAX = 300.0
RATIO_MAX = 4.0
"""Copies' worth of time that a round in one program may take, over the least it can. Three passes
over the contributions where two would do make 1.6."""

EXACT = 1e-6  # Per tensor, relative to its length.
COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the checks are run, and how large."""

    device: Any
    host: Any
    small: bool

    @property
    def backend(self) -> Backend:
        """Anchors in pinned memory everywhere: a CPU has that too."""
        if self.device.platform == "cpu":
            return dataclasses.replace(CPU, anchor_memory="pinned_host", copies_ahead=True)
        return next(b for b in BACKENDS.values() if self.device.platform in b.platforms)

    def put(self, tree: Any) -> Any:
        return jax.device_put(tree, self.device)


class Failed(Exception):
    """Something does not hold."""


def hold(true: Any, what: str) -> None:
    if not true:
        raise Failed(what)


def length(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def distance(a: Any, b: Any) -> float:
    """How far apart two tensors are, measured against the second."""
    wide = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return length(wide) / max(length(b), 1e-300)


# Rounds in one program


def one_round(
    settings: tuple[Any, float, float], deltas: Any, state: Any, params: Any, weights: Any
) -> tuple[Any, Any]:
    """Parameters and state after a round of the transformation."""
    merge, rate, momentum = settings
    tx = diloco_outer(merge, rate, momentum)
    updates, state = tx.update(deltas, state, params, weights=weights)
    return optax.apply_updates(params, updates), state


take_round = jax.jit(one_round, static_argnums=0)
take_round_in_place = jax.jit(one_round, static_argnums=0, donate_argnums=(2, 3))

PLAIN = (1.0, 0.0)  # No outer learning rate, no momentum: parameters − Δ.


def merged(place: Place, merge: Any, rows: Any, weights: Any, name: str = "w") -> np.ndarray:
    """The merge of one tensor on the device, as the first momentum of a round."""
    rows = np.asarray(rows, np.float32)
    params = place.put({name: np.zeros(rows.shape[1:], np.float32)})
    state = diloco_outer(merge, *PLAIN).init(params)
    given = place.put(({name: rows}, np.asarray(weights, np.float32)))
    _, state = take_round((merge, *PLAIN), given[0], state, params, given[1])
    return np.asarray(state[1].momentum[name])


# Tables

WEIGHTS = [("A", 12, 3_072, 786_432), ("B", 6, 1_536, 393_216), ("C", 12, 1_536, 196_608)]
SMALL = [
    ([(1, 0), (3, 0)], (1, 1), (2, 0), (2, 0)),
    ([(1, 0), (0, 1)], (4, 1), (0.8, 0.2), (0.970, 0.243)),
    ([(3, 0), (0, 1)], (1, 1), (1.5, 0.5), (1.414, 1.414)),
    ([(1, 0), (-1, 0)], (2, 1), (0.333, 0), (1, 0)),
    ([(1, 0), (-1, 0)], (1.001, 1), (0.0005, 0), (1, 0)),
    ([(1, 0), (-1, 0)], (1, 1), (0, 0), (0, 0)),
    ([(0, 0), (1, 0)], (1, 1), (0.5, 0), (0.5, 0)),
]
SHRUNK = {2: 0.705, 4: 0.498, 8: 0.354}


def tables(place: Place) -> Iterator[str]:
    for name, steps, samples, weight in WEIGHTS:
        hold(contribution_weight(steps=steps, samples=samples) == weight, f"weight of {name}")
    for rows, weights, mean, radial in SMALL:
        for merge, want, exact in (
            (weighted_mean(), mean, oracle.weighted_mean(rows, weights)),
            (rda(), radial, oracle.rda(rows, weights)),
        ):
            found = merged(place, merge, rows, weights)
            hold(np.allclose(found, want, atol=5.1e-4), f"{merge} of {rows}: {found}, not {want}")
            hold(np.allclose(found, exact, atol=1e-6), f"{merge} of {rows}: {found}, not {exact}")
    yield f"{len(WEIGHTS)} weights and {len(SMALL)} rows of small inputs, both merges"
    forty = math.radians(40)
    rows = [(math.cos(forty), math.sin(forty)), (math.cos(forty), -math.sin(forty))]
    lengths = [length(merged(place, merge, rows, (1, 1))) for merge in (weighted_mean(), rda())]
    hold(np.allclose(lengths, (0.766, 1), atol=5e-4), f"40 degrees either side: {lengths}")
    found = []
    for count, shrunk in SHRUNK.items():
        rows = np.random.default_rng(count).normal(size=(count, 100_000))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        found.append(length(merged(place, weighted_mean(), rows, np.ones(count))))
        hold(abs(found[-1] - shrunk) < 0.006, f"the mean of {count} directions: {found[-1]}")
        full = length(merged(place, rda(), rows, np.ones(count)))
        hold(abs(full - 1) < EXACT, f"RDA of {count} directions has length {full}")
    yield f"random directions: means of length {', '.join(f'{x:.3f}' for x in found)}, RDA 1"
    yield _embeddings(place)
    yield _limits(place)


def _embeddings(place: Place) -> str:
    """What is committed of two tensors, one of them an embedding."""
    names = ("tok_embed.weight", "mlp.weight")
    params = place.put({name: np.ones(2, np.float32) for name in names})
    deltas = place.put({name: np.eye(2, dtype=np.float32) for name in names})
    state = diloco_outer(rda(), *PLAIN).init(params)
    weights = place.put(np.array([4, 1], np.float32))
    committed, _ = take_round((rda(), *PLAIN), deltas, state, params, weights)
    for name, want in zip(names, ((0.2, 0.8), (0.030, 0.757)), strict=True):
        hold(np.allclose(committed[name], want, atol=1e-3), f"{name}: {committed[name]}")
    return "an embedding gets the weighted mean, its neighbour RDA"


def _limits(place: Place) -> str:
    row = np.random.default_rng(1).normal(size=(1, 1000)).astype(np.float32)
    alone = merged(place, weighted_mean(), row, [7.0])
    hold(alone.tobytes() == row[0].tobytes(), "one contribution is not its weighted mean")
    hold(distance(merged(place, rda(), row, [7.0]), row[0]) < 2e-7, "RDA of one contribution")
    same = merged(place, rda(), np.repeat(row, 3, axis=0), [1, 1000, 3])
    hold(distance(same, row[0]) < 2e-7, "RDA of equal deltas")
    opposite = np.concatenate([row, -2.5 * row])
    hold(not merged(place, rda(), opposite, [1, 1]).any(), "directions that cancel leave something")
    params = place.put({"w": np.zeros(1000, np.float32)})
    state = diloco_outer().init(params)
    deltas, weights = place.put(({"w": row}, np.ones(1, np.float32)))
    stepped, _ = take_round((rda(), 0.7, 0.9), deltas, state, params, weights)
    hold(distance(stepped["w"], -1.33 * row[0]) < EXACT, "the first outer step is not 1.33 Δ")
    return "one contribution, equal ones, opposite ones, and a first step of 1.33 Δ"


# Agreement

ROUND = (0.7, 0.9)


@dataclasses.dataclass(frozen=True)
class Case:
    """A round's inputs, on the host."""

    merge: Any
    deltas: Mapping[str, np.ndarray]
    params: Mapping[str, np.ndarray]
    weights: np.ndarray

    def run(self, device: Any) -> dict[str, np.ndarray]:
        """Merged delta and master of each tensor after a round on a device."""
        put = functools.partial(jax.device_put, device=device)
        params = put(dict(self.params))
        state = diloco_outer(self.merge, *ROUND).init(params)
        given = put((dict(self.deltas), self.weights.astype(np.float32)))
        after, state = take_round((self.merge, *ROUND), given[0], state, params, given[1])
        masters = {n: after[n] if m is None else m for n, m in state[2].master.items()}
        found = {f"{name}: Δ": state[1].momentum[name] for name in params}
        return jax.device_get(found | {f"{name}: Θ": masters[name] for name in params})

    def wanted(self) -> dict[str, np.ndarray]:
        """The same in float64."""
        found = {}
        for name, stack in self.deltas.items():
            rows, weights = list(stack), list(self.weights)
            plain = oracle.weighted_mean if self.is_direct(name) else oracle.rda
            delta = plain(rows, weights)
            found[f"{name}: Δ"] = delta
            found[f"{name}: Θ"] = oracle.outer_step(self.params[name], 0.0, delta)[0]
        return found

    def limit(self, name: str) -> float:
        """What fp32 can hold of a tensor's merge, relative to its length."""
        stack, weights = list(self.deltas[name]), list(self.weights)
        if not self.is_direct(name):
            u = oracle.mean_direction(stack, weights)
            return EXACT if u >= 0.1 else 2e-7 / u
        lengths = oracle.weighted_mean([oracle.norm(delta) for delta in stack], weights)
        return EXACT + 1e-7 * float(lengths) / length(oracle.weighted_mean(stack, weights))

    def is_direct(self, name: str) -> bool:
        return self.merge == weighted_mean() or "embed" in name


def cases(small: bool) -> list[Case]:
    """Both merges, three types, few and many contributions, and directions that nearly cancel."""
    shapes = {"w": (64, 32) if small else (2048, 1024), "embed/w": (100, 16), "b": (1003,), "s": ()}
    found = []
    for number, dtype in enumerate(("float32", "bfloat16", "float16")):
        for count in (3,) if small else (2, 8, 33):
            rng = np.random.default_rng([number, count])
            sizes = {name: (count, *shape) for name, shape in shapes.items()}
            deltas = {name: drawn(rng, size, dtype) for name, size in sizes.items()}
            params = {name: drawn(rng, shape, dtype) for name, shape in shapes.items()}
            weights = rng.lognormal(0, 1, count)
            merges = (rda(), weighted_mean()) if count in (3, 8) else (rda(),)
            found += [Case(merge, deltas, params, weights) for merge in merges]
    for noise in (1e-1, 1e-2, 1e-3):
        rng = np.random.default_rng(int(1 / noise))
        d, e = rng.normal(size=(2, *shapes["w"]))
        stack = np.stack([d, -3 * (d + noise * e)]).astype(np.float32)
        params = {"w": np.zeros(shapes["w"], np.float32)}
        found.append(Case(rda(), {"w": stack}, params, np.array([1.001, 1.0])))
    return found


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray(0.1 * rng.standard_normal(shape, np.float32)).astype(jnp.dtype(dtype))


def agreement(place: Place) -> Iterator[str]:
    worst: dict[str, float] = {}
    rounds = cases(place.small)
    for case in rounds:
        found = case.run(place.device)
        for other, values in (
            ("the host's CPU", case.run(place.host)),
            ("float64", case.wanted()),
            ("the close of a mailbox", closed_by_a_mailbox(case)),
        ):
            for key, want in values.items():
                part = distance(found[key], want) / case.limit(key.split(": ")[0])
                worst[other] = max(worst.get(other, 0.0), part)
                hold(part <= 1, f"{case.merge}, {key}: {part:.2f} of the limit from {other}")
    yield f"{len(rounds)} rounds; the limit is 1e-6 of a tensor, and 2e-7/‖u‖ where that is more"
    for other, part in worst.items():
        yield f"at most {part:.2f} of it from {other}"


def closed_by_a_mailbox(case: Case) -> dict[str, np.ndarray]:
    """A round as nodes close it, on the host."""
    specs = [TensorSpec(name, value.shape, value.dtype.name) for name, value in case.params.items()]
    closer = FragmentCloser(specs, case.merge, outer_lr=ROUND[0], outer_momentum=ROUND[1])
    closer.load(dict(case.params), None, None)
    rows = range(len(case.weights))
    measured = [closer.measure({n: stack[k] for n, stack in case.deltas.items()}) for k in rows]
    closed = closer.close(measured, case.weights.tolist())
    masters = {**closed.anchor, **closed.master}
    return {
        **{f"{name}: Δ": value.copy() for name, value in closed.momentum.items()},
        **{f"{name}: Θ": value.copy() for name, value in masters.items()},
    }


def repeated(place: Place) -> Iterator[str]:
    rounds = cases(place.small)[::4]
    first = [case.run(place.device) for case in rounds]
    for times in range(4):
        if times == 3:
            jax.clear_caches()
        for case, wanted in zip(rounds, first, strict=True):
            for key, value in case.run(place.device).items():
                hold(value.tobytes() == wanted[key].tobytes(), f"{case.merge}, {key}: other bytes")
    yield f"{len(rounds)} rounds five times each, compiled anew for the last: the same bytes"


# A node

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
        f"them; backend {node._backend.name}, no compilation in the last {8 * SYNC_EVERY} steps"
    )


def _check_places(place: Place, s: jdiloco.Session, params: Any) -> None:
    assert s._learner is not None
    anchors = [anchor for leaves in s._learner._anchors for anchor in leaves]
    kinds = {anchor.sharding.memory_kind for anchor in anchors}
    hold(kinds == {"pinned_host"}, f"anchors are in {kinds}")
    found = {(leaf.sharding.memory_kind, *leaf.sharding.device_set) for leaf in params.values()}
    hold(found == {("device", place.device)}, f"parameters are in {found}")


# The close


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


CHECKS: tuple[Callable[[Place], Iterator[str]], ...] = (
    tables, agreement, repeated, session, close,
)  # fmt: skip


def find(name: str, small: bool) -> Place | str:
    """Where to run, or why it cannot be."""
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.devices(None if name == "cpu" else name)
        return Place(devices[0], host_device(), small)
    except UsageError as error:
        return str(error)
    except RuntimeError as error:
        return (
            f"There is no {name} that JAX {jax.__version__} could see ({error}). Nothing was run. "
            'Install a JAX for it (`pip install "jax[cuda13]"`), or try the script alone on the '
            "CPU: --platform cpu --scale small"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the library promises, on a GPU.")
    parser.add_argument("--platform", choices=("gpu", "tpu", "cpu"), default="gpu")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--only", choices=[check.__name__ for check in CHECKS], action="append")
    options = parser.parse_args(arguments)
    place = find(options.platform, options.scale == "small")
    if isinstance(place, str):
        print(place, file=sys.stderr)
        return 2
    print(
        f"{place.device.device_kind} ({place.device.platform}, {options.scale}), "
        f"JAX {jax.__version__}, Python {platform.python_version()}",
        flush=True,
    )
    began, failures = time.perf_counter(), 0
    for check in CHECKS:
        if options.only and check.__name__ not in options.only:
            continue
        started = time.perf_counter()
        try:
            for line in check(place):
                print(f"  {check.__name__:<10} {line}", flush=True)
        except Failed as failure:
            failures += 1
            print(f"  {check.__name__:<10} FAILED: {failure}", flush=True)
        print(f"  {check.__name__:<10} {time.perf_counter() - started:.1f} s", flush=True)
    taken = time.perf_counter() - began
    late = taken > SECONDS_MAX
    print(f"{taken:.0f} s{', more than five minutes' if late else ''}; {failures} failed")
    return int(failures > 0 or late)


if __name__ == "__main__":
    sys.exit(main())
