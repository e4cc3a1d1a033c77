"""Whether a ledger agrees with the records: checked by closers, and by whoever reads a record."""

from __future__ import annotations

import msgspec
import pytest

from jdiloco import events
from jdiloco.protocol import effects as fx
from jdiloco.protocol import member, tally
from jdiloco.protocol.records import Ledger
from jdiloco.protocol.rules import Life
from jdiloco.types import Counters

from .test_member import World, beat, head, listing, merge_works, reported, start

A = Life("a", 1)
SENT = Counters(4, 32)
GOOD = Ledger().train(48).merge(8).drop("late", 8)  # 8 merged, 8 dropped, 32 pending.


def after(merged: int, *, complete: bool = True) -> tally.Tally:
    """A tally of somebody whose records merged so much, of as much that it had trained."""
    return tally.Tally(complete, {(A, 0): Ledger().train(merged).merge(merged)})


def test_a_ledger_that_agrees_with_the_records_is_good():
    assert tally.fault(after(8), A, 0, SENT, GOOD) == ""


@pytest.mark.parametrize(
    ("ledger", "message"),
    [
        (msgspec.structs.replace(GOOD, processed=49), "49 samples were processed"),
        (msgspec.structs.replace(GOOD, pending=31, processed=47), "31 samples are pending"),
        (msgspec.structs.replace(GOOD, merged=9, dropped={"late": 7}), "9 samples count as merged"),
        (msgspec.structs.replace(GOOD, dropped={"late": 9, "left": -1}), "processed"),
        (msgspec.structs.replace(GOOD, dropped={"boredom": 8}), "dropped as 'boredom'"),
    ],
)
def test_a_ledger_that_does_not_is_found(ledger, message):
    assert message in tally.fault(after(8), A, 0, SENT, ledger)


def test_a_ledger_does_not_take_back_what_it_has_settled():
    known = tally.Tally(True, {(A, 0): GOOD.merge(32)})
    again = Ledger().train(72).merge(40)  # Nothing is late any more.
    assert "it went back" in tally.fault(known, A, 0, SENT, again)


def test_who_joined_late_believes_the_first_ledger_of_a_life_and_no_other():
    late = tally.Tally(complete=False)
    assert tally.fault(late, A, 0, SENT, GOOD) == ""
    assert tally.fault(tally.Tally(complete=True), A, 0, SENT, GOOD) != ""
    assert tally.fault(after(9, complete=False), A, 0, SENT, GOOD) != ""


def lying(ledger: Ledger):
    """A store in which the contribution of `b` has this ledger."""

    def answer(effect: fx.Effect, now: float) -> fx.Event | None:
        if isinstance(effect, fx.Examine) and effect.key.node == "b":
            found = msgspec.structs.replace(head("b", effect.key.round), ledger=ledger)
            return fx.Examined(now, effect.key, found, 1.0, "s")
        if isinstance(effect, fx.WriteRecord):
            return fx.RecordSent(now, effect.round, True)
        return merge_works(effect, now)

    return answer


def test_a_contribution_whose_ledger_is_wrong_is_rejected_and_the_others_are_merged():
    """S8: `counters` is what it is rejected as."""
    names = (beat("a", 1), beat("b", 1), reported("a"), reported("b"))
    world = World(start(), listing(*names, but=lying(Ledger(merged=8, pending=32, processed=40))))
    world.run(3.0)
    committed = [event for event in world.told if isinstance(event, events.Committed)]
    assert committed[0].participants == ("a",)
    assert committed[0].rejected == ("b:counters",)


def test_whoever_reads_a_record_with_a_wrong_ledger_says_so_once_and_goes_on(monkeypatch):
    """A closer that does not look is somebody else's build."""
    names = (beat("a", 1), beat("b", 1), reported("a"), reported("b"))
    liar = lying(Ledger(merged=8, pending=32, processed=40))
    monkeypatch.setattr(member.close.tallies, "fault", lambda *arguments: "")
    writer = World(start(), listing(*names, but=liar))
    writer.run(3.0)
    monkeypatch.undo()
    (data,) = [e.data for _, e in writer.asked if isinstance(e, fx.WriteRecord)]
    reader, _ = member.step(start(), fx.Listed(1.0, (beat("b", 1),)))
    reader, effects = member.step(reader, fx.RecordRead(1.0, 0, data))
    told = [e.event for e in effects if isinstance(e, fx.Emit)]
    wrong = [event for event in told if isinstance(event, events.WrongLedger)]
    assert [event.message for event in wrong] == [
        "the ledger of b.0001 in round 0: 8 samples count as merged, the records merged 0"
    ]
    assert reader.chain.read == 0


def test_the_ledger_of_a_run_is_the_sum_over_its_lives():
    """Of two fragments one had 8 of 48 merged, one 40; each sample counts half in each."""
    held = {(A, 0): GOOD, (A, 1): Ledger().train(48).merge(40), (Life("b", 2), 0): GOOD}
    found = tally.totals(tally.Tally(True, held), 2)
    assert (found.processed, found.merged, found.pending) == (72, 28, 36)
    assert found.dropped == {"late": 8}
    assert found.processed == found.merged + sum(found.dropped.values()) + found.pending


def test_nothing_is_known_before_the_first_record():
    assert tally.totals(tally.Tally(True), 3) == tally.Totals()
