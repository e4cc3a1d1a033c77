"""The tables of the merges, computed on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jdiloco import contribution_weight, diloco_outer, rda, weighted_mean
from jdiloco.testing import oracle
from tests.device.place import EXACT, PLAIN, Place, distance, hold, length, merged, take_round

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
