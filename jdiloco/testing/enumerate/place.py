"""A process as a value: everything that one life of a node holds in memory, and has asked for."""

from __future__ import annotations

import dataclasses

from jdiloco.protocol import effects as fx
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.learner import LearnerState


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a learner aligned a fragment with: whose round it was (-1: nobody's), and the value."""

    round: int
    value: str
    first: int  # Steps up to here are not in the parameters any more.
    snapped: int = 0  # The step after which its newest snapshot was taken.


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """The learner's side of a process."""

    learner: LearnerState
    held: tuple[Held, ...]  # Per fragment.
    drafts: tuple[tuple[int, bytes], ...] = ()  # Contributions that may have to be sent, by round.


@dataclasses.dataclass(frozen=True, slots=True)
class Sent(fx.Effect):
    """Upload, with the bytes that are on their way."""

    key: ContributionKey
    name: str
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Living:
    """A process that has joined; its parts are numbers in `Inside`, which many places share."""

    member: int
    training: int
    asked: tuple[int, ...] = ()  # Requests under way; of one kind the oldest first.


@dataclasses.dataclass(frozen=True, slots=True)
class Dead:
    """No process: it was killed, or has not been started."""

    node: str
    starts: int = 0  # So often it has been started.


@dataclasses.dataclass(frozen=True, slots=True)
class Joining:
    """A process that joins: the answers it has had so far say where it stands."""

    node: str
    starts: int
    answers: tuple[object, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Over:
    """A life that found that it must not go on; its process has ended and is not started again."""

    node: str
    why: str


Place = Living | Dead | Joining | Over
