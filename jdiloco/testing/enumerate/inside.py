"""What happens inside a process: its member and its learner step, as they do in production.

States of members and of learners, events and requests are numbered, and what an event leads to in a
state is worked out once: thousands of interleavings share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from jdiloco.protocol import effects as fx
from jdiloco.protocol import learner as machine
from jdiloco.protocol import lease, member
from jdiloco.protocol.alignment import Overwrite
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.fragment import Align, Drop, News, Revert
from jdiloco.protocol.keys import ClaimKey
from jdiloco.protocol.learner import Snapshot
from jdiloco.protocol.lives import Birth
from jdiloco.protocol.member import MemberState
from jdiloco.protocol.records import Build, ContributionHead
from jdiloco.protocol.rules import Life, Rules
from jdiloco.testing.enumerate import values
from jdiloco.testing.enumerate.frozen import Numbered, canonical
from jdiloco.testing.enumerate.place import Held, Living, Over, Place, Sent, Training
from jdiloco.testing.enumerate.values import Delta, Values

NOW = 0.0
BUILD = Build("enumerated", "enumerated", "0", "enumerated", 1)

Removal = fx.Delete | fx.DeleteUnder
QUIET = (fx.Emit, fx.Follow, fx.Took)
"""Effects that lead to nothing here: what a member took is in its chain."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A process after something happened in it, and what it wants removed."""

    place: Place
    removals: tuple[Removal, ...] = ()


