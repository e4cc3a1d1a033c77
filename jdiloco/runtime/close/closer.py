"""The outer state of one fragment in host memory, and the arithmetic that moves it by a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from jdiloco.algo.merges import (
    CUT_OFF,
    FLOOR,
    Merge,
    merge_tensor,
    rda_kernel,
    weighted_mean_kernel,
)
from jdiloco.algo.sums import STACKED
from jdiloco.errors import OutOfRange, UsageError
from jdiloco.runtime import updates
from jdiloco.runtime.backends import on_host
from jdiloco.runtime.close import kernels
from jdiloco.runtime.close.layout import ROW, Block, lay_out
from jdiloco.runtime.close.received import Staging, Window, common_dtype, window
from jdiloco.runtime.precision import FULL, Precision
from jdiloco.types import TensorSpec

LIMITS = {"float32": 3.3e38, "bfloat16": 3.3e38, "float16": 65504.0}
"""What can be rounded to the type and stay finite, at least."""

UNKNOWN = 1e300
"""How long a delta is that nobody measured: long enough for the values to be looked at."""

OUR_KERNELS = (rda_kernel, weighted_mean_kernel)
GROUPS = (4, 8)
"""Contributions that one program reads. XLA's code collapses above eight input pointers."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One contribution, looked at once. Holds on to the received memory until it is dropped."""

    tensors: tuple[np.ndarray, ...]  # Flat, in the order of the specs, as received.
    windows: tuple[Window | None, ...]  # Per block; None where tensors have to be gathered.
    norms: np.ndarray  # shape=(tensors,), float64. Euclidean, over each whole tensor.
    finite: bool  # False if any element is not; such a contribution must not be closed over.


@dataclasses.dataclass(frozen=True)
class Closed:
    """What a round left. Read-only views of the closer's memory: drop them before its next close.

    (A view that is still held is not changed; the next close then has to copy the fragment.)

    `anchor` is in the parameters' dtypes, what is committed; `momentum` is in `momentum_dtype`;
    `master` is fp32 and holds what the anchor is rounded from (`Precision.masters`), since another
    fp32 anchor is its own master. `update` holds what leads from the anchor before to this one, as
    it is sent; it is empty where nothing would be narrowed.
    """

    anchor: dict[str, np.ndarray]
    momentum: dict[str, np.ndarray]
    master: dict[str, np.ndarray]
    update: dict[str, np.ndarray]
    mean_cosine: float


