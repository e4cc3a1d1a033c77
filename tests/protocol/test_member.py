"""A member between events: what it asks of a store that fails, and when it stops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from jdiloco import errors, events
from jdiloco.protocol import chain as chains
from jdiloco.protocol import effects as fx
from jdiloco.protocol import member
from jdiloco.protocol.keys import MANIFEST, BeatKey, ClaimKey, ContributionKey, Keys
from jdiloco.protocol.member import MemberState
from jdiloco.protocol.records import (
    FORMAT,
    Build,
    Checkpoint,
    Claim,
    ContributionHead,
    Ledger,
    Manifest,
    Payload,
    RoundRecord,
    Timing,
    seal,
    sha256,
    unseal,
)
from jdiloco.protocol.rules import Life, Rules
from jdiloco.types import Counters

ME, OTHER = Life("a", 1), Life("b", 1)
KEYS = Keys("run1")
RULES = Rules(sync_every=8, fragments=2, in_flight=2, beat_seconds=2.0, lease_seconds=6.0)
BUILD = Build("cpu", "cpu", "0", "m", 1)
POLL = 0.5
SMALL = (fx.Poll, fx.Beat, fx.ReadRecord, fx.WriteRecord, fx.MakeClaim, fx.ReadClaim)
BULK = (fx.Upload, fx.Examine, fx.Merge, fx.Deliver, fx.ReadPlace)


def start(*, closer: str = "a", **rules) -> MemberState:
    files = (Payload("0", 1, "h"),)
    checkpoint = Checkpoint(-1, (0, 0), "p", files)
    manifest = Manifest(FORMAT, "run1", {}, (), (("w",), ("v",)), checkpoint, closer, "w")
    return member.start(
        ME,
        dataclasses.replace(RULES, **rules),
        chains.begin(manifest, seal(MANIFEST, manifest)),
        poll_seconds=POLL,
        role="both",
        build=BUILD,
        now=0.0,
    )


def beat(node: str, number: int, *, life: int = 1, phase: str = "training") -> str:
    return KEYS.beat(BeatKey(node, life, number, phase, number, 0))


def reported(node: str, round: int = 0) -> str:
    return KEYS.contribution(ContributionKey(round, node, 1, False))


def head(node: str, round: int = 0) -> ContributionHead:
    return ContributionHead(
        "run1", round, round % 2, 0, node, 1, Counters(4, 32), Ledger().train(32), 4
    )


def kinds(effects: tuple[fx.Effect, ...]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


class World:
    """Answers a member's requests by `answer`, at once, and lets time pass when it waits."""

    def __init__(self, state: MemberState, answer: Callable[[fx.Effect, float], object]) -> None:
        self.state = state
        self.now = 0.0
        self.asked: list[tuple[float, fx.Effect]] = []
        self.told: list[events.Event] = []
        self.stopped: list[Exception] = []
        self._answer = answer

    def send(self, event: fx.Event) -> None:
        inbox = [event]
        while inbox:
            self.state, effects = member.step(self.state, inbox.pop(0))
            for effect in effects:
                if isinstance(effect, fx.Emit):
                    self.told.append(effect.event)
                elif isinstance(effect, fx.Stop):
                    self.stopped.append(effect.error)
                elif isinstance(effect, SMALL + BULK):
                    self.asked.append((self.now, effect))
                    answer = self._answer(effect, self.now)
                    inbox += [answer] if isinstance(answer, fx.Event) else []
            assert len(self.asked) < 5000, "it asks in a loop"

    def run(self, until: float) -> None:
        while self.now < until:
            self.send(fx.Tick(self.now))
            self.now = max(self.now + 0.001, member.wake_at(self.state))

    def times(self, kind: type) -> list[float]:
        return [at for at, effect in self.asked if isinstance(effect, kind)]


