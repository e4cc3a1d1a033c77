"""The outer state of one fragment in host memory, and the arithmetic that moves it by a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from jdiloco.algo.merges import CUT_OFF, FLOOR, is_direct
from jdiloco.errors import UsageError
from jdiloco.runtime.close import kernels
from jdiloco.runtime.close.layout import ROW, Segment, lay_out
from jdiloco.types import TensorSpec

GROUPS = (4, 8)
"""Contributions that one program reads. XLA's code collapses above eight input pointers."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One contribution, looked at once. Holds on to the received memory until it is dropped."""

    tensors: tuple[np.ndarray, ...]  # Flat, in the order of the specs, as received.
    norms: np.ndarray  # shape=(tensors,), float64. Euclidean, over each whole tensor.
    finite: bool  # False if any element is not; such a contribution must not be closed over.


@dataclasses.dataclass(frozen=True)
class Closed:
    """What a round left. Read-only views of the closer's memory, good until its next close or load.

    `anchor` is in the parameters' dtypes, what is committed; `momentum` is fp32; `master` is fp32
    for bf16 and fp16 parameters and None for the others, whose anchor is its own master.
    """

    anchor: dict[str, np.ndarray]
    momentum: dict[str, np.ndarray]
    master: dict[str, np.ndarray | None]
    mean_cosine: float


