"""What a learner hears in a pod: the same in every process, at the same step.

Each process runs the learner's state machine (`protocol.learner`), which is a function of its state
and of what it is told. So it is enough that all are told the same, in the same order, between the
same two steps: then all publish, align and stop alike, and nothing has to be decided twice.

The process that speaks for the pod has the node's threads, and hears from them. At steps that it
has named itself the last time all processes exchange a row (`World.gather`): it passes on what has
come, and every process says which committed values it holds by now. A commit is taken once all of
them do, and what came after it waits as it would in a queue. A row of a few hundred bytes, about
once in a poll interval: a step at which none is due costs nothing.

    head        others            all, after the exchange
    record r    -                 read the values of r, each its own, on a library thread
    -           values of r here  take record r
    halt        -                 raise, whatever else waits
    -           told to stop      stop before the next step
"""

from __future__ import annotations

import queue
from collections.abc import Callable

import msgspec

from jdiloco import errors
from jdiloco.errors import ClosingFailed, JDilocoError
from jdiloco.protocol.records import Checkpoint, RoundRecord
from jdiloco.runtime.inbox import Inbox
from jdiloco.runtime.news import Commit, Followed, Halt, Paused, Resumed, ToLearner, Values, Woken
from jdiloco.runtime.pods.world import World
from jdiloco.types import Spent

IMPATIENT_SECONDS = 0.01
"""How long the head waits for news while others are reading values that training waits for."""


class Item(msgspec.Struct, frozen=True):
    """One message to the learner."""

    kind: str  # The name of its class in `news`.
    round: int = -1
    record: RoundRecord | None = None
    values: bool = False
    error: str = ""  # Of a halt: the class of its error, and
    text: str = ""


class Order(msgspec.Struct, frozen=True):
    """What the head says."""

    items: tuple[Item, ...]
    look: int  # Steps until the next exchange.
    share: int | None  # Of the global batch.
    agreed: bool = False


class Placed(msgspec.Struct, frozen=True):
    """Where the node stands when it joins."""

    node: str
    incarnation: int
    position: int
    read: int
    versions: tuple[int, ...]
    records: tuple[RoundRecord | None, ...]  # Per fragment, whose version is the newest.
    checkpoint: Checkpoint
    manifest: str


class Word(msgspec.Struct, frozen=True):
    """What a process says while the node joins; the head says what it is about."""

    kind: str = ""  # "joining", "placed", "read", "failed"
    facts: dict[str, str] = {}  # What it was given.
    prefix: str = ""  # Where the initial values are wanted, when the pod creates the run.
    sent: bool = False  # This process's share of them is there.
    placed: Placed | None = None
    ok: bool = True  # Its share of the newest values is here.
    error: str = ""
    text: str = ""


class Row(msgspec.Struct, frozen=True):
    """What a process says."""

    stop: int = 0  # The signal that told it to.
    ready: tuple[int, ...] = ()  # Rounds whose values are here.
    gone: tuple[int, ...] = ()  # Rounds whose values have been replaced by newer ones.
    failed: str = ""  # Why this process cannot go on.
    spent: Spent = Spent()  # What it has asked of the store.
    counted: tuple[int, int] = (0, 0)  # Steps trained, and samples of those since it last said so.
    order: Order | None = None
    word: Word | None = None


class Mind:
    """What is known of the pod in one process: what it has read, and what all have agreed on."""

    def __init__(
        self, world: World, told_to_stop: Callable[[], int], spent: Callable[[], Spent]
    ) -> None:
        self.world = world
        self.spent_elsewhere = Spent()  # By the other processes.
        self.stop = 0  # The signal that all of them stop for.
        self.share: int | None = None
        self.failed = ""
        self.broken = False  # All know that one of them cannot go on.
        self._told_to_stop = told_to_stop
        self._spent = spent

    def exchange(self, row: Row) -> list[Row]:
        """All rows, the head's first. Raises ClosingFailed when a process cannot go on."""
        row = msgspec.structs.replace(
            row, stop=self._told_to_stop(), failed=self.failed, spent=self._spent()
        )
        rows = [
            msgspec.json.decode(r, type=Row) for r in self.world.gather(msgspec.json.encode(row))
        ]
        others = [row.spent for index, row in enumerate(rows) if index != self.world.index]
        self.spent_elsewhere = sum(others, Spent())
        self.stop = next((row.stop for row in rows if row.stop), 0)
        for index, row in enumerate(rows):
            if row.failed:
                self.broken = True
                raise ClosingFailed(f"Process {index} of this node cannot go on: {row.failed}")
        return rows