def dead(effect: fx.Effect, now: float) -> fx.Event | None:
    """A store that answers nothing."""
    match effect:
        case fx.Poll():
            return fx.Listed(now, None)
        case fx.Beat():
            return fx.Beaten(now, False)
        case fx.ReadRecord(round):
            return fx.RecordRead(now, round, None, ok=False)
        case fx.WriteRecord(round):
            return fx.RecordSent(now, round, None)
        case fx.MakeClaim(round, number) | fx.ReadClaim(round, number):
            return fx.ClaimRead(now, round, number, None)
        case fx.Examine(key):
            return fx.Examined(now, key)
        case fx.Merge(round, attempt):
            return fx.Merged(now, round, attempt, error="no answer")
        case fx.Upload(key):
            return fx.Uploaded(now, key, False)
        case fx.Deliver(record):
            return fx.Delivered(now, record.round, False)
        case fx.ReadPlace():
            return fx.PlaceRead(now, None)
    return None


def listing(*names: str, but: Callable = dead) -> Callable[[fx.Effect, float], fx.Event | None]:
    """A store that answers listings, and beats, and nothing else."""

    def answer(effect: fx.Effect, now: float) -> fx.Event | None:
        if isinstance(effect, fx.Poll):
            mine = [key for key in names if "live/a." not in key]
            return fx.Listed(now, (*mine, beat("a", 1 + int(now))))
        if isinstance(effect, fx.Beat):
            return fx.Beaten(now, True)
        return but(effect, now)

    return answer


# A store that fails


def test_a_store_that_answers_nothing_is_asked_less_and_less():
    """B39: training goes on, and the waits grow to a beat."""
    world = World(start(), dead)
    world.run(60.0)
    tries = sorted({at for at, _ in world.asked})
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (POLL, RULES.beat_seconds)
    assert len(world.asked) < 80
    assert [type(event) for event in world.told] == [events.Degraded]
    assert not world.stopped


def test_a_node_is_degraded_once_and_recovers_once():
    def answer(effect: fx.Effect, now: float) -> fx.Event | None:
        return (dead if 5.0 <= now < 20.0 else listing())(effect, now)

    world = World(start(), answer)
    world.run(40.0)
    assert [type(event) for event in world.told] == [events.Degraded, events.Recovered]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ((reported("a"), reported("b")), fx.Examine),
        ((KEYS.record(0),), fx.ReadRecord),
    ],
)
def test_a_request_that_fails_is_never_repeated_in_a_loop(names, kind):
    world = World(start(), listing(*names))
    world.run(20.0)
    assert 2 <= len(world.times(kind)) <= 2 * 20 / POLL + 2


def test_a_claim_without_an_answer_is_not_made_again_at_once():
    world = World(start(closer="b"), listing())
    world.run(20.0)
    claims = world.times(fx.MakeClaim)
    assert claims[0] >= RULES.lease_seconds
    assert 2 <= len(claims) <= 15 / POLL
    assert len(set(claims)) == len(claims)


def test_uploads_that_fail_are_tried_again_and_told_of_after_the_second():
    world = World(start(), listing())
    world.send(fx.Contributed(0.0, head("a")))
    world.run(10.0)
    assert 3 <= len(world.times(fx.Upload)) <= 10 / POLL + 2
    assert [type(event) for event in world.told][:1] == [events.Degraded]
    assert not [event for event in world.told if isinstance(event, events.Recovered)]


def merge_works(effect: fx.Effect, now: float) -> fx.Event | None:
    match effect:
        case fx.Examine(key):
            found = ContributionHead(
                "run1", key.round, 0, 0, key.node, 1, Counters(4, 32), Ledger().train(32), 4
            )
            return fx.Examined(now, key, found, 1.0, "s")
        case fx.Merge(round, attempt, name):
            anchor, outer = (
                Payload(KEYS.payload(round, name, part), 1, "h") for part in ("anchor", "outer")
            )
            return fx.Merged(now, round, attempt, anchor, outer)
        case fx.ReadRecord(round):
            return fx.RecordRead(now, round, None)
    return dead(effect, now)


