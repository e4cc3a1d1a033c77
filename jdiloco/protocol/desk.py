"""What a node has on its hands from one pool of work, and what it may say of it.

A unit's marks say something of batches that are *settled*: covered by a contribution that lies in
the mailbox. So a node that has trained the last batch of a unit keeps it until such a contribution
is there, and goes on with another meanwhile. One that has nothing else to train *owes* a report:
others may be waiting to hear that the unit is complete.

    taken -> trained ... trained -> ended, every batch settled    -> .done
                                 -> recalled, what was trained is -> .back
"""

from __future__ import annotations

import dataclasses

from jdiloco.protocol.keys import Pool
from jdiloco.protocol.records import Covered
from jdiloco.protocol.work import Held, Tally


@dataclasses.dataclass(slots=True)
class Piece:
    """A unit that this node holds. Batches are counted from the unit's start."""

    held: Held
    trained: int
    sent: int  # Covered by contributions that have been made.
    landed: int  # Covered by one that lies in the mailbox.
    started: bool = False
    ended: bool = False  # There are no further batches.
    recalled: bool = False  # None will be trained here.

    def train(self) -> None:
        """One more batch of it has been trained."""
        self.trained += 1

    @property
    def mark(self) -> str:
        """What may be said of it for good; "" for nothing yet."""
        if self.landed < self.trained:
            return ""
        return "done" if self.ended else "back" if self.recalled else ""


class Desk:
    """The units in hand, oldest first, and how the pool stood when it was last looked at."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.pieces: list[Piece] = []
        self.tally: Tally | None = None
        self.asking = False  # A unit has been asked for, and nothing heard.

    def ask(self) -> bool:
        """Whether to ask for a unit now: none lies ready, and none is under way."""
        if self.asking or self.ready:
            return False
        self.asking = True
        return True

    def answered(self, found: Held | Tally) -> None:
        """A unit has been taken, or there was none."""
        self.asking = False
        if isinstance(found, Held):
            self.pieces.append(Piece(found, found.begin, found.begin, found.begin))
        else:
            self.tally = found

    @property
    def ready(self) -> bool:
        """A unit lies ready to be begun."""
        return any(not piece.started and not piece.recalled for piece in self.pieces)

    def next(self) -> Piece | None:
        """Begins the unit that lies ready."""
        for piece in self.pieces:
            if not piece.started and not piece.recalled:
                piece.started = True
                self.tally = None
                return piece
        return None

    def over(self, *, stay: bool, stuck: bool = False) -> bool:
        """Nothing is left for this node; with `stay`, none that it might have to take over.

        A tally in which this node holds what it no longer has in hand is older than that was said:
        a unit that it gave back may be free.

        `stuck`: nothing has been committed for so long that nobody seems to close rounds. Then what
        it has trained last cannot be published, and two that wait for each other's would for ever.
        """
        tally = self.tally
        if tally is None or tally.free:
            return False
        return stuck if self.pieces else not (tally.mine or (stay and tally.held))

    def recall(self) -> None:
        """Gives everything back that is not ended, as soon as it may."""
        for piece in self.pieces:
            piece.recalled = True

    def cover(self) -> tuple[Covered, ...]:
        """What a contribution made now covers."""
        for piece in self.pieces:
            piece.sent = piece.trained
        return tuple(
            Covered(self.pool.unit(piece.held.unit), piece.held.claim, piece.trained)
            for piece in self.pieces
        )

    def landed(self, work: tuple[Covered, ...]) -> None:
        """A contribution that covers `work` lies in the mailbox."""
        batches = {(item.unit, item.claim): item.batches for item in work}
        for piece in self.pieces:
            at = (self.pool.unit(piece.held.unit), piece.held.claim)
            piece.landed = max(piece.landed, batches.get(at, 0))

    def owes(self, *, outstanding: bool) -> bool:
        """Whether a contribution is wanted; `outstanding` are any whose round is open."""
        waiting = [p for p in self.pieces if (p.ended or p.recalled) and not p.mark]
        return any(piece.sent < piece.trained or not outstanding for piece in waiting)

    def due(self) -> Piece | None:
        """The next unit of which something may be said for good."""
        return next((piece for piece in self.pieces if piece.mark), None)

    def marked(self, piece: Piece) -> None:
        """It has been said."""
        self.pieces.remove(piece)
