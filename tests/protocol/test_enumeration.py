"""Every interleaving of two nodes, and the faults that this finds when they are planted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from jdiloco.protocol import effects as fx
from jdiloco.protocol import learner, member
from jdiloco.protocol.keys import ClaimKey, RecordKey
from jdiloco.protocol.member import close, follow
from jdiloco.testing.enumerate import Found, Search, Setting, explore
from jdiloco.testing.enumerate import box as boxes
from jdiloco.testing.enumerate.box import KEYS

Patch = pytest.MonkeyPatch


def sound(setting: Setting, states: int) -> Found:
    """Explores a setting, of which about so many states are known."""
    found = explore(setting)
    print(f"\n{setting}\n{found}")
    assert found.complete, found
    assert not found.broken, found
    assert states / 2 < found.states < states * 2
    return found


def test_without_a_fault_one_node_closes_every_round():
    search = Search(Setting(leases_end=False))
    assert not search.run().broken
    for box in search.moves.boxes.met:
        parsed = [KEYS.parse(key) for key in box.list(KEYS.log)]
        assert not any(isinstance(key, ClaimKey) for key in parsed)
        rounds = sum(isinstance(key, RecordKey) for key in parsed)
        payloads = box.list("run/data/")
        assert len(payloads) <= 2 * (rounds + 1), "somebody else has begun to close the round"
        assert all(".a.0001." in key for key in payloads)


def test_two_rounds_are_sound_whoever_judges_whose_lease_to_have_ended():
    sound(Setting(), 38_000)


def test_a_round_is_sound_whichever_answer_is_lost():
    sound(Setting(rounds=1, lost=1), 15_000)


# The faults


def no_read_back(patch: Patch) -> None:
    """A record write without an answer counts as done."""
    sent = member._HANDLERS[fx.RecordSent]

    def believe(turn, event):
        sent(turn, dataclasses.replace(event, created=event.created is None or event.created))

    patch.setitem(member._HANDLERS, fx.RecordSent, believe)


def taken_counts_as_ours(patch: Patch) -> None:
    """A record write that was refused counts as done."""
    sent = member._HANDLERS[fx.RecordSent]

    def believe(turn, event):
        sent(turn, dataclasses.replace(event, created=event.created is not None))

    patch.setitem(member._HANDLERS, fx.RecordSent, believe)


def store_ignores_the_condition(patch: Patch) -> None:
    """A second create of a record replaces the first."""
    create = boxes.Boxes._create

    def overwrite(self, box, key, data):
        if isinstance(KEYS.parse(key), RecordKey):
            return True, self.overwrite(box, key, data)
        return create(self, box, key, data)

    patch.setattr(boxes.Boxes, "_create", overwrite)


def learner_aligns_before_the_commit_is_confirmed(patch: Patch) -> None:
    """A closer goes on from its result when it sends the record."""
    write = follow.write

    def act_at_once(turn, data):
        write(turn, data)
        follow.take_record(turn, data)

    patch.setattr(close, "write", act_at_once)


def payloads_of_open_rounds_are_swept(patch: Patch) -> None:
    """In doubt, a closer deletes its first attempt's payloads and computes anew."""
    sent = member._HANDLERS[fx.RecordSent]

    def clean_up(turn, event):
        state = turn.state
        sent(turn, event)
        if event.created is None and state.attempted:
            turn.add(fx.Delete(state.attempted))

    patch.setitem(member._HANDLERS, fx.RecordSent, clean_up)


def more_in_flight_than_fragments(patch: Patch) -> None:
    """A learner publishes a fragment again before it has aligned it."""
    patch.setattr(learner, "_may_publish", lambda state, held: True)


TWO = Setting(lost=1)

FAULTS: list[tuple[Callable[[Patch], None], Setting, str, int]] = [
    # fault, setting, the property that says so, moves of the shortest way there
    (no_read_back, TWO, "S5", 4),
    (taken_counts_as_ours, TWO, "S5", 4),
    (store_ignores_the_condition, TWO, "S1", 7),
    (learner_aligns_before_the_commit_is_confirmed, TWO, "S5", 3),
    (payloads_of_open_rounds_are_swept, TWO, "S2", 5),
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