def test_a_record_in_doubt_is_sent_again_with_the_same_bytes_and_patience():
    """Refused, and yet nothing is there: neither answer settles anything."""

    def refuse(effect: fx.Effect, now: float) -> fx.Event | None:
        if isinstance(effect, fx.WriteRecord):
            return fx.RecordSent(now, effect.round, False)
        return merge_works(effect, now)

    world = World(start(), listing(reported("a"), but=refuse))
    world.run(20.0)
    sent = [effect.data for _, effect in world.asked if isinstance(effect, fx.WriteRecord)]
    assert 3 <= len(sent) <= 2 * 20 / POLL
    assert len(set(sent)) == 1
    assert world.state.chain.read == -1
    assert not world.told or not isinstance(world.told[-1], events.Committed)


def test_a_commit_without_an_answer_is_settled_by_reading():
    """B66: counted once."""
    there: dict[int, bytes] = {}

    def lose(effect: fx.Effect, now: float) -> fx.Event | None:
        match effect:
            case fx.WriteRecord(round, data):
                there[round] = data
                return fx.RecordSent(now, round, None)
            case fx.ReadRecord(round):
                return fx.RecordRead(now, round, there.get(round))
        return merge_works(effect, now)

    world = World(start(), listing(reported("a"), but=lose))
    world.run(3.0)
    committed = [event for event in world.told if isinstance(event, events.Committed)]
    assert [event.round for event in committed] == [0]
    assert len(world.times(fx.WriteRecord)) == 1


def test_a_failed_merge_is_tried_again_under_another_name():
    world = World(
        start(),
        listing(
            reported("a"),
            but=lambda e, now: dead(e, now) if isinstance(e, fx.Merge) else merge_works(e, now),
        ),
    )
    world.run(10.0)
    names = [effect.write_id for _, effect in world.asked if isinstance(effect, fx.Merge)]
    assert len(names) >= 3
    assert len(set(names)) == len(names)


def test_a_closer_compares_what_it_goes_on_from_once_a_cycle_and_stops_when_it_was_replaced():
    """A store that ignores the condition under a race alone lets two nodes write one record."""
    written: list[bytes] = []

    def answer(effect: fx.Effect, now: float) -> fx.Event | None:
        match effect:
            case fx.WriteRecord(round, data):
                written.append(data)
                return fx.RecordSent(now, round, True)
            case fx.Merge(round=4):
                return fx.Merged(now, effect.round, effect.attempt, replaced=True)
        return merge_works(effect, now)

    names = (reported(f"n{round}", round) for round in range(6))
    world = World(start(), listing(*names, but=answer))
    world.run(10.0)
    compared = [effect.compare for _, effect in world.asked if isinstance(effect, fx.Merge)]
    assert compared == [None, None, sha256(written[1]), None, sha256(written[3])]
    (error,) = world.stopped
    assert isinstance(error, errors.StoreIgnoresConditions)
    assert "record of round 3" in str(error)


def test_a_merge_that_keeps_failing_is_tried_ever_later_though_listings_succeed():
    """A parameter out of float16's range, say: every attempt leaves payloads to clear away."""
    names = (beat("a", 1), beat("b", 1), reported("a"), reported("b"))

    def answer(effect: fx.Effect, now: float) -> fx.Event | None:
        return dead(effect, now) if isinstance(effect, fx.Merge) else merge_works(effect, now)

    world = World(start(lease_seconds=8.0), listing(*names, but=answer))
    world.run(60.0)
    gaps = [later - earlier for earlier, later in pairwise(world.times(fx.Merge))]
    assert gaps[:4] == sorted(gaps[:4])
    assert gaps[-1] >= 8.0
    assert len(gaps) < 15


