"""Private checkpoints of simulated nodes, which outlive the process that took them."""

from __future__ import annotations

import dataclasses

from jdiloco.protocol.resuming import Private
from jdiloco.testing.simulate.values import Delta, Row, Trained, Values


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """What a node needs to go on, as of a step boundary."""

    private: Private
    anchors: tuple[Values, ...]
    rounds: tuple[int, ...]  # Whose records made the anchors, -1 for the initial values.
    rows: tuple[Row, ...]  # One for each step.
    trained: tuple[Trained, ...]  # What each fragment's parameters hold beyond its anchor,
    snapshots: tuple[Trained, ...]  # and held when its newest contribution was taken.
    finite: tuple[bool, ...]
    deltas: tuple[Delta, ...]  # Outstanding.
