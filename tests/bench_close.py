"""How close the mailbox close comes to the memory floor. `make bench`, under a minute and a half.

The floor of a round: each contribution is read twice, anchor and momentum are read and written
once, at the speed of a plain copy of the fragment's own size. A copy reads and writes every byte
once, so the floor is as many copies as there are contributions, and two: it is timed as just that,
over the very memory that the round reads. Both are timed in turn in this run, so only ratios mean
anything. Exits with 1 when a round of 4 contributions takes more than 3 floors.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdiloco.algo.merges import Rda
from jdiloco.runtime.close import FragmentCloser
from jdiloco.types import TensorSpec

ELEMENTS = 8 * 2**20  # 32 MiB in fp32.
HEADER = 1240  # Bytes before the tensors of a message.
RATIO_MAX = 3.0
ROUNDS = 21
BASELINE_ROUNDS = 5
LEARNING_RATE, MOMENTUM = 0.7, 0.9


def specs_of(tensors: int) -> list[TensorSpec]:
    """A fragment of ELEMENTS elements: one matrix, or many of sizes that fit no row."""
    if tensors == 1:
        return [TensorSpec("w", (ELEMENTS // 1024, 1024), "float32")]
    raw = np.random.default_rng(tensors).lognormal(0.0, 1.5, tensors)
    sizes = np.maximum(1, (raw / raw.sum() * ELEMENTS).astype(int))
    sizes[0] += ELEMENTS - sizes.sum()
    return [TensorSpec(f"layer/{i}/w", (int(n),), "float32") for i, n in enumerate(sizes)]


def decode(received: bytes, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Views of a message's tensors; they start behind a header, at no particular address."""
    views, start = {}, len(received) - 4 * ELEMENTS
    for spec in specs:
        flat = np.frombuffer(received, np.float32, spec.size, start)
        views[spec.name] = flat.reshape(spec.shape)
        start += spec.nbytes
    return views


class Case:
    """A fragment, its closer, and the M messages of a round."""

    def __init__(self, tensors: int, contributions: int) -> None:
        rng = np.random.default_rng(contributions)
        self.tensors, self.contributions = tensors, contributions
        self.specs = specs_of(tensors)
        self.received = [
            b" " * HEADER + rng.standard_normal(ELEMENTS, np.float32).tobytes()
            for _ in range(contributions)
        ]
        self.weights = [float(k + 1) for k in range(contributions)]
        self.closer = FragmentCloser(
            self.specs, Rda(), outer_lr=LEARNING_RATE, outer_momentum=MOMENTUM
        )
        self.anchor: dict[str, Any] = {s.name: np.zeros(s.shape, np.float32) for s in self.specs}
        self.momentum = dict(self.anchor)
        self.closer.load(self.anchor, None, None)
        self.targets = [np.zeros(ELEMENTS, np.float32) for _ in range(2)]
        self.sources = [np.frombuffer(one, np.float32, offset=HEADER) for one in self.received]
        self.sources += [np.ones(ELEMENTS, np.float32) for _ in range(2)]

    def close(self) -> list[memoryview]:
        """From received bytes to committed bytes."""
        measured = [self.closer.measure(decode(one, self.specs)) for one in self.received]
        closed = self.closer.close(measured, self.weights)
        return [closed.anchor[spec.name].data for spec in self.specs]

    def floor(self) -> None:
        """As many plain copies as move the bytes that a round has to move."""
        for index, source in enumerate(self.sources):
            np.copyto(self.targets[index % 2], source)

    def baseline(self) -> None:
        """The same in NumPy, one operation at a time, as one would write it down."""
        views = [decode(one, self.specs) for one in self.received]
        shares = np.array(self.weights, np.float32) / np.float32(sum(self.weights))
        for name, anchor in self.anchor.items():
            deltas = [view[name] for view in views]
            norms = [np.linalg.norm(delta) for delta in deltas]
            u = sum(w / n * d for w, n, d in zip(shares, norms, deltas, strict=True))
            radius = sum(w * n for w, n in zip(shares, norms, strict=True))
            merged = radius / np.linalg.norm(u) * u
            self.momentum[name] = np.float32(MOMENTUM) * self.momentum[name] + merged
            step = merged + np.float32(MOMENTUM) * self.momentum[name]
            self.anchor[name] = anchor - np.float32(LEARNING_RATE) * step


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(case: Case) -> tuple[float, float, float]:
    """First call in seconds, then the medians of close and baseline, both over the floor's."""
    first = seconds(case.close)
    floors: list[float] = []
    closes: list[float] = []
    baselines: list[float] = []
    for index in range(ROUNDS):
        floors.append(seconds(case.floor))
        closes.append(seconds(case.close))
        if index < BASELINE_ROUNDS:
            baselines.append(seconds(case.baseline))
    floor = statistics.median(floors)
    return first, statistics.median(closes) / floor, statistics.median(baselines) / floor


def main() -> int:
    print(f"Closing a round of 32 MiB, over the memory floor (JAX {jax.__version__})")
    print(
        f"{'tensors':>8} {'M':>3} {'close':>7} {'NumPy':>7} {'NumPy/close':>12} {'first call':>11}"
    )
    worst = 0.0
    for tensors, contributions in ((1, 4), (300, 4), (1, 8), (300, 8)):
        first, close, baseline = measure(Case(tensors, contributions))
        print(
            f"{tensors:>8} {contributions:>3} {close:>7.2f} {baseline:>7.2f} "
            f"{baseline / close:>12.1f} {first:>9.2f} s"
        )
        if contributions == 4:
            worst = max(worst, close)
    if worst > RATIO_MAX:
        print(f"A round of 4 takes {worst:.2f} floors; at most {RATIO_MAX} were promised.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
