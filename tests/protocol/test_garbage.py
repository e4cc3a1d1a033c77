"""Collecting garbage: at any time, by anybody, killed anywhere, and nothing that anybody needs."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

import pytest

from jdiloco.errors import RunReplaced
from jdiloco.protocol import garbage, joining
from jdiloco.protocol.keys import MANIFEST, BeatKey, ContributionKey, Keys, RecordKey
from jdiloco.protocol.records import Manifest, RoundRecord, unseal
from jdiloco.protocol.rules import Rules
from jdiloco.testing import invariants, simulate
from jdiloco.testing.simulate.history import Deleted, Fate

Objects = dict[str, bytes]


class Mailbox:
    """Answers the requests of a generator from a dict, and remembers what was asked."""

    def __init__(self, objects: Objects) -> None:
        self.objects = dict(objects)
        self.slept = 0.0
        self.gets = 0
        self.while_it_sleeps: Callable[[], object] = lambda: None

    def run(self, steps: joining.Steps):
        answer = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as done:
                return done.value
            answer = self._perform(request)

    def _perform(self, request: joining.Request):
        match request:
            case joining.List(prefix, after):
                return sorted(k for k in self.objects if k.startswith(prefix) and k > after)
            case joining.Get(key):
                self.gets += 1
                return self.objects.get(key)
            case joining.Sleep(seconds):
                self.slept += seconds
                self.while_it_sleeps()
                return seconds
            case joining.Delete(keys):
                for key in keys:
                    self.objects.pop(key, None)
                return None
        raise AssertionError(request)


def manifest_of(objects: Objects) -> Manifest:
    return unseal(MANIFEST, objects[MANIFEST], Manifest)


def look(mailbox: Mailbox, rules: Rules, *, once: bool = False) -> garbage.Garbage:
    data = mailbox.objects[MANIFEST]
    return mailbox.run(garbage.look_through(manifest_of(mailbox.objects), data, rules, once=once))


# In simulated runs


def collected(seed: int) -> simulate.Scenario:
    """A drawn run, and up to six who call for garbage, some of whom are killed half way."""
    rng = random.Random(f"garbage {seed}")
    calls = tuple(
        simulate.Collection(
            at=rng.uniform(0, 60), requests=rng.choice((None, None, rng.randint(1, 60)))
        )
        for _ in range(rng.randint(1, 6))
    )
    return dataclasses.replace(simulate.draw(seed), collections=calls)


@functools.cache
def history_of(seed: int) -> simulate.History:
    return simulate.simulate(collected(seed))


@pytest.mark.parametrize("seed", range(30))
def test_every_property_holds_whoever_collects_and_whenever(seed):
    found = invariants.broken(history_of(seed))
    assert not found, "\n".join(map(str, found))


@pytest.mark.long
@pytest.mark.parametrize("first", range(30, 430, 40))
def test_every_property_holds_in_many_more(first):
    for seed in range(first, first + 40):
        found = invariants.broken(simulate.simulate(collected(seed)))
        assert not found, (seed, "\n".join(map(str, found)))


def test_the_drawn_runs_meet_what_they_are_for():
    """Otherwise they would prove nothing: every kind is removed, and collectors die and fail.

    But for payloads: whoever joins and closes clears those of rounds before, so that only the end
    of a run leaves any; those are collected below.
    """
    met: set[str] = set()
    for seed in range(30):
        history = history_of(seed)
        calls = [e for e in history.of(Fate) if e.who.startswith("gc#")]
        met |= {e.detail.partition(" ")[0].rstrip(":") for e in calls}
        gone = [e.key for e in history.of(Deleted) if e.who.startswith("gc#")]
        met |= {
            part for part in ("creating/", "/save/", "/live/", ".2.") for k in gone if part in k
        }
    assert met >= {"creating/", "/save/", "/live/", ".2.", "killed", "removed"}


# After a run


def ended_run(seed: int = 3) -> tuple[simulate.History, Objects]:
    """Three nodes of which one is killed while it closes and comes back; on a bad store."""
    deaths = (simulate.Death(before="/log/0", skip=9, back_after=4.0),)
    plans = (
        simulate.Plan(node="a", steps=90, deaths=deaths, merge_seconds=0.3),
        simulate.Plan(node="b", steps=90),
        simulate.Plan(node="c", steps=90, deaths=(simulate.Death(at=20.0),)),
    )
    faults = simulate.Faults(fail=0.05, lose=0.1, late=0.1, until=60.0)
    run = simulate.scenario(*plans, seed=seed, faults=faults, checkpoint_every=2)
    history = simulate.simulate(run)
    return history, history.objects


def needed(objects: Objects, rules: Rules) -> set[str]:
    """What must stay, from the records alone."""
    keys = Keys(manifest_of(objects).run)
    log = {
        key.round: unseal(name, objects[name], RoundRecord)
        for name in objects
        if name.startswith(keys.log) and isinstance(key := keys.parse(name), RecordKey)
    }
    newest = log[max(log)]
    named = list(dict.fromkeys(log[r].checkpoint.prefix for r in sorted(log)))[-2:]
    covered = next(r.checkpoint.round for r in log.values() if r.checkpoint.prefix == named[0])
    payloads = {
        payload.key
        for record in log.values()
        if record.round > covered or record.round in newest.heads
        for payload in (record.anchor, record.outer)
        if payload
    }
    kept = set(payloads)
    for name in objects:
        key = keys.parse(name) if name.startswith(keys.log) else None
        round = keys.round_of(name)
        if isinstance(key, ContributionKey):
            kept |= {name} if key.round + rules.keep_rounds >= newest.round else set()
        elif name.startswith(keys.saves):
            named_one = any(name.startswith(f"{prefix}/") for prefix in named)
            kept |= {name} if named_one or (round or 0) >= newest.checkpoint.round else set()
        elif "/data/" in name:
            kept |= {name} if (round or 0) > newest.round else set()
        elif not isinstance(key, BeatKey) and not name.startswith("creating/"):
            kept.add(name)
    return kept & set(objects)


@pytest.mark.parametrize("seed", range(4))
def test_what_must_stay_stays_and_nothing_else_but_a_few_beats(seed):
    history, objects = ended_run(seed)
    rules, mailbox = history.scenario.rules, Mailbox(objects)
    found = look(mailbox, rules)
    mailbox.run(garbage.remove(found))
    left = set(mailbox.objects)
    wanted = needed(objects, rules)
    assert wanted <= left
    beats = [k for k in left if "/live/" in k]
    assert left - wanted == set(beats)
    keys = Keys(manifest_of(objects).run)
    lives = [(b.node, b.incarnation) for k in beats if isinstance(b := keys.parse(k), BeatKey)]
    newest = newest_record(objects)
    closer = (newest.next_closer, newest.next_incarnation)
    assert all(number > 1 or (node, number) == closer for node, number in lives)
    assert len({node for node, _ in lives}) == len(lives)
    assert not any(look(mailbox, rules).values())


def newest_record(objects: Objects) -> RoundRecord:
    key = Keys(manifest_of(objects).run).record(max(_rounds(objects)))
    return unseal(key, objects[key], RoundRecord)


def _rounds(objects: Objects) -> list[int]:
    keys = Keys(manifest_of(objects).run)
    parsed = [keys.parse(name) for name in objects if name.startswith(keys.log)]
    return [key.round for key in parsed if isinstance(key, RecordKey)]


def test_it_takes_what_nobody_living_would():
    """Over some seeds: attempts that lost, checkpoints that were never named, old contributions."""
    taken: dict[str, int] = {}
    for seed in range(4):
        history, objects = ended_run(seed)
        for kind, keys in look(Mailbox(objects), history.scenario.rules).items():
            taken[kind] = taken.get(kind, 0) + len(keys)
    assert taken["beat"] > 0
    assert taken["payload"] + taken["checkpoint"] + taken["contribution"] > 0, taken


def test_it_reads_few_records_however_long_the_run_is():
    plans = (simulate.Plan(node="a", steps=1200, step_seconds=0.1),)
    run = simulate.scenario(*plans, checkpoint_every=10, sync_every=4, horizon=300.0)
    history = simulate.simulate(run)
    mailbox = Mailbox(history.objects)
    look(mailbox, run.rules, once=True)
    rounds = len(_rounds(history.objects))
    assert rounds > 200
    assert mailbox.gets < rounds / 3


# Who is gone


@pytest.fixture(scope="module")
def ended() -> tuple[simulate.History, Objects]:
    return ended_run()


def with_beats(
    ended, *beats: tuple[str, int, int, str]
) -> tuple[Mailbox, dict[tuple[str, int, int, str], str], Rules]:
    """The mailbox of a run with these beats and no others, how each is spelled, and its rules."""
    history, objects = ended
    keys = Keys(manifest_of(objects).run)
    left_out = ("/live/", "creating/")
    plain = {k: data for k, data in objects.items() if not any(part in k for part in left_out)}
    names = {beat: keys.beat(BeatKey(*beat, 5, 7)) for beat in beats}
    return Mailbox({**plain, **dict.fromkeys(names.values(), b"")}), names, history.scenario.rules


def test_a_beat_that_stays_the_same_for_a_lease_goes_and_one_that_changes_stays(ended):
    silent, alive, newer = ("x", 1, 3, "training"), ("y", 1, 3, "training"), ("y", 1, 4, "training")
    mailbox, names, rules = with_beats(ended, silent, alive)
    keys = Keys(manifest_of(mailbox.objects).run)
    beaten = {keys.beat(BeatKey(*newer, 5, 7)): b""}
    mailbox.while_it_sleeps = lambda: mailbox.objects.update(beaten)
    assert set(look(mailbox, rules)["beat"]) == {names[silent], names[alive]}
    assert rules.lease_seconds <= mailbox.slept <= rules.lease_seconds + rules.beat_seconds


def test_one_look_takes_no_beat_of_a_node_that_may_live(ended):
    mailbox, _, rules = with_beats(ended, ("x", 1, 3, "training"), ("y", 1, 3, "joining"))
    assert not look(mailbox, rules, once=True)["beat"]
    assert mailbox.slept == 0


def test_who_has_left_is_gone_at_once(ended):
    left = ("x", 1, 3, "left")
    mailbox, names, rules = with_beats(ended, left)
    assert look(mailbox, rules)["beat"] == (names[left],)
    assert mailbox.slept == 0


def test_the_last_beat_of_a_node_that_lived_twice_stays(ended):
    """It tells closers to take nothing more of its first life."""
    first, second = ("x", 1, 9, "training"), ("x", 2, 1, "left")
    mailbox, names, rules = with_beats(ended, first, second)
    assert look(mailbox, rules)["beat"] == (names[first],)


def test_the_beat_of_whoever_closes_next_stays(ended):
    """Those who come back need not wait for a lease before they take over."""
    record = newest_record(ended[1])
    named = (record.next_closer, record.next_incarnation, 8, "left")
    mailbox, _, rules = with_beats(ended, named)
    assert not look(mailbox, rules)["beat"]


def test_creators_who_fell_silent_go_with_all_their_beats_and_others_stay(ended):
    mailbox, _, rules = with_beats(ended)
    gone = ["creating/x.0a.00000001", "creating/x.0a.00000002"]
    mailbox.objects.update(dict.fromkeys([*gone, "creating/y.0b.00000001"], b""))
    mailbox.while_it_sleeps = lambda: mailbox.objects.update({"creating/y.0b.00000002": b""})
    assert list(look(mailbox, rules)["creating"]) == gone


def test_first_checkpoints_of_runs_that_never_came_to_be_go_and_those_of_others_stay(ended):
    """Another run's, which a manifest named once, is nobody's business; nor are a user's files."""
    mailbox, _, rules = with_beats(ended)
    unborn = ["0f/save/initial.x.0001.0001/_FILES", "0f/save/initial.x.0001.0001/params/d/0"]
    others = ["1e/save/initial.x.0001.0001/_FILES", "1e/log/0000000/0000000000.0"]
    foreign = ["backup/save/thesis", "save/initial.x.0001.0001/y", "2d/save/initial.x/y"]
    mailbox.objects.update(dict.fromkeys([*unborn, *others, *foreign], b""))
    found = look(mailbox, rules, once=True)
    assert [key for key in found["checkpoint"] if key[:3] == "0f/"] == unborn
    taken = {key for keys in found.values() for key in keys}
    assert not taken & {*others, *foreign}


def test_a_mailbox_that_gets_another_run_meanwhile_is_left_alone(ended):
    mailbox, _, rules = with_beats(ended, ("x", 1, 3, "training"))
    data = mailbox.objects[MANIFEST]
    mailbox.while_it_sleeps = lambda: mailbox.objects.update({MANIFEST: b"another"})
    steps = garbage.look_through(manifest_of({MANIFEST: data}), data, rules)
    with pytest.raises(RunReplaced, match="nothing was removed"):
        mailbox.run(steps)
