"""What a member remembers, and the turn in which one event changes it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from jdiloco import events
from jdiloco.errors import JDilocoError
from jdiloco.protocol import closing as closings
from jdiloco.protocol import effects as fx
from jdiloco.protocol import sweep
from jdiloco.protocol import tally as tallies
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.closing import Closing
from jdiloco.protocol.keys import BeatKey, ContributionKey, Keys
from jdiloco.protocol.lease import Lease, Verdict
from jdiloco.protocol.records import Build, RoundRecord
from jdiloco.protocol.rules import Life, Rules, closes
from jdiloco.protocol.tally import Tally

CHECK_LEASES = 10
"""A node looks whether the mailbox still holds its run once in so many lease timeouts."""

TROUBLES = (
    "listing",
    "beat",
    "manifest",
    "record",  # Reading one.
    "commit",  # Writing one.
    "claim",
    "contribution",  # Reading one.
    "merge",
    "upload",
    "values",
    "checkpoint",
)
"""Kinds of requests, each of which makes a node degraded until one of its kind has an answer."""

CLOSING = ("record", "commit", "claim", "contribution", "merge")
"""Of them, those that are over when the round has a record."""

UPLOADS = 2
"""So many uploads in a row fail before a node calls itself degraded."""

LONGEST_LISTING = 1.0
"""Seconds. A listing may take a third of a beat, but where beats come faster than every three
seconds what is slow is rather this machine than the store."""

NOBODY = Verdict()
EMPTY_SHELF = sweep.Shelf()


@dataclasses.dataclass(frozen=True, slots=True)
class Sending:
    """A contribution on its way."""

    key: ContributionKey
    sent: bool = False  # The upload runs.
    landed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Waits:
    """When things happened in the round that is open, on this node's clock."""

    opened: float
    accepted: float | None = None  # The first contribution was accepted.
    closable: float | None = None  # Seen by the closer.
    merging: float | None = None
    failed: int = 0  # Attempts to merge or to write the record that came to nothing.
    retry: float = 0.0  # No further attempt before this.
    seemed_closable: float | None = None  # Seen by everybody else.


@dataclasses.dataclass(frozen=True, slots=True)
class MemberState:
    """Everything a member has to remember."""

    me: Life
    rules: Rules
    keys: Keys
    poll_seconds: float
    role: str  # One of `rules.ROLES`.
    build: Build
    chain: Chain
    closing: Closing
    waits: Waits
    tally: Tally  # Of everybody's samples.
    # What the newest listing showed.
    leases: dict[Life, Lease] = dataclasses.field(default_factory=dict)
    verdict: Verdict = NOBODY
    beats: tuple[BeatKey, ...] = ()
    contributions: tuple[ContributionKey, ...] = ()
    records_to: int = -1  # The highest round seen to have a record.
    listed: float | None = None
    # Requests under way.
    polling: bool = False
    next_poll: float = 0.0
    reading: bool = False
    claiming: bool = False
    reading_claim: bool = False
    passed_over: tuple[tuple[Life, int], ...] = ()  # Syncers, and in which round.
    saving: bool = False
    save_number: int = 0
    checking: bool = False
    next_check: float = 0.0  # Of the manifest and of this node's incarnations.
    unsure: bool = False  # This life may have been ended; nothing is published until it is known.
    watched: tuple[Life, ...] = ()  # Whose leases matter though they may not have been seen.
    lost: bool = False  # The mailbox holds no manifest.
    # What this node does.
    phase: str = "joining"
    train_step: int = 0
    next_round: int = 0
    beat: int = 0
    beaten: bool = False  # A beat is known to have landed.
    next_beat: float = 0.0
    attempts: int = 0
    sending: tuple[Sending, ...] = ()
    followed: int = -1
    paused: bool = False  # Its learner was told to leave training to others.
    met_learner: bool = False  # Another node has been seen that trains.
    queue: tuple[tuple[RoundRecord, bool], ...] = ()  # To deliver, and whether with values.
    delivering: bool = False
    gone: int = 0  # How often the oldest was found to be swept.
    unlisted: tuple[ContributionKey, ...] = ()  # Late, and perhaps still on their way.
    attempted: tuple[str, ...] = ()  # Payloads of this round's attempts, uploaded or not.
    shelf: sweep.Shelf = EMPTY_SHELF
    degraded: bool = False  # It has said so, and not yet that it has recovered.
    troubles: tuple[tuple[str, str], ...] = ()  # What fails, one of TROUBLES, and how.
    slow: bool = False  # It has said that closing takes too long.
    unsent: int = 0  # Uploads in a row that failed, of whichever contribution.
    polled: float = 0.0  # When the newest listing was asked for.
    failures: int = 0  # Requests without an answer since the last listing that had one.
    hold: float = 0.0  # What failed is not tried again before this.
    stopped: bool = False

    @property
    def can_close(self) -> bool:
        """Whether this node closes rounds at all."""
        return closes(self.role)


