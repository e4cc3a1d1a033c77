"""What a run trains: tensors by name, and which fragment each belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jdiloco.algo.partition import plan
from jdiloco.errors import SchemaMismatch, UsageError
from jdiloco.protocol.records import Manifest
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.precision import FULL, Precision
from jdiloco.types import TensorSpec

SHOWN = 8
"""Differences that an error lists before it only counts."""


@dataclasses.dataclass(frozen=True)
class Schema:
    """The tensors of a model in canonical order, the fragment plan, and how commits are kept."""

    tensors: tuple[TensorSpec, ...]
    plan: tuple[tuple[str, ...], ...]
    precision: Precision = FULL

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec], algorithm: DiLoCo) -> Schema:
        """The schema of a model under `algorithm`."""
        if not tensors:
            raise UsageError("There is no floating-point tensor in these parameters to train.")
        odd = [spec.name for spec in tensors if spec.name == "__metadata__"]
        if odd:
            raise UsageError("A tensor cannot be called `__metadata__`: messages use that name.")
        wide = [spec.name for spec in tensors if spec.dtype == "float64"]
        if wide:
            raise UsageError(
                f"{wide[0]!r} is float64; a run holds float32, bfloat16 and float16. "
                "Cast the parameters to float32."
            )
        fragments = plan(algorithm.partition, tensors, algorithm.fragments)
        return cls(tuple(tensors), fragments, algorithm.precision)

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Schema:
        """The schema that a run was created with."""
        return cls(manifest.tensors, manifest.plan, Precision.of_manifest(manifest.algorithm))

    def fragment(self, index: int) -> tuple[TensorSpec, ...]:
        """The tensors of one fragment, in canonical order."""
        names = set(self.plan[index])
        return tuple(spec for spec in self.tensors if spec.name in names)

    def check_against(self, manifest: Manifest) -> None:
        """Raises SchemaMismatch unless the run trains this model.

        Aliases may differ: a split NNX state does not show which of its tensors the module shares.
        What the creator saw counts for every node.
        """
        check_same(manifest.tensors, self.tensors, "The run in this mailbox")
        if self.plan != manifest.plan:
            raise SchemaMismatch(
                "The run in this mailbox cuts the same model into other fragments: it was created "
                "by another version. Use that version, or another mailbox."
            )


def check_same(theirs: Sequence[TensorSpec], mine: Sequence[TensorSpec], who: str) -> None:
    """Raises SchemaMismatch unless both say the same of every tensor; `who` has the first."""
    there = {spec.name: spec for spec in theirs}
    here = {spec.name: spec for spec in mine}
    lines = [
        f"  {name}: the run has {_described(there.get(name))}, "
        f"this node {_described(here.get(name))}"
        for name in sorted({*there, *here})
        if _described(there.get(name)) != _described(here.get(name))
    ]
    if lines:
        raise SchemaMismatch(
            f"{who} trains another model:\n{listed(lines, SHOWN)}\n"
            "Build the same model, or use another mailbox for another run."
        )


def listed(lines: Sequence[str], shown: int) -> str:
    """The first so many of some lines, and how many more there are."""
    more = [f"  and {len(lines) - shown} more"] if len(lines) > shown else []
    return "\n".join([*lines[:shown], *more])


def _described(spec: TensorSpec | None) -> str:
    if spec is None:
        return "nothing"
    shape = ", ".join(map(str, spec.shape))
    return f"{spec.dtype}[{shape}]"
