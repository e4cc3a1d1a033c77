"""In how many bits a run sends and keeps what it commits, and what follows for each tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jdiloco.algo.wire import narrows
from jdiloco.types import TensorSpec


@dataclasses.dataclass(frozen=True)
class Precision:
    """`commit_dtype` and `momentum_dtype` of a run; `DiLoCo` says what they do."""

    commit_dtype: str | None = None
    momentum_dtype: str = "float32"

    @classmethod
    def of_manifest(cls, algorithm: Mapping[str, Any]) -> Precision:
        """Those of the settings that a manifest holds."""
        default = cls()
        return cls(
            algorithm.get("commit_dtype", default.commit_dtype),
            algorithm.get("momentum_dtype", default.momentum_dtype),
        )

    def narrows(self, spec: TensorSpec) -> bool:
        """Whether commits of a tensor are sent in fewer bits than it has."""
        return narrows(self.commit_dtype, spec.dtype)

    def narrowed(self, specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Those whose commits are."""
        return tuple(spec for spec in specs if self.narrows(spec))

    def masters(self, specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Those that are rounded from an fp32 master; another tensor is its own."""
        return tuple(s for s in specs if s.dtype in ("bfloat16", "float16") or self.narrows(s))

    def momenta(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """What is kept of the momentum of tensors."""
        return tuple(TensorSpec(spec.name, spec.shape, self.momentum_dtype) for spec in specs)


FULL = Precision()
"""Commits go out whole, and momentum is kept in fp32."""