class FragmentCloser:
    """Anchor, master and momentum of one fragment, and the round that moves them.

    Not thread-safe: it belongs to the library's thread. Arguments are read and never changed.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], merge, *, outer_lr: float, outer_momentum: float
    ) -> None:
        self._layout = lay_out(specs)
        self._direct = np.array([is_direct(merge, spec.name) for spec in specs], bool)
        self._learning_rate = np.float64(outer_lr)
        self._beta = np.float64(outer_momentum)
        shape = (self._layout.blocks, self._layout.block_rows, ROW)
        self._master = kernels.aligned_zeros(shape, np.float32)
        self._momentum = kernels.aligned_zeros(shape, np.float32)
        self._u = kernels.aligned_zeros(shape, np.float32)
        self._narrow = {
            dtype: kernels.aligned_zeros(shape, dtype)
            for dtype in ("bfloat16", "float16")
            if any(spec.dtype == dtype for spec in specs)
        }
        self._stagings: dict[tuple[int, np.dtype], np.ndarray] = {}
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
            held = self._place(index, self._master)
            narrow = self._narrow.get(spec.dtype)
            if narrow is not None:
                self._place(index, narrow)[...] = values[spec.name].reshape(-1)
            widened = values if narrow is None or master is None else master
            held[...] = widened[spec.name].reshape(-1)
            if momentum is not None:
                self._place(index, self._momentum)[...] = momentum[spec.name].reshape(-1)
        self._loaded = True

    def measure(self, delta: Mapping[str, np.ndarray]) -> Measured:
        """Norms of a contribution and whether it is finite: one pass, when it arrives.

        `delta` holds fp32, bf16 or fp16 arrays in the parameters' shapes, at any address.
        """
        tensors = tuple(_flat(delta, spec) for spec in self._layout.specs)
        sums = np.zeros(len(tensors) + 1)
        with kernels.on_host():
            for block in range(self._layout.blocks):
                staged = self._stage(block, tensors, 0, self._dtype(block, (tensors,)))
                self._add_rows(sums, block, kernels.squares(staged))
        norms = np.sqrt(sums[:-1])
        return Measured(tensors, norms, bool(np.isfinite(norms).all()))

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
            u_norms = self._combine([one.tensors for one in contributions], coefficients)
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
        padded = np.pad(coefficients, ((0, 0), (0, 1)))
        scratch = self._scratch(np.float32)
        for block in range(self._layout.blocks):
            scratch = self._combine_block(block, deltas, padded, scratch)
            rows = kernels.squares(scratch)
            self._u[block] = np.asarray(scratch)
            self._add_rows(sums, block, rows)
        return np.sqrt(sums[:-1])

    def _combine_block(self, block: int, deltas, padded: np.ndarray, scratch) -> jax.Array:
        dtype = self._dtype(block, deltas)
        rows = self._layout.row_tensor[block]
        group = next((size for size in GROUPS if size >= len(deltas)), GROUPS[-1])
        accumulator = None
        for start in range(0, len(deltas), group):
            members = deltas[start : start + group]
            staged = [self._stage(block, one, slot, dtype) for slot, one in enumerate(members)]
            # A pad is the last block once more with coefficient 0: a pad of its own would be
            # another stream of memory, and −0.0 + 0·(−0.0) is still −0.0.
            staged += staged[-1:] * (group - len(members))
            factors = kernels.aligned_zeros((group, len(rows)), np.float64)
            factors[: len(members)] = padded[start : start + group, rows]
            if len(deltas) <= group:
                return kernels.combine(factors, scratch, *staged)
            if accumulator is None:
                accumulator = self._scratch(np.float64)
            accumulator = kernels.accumulate(factors, accumulator, *staged)
            accumulator.block_until_ready()  # The staged blocks are about to be overwritten.
        return kernels.narrow(scratch, accumulator)

    def _step(self, scale: np.ndarray, final: bool) -> None:
        scratch = (self._scratch(np.float32), self._scratch(np.float32))
        narrowed = {dtype: self._scratch(dtype) for dtype in self._narrow}
        padded = np.append(scale, 0.0)
        for block in range(self._layout.blocks):
            anchor, momentum, u = self._master[block], self._momentum[block], self._u[block]
            rows = kernels.aligned_zeros((self._layout.block_rows,), np.float64)
            rows[:] = padded[self._layout.row_tensor[block]]
            if final:
                moved = kernels.final_step(scratch[0], anchor, u, rows)
                scratch = (moved, scratch[1])
            else:
                scratch = kernels.outer_step(
                    *scratch, anchor, momentum, u, rows, self._learning_rate, self._beta
                )
                momentum[...] = np.asarray(scratch[1])
            for dtype, held in self._narrow.items():
                narrowed[dtype] = kernels.narrow(narrowed[dtype], scratch[0])
                held[block] = np.asarray(narrowed[dtype])
            anchor[...] = np.asarray(scratch[0])

    def _check_range(self) -> None:
        for index, spec in enumerate(self._layout.specs):
            if spec.dtype != "float16":
                continue
            bits = self._place(index, self._narrow["float16"]).view(np.uint16)
            if bits.size and np.max(bits & 0x7FFF) >= 0x7C00:
                raise UsageError(
                    f"`{spec.name}` left the range of float16 in this round. "
                    "Hold the parameter in bfloat16 or float32, or lower `outer_lr`."
                )

    def _closed(self, mean_cosine: float) -> Closed:
        layout = self._layout
        master, momentum = self._master.reshape(-1), self._momentum.reshape(-1)
        anchor: dict[str, np.ndarray] = {}
        masters: dict[str, np.ndarray | None] = {}
        for index, spec in enumerate(layout.specs):
            held = layout.tensor(index, master)
            narrow = self._narrow.get(spec.dtype)
            masters[spec.name] = None if narrow is None else held
            anchor[spec.name] = held if narrow is None else layout.tensor(index, narrow.reshape(-1))
        momenta = {s.name: layout.tensor(i, momentum) for i, s in enumerate(layout.specs)}
        return Closed(anchor, momenta, masters, mean_cosine)

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

    def _dtype(self, block: int, deltas) -> np.dtype:
        """The dtype in which all deltas can be staged: their own if it is one, else fp32."""
        dtypes = {one[s.tensor].dtype for one in deltas for s in self._layout.segments[block]}
        return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    def _stage(self, block: int, tensors, slot: int, dtype: np.dtype) -> np.ndarray:
        """One block of a contribution, copied to where a program can read it in place."""
        staged = self._staging(slot, dtype)
        flat = staged.reshape(-1)
        segments: tuple[Segment, ...] = self._layout.segments[block]
        for segment in segments:
            flat[segment.target] = tensors[segment.tensor][segment.source]
            flat[segment.padding] = 0
        flat[segments[-1].padding.stop if segments else 0 :] = 0
        return staged

    def _staging(self, slot: int, dtype: np.dtype) -> np.ndarray:
        if (slot, dtype) not in self._stagings:
            shape = (self._layout.block_rows, ROW)
            self._stagings[slot, dtype] = kernels.aligned_zeros(shape, dtype)
        return self._stagings[slot, dtype]

    def _scratch(self, dtype) -> jax.Array:
        return jnp.zeros((self._layout.block_rows, ROW), dtype)

    def _place(self, index: int, blocks: np.ndarray) -> np.ndarray:
        start = self._layout.starts[index]
        return blocks.reshape(-1)[start : start + self._layout.specs[index].size]

    def _add_rows(self, sums: np.ndarray, block: int, rows: jax.Array) -> None:
        np.add.at(sums, self._layout.row_tensor[block], np.asarray(rows).sum(axis=1))


def _flat(delta: Mapping[str, np.ndarray], spec: TensorSpec) -> np.ndarray:
    found = delta[spec.name]
    if found.shape != spec.shape:
        raise UsageError(f"The delta of `{spec.name}` has shape {found.shape}, not {spec.shape}.")
    return found.reshape(-1)
