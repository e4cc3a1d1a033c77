"""What happens to a node, as frozen values handed to callbacks.

Each event has a one-line text, `str(event)`, which is what the default callback logs. `fields`
gives the same as plain values for JSON lines. Samples and steps are those of one fragment.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """The root. `node` is the id of the node that saw it."""

    node: str

    def fields(self) -> dict[str, Any]:
        """The event as plain values, with its class name under `event`."""
        return {"event": type(self).__name__, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        shown = " ".join(f"{name}={_short(value)}" for name, value in pairs if name != "node")
        return f"{self.node} {type(self).__name__} {shown}".rstrip()


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        return ",".join(_short(item) for item in value) or "-"
    return "-" if value is None else str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCreated(Event):
    """This node created the run: the first checkpoint and the manifest are in the mailbox."""

    run: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joining(Event):
    """The node has to wait before it can join; told once for each reason."""

    because: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined(Event):
    """The node holds the run's newest values and starts to train at `round`."""

    run: str
    incarnation: int
    round: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published(Event):
    """A contribution of this node is in the mailbox."""

    round: int
    fragment: int
    version: int  # The version it was computed against.
    steps: int
    samples: int
    final: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Committed(Event):
    """The record of a round has been read, or this node's own write of it confirmed."""

    round: int
    fragment: int
    version: int  # The fragment's version after this round.
    participants: tuple[str, ...]
    rejected: tuple[str, ...]  # `learner:reason`.
    expected: int  # Learners that could have taken part.
    void: bool  # Nothing was accepted, the version stays.
    closer: str
    cosine: float | None  # Mean pairwise cosine of the deltas; None without a pair.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aligned(Event):
    """The node took a committed version of a fragment; steps and samples are what it kept."""

    round: int
    fragment: int
    version: int
    how: str  # overwrite, blend, carry
    steps: int
    samples: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropped(Event):
    """Training of this node that will never be merged."""

    round: int
    fragment: int
    reason: str  # overwritten, late, rejected, superseded, left, lost
    steps: int
    samples: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuchDropped(Event):
    """Over a fifth of what this node trained lately was dropped; said once until it is less."""

    round: int
    share: float  # Of the samples merged or dropped in the newest four cycles of rounds.
    reasons: tuple[str, ...]  # `reason:samples` since this node joined, means over fragments.
    advice: str  # What helps against the one that cost most.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosingSlow(Event):
    """A commit takes longer than the steps between two rounds, so rounds fall behind."""

    round: int
    commit_seconds: float  # From closing to the record, on the average.
    between_seconds: float  # What the steps between two rounds take.
    advice: str  # Settings with which there is time enough.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed(Event):
    """Where the time of the training thread went since the commit before, in seconds.

    The parts add up to `wall`. What is sent, received and merged while the user's step runs costs
    nothing and is in none of them.
    """

    round: int
    wall: float
    compute: float  # Outside the session: the user's own.
    wait: float  # Blocked, for other nodes.
    upload: float  # Blocked, while this node's contribution was on its way.
    download: float  # Blocked, while committed values were.
    merge: float  # Blocked, while this node closed a round.
    other: float  # In the session, and not blocked.


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrongLedger(Event):
    """A round record holds a ledger that does not add up, or contradicts the records before it."""

    round: int
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting(Event):
    """Training pauses until a round is committed, because `overlap_steps` says so."""

    round: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resting(Event):
    """The node trains nothing for a while; rounds do not wait for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitTaken(Event):
    """The node begins a unit of shared work, after the batches that are behind it."""

    unit: str
    begin: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """This node was elected: it closes the rounds from `round` on and leaves training to others."""

    round: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """This node trains again."""

    round: int
    because: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TookOver(Event):
    """This node claims the closing of a round from the node that was named for it."""

    round: int
    claim: int
    closer: str  # Who was named.
    because: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpointed(Event):
    """A run checkpoint of the values after `round` is complete in the mailbox."""

    round: int
    prefix: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forged(Event):
    """An object that does not carry the signature of the run's key; it counts as absent.

    Told once by every node that sees it.
    """

    name: str  # Of the object in the mailbox.
    because: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Degraded(Event):
    """The store does not answer; training goes on alone."""

    because: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """The store answers again and nothing waits to be sent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left(Event):
    """The node's last event. The four figures are means over the fragments and add up:
    `processed = merged + dropped + pending`, in samples."""

    because: str
    steps: int
    processed: float
    merged: float
    dropped: float
    pending: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something the user will want to look at."""

    message: str
