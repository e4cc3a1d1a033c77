"""Going on from a private checkpoint: what is inherited, what is lost, and how one finds out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jdiloco import events
from jdiloco.protocol import joining, learner, lives, resuming
from jdiloco.protocol.fragment import Drop
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.lives import Birth, Person
from jdiloco.protocol.records import ContributionHead, Incarnation, Ledger, seal, unseal
from jdiloco.protocol.resuming import Private
from jdiloco.protocol.rules import Life, Rules
from jdiloco.store.memory import MemoryStore
from jdiloco.testing import invariants
from jdiloco.testing.simulate import Death, Faults, Plan, Scenario, scenario, simulate
from jdiloco.testing.simulate.history import History, Resumed
from jdiloco.types import Counters

from .test_joining import KEYS, WAITING, Driver, commit, creates, head, live, send

RULES = Rules(sync_every=4, fragments=2, in_flight=2)
ME = Life("a", 1)


def trained(steps: int) -> learner.LearnerState:
    """A learner of life 1 that has trained so many steps, of eight samples; rounds 0, 1, … are out
    from step 2 on, and none has been read of."""
    state = learner.joined(ME, RULES, read=-1, versions=(0, 0))
    for _ in range(steps):
        state, _ = learner.trained(state, steps=1, samples=8)
    return state


def saved(steps: int = 5, *, claimed: bool = False) -> Private:
    state = trained(steps)
    sent = tuple(
        ContributionHead(
            "run1", item.round, item.round % 2, 0, "a", 1, item.counters, Ledger(), item.at_step
        )
        for item in learner.outstanding(state)
    )
    made = resuming.private(state, "run1", sent=sent, claimed=claimed, step_seconds=None)
    return msgspec.json.decode(msgspec.json.encode(made), type=Private)


# The learner


def test_a_resumed_learner_counts_what_was_not_sent_as_its_first_pending_samples():
    state = resuming.resumed(saved(5), Life("a", 2), RULES)
    assert state.position == 5
    assert [held.outstanding and held.outstanding.inherited for held in state.fragments] == [1, 1]
    assert [held.counters for held in state.fragments] == [Counters(5, 40), Counters(5, 40)]
    rest = [(5 - 2) * 8, (5 - 4) * 8]
    assert [held.ledger for held in state.fragments] == [
        Ledger(pending=samples, processed=samples) for samples in rest
    ]


def record(round: int, *, incarnation: int | None, rejected: str = "") -> Any:
    """What a record says of this node's contribution to a round."""
    news = {"merged": incarnation is not None, "rejected": rejected}
    return learner.News(round, round % 2, 1, False, **news)


def test_a_record_that_merges_what_was_inherited_merges_work_of_its_own():
    """It is in the ledger of the life that sent it, and what came after it goes on."""
    state = resuming.resumed(saved(5), Life("a", 2), RULES)
    state, effects = learner.committed(state, record(0, incarnation=1), values=False)
    assert effects == ()
    held = state.fragments[0]
    assert (held.counters, held.ledger) == (Counters(3, 24), Ledger(pending=24, processed=24))


def test_what_was_inherited_and_never_merged_is_training_of_the_new_life():
    state = resuming.resumed(saved(5), Life("a", 2), RULES)
    state, effects = learner.committed(state, record(0, incarnation=None), values=True)
    drops = [effect for effect in effects if isinstance(effect, Drop)]
    assert [(drop.reason, drop.counters) for drop in drops] == [
        ("late", Counters(2, 16)),
        ("overwritten", Counters(3, 24)),
    ]
    ledger = state.fragments[0].ledger
    assert ledger == Ledger(dropped={"late": 16, "overwritten": 24}, processed=40)


def test_an_overtaken_learner_drops_what_it_has_pending_and_goes_on_like_any_other():
    state = resuming.resumed(saved(5), Life("a", 2), RULES)
    state, drops = resuming.overtaken(state, read=7, versions=(4, 4), position=9)
    assert [(d.fragment, d.reason, d.counters.steps) for d in drops] == [
        (0, "lost", 3),
        (1, "lost", 1),
    ]
    assert (state.position, state.next_round) == (9, 8)
    for held, lost in zip(state.fragments, (24, 8), strict=True):
        assert (held.version, held.counters, held.outstanding) == (4, Counters(), None)
        assert held.ledger == Ledger(dropped={"lost": lost}, processed=lost)


# Taking up the next life


def be_born(store: MemoryStore, private: Private | None, driver: Driver | None = None) -> Birth:
    person = Person("a", "host", 7, "cpu", "x")
    driver = driver or Driver(store)
    return driver.run(lives.take_up_life(KEYS, person, WAITING, private))


def vouched(store: MemoryStore, number: int) -> tuple[str, ...]:
    key = KEYS.incarnation("a", number)
    data = store.get(key)
    assert data is not None
    return unseal(key, data, Incarnation).valid


def lived() -> MemoryStore:
    """Life 1 has been, and is gone."""
    store = MemoryStore()
    assert be_born(store, None).life == Life("a", 1)
    live(store, 9, phase="left")
    return store


def sent_keys(private: Private) -> tuple[str, ...]:
    return tuple(KEYS.contribution(key) for key in private.keys)


