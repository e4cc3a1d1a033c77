"""What goes into a member of a run and what comes out of it.

Every event carries the time at which it happened, `now`, in seconds of any clock that only moves
forward. Effects are requests: whoever performs them answers each with the event named beside it.
"""

from __future__ import annotations

import dataclasses

from jdiloco import events
from jdiloco.errors import JDilocoError
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.records import (
    Checkpoint,
    ContributionHead,
    Payload,
    RoundRecord,
)
from jdiloco.protocol.rules import Life


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """The root of what happens."""

    now: float


@dataclasses.dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Listed(Event):
    """Answers Poll: the keys that the listing showed, or None when the store did not answer."""

    keys: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Beaten(Event):
    """Answers Beat."""

    ok: bool


@dataclasses.dataclass(frozen=True, slots=True)
class RecordRead(Event):
    """Answers ReadRecord: the object's bytes, None when there is none."""

    round: int
    data: bytes | None
    ok: bool = True  # False: no answer.


@dataclasses.dataclass(frozen=True, slots=True)
class RecordSent(Event):
    """Answers WriteRecord: True created, False taken, None no clear answer."""

    round: int
    created: bool | None


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimRead(Event):
    """Answers MakeClaim and ReadClaim: the claim that lies there, None when none was found."""

    round: int
    number: int
    data: bytes | None


@dataclasses.dataclass(frozen=True, slots=True)
class Examined(Event):
    """Answers Examine: the contribution's head, or why it is rejected, or neither: no answer."""

    key: ContributionKey
    head: ContributionHead | None = None
    weight: float = 0.0
    sha256: str = ""
    rejected: str = ""
    parts: int = 0  # Objects that hold its tensors, beside its own.


@dataclasses.dataclass(frozen=True, slots=True)
class Merged(Event):
    """Answers Merge: the payloads are in the mailbox; None when the attempt failed.

    Or the merge of these contributions leaves the range of a parameter's type, and `culprit` is the
    one that reaches furthest.
    """

    round: int
    attempt: int
    anchor: Payload | None = None
    outer: Payload | None = None
    update: Payload | None = None
    cosine: float = 1.0
    error: str = ""
    culprit: ContributionKey | None = None
    replaced: bool = False  # The record to compare is another than this node has read.

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """What the attempt has put into the mailbox."""
        return tuple(p for p in (self.anchor, self.outer, self.update) if p is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Contributed(Event):
    """The learner has taken a snapshot; its delta is ready to be sent."""

    head: ContributionHead


@dataclasses.dataclass(frozen=True, slots=True)
class Uploaded(Event):
    """Answers Upload."""

    key: ContributionKey
    ok: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Progress(Event):
    """What the learner is doing."""

    phase: str
    step: int
    next_round: int


@dataclasses.dataclass(frozen=True, slots=True)
class Watched(Event):
    """This node has claimed work in view, and has to know whether these lives go on."""

    lives: tuple[Life, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Delivered(Event):
    """Answers Deliver; not `ok` when the store did not answer, or the values are `gone`: swept,
    because a newer version has replaced them.
    """

    round: int
    ok: bool
    gone: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Saved(Event):
    """Answers Save; None when it failed."""

    checkpoint: Checkpoint | None


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceRead(Event):
    """Answers ReadPlace: the run that the manifest names, "" for none, None without an answer."""

    run: str | None
    superseded: bool = False  # This node has a newer incarnation.


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """The root of what is to be done."""


@dataclasses.dataclass(frozen=True, slots=True)
class Poll(Effect):
    """List the log after `after`."""

    after: str


@dataclasses.dataclass(frozen=True, slots=True)
class Beat(Effect):
    """Create an empty object."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRecord(Effect):
    """Get a round record."""

    round: int


@dataclasses.dataclass(frozen=True, slots=True)
class WriteRecord(Effect):
    """Create a round record with these bytes; once, without trying again."""

    round: int
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class MakeClaim(Effect):
    """Create a claim, then read what lies there."""

    round: int
    number: int
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ReadClaim(Effect):
    """Get a claim."""

    round: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Examine(Effect):
    """Get a contribution, check it against the fragment's version, and measure it."""

    key: ContributionKey
    fragment: int
    version: int
    newer: int | None  # A higher incarnation of its node: it must list the contribution as valid.


@dataclasses.dataclass(frozen=True, slots=True)
class Merge(Effect):
    """Merge examined contributions in this order, take the outer step, upload the payloads."""

    round: int
    attempt: int
    write_id: str
    fragment: int
    base: RoundRecord | None  # Whose version it starts from, None for the initial one.
    contributions: tuple[ContributionKey, ...]
    weights: tuple[float, ...]
    final: bool  # Every participant is leaving: no outer learning rate, no momentum.
    compare: str | None = None  # First: what the record of the round before must hash to.


@dataclasses.dataclass(frozen=True, slots=True)
class Upload(Effect):
    """Send the contribution of `round`."""

    key: ContributionKey


@dataclasses.dataclass(frozen=True, slots=True)
class Forget(Effect):
    """The record of `round` has been read: what is held for it is no longer needed."""

    round: int


@dataclasses.dataclass(frozen=True, slots=True)
class Took(Effect):
    """A record has been read; `own` when it is this node's. Comes before what follows from it."""

    record: RoundRecord
    own: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver(Effect):
    """Give a record to the learner, with its values unless they are not needed."""

    record: RoundRecord
    values: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Follow(Effect):
    """Tell the learner that the others wait for it."""

    round: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pause(Effect):
    """Tell the learner to leave training to others until `Resume`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resume(Effect):
    """Tell the learner to train again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Save(Effect):
    """Write a run checkpoint of the values after `round` under `prefix`."""

    round: int
    records: tuple[RoundRecord | None, ...]  # Per fragment whose version, None for the initial one.
    versions: tuple[int, ...]
    prefix: str


@dataclasses.dataclass(frozen=True, slots=True)
class Delete(Effect):
    """Remove owned objects; needs no answer."""

    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteUnder(Effect):
    """Remove every object under a prefix of owned objects; needs no answer."""

    prefix: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReadPlace(Effect):
    """See whether the mailbox still holds this run, and whether this life has a successor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Emit(Effect):
    """Tell the callbacks."""

    event: events.Event


@dataclasses.dataclass(frozen=True, slots=True)
class Stop(Effect):
    """This node must not go on."""

    error: JDilocoError