def test_a_member_sleeps_while_a_contribution_is_examined():
    """A wake-up time in the past would turn the control thread in a loop."""
    state = start(grace_seconds=0.0, quorum_size=1)
    first = (reported("a"), beat("a", 1), beat("b", 1), beat("c", 1))
    state, _ = member.step(state, fx.Listed(1.0, first))
    examined = fx.Examined(1.1, ContributionKey(0, "a", 1, False), head("a"), 1.0, "s")
    grace = dataclasses.replace(state, rules=dataclasses.replace(state.rules, grace_seconds=0.2))
    state, _ = member.step(grace, examined)
    assert member.wake_at(state) == pytest.approx(1.3)
    state, _ = member.step(state, fx.Listed(1.2, (*first, reported("b"))))
    assert member.wake_at(state) > 1.3


# Closers


def test_a_closer_that_was_just_named_is_not_taken_over_from_before_anybody_looked():
    state, _ = member.step(start(closer="b"), fx.Listed(1.0, (beat("a", 1),)))
    stranger = chains.replace(state.chain, named=Life("z", 1))
    closing = dataclasses.replace(state.closing, closer=Life("z", 1))
    state = dataclasses.replace(state, chain=stranger, closing=closing)
    _, effects = member.step(state, fx.Tick(1.1))
    assert "MakeClaim" not in kinds(effects)


def test_every_further_claim_on_a_round_doubles_the_wait():
    """Or nodes that close slowly take over from one another for ever."""
    waits = []
    for claims in range(4):
        state = start(closer="b", quorum_size=1)
        closing = dataclasses.replace(state.closing, claims=claims)
        state = dataclasses.replace(state, closing=closing)
        now, claimed = 0.0, None
        while claimed is None:
            now += POLL
            shown = (reported("b"), beat("b", 1 + int(now)), beat("a", 1))
            state, effects = member.step(state, fx.Listed(now, shown))
            claimed = next((e for e in effects if isinstance(e, fx.MakeClaim)), None)
        assert claimed.number == claims + 1
        waits.append(now - POLL)
    assert waits == [5.0, 10.0, 20.0, 40.0]


def test_a_closer_whose_lease_has_ended_is_taken_over_from_at_once():
    world = World(start(closer="b"), listing(beat("b", 1)))
    world.run(RULES.lease_seconds + 2 * POLL)
    first = world.times(fx.MakeClaim)[0]
    assert RULES.lease_seconds <= first <= RULES.lease_seconds + 2 * POLL


def test_a_claim_that_somebody_else_won_is_followed():
    state, _ = member.step(start(closer="b"), fx.Listed(1.0, (KEYS.claim(ClaimKey(0, 1)),)))
    data = seal(KEYS.claim(ClaimKey(0, 1)), Claim("c", 1, "because"))
    state, _ = member.step(state, fx.ClaimRead(1.1, 0, 1, data))
    assert state.closing.closer == Life("c", 1)
    assert not state.closing.mine


# Stopping


def test_a_node_that_finds_a_higher_life_of_itself_stops():
    world = World(start(), dead)
    world.send(fx.Listed(1.0, (beat("a", 9), beat("a", 1, life=2))))
    assert [type(error) for error in world.stopped] == [errors.NodeSuperseded]
    world.run(30.0)
    assert member.step(world.state, fx.Tick(99.0))[1] == ()


@pytest.mark.parametrize(("found", "stops"), [("run2", True), ("", False), ("run1", False)])
def test_a_node_whose_beats_are_gone_looks_at_the_manifest(found, stops):
    def answer(effect: fx.Effect, now: float) -> fx.Event | None:
        match effect:
            case fx.Beat():
                return fx.Beaten(now, True)
            case fx.Poll():
                return fx.Listed(now, (beat("b", 1 + int(now)),))
            case fx.ReadPlace():
                return fx.PlaceRead(now, found)
        return None

    world = World(start(), answer)
    world.run(3.0)
    assert [type(error) for error in world.stopped] == [errors.RunReplaced] * stops
    if found == "run1":
        assert len(world.times(fx.Beat)) >= 3  # It says at once that it is there.
    if not found:  # It may only not be mounted, and training is not ended by the store.
        assert world.state.degraded


