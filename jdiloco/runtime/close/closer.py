"""The outer state of one fragment in host memory, and the arithmetic that moves it by a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from jdiloco.algo.merges import CUT_OFF, FLOOR, Merge, rda_kernel, weighted_mean_kernel
from jdiloco.errors import UsageError
from jdiloco.runtime.close import kernels
from jdiloco.runtime.close.layout import ROW, lay_out
from jdiloco.runtime.close.pool import POOL, Pool
from jdiloco.types import TensorSpec

GROUPS = (4, 8)
"""Contributions that one program reads. XLA's code collapses above eight input pointers."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One contribution, copied to where a close reads it; its memory is used again once dropped."""

    blocks: tuple[np.ndarray, ...]  # In the delta's dtype; fp32 where a block mixes two.
    norms: np.ndarray  # shape=(tensors,), float64. Euclidean, over each whole tensor.
    finite: bool  # False if any element is not; such a contribution must not be closed over.


@dataclasses.dataclass(frozen=True)
class Closed:
    """What a round left. Read-only views of the closer's memory, good until its next close or load.

    `anchor` is in the parameters' dtypes, what is committed; `momentum` is fp32; `master` is fp32
    and holds the bf16 and fp16 parameters only, since an fp32 anchor is its own master.
    """

    anchor: dict[str, np.ndarray]
    momentum: dict[str, np.ndarray]
    master: dict[str, np.ndarray]
    mean_cosine: float


