"""What can happen next: every move of a process, and of what is on its way to the mailbox."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jdiloco.protocol import effects as fx
from jdiloco.protocol.rules import Life
from jdiloco.testing.enumerate import births
from jdiloco.testing.enumerate.box import Box, Boxes
from jdiloco.testing.enumerate.frozen import Numbered
from jdiloco.testing.enumerate.inside import Inside, Removal, Turn
from jdiloco.testing.enumerate.place import Dead, Joining, Living, Place
from jdiloco.testing.enumerate.requests import READS, Answer, answers
from jdiloco.testing.enumerate.setting import Setting

OF_THE_CHAIN = (fx.Deliver, fx.Merge, fx.Save)
"""Requests that are answered by what the member knows of the chain as well."""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """One thing that a process does, and what comes of it. Places and mailboxes by number."""

    what: str
    place: int
    box: int
    lost: int = 0
    crashed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Raw:
    what: str
    turn: Turn
    box: Box
    lost: int = 0


class Moves:
    """Every place and every mailbox met so far, and what can happen there."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rules = setting.rules
        self.boxes = Boxes()
        self.inside = Inside(setting.nonfinite)
        self.places: Numbered[Place] = Numbered()
        self._answers: dict[tuple, tuple[tuple[Answer, int], ...]] = {}
        self._own_moves: dict[int, list[tuple[str, Turn]]] = {}

    # The beginning

    def begin(self) -> tuple[tuple[int, ...], int]:
        """The places of all seats, and the mailbox."""
        box = births.founded(self.boxes, self.setting)
        places: list[Place] = []
        for node, joined in zip(self.setting.seats, self.setting.joined, strict=True):
            place: Place = Dead(node)
            if joined:
                place, box = self._founder(box, node)
            places.append(place)
        return tuple(map(self.places.number, places)), box.number

    def _founder(self, box: Box, node: str) -> tuple[Place, Box]:
        """A process that has joined, and beaten once, before anything is explored."""
        first = Joining(node, 1)
        step = births.join_at_once(self.inside, self.boxes, box, first, self.rules)
        assert step.turn is not None
        place = step.turn.place
        assert isinstance(place, Living)
        beat = next(n for n in place.asked if isinstance(self.inside.requests[n], fx.Beat))
        (answer, event), *_ = self._to(place, beat, step.box)
        return self._after(place, beat, answer, event).place, answer.box

    # What can happen

    def of(self, number: int, box_number: int) -> tuple[list[Move], list[Move]]:
        """What the process at a place can do next: as it should be, and as a fault."""
        place, box = self.places[number], self.boxes.met[box_number]
        free: list[Move] = []
        faults: list[Move] = []
        for raw in self._raw(number, place, box):
            for end in self._settled(raw):
                after = self.places.number(end.turn.place)
                if (after, end.box.number) != (number, box_number):
                    move = Move(end.what, after, end.box.number, lost=end.lost)
                    (faults if end.lost else free).append(move)
        if self.setting.crashes and isinstance(place, Living | Joining):
            faults.append(self._crash(place, box))
        return free, faults

    def landings(self, box_number: int) -> list[tuple[str, int]]:
        """What may come to lie in a mailbox though nobody waits for it."""
        found = self.boxes.landings(self.boxes.met[box_number])
        return [(what, box.number) for what, box in found]

    def _raw(self, number: int, place: Place, box: Box) -> Iterator[_Raw]:
        match place:
            case Living():
                yield from self._requests(place, box, self.inside.oldest(place))
                if number not in self._own_moves:
                    self._own_moves[number] = list(self._own(place))
                for what, turn in self._own_moves[number]:
                    yield _Raw(what, turn, box)
                yield from self._judges(place, box)
            case Dead(node, starts):
                yield from self._start(Joining(node, starts + 1), box)
            case Joining():
                yield from self._join(place, box)

    # A process that lives

    def _requests(self, place: Living, box: Box, asked: list[int]) -> Iterator[_Raw]:
        for request in asked:
            for answer, event in self._to(place, request, box):
                turn = self._after(place, request, answer, event)
                yield _Raw(answer.what, turn, answer.box, int(answer.lost))

    def _to(self, place: Living, request: int, box: Box) -> tuple[tuple[Answer, int], ...]:
        effect = self.inside.requests[request]
        chain = place.member if isinstance(effect, OF_THE_CHAIN) else -1
        known = request, box.number, chain
        if known not in self._answers:
            state = self.inside.members[place.member]
            found = answers(self.boxes, box, state, effect)
            self._answers[known] = tuple(
                (answer, self.inside.events.number(answer.event))
                for answer in found
                if self._may_be(answer, effect)
            )
        return self._answers[known]

    def _may_be(self, answer: Answer, effect: fx.Effect) -> bool:
        if not answer.lost:
            return True
        return self.setting.lost > 0 and (self.setting.reads_fail or not isinstance(effect, READS))

    def _after(self, place: Living, request: int, answer: Answer, event: int) -> Turn:
        rest = self.inside.answered(place, request)
        if isinstance(answer.event, fx.Delivered) and answer.event.ok:
            return self.inside.deliver(rest, request, event, answer.value)
        return self.inside.follow(rest, event)

    def _own(self, place: Living) -> Iterator[tuple[str, Turn]]:
        """What a process does with nobody asked."""
        inside, last = self.inside, self.setting.rounds
        state = inside.members[place.member]
        round = inside.trainings[place.training].learner.next_round
        if round < last:
            turn = inside.train(place)
            assert isinstance(turn.place, Living)
            if inside.trainings[turn.place.training].learner.next_round > round:
                yield "trains a step and publishes", turn
        if state.hold > 0:
            yield "asks again", inside.rested(place)

    def _judges(self, place: Living, box: Box) -> Iterator[_Raw]:
        """A lease ends, right or wrong; once the round has a record that leads nowhere."""
        state = self.inside.members[place.member]
        round = state.chain.round
        if round >= self.setting.rounds or box.get(state.keys.record(round)) is not None:
            return
        for life in sorted(state.leases):
            if life != state.me and self._may_end(life, box):
                yield _Raw(f"thinks that {life} is gone", self.inside.judged(place, life), box)

    def _may_end(self, life: Life, box: Box) -> bool:
        dead = life in box.dead
        return self.setting.judged == "anybody" or (self.setting.judged == "dead" and dead)

    def _crash(self, place: Living | Joining, box: Box) -> Move:
        if isinstance(place, Joining):
            dead = Dead(place.node, place.starts)
            return Move("is killed", self.places.number(dead), box.number, crashed=1)
        me = self.inside.members[place.member].me
        late = self.boxes.send(box, *self.inside.on_the_way(place))
        if self.setting.judged == "dead":
            late = self.boxes.bury(late, me)
        dead = Dead(me.node, me.incarnation)
        return Move("is killed", self.places.number(dead), late.number, crashed=1)

    # A process that starts

    def _start(self, place: Joining, box: Box) -> Iterator[_Raw]:
        if not self.setting.joins_at_once:
            yield _Raw("is started", Turn(place), box)
            return
        step = births.join_at_once(self.inside, self.boxes, box, place, self.rules)
        assert step.turn is not None
        yield _Raw(step.what, step.turn, step.box)

    def _join(self, place: Joining, box: Box) -> Iterator[_Raw]:
        for step in births.steps(self.inside, self.boxes, box, place, self.rules):
            if step.lost and not self.setting.lost:
                continue
            turn = step.turn or Turn(step.place or place)
            yield _Raw(step.what, turn, step.box, int(step.lost))

    # What follows at once

    def _settled(self, raw: _Raw) -> Iterator[_Raw]:
        """Removals land, and requests that need no step of their own are answered."""
        box = self._removed(raw.box, raw.turn.removals)
        place = raw.turn.place
        asked = self._at_once(place) if isinstance(place, Living) else []
        if not asked:
            yield _Raw(raw.what, Turn(place), box, raw.lost)
            return
        assert isinstance(place, Living)
        for more in self._requests(place, box, asked):
            if raw.lost + more.lost <= self.setting.lost:
                what = f"{raw.what}, {more.what}"
                yield from self._settled(_Raw(what, more.turn, more.box, raw.lost + more.lost))

    def _at_once(self, place: Living) -> list[int]:
        for request in place.asked:
            if type(self.inside.requests[request]) in self.setting.at_once:
                return [request]
        return []

    def _removed(self, box: Box, removals: tuple[Removal, ...]) -> Box:
        for removal in removals:
            keys = removal.keys if isinstance(removal, fx.Delete) else box.list(removal.prefix)
            if self.setting.late_deletes:
                box = self.boxes.send(box, *((key, None) for key in keys))
            else:
                box = self.boxes.delete(box, keys)
        return box