def test_a_replaced_run_is_noticed_although_the_own_beat_is_there():
    """The folder was emptied between two polls, and this node's next beat lies in it."""

    def answer(effect: fx.Effect, now: float) -> fx.Event | None:
        match effect:
            case fx.Beat():
                return fx.Beaten(now, True)
            case fx.Poll():
                return fx.Listed(now, (beat("a", 1 + int(now)),))
            case fx.ReadPlace():
                return fx.PlaceRead(now, "another")
        return None

    world = World(start(), answer)
    world.run(12 * RULES.lease_seconds)
    assert [type(error) for error in world.stopped] == [errors.RunReplaced]


def test_a_claim_with_an_absurd_number_costs_nothing_but_a_wait():
    world = World(start(closer="b"), dead)
    world.send(fx.Listed(0.0, (beat("b", 1), reported("b"), KEYS.claim(ClaimKey(0, 999)))))
    data = seal(KEYS.claim(ClaimKey(0, 999)), Claim("ghost", 1, "because"))
    world.send(fx.ClaimRead(0.0, 0, 999, data))
    assert world.state.closing.claims == 999
    assert KEYS.parse(f"{KEYS.after(0)}.1.5000") is None


def test_a_claim_that_cannot_be_read_is_passed_over():
    world = World(start(closer="b"), dead)
    world.send(fx.ClaimRead(0.0, 0, 1, b""))
    assert world.state.closing.claims == 1
    assert world.state.closing.closer == OTHER


def test_what_leaves_the_range_is_closed_without_the_contribution_furthest_out():
    names = (beat("a", 1), beat("b", 1), reported("a"), reported("b"))
    wild = ContributionKey(0, "b", 1, False)

    def answer(effect: fx.Effect, now: float) -> fx.Event | None:
        if isinstance(effect, fx.Merge) and wild in effect.contributions:
            return fx.Merged(now, effect.round, effect.attempt, culprit=wild)
        if isinstance(effect, fx.WriteRecord):
            return fx.RecordSent(now, effect.round, True)
        return merge_works(effect, now)

    world = World(start(), listing(*names, but=answer))
    world.run(3.0)
    committed = [event for event in world.told if isinstance(event, events.Committed)]
    assert committed[0].participants == ("a",)
    assert committed[0].rejected == ("b:nonfinite",)


def test_a_node_without_an_answer_about_the_manifest_goes_on():
    world = World(
        start(),
        lambda effect, now: (
            fx.PlaceRead(now, None)
            if isinstance(effect, fx.ReadPlace)
            else fx.Listed(now, ())
            if isinstance(effect, fx.Poll)
            else fx.Beaten(now, True)
            if isinstance(effect, fx.Beat)
            else None
        ),
    )
    world.run(10.0)
    assert not world.stopped
    assert 2 <= len(world.times(fx.ReadPlace)) <= 10 / POLL


def test_every_event_has_an_answer_in_a_fresh_state():
    key = ContributionKey(9, "z", 1, False)
    for event in (
        fx.Tick(0.0),
        fx.Listed(0.0, ("rubbish", "", KEYS.log)),
        fx.Beaten(0.0, False),
        fx.RecordRead(0.0, 7, b"rubbish"),
        fx.RecordRead(0.0, 0, b"rubbish"),
        fx.RecordSent(0.0, 7, True),
        fx.ClaimRead(0.0, 0, 1, b"rubbish"),
        fx.Examined(0.0, key),
        fx.Merged(0.0, 7, 1),
        fx.Uploaded(0.0, key, True),
        fx.Progress(0.0, "training", 1, 0),
        fx.Saved(0.0, None),
        fx.PlaceRead(0.0, None),
    ):
        state, _ = member.step(start(), event)
        assert not state.stopped


