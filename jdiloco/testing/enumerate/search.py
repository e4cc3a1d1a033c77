"""Every state, breadth first, each checked; the shortest way to one that breaks a property."""

from __future__ import annotations

import array
import dataclasses
import time
from collections.abc import Iterator

import numpy as np

from jdiloco.testing.enumerate.moves import Move, Moves
from jdiloco.testing.enumerate.place import Living
from jdiloco.testing.enumerate.properties import Belief, Truth, of_process
from jdiloco.testing.enumerate.setting import Setting

BITS = 21
MASK = (1 << BITS) - 1
LOST, CRASH = 1, 16
"""What a fault takes off a state's last byte."""

MANY = 50_000_000

Packed = tuple[int, int, int, str]
"""A move: the place and the mailbox that it leads to, what it takes off the faults, its words."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What an exploration came to."""

    setting: Setting
    states: int
    moves: int  # From one state to another.
    depth: int  # Moves to the state furthest away.
    seconds: float  # Of processor time.
    complete: bool  # Every state was met; False: one breaks a property, or there were too many.
    broken: str = ""  # The property, and what is wrong.
    trace: tuple[str, ...] = ()  # The shortest way there, one line per move.
    stuck: int = 0  # States from which no way without a fault commits every round.
    size: str = ""

    def __str__(self) -> str:
        pace = self.states / max(self.seconds, 1e-9)
        text = (
            f"{self.states:,} states, {self.moves:,} moves, depth {self.depth}, "
            f"{self.seconds:.1f} s, {pace:,.0f} states/s"
        )
        if not self.broken:
            return text if self.complete else f"{text}; cut off"
        lines = "\n".join(f"{i:3} {line}" for i, line in enumerate(self.trace, 1))
        return f"{self.broken}\n{lines}\n({text})"


