"""What a program says of work that nodes share: a queue of units, a barrier."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jdiloco.errors import UsageError
from jdiloco.protocol.keys import Pool

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


@dataclasses.dataclass(frozen=True)
class SharedQueue:
    """Units of work that the nodes of a run divide among themselves, each to one at a time.

        files = jdiloco.SharedQueue(paths, batches=read_batches)
        params = session.run(step, files)                  # the same on every node

    A node claims the lowest unit that is free, trains its batches in order and claims the next. A
    unit of a node that died goes on, at another, after the last batch that any contribution of the
    dead one covers: no batch is merged twice into a fragment, and what had been trained and not
    published is trained again. What had been published for some fragments and not yet for others is
    lost for the others. Without a death or a restart every batch is trained exactly once, and a run
    that is stopped and started again, with any number of nodes, goes on where it was.

    Arguments:
      units: the units, the same in the same order on every node; or how many there are, and then
        the numbers from 0 are the units.
      name: 1 to 40 of `a-z0-9-`. A second pass over the data is another queue: `"epoch-2"`.
      batches: gives the batches of a unit, a function or mapping from unit to iterable. They must
        be the same whenever and wherever they are asked for: a unit that was begun elsewhere goes
        on after the batches that are behind it. None: each unit is one batch.
      stay: whether a node for which no unit is free waits while others hold some, to go on with
        them should their node die. Rounds do not wait for it meanwhile.
    """

    units: Sequence[Any] | int
    name: str = "work"
    batches: Callable[[Any], Iterable[Any]] | Mapping[Any, Iterable[Any]] | None = None
    stay: bool = True

    def __post_init__(self) -> None:
        _check_name("queue", self.name)
        if isinstance(self.units, bool) or not isinstance(self.units, (int, Sequence)):
            raise UsageError(
                f"`units` is a {type(self.units).__name__}. Pass a sequence, the same on every "
                "node, or the number of units."
            )
        if (self.units if isinstance(self.units, int) else len(self.units)) < 1:
            raise UsageError(
                f"`units` is {self.units!r}: there is no unit to train on. Pass the units, or how "
                "many there are."
            )
        known = self.batches is None or isinstance(self.batches, Mapping)
        if not (known or callable(self.batches)):
            raise UsageError(
                f"`batches` is a {type(self.batches).__name__}. Pass a function or a mapping from "
                "a unit to its batches, or None where a unit is one batch."
            )

    def __len__(self) -> int:
        return self.units if isinstance(self.units, int) else len(self.units)

    @property
    def pool(self) -> Pool:
        """What the protocol knows of it."""
        return Pool.queue(self.name, len(self))

    def after(self, unit: int, begin: int) -> Iterator[Any]:
        """The batches of a unit after the first `begin`."""
        item = unit if isinstance(self.units, int) else self.units[unit]
        if self.batches is None:
            found: Iterable[Any] = (item,)
        elif isinstance(self.batches, Mapping):
            found = self.batches[item]
        else:
            found = self.batches(item)
        return itertools.islice(iter(found), begin, None)


@dataclasses.dataclass(frozen=True)
class Barrier:
    """A named point at which nodes wait for each other.

        params = session.wait_at(jdiloco.Barrier("evaluated", nodes=3), params)

    It opens once `nodes` different node ids have come, and stays open: who comes later, or is
    started again, passes. A node that came and died has come; give nodes ids of their own
    (`node_id`), or one that is started again counts as another. Rounds do not wait for a node that
    waits here.

    Arguments:
      name: 1 to 40 of `a-z0-9-`; a barrier is used once.
      nodes: how many have to come.
      timeout: seconds after which BarrierTimeout is raised; None waits for ever.
    """

    name: str
    nodes: int
    timeout: float | None = None

    def __post_init__(self) -> None:
        _check_name("barrier", self.name)
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or self.nodes < 1:
            raise UsageError(
                f"`nodes` of barrier {self.name!r} must be an integer of at least 1, got "
                f"{self.nodes!r}."
            )


def _check_name(kind: str, name: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(
            f"The name of a {kind} becomes part of a key: 1 to 40 of a-z, 0-9 and '-', beginning "
            f"with a letter or digit, not {name!r}."
        )