# One kind of request that fails while all others work


def only(*kinds: type) -> Callable[[fx.Effect, float], fx.Event | None]:
    """A store on which requests of these kinds fail, and no others."""

    def answer(effect: fx.Effect, now: float) -> fx.Event | None:
        if isinstance(effect, kinds):
            return dead(effect, now)
        if isinstance(effect, fx.WriteRecord):
            return fx.RecordSent(now, effect.round, True)
        if isinstance(effect, fx.Deliver):
            return fx.Delivered(now, effect.record.round, True)
        if isinstance(effect, fx.Upload):
            return fx.Uploaded(now, effect.key, True)
        return merge_works(effect, now)

    return answer


@pytest.mark.parametrize("kind", [fx.Examine, fx.Merge, fx.WriteRecord, fx.Deliver, fx.Upload])
def test_a_node_stays_degraded_while_one_kind_of_request_fails(kind):
    """B102: not told again with every listing that works, and not over because one does."""
    names = (beat("a", 1), beat("b", 1), reported("a"), reported("b"))
    world = World(start(), listing(*names, but=only(kind)))
    world.send(fx.Contributed(0.0, head("a")))
    world.run(30.0)
    told = [e for e in world.told if isinstance(e, (events.Degraded, events.Recovered))]
    assert [type(event) for event in told] == [events.Degraded]
    assert world.state.degraded
    assert world.state.troubles


def test_a_node_whose_uploads_all_fail_is_degraded_though_others_close_its_rounds():
    """B102: each round has a record before a second try; the second failure counts all the same."""
    state, told = start(closer="b"), []
    for round in range(4):
        state, _ = member.step(state, fx.Contributed(float(round), head("a", round)))
        key = ContributionKey(round, "a", 1, False)
        state, effects = member.step(state, fx.Uploaded(float(round), key, False))
        told += [e.event for e in effects if isinstance(e, fx.Emit)]
        state = dataclasses.replace(state, sending=(), hold=0.0)
        state, effects = member.step(state, fx.Listed(round + 0.5, (beat("a", round + 1),)))
        told += [e.event for e in effects if isinstance(e, fx.Emit)]
        assert state.degraded == (round >= 1)
    assert [type(event) for event in told] == [events.Degraded]
    state, _ = member.step(state, fx.Uploaded(9.0, key, True))
    _, effects = member.step(state, fx.Listed(9.5, (beat("a", 9),)))
    assert "Recovered" in [type(e.event).__name__ for e in effects if isinstance(e, fx.Emit)]


def test_a_listing_that_hangs_makes_a_node_degraded_in_time():
    """No answer ever comes, so none can say so."""
    state, _ = member.step(start(), fx.Tick(0.0))
    assert state.polling
    limit = max(1.0, RULES.beat_seconds / 3)
    assert member.wake_at(state) <= limit
    state, effects = member.step(state, fx.Tick(limit - 0.01))
    assert not state.degraded
    state, effects = member.step(state, fx.Tick(limit))
    told = [e.event for e in effects if isinstance(e, fx.Emit)]
    assert told == [events.Degraded(node="a", because="a listing is not answered in time")]
    state, effects = member.step(state, fx.Listed(limit + 5, (beat("a", 1),)))
    assert "Recovered" in [type(e.event).__name__ for e in effects if isinstance(e, fx.Emit)]


def test_a_reader_that_the_sweep_overtakes_waits_for_the_newer_record_in_silence():
    """Unless there is none: then something is missing that should be there."""
    names = (beat("a", 1), beat("b", 1), reported("a"), reported("b"))

    def swept(effect: fx.Effect, now: float) -> fx.Event | None:
        if isinstance(effect, fx.Deliver):
            return fx.Delivered(now, effect.record.round, False, gone=True)
        return only()(effect, now)

    world = World(start(), listing(*names, but=swept))
    while len(world.times(fx.Deliver)) < 2:
        world.run(world.now + POLL)
    assert not [e for e in world.told if isinstance(e, events.Degraded)]
    world.run(world.now + 20.0)
    assert [e.because for e in world.told if isinstance(e, events.Degraded)] == [
        "the values of round 0 could not be read"
    ]