class Search:
    """One exploration. A state is an integer: mailbox, places, and the faults that may come."""

    def __init__(self, setting: Setting, limit: int = MANY) -> None:
        self.setting = setting
        self.moves = Moves(setting)
        self.limit = limit
        self._shifts = [8 + BITS * seat for seat in range(len(setting.seats))]
        self._box_shift = 8 + BITS * len(setting.seats)
        self._of: dict[int, tuple[list[Packed], list[Packed]]] = {}
        self._landings: dict[int, list[tuple[str, int]]] = {}
        self._beliefs: dict[int, Belief | None] = {}
        self._truths: dict[int, Truth] = {}
        self.states: list[int] = []
        self._parents = array.array("q")
        self._edges = array.array("q"), array.array("q")

    def run(self) -> Found:
        """Explores until every state is met, or one is found that breaks a property."""
        began = time.process_time()
        places, box = self.moves.begin()
        first = box << self._box_shift | self.setting.lost * LOST | self.setting.crashes * CRASH
        for place, shift in zip(places, self._shifts, strict=True):
            first |= place << shift
        broken, met, moves, depth = self._spread(first)
        complete = met == len(self.states) and not broken
        end, stuck = len(self.states) - 1, 0
        if complete:
            stuck, end = self._stuck()
            broken = "progress: no way without a fault commits every round" if stuck else ""
        return Found(
            setting=self.setting,
            states=len(self.states),
            moves=moves,
            depth=depth,
            seconds=time.process_time() - began,
            complete=complete,
            broken=broken,
            trace=self._trace(end) if broken else (),
            stuck=stuck,
            size=f"{len(self._of):,} pairs, {len(self.moves.places):,} places, "
            f"{len(self.moves.boxes.met):,} mailboxes, {self.moves.inside.steps:,} steps, "
            f"{len(self.moves.inside.members):,} members, "
            f"{len(self.moves.inside.trainings):,} trainings",
        )

    def _spread(self, first: int) -> tuple[str, int, int, int]:
        """What is broken, and how many states were left, moves made and levels seen."""
        states, parents, (sources, targets) = self.states, self._parents, self._edges
        index = {first: 0}
        states.append(first)
        parents.append(-1)
        broken = self._check(first)
        at = moves = depth = 0
        level = 1
        while at < len(states) and not broken and len(states) < self.limit:
            if at == level:
                level, depth = len(states), depth + 1
            for after, fault, _, _ in self.successors(states[at]):
                moves += 1
                number = index.get(after)
                if number is None:
                    number = index[after] = len(states)
                    states.append(after)
                    parents.append(at)
                    if broken := self._check(after):
                        return broken, at, moves, depth + 1
                if not fault:
                    sources.append(at)
                    targets.append(number)
            at += 1
        return broken, at, moves, depth

    def successors(self, state: int) -> Iterator[tuple[int, bool, int, str]]:
        """State, whether it takes a fault, seat and words of everything that can happen next.

        That something lands which nobody waits for is nothing to rely on, so it counts as a fault.
        """
        box, shift = state >> self._box_shift, self._box_shift
        faults = state & 255
        for seat, at in enumerate(self._shifts):
            place = state >> at & MASK
            pair = box << BITS | place
            found = self._of.get(pair)
            if found is None:
                found = self._of[pair] = self._moves_of(place, box)
            rest = state - (place << at) - (box << shift)
            for to, into, _, what in found[0]:
                yield rest + (to << at) + (into << shift), False, seat, what
            if faults:
                for to, into, cost, what in found[1]:
                    if cost & 15 <= faults & 15 and cost >> 4 <= faults >> 4:
                        yield rest + (to << at) + (into << shift) - cost, True, seat, what
        if box not in self._landings:
            self._landings[box] = self.moves.landings(box)
        for what, into in self._landings[box]:
            yield state + ((into - box) << shift), True, -1, what

    def _moves_of(self, place: int, box: int) -> tuple[list[Packed], list[Packed]]:
        def packed(moves: list[Move]) -> list[Packed]:
            return [(m.place, m.box, m.lost * LOST + m.crashed * CRASH, m.what) for m in moves]

        free, faults = self.moves.of(place, box)
        return packed(free), packed(faults)

    def _check(self, state: int) -> str:
        box = state >> self._box_shift
        truth = self._truths.get(box)
        if truth is None:
            truth = self._truths[box] = Truth.of(
                self.moves.boxes.met[box], is_calm=self.setting.calm
            )
        if truth.broken:
            return truth.broken
        for at in self._shifts:
            place = state >> at & MASK
            if place not in self._beliefs:
                self._beliefs[place] = self._belief(place)
            belief = self._beliefs[place]
            if belief is not None and (broken := of_process(belief, truth)):
                return broken
        return ""

    def _belief(self, number: int) -> Belief | None:
        place = self.moves.places[number]
        return Belief.of(self.moves.inside, place) if isinstance(place, Living) else None

    def _stuck(self) -> tuple[int, int]:
        """How many states no way without a fault leads on from to the end, and the first."""
        rounds = self.setting.rounds
        done = [len(self._truths[box.number].records) >= rounds for box in self._met_boxes()]
        reach = np.array([done[state >> self._box_shift] for state in self.states])
        sources, targets = (np.array(edges, dtype=np.int64) for edges in self._edges)
        while len(more := sources[reach[targets] & ~reach[sources]]):
            reach[more] = True
        return int((~reach).sum()), int(np.argmin(reach))

    def _met_boxes(self):
        boxes = self.moves.boxes.met
        for box in boxes:
            if box.number not in self._truths:
                self._truths[box.number] = Truth.of(box, is_calm=self.setting.calm)
        return boxes

    def _trace(self, end: int) -> tuple[str, ...]:
        lines = []
        while (before := self._parents[end]) >= 0:
            state = self.states[before]
            seat, what = next(
                (seat, what)
                for after, _, seat, what in self.successors(state)
                if after == self.states[end]
            )
            lines.append(f"{self._name(state, seat)} {what}".strip())
            end = before
        return tuple(reversed(lines))

    def _name(self, state: int, seat: int) -> str:
        if seat < 0:
            return ""
        number = state >> self._shifts[seat] & MASK
        place = self.moves.places[number]
        if isinstance(place, Living):
            return str(self.moves.inside.members[place.member].me)
        return place.node


def explore(setting: Setting, limit: int = MANY) -> Found:
    """Every state of a setting."""
    return Search(setting, limit).run()