def start(
    me: Life,
    rules: Rules,
    chain: Chain,
    *,
    poll_seconds: float,
    role: str,
    build: Build,
    now: float,
    beat: int = 1,
    shelf: sweep.Shelf = EMPTY_SHELF,
) -> MemberState:
    """A member that has joined and knows the chain up to its newest record.

    Its life has shown itself with beat number `beat`; `shelf` holds what it found in the mailbox
    that will be garbage (`joining.find_old`).
    """
    return MemberState(
        me=me,
        rules=rules,
        keys=Keys(chain.run),
        poll_seconds=poll_seconds,
        role=role,
        build=build,
        chain=chain,
        closing=closings.opened(chain.round, chain.named, me, can_close=closes(role)),
        waits=Waits(opened=now),
        tally=tallies.begin(chain.records, complete=chain.read < 0),
        records_to=chain.read,
        beat=beat,
        beaten=True,
        next_poll=now,
        next_beat=now,
        next_check=now + CHECK_LEASES * rules.lease_seconds,
        shelf=replace(shelf, checkpoints=(chain.checkpoint,)),
    )


def has_ended(state: MemberState, life: Life) -> bool:
    """Whether a lease has ended; that of a life no listing was asked about yet has not."""
    looked_at = life in state.leases or state.verdict.newer(life) is not None
    return looked_at and life not in state.verdict.live


class Turn:
    """One event's worth of changes. Collects effects in the order in which they were decided."""

    def __init__(self, state: MemberState, now: float) -> None:
        self.state = state
        self.now = now
        self.effects: list[fx.Effect] = []

    def set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def add(self, *effects: fx.Effect) -> None:
        self.effects.extend(effects)

    def emit(self, event: events.Event) -> None:
        self.add(fx.Emit(event))

    def defer(self) -> None:
        """Nothing is asked of the store for a while, longer each time until a listing succeeds."""
        state = self.state
        wait = min(state.poll_seconds * 2**state.failures, state.rules.beat_seconds)
        hold = max(state.hold, self.now + wait)
        self.set(hold=hold, failures=min(state.failures + 1, 30))

    def degrade(self, trouble: str, because: str) -> None:
        """Training goes on; what failed is tried again.

        `trouble` is one of TROUBLES. The node stays degraded until each that it has is over, so
        that one kind of request which fails all the time is not forgotten between two tries.
        """
        self.defer()
        self.trouble(trouble, because)

    def trouble(self, trouble: str, because: str) -> None:
        """Says so, at once, unless it has."""
        assert trouble in TROUBLES
        others = tuple(item for item in self.state.troubles if item[0] != trouble)
        self.set(troubles=(*others, (trouble, because)))
        if not self.state.degraded:
            self.set(degraded=True)
            self.emit(events.Degraded(node=self.state.me.node, because=because))

    def over(self, *troubles: str) -> None:
        """Requests of these kinds work again, or are not needed any more."""
        if any(name in troubles for name, _ in self.state.troubles):
            left = tuple(item for item in self.state.troubles if item[0] not in troubles)
            self.set(troubles=left)

    def stop(self, error: JDilocoError) -> None:
        """This node must not go on; the first reason counts."""
        if not self.state.stopped:
            self.set(stopped=True)
            self.add(fx.Stop(error))


def mix(old: float | None, new: float, *, count: int) -> float:
    """A moving average with a decay of 0.1, and the plain mean of the first ten values.

    The first round of a run waits for compilers and late starters; it would weigh for thirty.
    """
    share = max(0.1, 1 / max(1, count))
    return new if old is None else (1 - share) * old + share * new


def later(turn: Turn) -> Waits:
    """What fails fails often: the next tries come ever later, at most a lease apart.

    Listings that succeed meanwhile say nothing of it, so it has a wait of its own.
    """
    state = turn.state
    wait = min(state.poll_seconds * 2**state.waits.failed, state.rules.lease_seconds)
    return replace(state.waits, failed=state.waits.failed + 1, retry=turn.now + wait)
