"""What a session was asked for, checked before anything is touched."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any

from jdiloco import events
from jdiloco.errors import UsageError
from jdiloco.protocol.joining import Waiting
from jdiloco.protocol.rules import ROLES, trains
from jdiloco.protocol.signing import RunKey
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.clock import Clock
from jdiloco.store.base import Store

Callback = Callable[[events.Event], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A node's own settings, and those of its run. Raises UsageError for what cannot be meant."""

    algorithm: DiLoCo
    mailbox: str | os.PathLike[str] | Store
    key: RunKey | None
    role: str
    ranks: int | None
    poll_interval: float
    compression: str | None
    callbacks: tuple[Callback, ...]
    leave_with_run: bool
    clock: Clock

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            roles = ", ".join(map(repr, ROLES))
            raise UsageError(f"`role` must be one of {roles}, got {self.role!r}.")
        if self.ranks is not None and not self.ranks >= 1:
            raise UsageError(f"`ranks` counts slices of the data: 1 or more, not {self.ranks!r}.")
        if not self.poll_interval > 0:
            raise UsageError(
                f"`poll_interval` must be above 0 seconds, got {self.poll_interval!r}."
            )
        if self.poll_interval * 4 > self.algorithm.beat_seconds:
            raise UsageError(
                f"`poll_interval` is {self.poll_interval} s and the run's `beat_seconds` "
                f"{self.algorithm.beat_seconds}: a beat needs at least four polls to be seen in "
                "time. Poll more often, or beat less."
            )

    @property
    def trains(self) -> bool:
        """Whether the node has a learner."""
        return trains(self.role)

    @property
    def waiting(self) -> Waiting:
        """How long what waits for what, while the node joins."""
        algorithm = self.algorithm
        return Waiting(self.poll_interval, algorithm.beat_seconds, algorithm.lease_seconds)

    @property
    def patience(self) -> float:
        """Seconds for a closer that died to be noticed and for another to take its place."""
        return self.algorithm.rules().patience(self.poll_interval)


def check_arguments(algorithm: Any, mailbox: Any, callbacks: Iterable[Any]) -> None:
    """What a slip of the hand leaves behind; everything else is checked where it is used."""
    if not isinstance(algorithm, DiLoCo):
        raise UsageError(
            f"`algorithm` is {algorithm!r:.80}. "
            "Call Session(params, jdiloco.DiLoCo(sync_every=…, fragments=…), mailbox)."
        )
    if mailbox is None:
        raise UsageError("`mailbox` is None. Name a folder that every node of the run can reach.")
    if callable(callbacks) or not all(map(callable, callbacks)):
        raise UsageError(
            f"`callbacks` is {callbacks!r:.80}. Pass a sequence of functions of one event, "
            "`callbacks=(jdiloco.log_events,)`, or () for none."
        )


def check_model(settings: Settings, params: Any) -> None:
    """A node that trains has something to train."""
    if params is None and settings.trains:
        raise UsageError(
            f"`params` is None, and a node of role {settings.role!r} trains. Pass the parameters "
            "or the module, or use role='syncer' for a node that only closes rounds."
        )
