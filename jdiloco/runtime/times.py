"""Where the time of the training thread goes.

Between two calls of the session it is the user's. Inside, it is either blocked or not; what it is
blocked for is told by what the node's other threads did meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

from jdiloco import events

BLOCKING = {"upload": "upload", "deliver": "download", "close": "merge"}
"""What a library thread does, by its name, while training is blocked."""


class Busy:
    """How long a thread has been at work. One thread writes; any other may read."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._total = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = self._now()

    def __exit__(self, *error: object) -> None:
        began, self._since = self._since, None
        self._total += self._now() - (began or 0.0)

    @property
    def seconds(self) -> float:
        """Up to now."""
        total, since = self._total, self._since
        return total + (self._now() - since if since is not None else 0.0)


@dataclasses.dataclass
class Account:
    """Seconds since the commit before; `events.Timed` says what each part is."""

    compute: float = 0.0
    wait: float = 0.0
    upload: float = 0.0
    download: float = 0.0
    merge: float = 0.0
    other: float = 0.0

    def block(self, seconds: float, busy: Mapping[str, float]) -> None:
        """Blocked for `seconds`, in which each thread was `busy` for so long.

        Two that were busy at once share the time.
        """
        worked = sum(busy.values())
        part = min(1.0, seconds / worked) if worked > 0 else 0.0
        for name, spent in busy.items():
            field = BLOCKING[name]
            setattr(self, field, getattr(self, field) + spent * part)
        self.wait += seconds - worked * part


class Clocked:
    """The account of one training thread. `busy` tells of each other thread how long it was."""

    def __init__(self, now: Callable[[], float], busy: Callable[[], Mapping[str, float]]) -> None:
        self._now = now
        self._busy = busy
        self._account = Account()
        self._mark = now()  # Everything up to here has been accounted for.
        self._inside = False

    def enter(self) -> None:
        """The user's own code has ended."""
        self._settle()
        self._inside = True

    def leave(self) -> None:
        """It goes on."""
        self._settle()
        self._inside = False

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Training stands still in this block."""
        self._settle()
        before = self._busy()
        try:
            yield
        finally:
            mark, self._mark = self._mark, self._now()
            now = self._busy()
            spent = {name: now[name] - before[name] for name in now}
            self._account.block(self._mark - mark, spent)

    def take(self, node: str, round: int) -> events.Timed:
        """Closes the account."""
        self._settle()
        parts = dataclasses.asdict(self._account)
        self._account = Account()
        return events.Timed(node=node, round=round, wall=sum(parts.values()), **parts)

    def _settle(self) -> None:
        now = self._now()
        if self._inside:
            self._account.other += now - self._mark
        else:
            self._account.compute += now - self._mark
        self._mark = now