class FragmentCloser:
    """Anchor, master and momentum of one fragment, and the round that moves them.

    Not thread-safe: it belongs to the library's thread. Arguments are read and never changed.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        merge: Merge,
        *,
        outer_lr: float,
        outer_momentum: float,
        pool: Pool = POOL,
    ) -> None:
        self._layout = layout = lay_out(specs)
        self._pool = pool
        self._direct = np.array([_is_direct(merge, spec.name) for spec in specs], bool)
        self._learning_rate = np.float64(outer_lr)
        self._beta = np.float64(outer_momentum)
        shape = (layout.blocks, layout.block_rows, ROW)
        self._master = kernels.aligned_zeros(shape, np.float32)
        self._momentum = kernels.aligned_zeros(shape, np.float32)
        self._narrow = {
            dtype: kernels.aligned_zeros(shape, dtype)
            for dtype in ("bfloat16", "float16")
            if any(spec.dtype == dtype for spec in specs)
        }
        self._u: list[jax.Array] = []  # Made by the first close.
        self._loaded = False

    def load(
        self,
        values: Mapping[str, np.ndarray],
        momentum: Mapping[str, np.ndarray] | None,
        master: Mapping[str, np.ndarray] | None,
    ) -> None:
        """Takes over a committed state, whatever was held before.

        `values` are the committed anchors in the parameters' dtypes, `momentum` is fp32 (None:
        zero), `master` fp32 for bf16 and fp16 parameters (None: the values, widened).
        """
        self._momentum.fill(0)
        for index, spec in enumerate(self._layout.specs):
            narrow = self._narrow.get(spec.dtype)
            if narrow is not None:
                self._layout.part(index, narrow)[...] = values[spec.name].reshape(-1)
            widened = values if narrow is None or master is None else master
            self._layout.part(index, self._master)[...] = widened[spec.name].reshape(-1)
            if momentum is not None:
                held = self._layout.part(index, self._momentum)
                held[...] = momentum[spec.name].reshape(-1)
        self._loaded = True

    def measure(self, delta: Mapping[str, np.ndarray]) -> Measured:
        """Norms of a contribution and whether it is finite: one pass, when it arrives.

        `delta` holds fp32, bf16 or fp16 arrays in the parameters' shapes, at any address.
        """
        tensors = [_flat(delta, spec) for spec in self._layout.specs]
        sums = np.zeros(len(tensors) + 1)
        blocks = [self._gather(0, tensors)]

        def start(block: int) -> jax.Array:
            # One block ahead: bytes just written lie in this core's own cache, and the program
            # runs on another core, which gets them faster once they have left it.
            if block + 1 < self._layout.blocks:
                blocks.append(self._gather(block + 1, tensors))
            return kernels.squares(blocks[block])

        with kernels.on_host():
            self._each_block(start, lambda block, rows: self._layout.add_rows(sums, block, rows))
        norms = np.sqrt(sums[:-1])
        measured = Measured(tuple(blocks), norms, bool(np.isfinite(norms).all()))
        self._pool.give_back_after(measured, blocks)
        return measured

    def _gather(self, block: int, tensors: Sequence[np.ndarray]) -> np.ndarray:
        segments = self._layout.segments[block]
        dtypes = {tensors[segment.tensor].dtype for segment in segments}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        gathered = self._pool.take((self._layout.block_rows, ROW), dtype)
        flat = gathered.reshape(-1)
        end = 0
        for segment in segments:
            flat[segment.target] = tensors[segment.tensor][segment.source]
            flat[segment.padding] = 0  # The pool's memory holds what it held last.
            end = segment.padding.stop
        flat[end:] = 0
        return gathered

    def close(
        self, contributions: Sequence[Measured], weights: Sequence[float], *, final: bool = False
    ) -> Closed:
        """Merges the contributions and takes the outer step.

        With Δ the merge: m ← β·m + Δ, Θ ← Θ − η·(Δ + β·m); in a final round Θ ← Θ − Δ and the
        momentum stays. Contributions come in canonical order, since their order shows in the
        last bit. One contribution under the weighted mean is Δ itself, bit for bit.
        """
        assert self._loaded, "`load` comes before `close`"
        assert len(contributions) == len(weights) > 0
        assert all(one.finite for one in contributions)
        self._loaded = False
        total = sum(weights)
        shares = np.array([weight / total for weight in weights])
        norms = np.stack([one.norms for one in contributions])
        coefficients = shares[:, None] / np.where(self._direct, 1.0, np.maximum(norms, FLOOR))
        with kernels.on_host():
            u_norms = self._combine([one.blocks for one in contributions], coefficients)
            self._step(self._scale(shares @ norms, u_norms), final)
        self._check_range()
        self._loaded = True
        return self._closed(self._cosine(coefficients * norms, u_norms))

    def _scale(self, radius: np.ndarray, u_norms: np.ndarray) -> np.ndarray:
        """What turns u into the merged delta: r̄/‖u‖, and 1 for tensors merged directly."""
        length = np.where(u_norms < CUT_OFF, np.inf, u_norms)
        return np.where(self._direct, 1.0, radius / length)

    def _combine(self, deltas, coefficients: np.ndarray) -> np.ndarray:
        """Fills u block by block and returns its norm per tensor, in float64."""
        sums = np.zeros(len(self._direct) + 1)
        coefficients = _with_padding(coefficients)
        if not self._u:
            self._u = [self._scratch(np.float32) for _ in range(self._layout.blocks)]

        def start(block: int) -> jax.Array:
            self._u[block] = self._combine_block(block, deltas, coefficients)
            return kernels.squares(self._u[block])

        self._each_block(start, lambda block, rows: self._layout.add_rows(sums, block, rows))
        return np.sqrt(sums[:-1])

    def _combine_block(self, block: int, deltas, coefficients: np.ndarray) -> jax.Array:
        group = next((size for size in GROUPS if size >= len(deltas)), GROUPS[-1])
        per_row = self._layout.per_row(block, coefficients)
        blocks = _of_one_dtype([one[block] for one in deltas])
        if len(blocks) <= group:
            return kernels.combine(self._u[block], *_padded(per_row, blocks, group))
        total = self._scratch(np.float64)
        for start in range(0, len(blocks), group):
            members = slice(start, start + group)
            total = kernels.accumulate(total, *_padded(per_row[members], blocks[members], group))
        return kernels.narrow(self._u[block], total)

    def _step(self, scale: np.ndarray, final: bool) -> None:
        free = [kernels.Stepped(*(self._scratch(np.float32) for _ in "ab")) for _ in range(2)]
        narrowed = {dtype: self._scratch(dtype) for dtype in self._narrow}
        scales = _with_padding(scale[None])

        def start(block: int) -> kernels.Stepped:
            rows = self._layout.per_row(block, scales)[0]
            arguments = (self._master[block], self._momentum[block], self._u[block], rows)
            if final:
                return kernels.final_step(free.pop(), *arguments)
            return kernels.outer_step(free.pop(), *arguments, self._learning_rate, self._beta)

        def finish(block: int, stepped: kernels.Stepped) -> None:
            for dtype, held in self._narrow.items():
                narrowed[dtype] = kernels.narrow(narrowed[dtype], stepped.anchor)
                held[block] = np.asarray(narrowed[dtype])
            self._master[block] = np.asarray(stepped.anchor)
            self._momentum[block] = np.asarray(stepped.momentum)
            free.append(stepped)

        self._each_block(start, finish)

    def _each_block(self, start: Callable[[int], Any], finish: Callable[[int, Any], None]) -> None:
        """Starts a block before it finishes the one before.

        Programs run on threads of JAX's own, so the copies that the two functions make pass
        while the arithmetic of the neighbouring block is under way.
        """
        started = start(0)
        for block in range(1, self._layout.blocks):
            following = start(block)
            finish(block - 1, started)
            started = following
        finish(self._layout.blocks - 1, started)

    def _check_range(self) -> None:
        for index, spec in enumerate(self._layout.specs):
            if spec.dtype != "float16":
                continue
            bits = self._layout.part(index, self._narrow["float16"]).view(np.uint16)
            if bits.size and np.max(bits & 0x7FFF) >= 0x7C00:
                raise UsageError(
                    f"`{spec.name}` left the range of float16 in this round. "
                    "Hold the parameter in bfloat16 or float32, or lower `outer_lr`."
                )

    def _closed(self, mean_cosine: float) -> Closed:
        anchor: dict[str, np.ndarray] = {}
        momentum: dict[str, np.ndarray] = {}
        master: dict[str, np.ndarray] = {}
        for index, spec in enumerate(self._layout.specs):
            held = self._layout.tensor(index, self._master)
            if spec.dtype in self._narrow:
                master[spec.name] = held
                held = self._layout.tensor(index, self._narrow[spec.dtype])
            anchor[spec.name] = held
            momentum[spec.name] = self._layout.tensor(index, self._momentum)
        return Closed(anchor, momentum, master, mean_cosine)

    def _cosine(self, lengths: np.ndarray, u_norms: np.ndarray) -> float:
        """Mean cosine over all pairs of contributions, and over tensors by their size.

        With bᵢ = cᵢ‖Δᵢ‖ the length of each term of u, ‖u‖² is Σᵢⱼ bᵢ·bⱼ·cos(i, j): so the cosines
        come without another pass, each pair counted by bᵢ·bⱼ.
        """
        own = np.sum(lengths**2, axis=0)
        pairs = np.sum(lengths, axis=0) ** 2 - own
        counted = pairs > 1e-12 * own
        if not counted.any():
            return 1.0  # A single delta, or none but zeros: nothing disagrees.
        cosines = (u_norms**2 - own)[counted] / pairs[counted]
        sizes = np.array([spec.size for spec in self._layout.specs])[counted]
        return float(np.clip(np.average(cosines, weights=sizes), -1.0, 1.0))

    def _scratch(self, dtype) -> jax.Array:
        return jnp.zeros((self._layout.block_rows, ROW), dtype)


def _with_padding(values: np.ndarray) -> np.ndarray:
    """Values per tensor, (n, tensors), and a 0 for the rows where none lies."""
    return np.pad(values, ((0, 0), (0, 1)))


def _padded(per_row: np.ndarray, blocks: list, group: int) -> list:
    """Coefficients and blocks of a group, filled up to its size.

    A pad is the last block once more with coefficient 0: a pad of its own would be another stream
    of memory, and −0.0 + 0·(−0.0) is still −0.0.
    """
    coefficients = kernels.aligned_zeros((group, per_row.shape[1]), np.float64)
    coefficients[: len(blocks)] = per_row
    return [coefficients, *blocks, *blocks[-1:] * (group - len(blocks))]


def _of_one_dtype(blocks: list[np.ndarray]) -> list[np.ndarray]:
    """Widened where contributions differ, which no run of one configuration produces."""
    if len({block.dtype for block in blocks}) == 1:
        return blocks
    return [block.astype(np.float32) for block in blocks]


def _is_direct(merge: Merge, name: str) -> bool:
    kernel = merge.kernel(name)
    if kernel is not weighted_mean_kernel and kernel is not rda_kernel:
        raise UsageError(
            f"`{name}` would be merged by {kernel!r}; a mailbox run has `rda()` and "
            "`weighted_mean()`. A merge of your own works in the optax transformation."
        )
    return kernel is weighted_mean_kernel


def _flat(delta: Mapping[str, np.ndarray], spec: TensorSpec) -> np.ndarray:
    found = delta[spec.name]
    if found.shape != spec.shape:
        raise UsageError(f"The delta of `{spec.name}` has shape {found.shape}, not {spec.shape}.")
    return found.reshape(-1)