@dataclasses.dataclass
class _Held:
    """The arrays of a fragment: all tensors in rows, made by programs and donated to them."""

    master: jax.Array  # fp32; for fp32 parameters the anchor, unless it is among `sent`.
    momentum: jax.Array
    u: jax.Array  # Of the last round; its memory is what is kept.
    narrowed: dict[str, jax.Array]  # By dtype: the anchor of bf16 and fp16 parameters.
    sent: Mapping[str, np.ndarray]  # The anchor of tensors that commits narrow, tensor by tensor.
    master_reach: float  # No element is further from zero than this, in either of the two.
    momentum_reach: float


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
        precision: Precision = FULL,
    ) -> None:
        self._layout = lay_out(specs)
        self._precision = precision
        self._sent = {spec.name for spec in precision.narrowed(specs)}
        self._masters = {spec.name for spec in precision.masters(specs)}
        self._staging = Staging(self._layout.block_rows)
        kernels_of = [merge.kernel(*spec.names) for spec in specs]
        # A merge of the user's own is put over u once the weighted mean is there.
        self._direct = np.array([kernel is not rda_kernel for kernel in kernels_of], bool)
        self._own = {i: k for i, k in enumerate(kernels_of) if k not in OUR_KERNELS}
        self._learning_rate = np.float64(outer_lr)
        self._beta = np.float64(outer_momentum)
        others = {spec.dtype for spec in specs if spec.name not in self._sent}
        self._narrowed = [dtype for dtype in ("bfloat16", "float16") if dtype in others]
        self._held: _Held | None = None

    def load(
        self,
        values: Mapping[str, np.ndarray],
        momentum: Mapping[str, np.ndarray] | None,
        master: Mapping[str, np.ndarray] | None,
    ) -> None:
        """Takes over a committed state, whatever was held before.

        `values` are the committed anchors in the parameters' dtypes, `momentum` is in the run's
        (None: zero), `master` fp32 for what has one (None: the values, widened).
        """
        masters = {
            spec.name: values[spec.name]
            if master is None or spec.name not in self._masters
            else master[spec.name]
            for spec in self._layout.specs
        }
        u = None if self._held is None else self._held.u
        with on_host(), jax.enable_x64(True):
            self._held = _Held(
                self._whole(masters, "float32"),
                self._whole(momentum or {}, self._precision.momentum_dtype),
                self._whole({}, "float32") if u is None else u,
                {dtype: self._whole(self._of(dtype, values), dtype) for dtype in self._narrowed},
                {name: values[name].copy() for name in self._sent},
                max(map(_reach, masters.values()), default=0.0),
                max(map(_reach, (momentum or {}).values()), default=0.0),
            )

    def state(self) -> Closed:
        """What is held now, as views; see `Closed`. A mean cosine of 1 stands in for none."""
        assert self._held is not None, "`load` comes before `state`"
        with on_host(), jax.enable_x64(True):
            return self._closed(self._held, 1.0, {})

    def _of(self, dtype: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {s.name: tensors[s.name] for s in self._layout.specs if s.dtype == dtype}

    def _whole(self, tensors: Mapping[str, np.ndarray], dtype: str) -> jax.Array:
        """All tensors in one array; missing ones are zero."""
        whole = kernels.aligned_zeros((self._layout.rows, ROW), dtype)
        for index, spec in enumerate(self._layout.specs):
            if spec.name in tensors:
                self._layout.tensor(index, whole)[...] = tensors[spec.name]
        return kernels.owned(whole)

    def measure(self, delta: Mapping[str, np.ndarray]) -> Measured:
        """Norms of a contribution and whether it is finite: one pass, when it arrives.

        `delta` holds fp32, bf16 or fp16 arrays in the parameters' shapes, at any address.
        """
        tensors = tuple(_flat(delta, spec) for spec in self._layout.specs)
        sums = np.zeros(len(tensors) + 1)
        windows: list[Window | None] = []

        def start(block: Block) -> jax.Array:
            dtype = common_dtype(block, [tensors])
            windows.append(window(block, tensors, dtype))
            slot = len(windows) % 2  # The block before is still being read.
            shown = windows[-1] or self._staging.gather(block, tensors, dtype, slot)
            return kernels.squares(*shown, block.valid)

        with on_host(), jax.enable_x64(True):
            self._each_block(start, lambda block, rows: block.add_rows(sums, rows))
        norms = np.sqrt(sums[:-1])
        return Measured(tensors, tuple(windows), norms, bool(np.isfinite(norms).all()))

    def close(
        self, contributions: Sequence[Measured], weights: Sequence[float], *, final: bool = False
    ) -> Closed:
        """Merges the contributions and takes the outer step.

        With Δ the merge: m ← β·m + Δ, Θ ← Θ − η·(Δ + β·m); in a final round Θ ← Θ − Δ and the
        momentum stays. Contributions come in canonical order, since their order shows in the
        last bit. One contribution under the weighted mean is Δ itself, bit for bit.

        Where commits are narrow, the anchor moves by what an update can carry of Θ − anchor. A
        final round commits Θ itself, without one: there may be no later round for the rest.
        """
        assert self._held is not None, "`load` comes before `close`"
        assert len(contributions) == len(weights) > 0
        assert all(one.finite for one in contributions)
        held, self._held = self._held, None  # Until it is whole again.
        total = sum(weights)
        shares = np.array([weight / total for weight in weights])
        norms = np.stack([one.norms for one in contributions])
        coefficients = shares[:, None] / np.where(self._direct, 1.0, np.maximum(norms, FLOOR))
        with on_host(), jax.enable_x64(True):
            u_norms = self._combine(held, contributions, coefficients)
            self._merge_own(held, contributions, shares)
            scale = self._scale(shares @ norms, u_norms)
            self._step(held, scale, final)
            cosine = self._cosine(coefficients * norms, u_norms)
            masters = self._masters_of(held)
        longest = UNKNOWN if self._own else float(np.max(scale * u_norms, initial=0.0))
        self._check_range(held, longest, final)
        update = self._send(held, masters, final)
        with on_host(), jax.enable_x64(True):
            closed = self._closed(held, cosine, update)
        self._held = held
        return closed

    def _send(self, held: _Held, masters: Mapping[str, np.ndarray], final: bool) -> dict[str, Any]:
        """Moves the anchor of what commits narrow, and returns the update that says so."""
        if not self._sent:
            return {}
        if final:
            specs = self._precision.narrowed(self._layout.specs)
            held.sent = {spec.name: masters[spec.name].astype(spec.dtype) for spec in specs}
            return {}
        specs = self._layout.specs
        sent, held.sent = updates.made(specs, self._precision, held.sent, masters)
        return dict(sent)

    def _masters_of(self, held: _Held) -> dict[str, np.ndarray]:
        master = np.asarray(held.master)
        return {
            spec.name: self._layout.tensor(index, master)
            for index, spec in enumerate(self._layout.specs)
            if spec.name in self._masters
        }

    def _merge_own(
        self, held: _Held, contributions: Sequence[Measured], shares: np.ndarray
    ) -> None:
        """Merges the tensors that a kernel of the user's own is for, in fp32, one by one.

        The stack is padded to a power of two, so that few numbers of contributions compile.
        """
        if not self._own:
            return
        rows = 1 << (len(contributions) - 1).bit_length()
        padded = np.zeros(rows, np.float32)
        padded[: len(shares)] = shares
        whole = np.array(held.u)
        for index, kernel in self._own.items():
            shape = self._layout.specs[index].shape
            stack = np.zeros((rows, *shape), np.float32)
            for row, one in enumerate(contributions):
                stack[row] = one.tensors[index].reshape(shape)
            merged = merge_tensor(stack, padded, kernel=kernel, sums=STACKED)
            self._layout.tensor(index, whole)[...] = merged
        held.u = kernels.owned(whole)

    def _scale(self, radius: np.ndarray, u_norms: np.ndarray) -> np.ndarray:
        """What turns u into the merged delta: r̄/‖u‖, and 1 for tensors merged directly."""
        length = np.where(u_norms < CUT_OFF, np.inf, u_norms)
        return np.where(self._direct, 1.0, radius / length)

    def _combine(
        self, held: _Held, contributions: Sequence[Measured], coefficients: np.ndarray
    ) -> np.ndarray:
        """Fills u block by block and returns its norm per tensor, in float64."""
        sums = np.zeros(len(self._direct) + 1)
        coefficients = _with_padding(coefficients)

        def start(block: Block) -> jax.Array:
            self._combine_block(held, block, contributions, block.per_row(coefficients))
            return kernels.squares_of_state(held.u, block.row, block.valid)

        self._each_block(start, lambda block, rows: block.add_rows(sums, rows))
        return np.sqrt(sums[:-1])

    def _combine_block(
        self, held: _Held, block: Block, contributions: Sequence[Measured], per_row: np.ndarray
    ) -> None:
        count = len(contributions)
        group = next((size for size in GROUPS if size >= count), GROUPS[-1])
        dtype = common_dtype(block, [one.tensors for one in contributions])
        if count <= group:
            windows = self._windows(block, contributions, dtype, held.u)
            held.u = kernels.combine(held.u, block.row, *_padded(per_row, block, windows, group))
            return
        total = jnp.zeros((self._layout.block_rows, ROW), np.float64)
        for start in range(0, count, group):
            members = slice(start, start + group)
            windows = self._windows(block, contributions[members], dtype, (held.u, total))
            total = kernels.accumulate(total, *_padded(per_row[members], block, windows, group))
        held.u = kernels.replace(held.u, block.row, total)

    def _windows(
        self, block: Block, contributions: Sequence[Measured], dtype: np.dtype, pending: Any
    ) -> list[Window]:
        """A block of each contribution; `pending` is what was computed from the windows before."""
        index = int(block.row) // self._layout.block_rows
        windows: list[Window] = []
        for slot, one in enumerate(contributions):
            shown = one.windows[index]
            if shown is None or shown.memory.dtype != dtype:
                jax.block_until_ready(pending)  # It may still read what the slot held.
                shown = self._staging.gather(block, one.tensors, dtype, slot)
            windows.append(shown)
        return windows

    def _step(self, held: _Held, scale: np.ndarray, final: bool) -> None:
        # The momentum has no part in a final round: Θ − 1·(Δ + 0·m) is Θ − Δ to the bit.
        rate, beta = (np.float64(1), np.float64(0)) if final else (self._learning_rate, self._beta)
        scales = _with_padding(scale[None])
        for block in self._layout.blocks:
            row, rows = block.row, block.per_row(scales)[0]
            if not final:
                held.momentum = kernels.step_momentum(held.momentum, row, held.u, rows, beta)
            held.master = kernels.step_anchor(
                held.master, row, held.momentum, held.u, rows, rate, beta
            )
            for dtype, narrowed in held.narrowed.items():
                held.narrowed[dtype] = kernels.narrow(narrowed, row, held.master, rows)

    def _each_block(
        self, start: Callable[[Block], Any], finish: Callable[[Block, Any], None]
    ) -> None:
        """Starts a block before it finishes the one before.

        Programs run on threads of JAX's own, so what the two functions do passes while the
        arithmetic of the neighbouring block is under way.
        """
        first, *others = self._layout.blocks
        before, started = first, start(first)
        for block in others:
            following = start(block)
            finish(before, started)
            before, started = block, following
        finish(before, started)

    def _closed(self, held: _Held, mean_cosine: float, update: dict[str, np.ndarray]) -> Closed:
        wholes = {dtype: np.asarray(whole) for dtype, whole in held.narrowed.items()}
        master, momentum = np.asarray(held.master), np.asarray(held.momentum)
        closed = Closed({}, {}, self._masters_of(held), update, mean_cosine)
        for index, spec in enumerate(self._layout.specs):
            closed.momentum[spec.name] = self._layout.tensor(index, momentum)
            whole = wholes.get(spec.dtype, master)
            sent = held.sent.get(spec.name)
            closed.anchor[spec.name] = self._layout.tensor(index, whole) if sent is None else sent
        if update:  # What is not narrowed is in it too.
            update |= {n: array for n, array in closed.anchor.items() if n not in self._sent}
        return closed

    def _check_range(self, held: _Held, longest: float, final: bool) -> None:
        """Raises OutOfRange when an element is not finite; `longest` bounds the merged delta.

        No element moves further than the delta is long, so a bound is carried from round to round,
        and the values are looked at only when it leaves the range.
        """
        rate, beta = (1.0, 0.0) if final else (self._learning_rate, self._beta)
        if not final:
            rounding = 1 if self._precision.momentum_dtype == "float32" else 1 + 2**-8
            held.momentum_reach = float(beta * held.momentum_reach + longest) * rounding
        held.master_reach += float(rate * (longest + beta * held.momentum_reach))
        limit = min((LIMITS[spec.dtype] for spec in self._layout.specs), default=np.inf)
        if held.master_reach <= limit and held.momentum_reach <= LIMITS["float32"]:
            return
        master, momentum = np.asarray(held.master), np.asarray(held.momentum)
        for index, spec in enumerate(self._layout.specs):
            with np.errstate(over="ignore"):
                value = self._layout.tensor(index, master).astype(spec.dtype, copy=False)
            if not max(_reach(value), _reach(self._layout.tensor(index, momentum))) < np.inf:
                raise OutOfRange(
                    f"`{spec.name}` left the range of {spec.dtype} in this round. Hold the "
                    "parameter in bfloat16 or float32, lower `outer_lr`, or look for a node that "
                    "diverges."
                )
        held.master_reach = _reach(master)
        held.momentum_reach = _reach(momentum)

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


def _with_padding(values: np.ndarray) -> np.ndarray:
    """Values per tensor, (n, tensors), and a 0 for the rows where none lies."""
    return np.pad(values, ((0, 0), (0, 1)))


def _padded(per_row: np.ndarray, block: Block, windows: list[Window], group: int) -> list:
    """Coefficients, valid elements and windows of a group, filled up to its size.

    A pad is the last window once more with coefficient 0: a pad of its own would be another stream
    of memory, and −0.0 + 0·(−0.0) is still −0.0.
    """
    coefficients = kernels.aligned_zeros((group, per_row.shape[1]), np.float64)
    coefficients[: len(windows)] = per_row
    return [coefficients, block.valid, *windows, *windows[-1:] * (group - len(windows))]


def _reach(values: np.ndarray) -> float:
    """The largest distance from zero; infinite if any element is not finite."""
    largest = float(np.max(np.abs(values.astype(np.float32, copy=False)), initial=0.0))
    return largest if np.isfinite(largest) else np.inf


def _flat(delta: Mapping[str, np.ndarray], spec: TensorSpec) -> np.ndarray:
    found = delta[spec.name]
    if found.shape != spec.shape:
        raise UsageError(f"The delta of `{spec.name}` has shape {found.shape}, not {spec.shape}.")
    return found.reshape(-1)