class SharedInbox(Inbox):
    """One process's end.

    `heard` is told of every record, and whether this process's share of its values is wanted: that
    is handed over by `fetched`.
    """

    def __init__(
        self,
        messages: queue.SimpleQueue[ToLearner],
        mind: Mind,
        *,
        heard: Callable[[RoundRecord, bool], None],
        share: Callable[[], int | None],
        poll_seconds: float,
    ) -> None:
        super().__init__(messages)
        self._mind = mind
        self._hear = heard
        self._share = share
        self._poll_seconds = poll_seconds
        self._look = 1
        self._pending: list[Item] = []
        self._values: dict[int, Values | None] = {}  # By round; None: gone.
        self._fetched: queue.SimpleQueue[tuple[int, Values | None]] = queue.SimpleQueue()

    @property
    def news(self) -> bool:
        """Nothing is news before all have heard it."""
        return False

    @property
    def look(self) -> int:
        return self._look

    def fetched(self, round: int, values: Values | None) -> None:
        """Takes what this process holds of a round's values; any thread may call it."""
        self._fetched.put((round, values))

    def arrived(self) -> list[ToLearner]:
        return self._heard(0.0)

    def wait(self, seconds: float) -> list[ToLearner]:
        return self._heard(IMPATIENT_SECONDS if self._pending else seconds)

    def agreed(self, verdict: Callable[[], bool]) -> bool:
        order = self._exchange(0.0, verdict)
        return order.agreed

    def _heard(self, seconds: float) -> list[ToLearner]:
        self._exchange(seconds, lambda: False)
        return self._take()

    def _exchange(self, seconds: float, verdict: Callable[[], bool]) -> Order:
        order = self._order(seconds, verdict) if self._mind.world.is_head else None
        while not self._fetched.empty():
            round, values = self._fetched.get()
            self._values[round] = values
        rows = self._mind.exchange(
            Row(
                ready=tuple(r for r, values in self._values.items() if values is not None),
                gone=tuple(r for r, values in self._values.items() if values is None),
                order=order,
                counted=self.counted,
            )
        )
        self._check_counted(rows)
        heard = rows[0].order
        assert heard is not None, "the head gives an order each time"
        self._settle(rows)
        for item in heard.items:
            if item.record is not None:
                self._hear(item.record, item.values)
        self._pending += heard.items
        self._look, self._mind.share = heard.look, heard.share
        return heard

    # The head's part

    def _order(self, seconds: float, verdict: Callable[[], bool]) -> Order:
        items = tuple(self._item(message) for message in self._drained(seconds))
        busy = bool(items or self._pending)
        return Order(items, self._looks(busy=busy), self._share(), verdict())

    def _item(self, message: ToLearner) -> Item:
        match message:
            case Commit(record, values):
                if values is not None:
                    self.fetched(record.round, values)
                return Item("Commit", record.round, record, values is not None)
            case Followed(round):
                return Item("Followed", round)
            case Halt(error):
                return Item("Halt", error=type(error).__name__, text=str(error))
            case _:
                return Item(type(message).__name__)

    def _looks(self, *, busy: bool) -> int:
        """Nothing comes more often than the mailbox is looked at."""
        if self.pace is None:
            return 1
        seconds = self._poll_seconds / 4 if busy else self._poll_seconds
        return max(1, int(min(seconds / max(self.pace, 1e-9), 2.0**20)))

    # Everybody's

    def _check_counted(self, rows: list[Row]) -> None:
        """Weights would be those of one process. All see the same rows, so all raise."""
        mine = rows[0].counted
        for index, row in enumerate(rows):
            if row.counted != mine:
                self._mind.broken = True
                raise ClosingFailed(
                    f"Processes 0 and {index} of this node have counted {mine[0]} and "
                    f"{row.counted[0]} steps, and {mine[1]} and {row.counted[1]} samples in the "
                    "newest of them. Every process of a pod calls `session.step` at the same steps "
                    "with the same `samples`, the rows of all of them together."
                )

    def _settle(self, rows: list[Row]) -> None:
        self._ready = set.intersection(*({*row.ready, *row.gone} for row in rows))
        self._gone = {round for row in rows for round in row.gone}

    def _take(self) -> list[ToLearner]:
        """What all can take by now, and a halt at once."""
        halts = [item for item in self._pending if item.kind == "Halt"]
        taken = []
        while self._pending and self._may_take(self._pending[0]):
            taken.append(self._message(self._pending.pop(0)))
        return taken + [self._message(item) for item in halts if item in self._pending]

    def _may_take(self, item: Item) -> bool:
        return not item.values or item.round in self._ready

    def _message(self, item: Item) -> ToLearner:
        match item.kind:
            case "Commit":
                assert item.record is not None
                values = self._values.pop(item.round, None) if item.values else None
                return Commit(item.record, None if item.round in self._gone else values)
            case "Followed":
                return Followed(item.round)
            case "Halt":
                return Halt(raised(item.error, item.text))
            case "Paused":
                return Paused()
            case "Resumed":
                return Resumed()
            case _:
                return Woken()


def raised(kind: str, text: str) -> BaseException:
    """An error as it was raised in another process."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, JDilocoError):
        return found(text)
    return KeyboardInterrupt(text) if kind == "KeyboardInterrupt" else ClosingFailed(text)
