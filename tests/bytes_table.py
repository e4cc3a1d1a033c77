"""What a round costs in bytes, for every precision on the wire. `python -m tests.bytes_table`.

Two learners train a small byte-level transformer in lock step; what they send in the last round,
and what it commits, is encoded as nodes encode it. `docs/costs.md` shows the table, and
`tests/test_bytes_table.py` holds it to this program. Takes some ten seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import time
import typing
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jdiloco.algo.merges import Rda
from jdiloco.cli.demo_model import ByteTransformer, inner_optimizer, train_step
from jdiloco.nnx import ModuleHolder
from jdiloco.protocol.records import ContributionHead, Ledger
from jdiloco.runtime import contributions, messages, payloads, wire
from jdiloco.runtime.close import Closed, FragmentCloser
from jdiloco.runtime.precision import FULL, Precision
from jdiloco.store.base import Buffer
from jdiloco.types import Counters, TensorSpec

LEARNERS, ROUNDS, STEPS = 2, 3, 20
CONTEXT, BATCH = 64, 8
KEY = f"{'0' * 12}/log/0000000/0000000002.2.learner-0.0001"
HEAD = ContributionHead(
    "0" * 12, 2, 0, 2, "learner-0", 1, Counters(STEPS, STEPS * BATCH), Ledger(), ROUNDS * STEPS
)

Tensors = Mapping[str, np.ndarray]
Encode = Callable[[str | None], Sequence[Buffer]]


def text() -> np.ndarray:
    """Source code, as bytes."""
    sources = [inspect.getsource(module) for module in (argparse, inspect, typing)]
    return np.frombuffer("".join(sources).encode(), np.uint8)


@dataclasses.dataclass(frozen=True)
class Round:
    """The last round: what it began from, what learners sent, and what that commits; in float32."""

    specs: list[TensorSpec]
    anchor: Tensors
    momentum: Tensors
    deltas: list[dict[str, np.ndarray]]

    def closed(self, precision: Precision) -> Closed:
        """As a run with these settings closes it."""
        closer = FragmentCloser(
            self.specs, Rda(), outer_lr=0.7, outer_momentum=0.9, precision=precision
        )
        closer.load(self.anchor, self.momentum, None)
        return closer.close([closer.measure(delta) for delta in self.deltas], [1.0] * LEARNERS)


def trained() -> Round:
    """Trains, and returns the last round."""
    rng, corpus = np.random.default_rng(0), text()
    models = [
        ByteTransformer(rngs=nnx.Rngs(0), context=CONTEXT, width=64, heads=4)
        for _ in range(LEARNERS)
    ]
    optimizers = [inner_optimizer(model, ROUNDS * STEPS, 3e-3) for model in models]
    holders = [ModuleHolder(model) for model in models]
    specs = list(holders[0].specs)
    anchor = values_of(holders[0], specs)
    last = found = Round(
        specs, anchor, {spec.name: np.zeros(spec.shape, "f") for spec in specs}, []
    )
    for _ in range(ROUNDS):
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(STEPS):
                starts = rng.integers(len(corpus) - CONTEXT - 1, size=BATCH)
                rows = corpus[starts[:, None] + np.arange(CONTEXT + 1)]
                train_step(model, optimizer, jnp.asarray(rows, np.int32))
        ends = [values_of(holder, specs) for holder in holders]
        deltas = [{name: anchor[name] - end[name] for name in end} for end in ends]
        found = dataclasses.replace(found, anchor=anchor, deltas=deltas)
        closed = found.closed(FULL)
        anchor = {name: array.copy() for name, array in closed.anchor.items()}
        momentum = {name: array.copy() for name, array in closed.momentum.items()}
        last, found = found, dataclasses.replace(found, momentum=momentum)
        for holder in holders:
            holder.put(None, {name: jnp.array(array) for name, array in anchor.items()})
    return last


def values_of(holder: ModuleHolder, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    names = [spec.name for spec in specs]
    return {n: np.array(leaf) for n, leaf in zip(names, holder.get(None, names), strict=True)}


def narrow(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}


def encodings(round: Round) -> dict[str, Encode]:
    """Everything that nodes send in bulk: what it is, and how it is encoded."""
    delta, closed = round.deltas[0], round.closed(FULL)
    narrow_commits = round.closed(Precision("float8_e4m3fn", "float32"))
    narrow_momentum = round.closed(Precision("float8_e4m3fn", "bfloat16"))

    def contribution(dtype: str) -> Encode:
        host = {n: a.astype(wire.subtracted_as(dtype) or dtype) for n, a in delta.items()}
        out = wire.outgoing(host, dtype)
        return lambda how: contributions.encode(KEY, HEAD, out, compression=how)

    def anchor(values: Tensors) -> Encode:
        return lambda how: payloads.encode_anchor(values, compression=how)

    def update(dtype: str) -> Encode:
        made = round.closed(Precision(dtype, "float32")).update
        return lambda how: payloads.encode_update(made, compression=how)

    def outer(momentum: Tensors, master: Tensors) -> Encode:
        return lambda how: payloads.encode_outer(momentum, master, compression=how)

    found = {f"contribution, `delta_dtype` {d}": contribution(d) for d in wire.FORMATS if d}
    return {
        **found,
        "commit, float32 parameters": anchor(closed.anchor),
        "commit, bfloat16 parameters": anchor(narrow(closed.anchor)),
        **{f"update, `commit_dtype` {d}": update(d) for d in wire.FORMATS[2:] if d},
        "outer state, float32 parameters": outer(closed.momentum, {}),
        "outer state, bfloat16 parameters": outer(closed.momentum, closed.anchor),
        "outer state, any `commit_dtype`": outer(narrow_commits.momentum, narrow_commits.master),
        "the same, `momentum_dtype` bfloat16": outer(
            narrow_momentum.momentum, narrow_momentum.master
        ),
    }


def bytes_of(buffers: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def rows() -> dict[str, tuple[float, float]]:
    """Bytes per parameter and round, plain and compressed."""
    round = trained()
    parameters = sum(spec.size for spec in round.specs)
    return {
        what: (bytes_of(encode(None)) / parameters, bytes_of(encode("zstd")) / parameters)
        for what, encode in encodings(round).items()
    }


def table(found: Mapping[str, tuple[float, float]]) -> str:
    """As it stands in the docs."""
    lines = ["| bytes per parameter and round | plain | zstd |", "|---|---|---|"]
    lines += [f"| {what} | {plain:.2f} | {zstd:.2f} |" for what, (plain, zstd) in found.items()]
    return "\n".join(lines)


def speeds(megabytes: int = 32) -> str:
    """How fast one core compresses and expands what looks like a delta."""
    said = []
    for name in ("float32", "bfloat16"):
        noise = np.random.default_rng(0).standard_normal(megabytes * 2**18) * 1e-3
        array = np.tile(noise.astype(name), 4 // np.dtype(name).itemsize)
        began = time.perf_counter()
        data = b"".join(messages.encode({"w": array}, {}, compression="zstd"))
        encoded = time.perf_counter()
        messages.decode(data, room=array.nbytes)
        ended = time.perf_counter()
        rates = [array.nbytes / 1e6 / (b - a) for a, b in ((began, encoded), (encoded, ended))]
        said.append(f"{name} {rates[0]:.0f} MB/s out, {rates[1]:.0f} MB/s in")
    return "; ".join(said)


if __name__ == "__main__":
    print(table(rows()))
    print(f"\nCompressing and expanding, one core: {speeds()}")