class Inside:
    """Every state that a process has been met in."""

    def __init__(self, nonfinite: tuple[int, ...] = ()) -> None:
        self._nonfinite = nonfinite
        self.members: Numbered[MemberState] = Numbered()
        self.trainings: Numbered[Training] = Numbered()
        self.requests: Numbered[fx.Effect] = Numbered()
        self.events: Numbered[fx.Event] = Numbered()
        self.steps = 0
        self._stepped: dict[tuple[int, int], tuple[int, tuple[fx.Effect, ...]]] = {}
        self._delivered: dict[tuple[int, int, Values | None], tuple[int, tuple[int, ...]]] = {}
        self._trained: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._judged: dict[tuple[int, Life], int] = {}
        self._tick = self.events.number(fx.Tick(NOW))

    def begin(self, birth: Birth, rules: Rules, chain: Chain, held: list[Values]) -> Turn:
        """A process that has just joined, with a beat and its first poll under way."""
        state = member.start(
            birth.life,
            rules,
            chain,
            poll_seconds=1.0,
            role="both",
            build=BUILD,
            now=NOW,
            beat=birth.beat,
        )
        learner = machine.joined(
            birth.life,
            rules,
            read=chain.read,
            versions=tuple(value.version for value in held),
            position=birth.position,
        )
        anchors = tuple(
            Held(round, value.value, 0) for round, value in zip(chain.heads, held, strict=True)
        )
        # Not by way of `canonical`, which would leave out the first beat.
        self.members.values.append(state)
        place = Living(
            len(self.members) - 1,
            self.trainings.number(Training(learner, anchors)),
        )
        return self.happen(place, fx.Progress(NOW, "training", 0, chain.round))

    # The member

    def happen(self, place: Living, *events: fx.Event) -> Turn:
        """Events, one after another, and what the member asks for because of them."""
        return self.follow(place, *(self.events.number(event) for event in events))

    def follow(self, place: Living, *events: int) -> Turn:
        """The same, of events by number."""
        removals: list[Removal] = []
        for event in events:
            number, effects = self._step(place.member, event)
            place = replace(place, member=number)
            for effect in effects:
                if isinstance(effect, fx.Stop):
                    node = self.members[number].me.node
                    return Turn(Over(node, type(effect.error).__name__), tuple(removals))
                if isinstance(effect, Removal):
                    removals.append(effect)
                else:
                    place = self._ask(place, effect)
        return Turn(place, tuple(removals))

    def _step(self, number: int, event: int) -> tuple[int, tuple[fx.Effect, ...]]:
        known = number, event
        if known not in self._stepped:
            self.steps += 1
            state, effects = member.step(self.members[number], self.events[event])
            loud = tuple(effect for effect in effects if not isinstance(effect, QUIET))
            self._stepped[known] = self.members.number(canonical(state)), loud
        return self._stepped[known]

    def _ask(self, place: Living, effect: fx.Effect) -> Living:
        match effect:
            case fx.Forget(round):
                held = self.trainings[place.training]
                drafts = tuple(draft for draft in held.drafts if draft[0] != round)
                return replace(place, training=self.trainings.number(replace(held, drafts=drafts)))
            case fx.Upload(key):
                state = self.members[place.member]
                name = state.keys.contribution(key)
                data = dict(self.trainings[place.training].drafts)[key.round]
                effect = Sent(key, name, values.seal_delta(name, data))
        asked = (*place.asked, self.requests.number(effect))
        return replace(place, asked=tuple(sorted(asked, key=self._kind)))

    def _kind(self, request: int) -> str:
        return type(self.requests[request]).__name__

    def oldest(self, place: Living) -> list[int]:
        """Of each kind of request the one that is next to be answered."""
        return list({self._kind(number): number for number in reversed(place.asked)}.values())

    def judged(self, place: Living, gone: Life) -> Turn:
        """A life's lease has ended as a process sees it, for as long as it takes to act on it."""
        known = place.member, gone
        if known not in self._judged:
            state = self.members[place.member]
            leases = dict(state.leases)
            leases[gone] = replace(leases[gone], unchanged=state.rules.lease_seconds)
            verdict = lease.judge(leases, state.rules, before=state.verdict)
            ended = replace(state, leases=leases, verdict=verdict)
            self._judged[known] = self.members.number(ended)
        return self.follow(replace(place, member=self._judged[known]), self._tick)

    def rested(self, place: Living) -> Turn:
        """The time is over for which nothing was asked of a store that had not answered."""
        state = replace(self.members[place.member], hold=0.0)
        return self.follow(replace(place, member=self.members.number(state)), self._tick)

    def answered(self, place: Living, request: int) -> Living:
        """Without a request."""
        rest = list(place.asked)
        rest.remove(request)
        return replace(place, asked=tuple(rest))

    def on_the_way(self, place: Living) -> list[tuple[str, bytes]]:
        """The creates that a process has sent, which may land whatever becomes of it."""
        keys = self.members[place.member].keys
        found = []
        for number in place.asked:
            match self.requests[number]:
                case fx.WriteRecord(round, data):
                    found.append((keys.record(round), data))
                case fx.MakeClaim(round, number, data):
                    found.append((keys.claim(ClaimKey(round, number)), data))
                case Sent(_, name, data):
                    found.append((name, data))
                case fx.Beat(key):
                    found.append((key, b""))
        return found

    # The learner

    def train(self, place: Living) -> Turn:
        """One step of training, and what is due after it."""
        if place.training not in self._trained:
            training = self.trainings[place.training]
            state, effects = machine.trained(training.learner, steps=1, samples=1)
            run = self.members[place.member].chain.run
            self._trained[place.training] = self._perform(
                replace(training, learner=state), effects, None, run
            )
        number, heads = self._trained[place.training]
        return self.follow(replace(place, training=number), *heads)

    def deliver(self, place: Living, request: int, event: int, value: Values | None) -> Turn:
        """The learner reads a record; `value` is what it committed, when it aligns with it."""
        known = place.training, request, value
        if known not in self._delivered:
            effect = self.requests[request]
            assert isinstance(effect, fx.Deliver)
            training = self.trainings[place.training]
            news = News.of(effect.record, training.learner.life)
            state, effects = machine.committed(training.learner, news, values=value is not None)
            self._delivered[known] = self._perform(
                replace(training, learner=state), effects, value, effect.record.run
            )
        number, heads = self._delivered[known]
        return self.follow(replace(place, training=number), *heads, event)

    def _perform(
        self, training: Training, effects: Iterable[machine.Effect], value: Values | None, run: str
    ) -> tuple[int, tuple[int, ...]]:
        heads: list[int] = []
        for effect in effects:
            match effect:
                case Snapshot():
                    training, head = self._publish(training, effect, run)
                    heads.append(self.events.number(fx.Contributed(NOW, head)))
                case Align():
                    assert value is not None
                    training = _align(training, effect, value)
                case Revert(_, fragment):
                    held = replace(training.held[fragment], first=training.learner.steps)
                    training = _hold(training, fragment, held)
                case Drop():
                    pass
        return self.trainings.number(training), tuple(heads)

    def _publish(
        self, training: Training, snapshot: Snapshot, run: str
    ) -> tuple[Training, ContributionHead]:
        held = training.held[snapshot.fragment]
        head = machine.head_of(training.learner, snapshot, run)
        began, steps = training.learner.began, training.learner.steps
        rows = ((began + held.first, began + steps),)
        finite = snapshot.round not in self._nonfinite
        data = msgspec.json.encode(Delta(head, held.value, rows, finite), order="deterministic")
        training = _hold(training, snapshot.fragment, replace(held, snapped=steps))
        return replace(training, drafts=(*training.drafts, (snapshot.round, data))), head


def _align(training: Training, effect: Align, value: Values) -> Training:
    """Which steps are in the parameters now: those that the alignment keeps."""
    before, first = training.held[effect.fragment], training.learner.steps
    if not isinstance(effect.how, Overwrite):
        first = before.snapped if effect.from_snapshot else before.first
    return _hold(training, effect.fragment, Held(effect.round, value.value, first))


def _hold(training: Training, index: int, held: Held) -> Training:
    anchors = (*training.held[:index], held, *training.held[index + 1 :])
    return replace(training, held=anchors)
