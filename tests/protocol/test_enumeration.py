"""Every interleaving of two nodes, and the faults that this finds when they are planted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from jdiloco.protocol import effects as fx
from jdiloco.protocol import joining, learner, lease, lives, member, sweep
from jdiloco.protocol.keys import RecordKey
from jdiloco.protocol.member import close
from jdiloco.testing.enumerate import Found, Setting, explore
from jdiloco.testing.enumerate import box as boxes
from jdiloco.testing.enumerate.box import KEYS
from tests.protocol.faults import (
    a_new_record_is_computed_in_doubt,
    claims_never_come,
    failed_uploads_are_given_up,
    learner_aligns_before_the_commit_is_confirmed,
    more_in_flight_than_fragments,
    no_read_back,
    nothing_is_ever_void,
    payloads_of_open_rounds_are_swept,
    taken_counts_as_ours,
)

Patch = pytest.MonkeyPatch


TWO = Setting(lost=1)
CALM = Setting(judged="nobody")
CRASH = Setting(crashes=1, rounds=1)
BAD_ROUND = Setting(nonfinite=(0,), judged="nobody")
BOTH_WANTED = Setting(lost=1, quorum_size=2, judged="nobody")
ALONE = Setting(seats=("a",), joined=(True,), crashes=1)
LIVES = Setting(seats=("a", "a"), joined=(True, False), joins_at_once=False)


def sound(setting: Setting, states: int) -> Found:
    """Explores a setting, of which about so many states are known."""
    found = explore(setting)
    print(f"\n{setting}\n{found}")
    assert found.complete, found
    assert not found.broken, found
    assert states / 2 < found.states < states * 2
    return found


def test_without_a_fault_one_node_closes_every_round():
    """`Setting.calm` adds it to the properties."""
    sound(Setting(judged="nobody"), 1_300)


def test_a_round_in_which_nothing_can_be_merged_is_void_and_the_next_one_goes_on():
    sound(BAD_ROUND, 300)


def test_two_rounds_are_sound_whoever_judges_whose_lease_to_have_ended():
    sound(Setting(), 38_000)


def test_a_round_is_sound_whichever_answer_is_lost_and_whosever_lease_ends():
    sound(Setting(rounds=1, lost=1), 15_000)


def test_two_rounds_are_sound_whichever_answer_is_lost():
    """Of any request, where no lease ends; with that too, of writes, in the long set."""
    sound(Setting(lost=1, judged="nobody"), 22_000)


def test_two_lives_of_one_node_merge_no_row_twice():
    """The second starts at any time, while the first goes on."""
    sound(LIVES, 20_000)


def test_a_node_that_is_alone_goes_on_after_a_crash():
    sound(ALONE, 1_700)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("setting", "states"),
    [
        (Setting(lost=1, reads_fail=False), 784_000),
        (Setting(crashes=1, rounds=1), 832_000),
        (Setting(crashes=1, judged="dead"), 6_163_000),
        (Setting(crashes=1, lost=1, rounds=1, judged="dead", reads_fail=False), 3_198_000),
        (dataclasses.replace(LIVES, lost=1, reads_fail=False), 345_000),
    ],
    ids=str,
)
def test_whatever_else_goes_wrong_once_is_harmless(setting, states):
    sound(setting, states)


# The faults


def store_ignores_the_condition(patch: Patch) -> None:
    """A second create of a record replaces the first."""
    create = boxes.Boxes._create

    def overwrite(self, box, key, data):
        if isinstance(KEYS.parse(key), RecordKey):
            return True, self.overwrite(box, key, data)
        return create(self, box, key, data)

    patch.setattr(boxes.Boxes, "_create", overwrite)


def payload_keys_by_content(patch: Patch) -> None:
    """Two closers with equal inputs share a payload, and the one that comes second cleans up."""
    merge = close._merge
    sent = member._HANDLERS[fx.RecordSent]

    def by_content(turn):
        content = "-".join(report.key.node for report in turn.state.closing.accepted)
        patch.setattr(close, "write_id", lambda *attempt: f"{content}.0001.0001")
        merge(turn)

    def clean_up(turn, event):
        attempted = turn.state.attempted
        sent(turn, event)
        if event.created is False:
            turn.add(fx.Delete(attempted))

    patch.setattr(close, "_merge", by_content)
    patch.setitem(member._HANDLERS, fx.RecordSent, clean_up)


def covered_records_are_swept(patch: Patch) -> None:
    """A record goes when there is a newer one."""
    swept = sweep.sweep

    def too_much(shelf, keys, rules, *, round, heads):
        shelf, doomed, prefixes = swept(shelf, keys, rules, round=round, heads=heads)
        return shelf, (*doomed, keys.record(round - 1)) if round >= 1 else doomed, prefixes

    patch.setattr(sweep, "sweep", too_much)


def a_restarted_node_clears_what_it_left_undecided(patch: Patch) -> None:
    """Payloads of its earlier lives that no record names yet."""
    take_up_life = lives.take_up_life

    def tidy(keys, person, waiting):
        birth = yield from take_up_life(keys, person, waiting)
        names = yield joining.List(f"{keys.run}/data/")
        open_ones = [n for n in names if keys.record(keys.round_of(n) or 0) not in birth.listed]
        mine = tuple(name for name in open_ones if f".{person.node}." in name)
        if mine:
            yield joining.Delete(mine)
        return birth

    patch.setattr(lives, "take_up_life", tidy)


def a_node_goes_on_from_the_start_of_its_data(patch: Patch) -> None:
    """Whatever its earlier lives have sent."""
    joined = learner.joined
    patch.setattr(learner, "joined", lambda *a, position, **k: joined(*a, position=0, **k))


def a_node_lists_before_its_life_is_created_and_not_after(patch: Patch) -> None:
    """What an earlier life sends in between is not seen."""

    def nothing_new(search, past, listed):
        yield from ()
        return past

    patch.setattr(lives, "_look_again", nothing_new)


def a_life_is_shown_after_it_has_looked_back(patch: Patch) -> None:
    """A closer may merge what an earlier life sends between the look and the beat."""

    def unseen(keys, life, waiting, next_round):
        del life, waiting, next_round
        return 0, (yield joining.List(keys.log))

    patch.setattr(lives, "_show_life", unseen)


def closers_do_not_ask_for_newer_lives(patch: Patch) -> None:
    """What an earlier life sent is merged, whatever the newer one vouches for."""
    patch.setattr(lease.Verdict, "newer", lambda self, life: None)


FAULTS: list[tuple[Callable[[Patch], None], Setting, str, int]] = [
    # fault, setting, the property that says so, moves of the shortest way there
    (no_read_back, TWO, "S5", 4),
    (taken_counts_as_ours, TWO, "S5", 4),
    (store_ignores_the_condition, TWO, "S1", 8),
    (payload_keys_by_content, TWO, "S2", 5),
    (payloads_of_open_rounds_are_swept, TWO, "S2", 5),
    (a_new_record_is_computed_in_doubt, TWO, "S5", 6),
    (covered_records_are_swept, TWO, "S1", 8),
    (learner_aligns_before_the_commit_is_confirmed, TWO, "S5", 3),
    (a_restarted_node_clears_what_it_left_undecided, CRASH, "S2", 6),
    (more_in_flight_than_fragments, CALM, "calm", 11),
    (nothing_is_ever_void, BAD_ROUND, "progress", 0),
    (failed_uploads_are_given_up, BOTH_WANTED, "progress", 2),
    (claims_never_come, ALONE, "progress", 2),
    (a_node_goes_on_from_the_start_of_its_data, ALONE, "S3", 8),
    (a_node_lists_before_its_life_is_created_and_not_after, LIVES, "S3", 17),
    (a_life_is_shown_after_it_has_looked_back, CRASH, "S3", 8),
    (closers_do_not_ask_for_newer_lives, CRASH, "S3", 8),
]


@pytest.mark.parametrize(
    ("fault", "setting", "name", "moves"), FAULTS, ids=lambda v: getattr(v, "__name__", None)
)
def test_a_planted_fault_is_found_by_the_shortest_way(fault, setting, name, moves, monkeypatch):
    fault(monkeypatch)
    found = explore(setting)
    print(f"\n{found}")
    assert found.broken.startswith(name), found
    assert moves - 2 <= len(found.trace) <= moves + 2