def test_a_run_that_closes_more_slowly_than_it_trains_says_how_many_fragments_would_fit():
    """Each node says so once; with so many a commit takes no longer than a round's steps."""
    names = (beat("a", 1), beat("b", 1), reported("a"), reported("b"))
    writer = World(start(), listing(*names, but=only()))
    writer.run(2.0)
    data = next(e.data for _, e in writer.asked if isinstance(e, fx.WriteRecord))
    record = unseal(KEYS.record(0), data, RoundRecord)
    slow = msgspec.structs.replace(record, timing=Timing(step=0.5, commit=3.0))
    state, _ = member.step(start(), fx.Listed(1.0, (beat("b", 1),)))
    state, effects = member.step(state, fx.RecordRead(1.0, 0, seal(KEYS.record(0), slow)))
    told = [e.event for e in effects if isinstance(e, fx.Emit)]
    (event,) = [event for event in told if isinstance(event, events.ClosingSlow)]
    assert (event.commit_seconds, event.between_seconds) == (3.0, 2.0)
    assert event.advice == "sync_every=12 or more, or fragments=1 or fewer"
    assert state.slow


@pytest.mark.parametrize("hangs", [False, True])
def test_an_elected_node_leaves_training_to_others_unless_a_syncer_closes(hangs):
    """One that was passed over closes nothing for a while, however well it beats."""
    state = dataclasses.replace(start(), role="either")
    if hangs:
        state = dataclasses.replace(state, passed_over=((Life("s", 1), 0),))
    shown = (beat("a", 1), beat("b", 1), beat("s", 1, phase="syncing"))
    state, _ = member.step(state, fx.Progress(0.5, "training", 1, 0))
    _, effects = member.step(state, fx.Listed(1.0, shown))
    assert ("Pause" in kinds(effects)) == hangs


def test_the_wait_for_a_closer_that_died_is_not_taken_for_a_wait_for_learners():
    """It would be seconds in an average of moments, and leave nothing for the grace window."""

    def quorum_wait(closer: str) -> float | None:
        names = (beat("b", 1), reported("a"), reported("b"))

        def claims_too(effect: fx.Effect, now: float) -> fx.Event | None:
            if isinstance(effect, fx.MakeClaim):
                return fx.ClaimRead(now, effect.round, effect.number, effect.data)
            return only()(effect, now)

        world = World(start(closer=closer), listing(*names, but=claims_too))
        world.run(RULES.lease_seconds + 4 * POLL)
        data = next(e.data for _, e in world.asked if isinstance(e, fx.WriteRecord))
        return unseal(KEYS.record(0), data, RoundRecord).timing.quorum

    assert quorum_wait(closer="a") == pytest.approx(0.0, abs=2 * POLL)
    assert quorum_wait(closer="b") is None


def test_a_round_closes_when_its_time_is_over_though_nothing_else_happens():
    """B44: two of three have reported, the third is silent, and no message comes any more."""
    state = start(quorum_size=3, round_seconds=5.0, grace_seconds=0.0)
    shown = (*(beat(node, 1) for node in "abc"), reported("a"), reported("b"))
    state, effects = member.step(state, fx.Listed(1.0, shown))
    for key in [e.key for e in effects if isinstance(e, fx.Examine)]:
        examined = fx.Examined(1.0, key, head(key.node), 1.0, "s")
        state, effects = member.step(state, examined)
    assert "Merge" not in kinds(effects)
    state, effects = member.step(state, fx.Tick(5.9))
    assert "Merge" not in kinds(effects)
    assert member.wake_at(state) <= 6.0
    state, effects = member.step(state, fx.Tick(6.0))
    assert "Merge" in kinds(effects)
