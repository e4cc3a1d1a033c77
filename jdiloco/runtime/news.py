"""What a node's threads have to say to its learner."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jdiloco.protocol.records import RoundRecord
from jdiloco.runtime.pieces import Pieces

Values = Mapping[str, np.ndarray | Pieces]
"""Tensors by path name, on the host: whole ones, or what a process of a pod holds of them."""


@dataclasses.dataclass(frozen=True)
class Commit:
    """A round record, with its values when the learner is to align with them."""

    record: RoundRecord
    values: Values | None


@dataclasses.dataclass(frozen=True)
class Followed:
    """The others wait for this learner in this round."""

    round: int


@dataclasses.dataclass(frozen=True)
class Paused:
    """It leaves training to others."""


@dataclasses.dataclass(frozen=True)
class Resumed:
    """It trains again."""


@dataclasses.dataclass(frozen=True)
class Halt:
    """This node must not go on."""

    error: BaseException


@dataclasses.dataclass(frozen=True)
class Woken:
    """Something else that it waits for may have happened."""


ToLearner = Commit | Followed | Paused | Resumed | Halt | Woken
