"""What happened in a simulated run, entry by entry, each with one readable line."""

from __future__ import annotations

import collections
import dataclasses

from jdiloco import events
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.records import RoundRecord
from jdiloco.testing.simulate.scenario import Scenario
from jdiloco.testing.simulate.values import Span


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The root. `at` is in seconds of the world's clock, which no node can see."""

    at: float
    who: str  # The process: a node's id and which start of it this is.

    @property
    def what(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.at:9.3f} {self.who:8} {self.what}"


@dataclasses.dataclass(frozen=True, slots=True)
class Stored(Entry):
    """An object came to lie in the mailbox."""

    key: str
    data: bytes

    @property
    def what(self) -> str:
        return f"stored {self.key} ({len(self.data)} bytes)"


@dataclasses.dataclass(frozen=True, slots=True)
class Deleted(Entry):
    """An object was removed from the mailbox."""

    key: str

    @property
    def what(self) -> str:
        return f"deleted {self.key}"


@dataclasses.dataclass(frozen=True, slots=True)
class Forged(Entry):
    """Somebody who has no key put an object into the mailbox."""

    name: str
    how: str

    @property
    def what(self) -> str:
        return f"forged {self.name} ({self.how})"


@dataclasses.dataclass(frozen=True, slots=True)
class Believed(Entry):
    """A process was shown what no node has written."""

    key: str

    @property
    def what(self) -> str:
        return f"was shown {self.key}, which no node wrote"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked(Entry):
    """A process sent a request that did not go well."""

    verb: str
    key: str
    fate: str

    @property
    def what(self) -> str:
        return f"asked {self.verb} {self.key}: {self.fate}"


@dataclasses.dataclass(frozen=True, slots=True)
class Took(Entry):
    """A node acts on a round's record."""

    record: RoundRecord
    own: bool

    @property
    def what(self) -> str:
        return f"took {'its own' if self.own else 'the'} record of round {self.record.round}"


@dataclasses.dataclass(frozen=True, slots=True)
class Held(Entry):
    """A learner took a fragment's committed value, when it joined or by an alignment."""

    fragment: int
    version: int
    value: str
    round: int  # Whose record it acts on, -1 for the initial values.

    @property
    def what(self) -> str:
        return f"holds version {self.version} of fragment {self.fragment}"


@dataclasses.dataclass(frozen=True, slots=True)
class Snapped(Entry):
    """A learner took a snapshot, to be sent as this contribution."""

    key: ContributionKey
    steps: int  # Trained in this life so far.

    @property
    def what(self) -> str:
        return f"took a snapshot for round {self.key.round} after {self.steps} steps"


@dataclasses.dataclass(frozen=True, slots=True)
class Saved(Entry):
    """A node wrote what it needs to go on."""

    steps: int  # Trained by then, in this life and those that it goes on from.

    @property
    def what(self) -> str:
        return f"saved its state after {self.steps} steps"


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed(Entry):
    """A node goes on from what an earlier life saved."""

    rest: tuple[int, ...]  # Per fragment: samples since its anchor that were in no contribution.
    sent: tuple[tuple[ContributionKey, int], ...]  # What it inherits, with the samples of each.

    @property
    def what(self) -> str:
        return f"goes on with {self.rest} samples and {len(self.sent)} contributions"


@dataclasses.dataclass(frozen=True, slots=True)
class Happened(Entry):
    """A node told its callbacks something."""

    event: events.Event

    @property
    def what(self) -> str:
        return str(self.event)


@dataclasses.dataclass(frozen=True, slots=True)
class Fate(Entry):
    """A process starts, is killed, falls asleep, wakes up or ends."""

    kind: str  # started, joined, killed, paused, woke, ended
    detail: str = ""

    @property
    def what(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()


@dataclasses.dataclass(frozen=True, slots=True)
class Worked(Entry):
    """A learner's time account, when it has done its last step."""

    steps: int
    seconds: float  # Since its first step began.
    asleep: float  # Of these, paused, hanging, or waiting because of `overlap_steps`.
    step_seconds: float
    rows: tuple[Span, ...]

    @property
    def what(self) -> str:
        return f"trained {self.steps} steps in {self.seconds:.3f} s ({self.asleep:.3f} s asleep)"


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """A request, whatever became of it. Not an entry of the history: there are too many."""

    at: float
    who: str
    verb: str
    key: str  # The prefix, for `list`; empty for `delete`.
    size: int  # Bytes of its body.


@dataclasses.dataclass(frozen=True)
class History:
    """A simulated run: how it was set up, what happened, and the mailbox at the end."""

    scenario: Scenario
    entries: tuple[Entry, ...]
    objects: dict[str, bytes]
    ended: bool  # Every process had ended before the horizon.
    sent: tuple[Sent, ...]  # Every request, in order.

    @property
    def busiest(self) -> dict[str, int]:
        """The most requests that each process sent in one second."""
        counts = collections.Counter((request.who, int(request.at)) for request in self.sent)
        most: dict[str, int] = {}
        for (who, _), count in counts.items():
            most[who] = max(most.get(who, 0), count)
        return most

    def of(self, kind: type) -> list:
        """The entries of one kind, in order."""
        return [entry for entry in self.entries if isinstance(entry, kind)]

    def events(self, kind: type, node: str | None = None) -> list:
        """The events of one kind that nodes told their callbacks, in order."""
        found = [entry.event for entry in self.of(Happened) if isinstance(entry.event, kind)]
        return [event for event in found if node is None or event.node == node]

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.entries)
