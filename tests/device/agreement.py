"""One round on a device, on the host, in float64 and as nodes close it; and twice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdiloco import diloco_outer, rda, weighted_mean
from jdiloco.runtime.close import FragmentCloser
from jdiloco.testing import oracle
from jdiloco.types import TensorSpec
from tests.device.place import EXACT, Place, distance, hold, length, take_round

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
    shapes = {"w": (64, 32) if small else (700, 900), "embed/w": (100, 16), "b": (1003,), "s": ()}
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
        limits = {name: case.limit(name) for name in case.params}
        for other, values in (
            ("the host's CPU", case.run(place.host)),
            ("float64", case.wanted()),
            ("the close of a mailbox", closed_by_a_mailbox(case)),
        ):
            for key, want in values.items():
                part = distance(found[key], want) / limits[key.split(": ")[0]]
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