def test_a_resumed_life_vouches_for_what_it_inherits_though_it_has_not_landed():
    store, private = lived(), saved()
    birth = be_born(store, private)
    assert (birth.overtaken, birth.position) == (False, 0)
    assert vouched(store, 2) == sent_keys(private)


def test_what_the_checkpoint_knows_of_overtakes_nobody():
    """Landed, merged, or both."""
    store, private = lived(), saved()
    send(store, 1, 4)
    commit(store, 0, head(0, 2))
    birth = be_born(store, private)
    assert (birth.overtaken, birth.position) == (False, 4)


def the_log(store: MemoryStore) -> None:
    send(store, 2, 6)


def a_record(store: MemoryStore) -> None:
    for round in range(3):
        commit(store, round, *([head(2, 6)] if round == 2 else []))


def a_last_word_of_the_same_step(store: MemoryStore) -> None:
    """It finished right after it had saved, and flushed what was left."""
    send(store, 2, 5)


def a_later_life_that_trained_less(store: MemoryStore) -> None:
    be_born(store, None)
    send(store, 2, 3, life=2)
    live(store, 9, life=2, phase="left")


def a_life_that_another_node_ended(store: MemoryStore) -> None:
    """It has gone on with the work of this one."""
    key = KEYS.incarnation("a", 2)
    ended = Incarnation("a", 2, "", 0, "", (), -1, 0, "b.0001.ends", ended_by="b.0001")
    store.create(key, seal(key, ended))
    live(store, 0, life=2, phase="left")


@pytest.mark.parametrize(
    "happened",
    [
        the_log,
        a_record,
        a_last_word_of_the_same_step,
        a_later_life_that_trained_less,
        a_life_that_another_node_ended,
    ],
)
def test_work_that_the_checkpoint_does_not_know_of_overtakes_it(happened):
    store, private = lived(), saved()
    happened(store)
    birth = be_born(store, private)
    assert birth.overtaken
    assert not set(sent_keys(private)) & set(vouched(store, birth.life.incarnation))


def test_claimed_work_is_left_to_others():
    """They may go on with it as soon as the lease of the life before has ended."""
    assert be_born(lived(), saved(claimed=True)).overtaken


LATE = ContributionKey(2, "a", 1, False)


def test_a_life_that_learns_too_late_that_it_is_overtaken_takes_up_another():
    """It has vouched for contributions that may hold what a later one trained again."""
    store, private = lived(), saved()

    class Between(Driver):
        def _perform(self, request: joining.Request) -> Any:
            if creates("/node/")(request) and not store.get(KEYS.contribution(LATE)):
                send(store, LATE.round, 6)
            return super()._perform(request)

    birth = be_born(store, private, Between(store))
    assert (birth.life, birth.overtaken, birth.position) == (Life("a", 3), True, 6)
    assert set(vouched(store, 2)) == set(sent_keys(private))
    assert not set(vouched(store, 3)) & set(sent_keys(private))


# Whole runs


ALL = tuple(range(1, 41))


def alone(*deaths: Death, **settings: Any) -> Scenario:
    plan = Plan(node="a", deaths=deaths, saves=ALL, resumes=0)
    return scenario(plan, **{"overlap_steps": 0, "follow": 0, **settings})


def merged(history: History) -> list[tuple[int, Any]]:
    """Rounds, and the rows that each merged."""
    assert not invariants.broken(history), history
    facts = invariants.Facts(history)
    found = []
    for record in facts.in_order:
        for who in record.participants:
            delta = facts.delta(record, who)
            assert delta is not None
            found.append((record.round, delta[1].rows))
    return found


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_a_node_that_is_killed_twice_goes_on_as_if_it_had_not_been(fragments):
    """B79, by what every round merged: the same rows, whatever was under way.

    Not where it was killed in a step that published and had not been saved: then it is overtaken.
    """
    settings = {"fragments": fragments, "in_flight": fragments}
    wanted, same = merged(simulate(alone(**settings))), 0
    for tenths in range(40, 160, 7):
        deaths = (Death(at=tenths / 10, back_after=1.0), Death(at=tenths / 10 + 12, back_after=1.0))
        history = simulate(alone(*deaths, **settings))
        assert [entry.who for entry in history.of(Resumed)] == ["a#2", "a#3"]
        lost = [event for event in history.events(events.Dropped) if event.reason == "lost"]
        assert lost or merged(history) == wanted
        same += not lost
    assert same >= 7


def zombie(seed: int, resumes: int) -> Scenario:
    """A node is started from a save while the process that took it sleeps, and wakes up later."""
    plan = Plan(
        node="b",
        steps=60,
        saves=tuple(range(1, 61, 2)),
        resumes=resumes,
        pauses=((6.0 + seed % 4, 13.0),),
        again=(6.5 + seed % 4,),
    )
    faults = Faults(late=0.2, stale=0.2, lose=0.1, late_seconds=10.0, until=35.0)
    plans = (Plan(node="a", steps=90), plan)
    return scenario(*plans, quorum_size=2, faults=faults, latency_seconds=0.1, seed=seed)


def test_whoever_wakes_up_beside_its_next_life_no_row_is_merged_twice():
    met: set[bool] = set()
    for seed in range(16):
        history = simulate(zombie(seed, resumes=2 * (seed % 2)))
        found = invariants.broken(history)
        assert not found, "\n".join(map(str, (*found, history)))
        met |= {bool(entry.sent) for entry in history.of(Resumed)}
    assert met == {True, False}
