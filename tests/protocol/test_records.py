"""Small objects at rest: one spelling, and every kind of damage is found."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.errors import FormatError
from jdiloco.protocol import records
from jdiloco.protocol.records import (
    FORMAT,
    Checkpoint,
    Claim,
    Incarnation,
    Ledger,
    Participant,
    Payload,
    RoundRecord,
    Timing,
    seal,
    sha256,
    unseal,
)
from jdiloco.types import Counters

CLAIM = Claim("a", 1, "its lease has ended")


def record(**changes) -> RoundRecord:
    made = RoundRecord(
        format=FORMAT,
        run="run1",
        round=3,
        fragment=1,
        version=2,
        write_id="a.0001.0004",
        closer="a",
        incarnation=1,
        previous="p",
        base="b",
        participants=(
            Participant(
                "a", 1, Counters(4, 32), Ledger(8, {"late": 2, "left": 1}, 32, 43), 9, 256.0, "s"
            ),
        ),
        rejected=(),
        expected=1,
        next_closer="a",
        next_incarnation=1,
        heads=(2, 3),
        versions=(2, 2),
        timing=Timing(step=0.5),
        checkpoint=Checkpoint(-1, (0, 0), "prefix", (Payload("0", 4, "h"),)),
        anchor=Payload("anchor", 4, "h"),
        outer=Payload("outer", 4, "h"),
        update=Payload("update", 1, "h"),
        cosine=1.0,
    )
    return msgspec.structs.replace(made, **changes)


def test_a_record_is_read_back():
    assert unseal("k", seal("k", record()), RoundRecord) == record()


def test_equal_values_give_equal_bytes():
    """The order in which a dict was filled leaves no trace."""
    here = Ledger(1, {"late": 2, "left": 3}, 4)
    there = Ledger(1, {"left": 3, "late": 2}, 4)
    assert seal("k", here) == seal("k", there)


def test_the_bytes_of_format_1_never_change():
    body = b'{"node":"a","incarnation":1,"because":"its lease has ended"}'
    digest = b"3c9ca24d4b08bd74e86fb63b6c55a31f788faa1993f28d17c69b45058a53a2eb"
    assert seal("run1/log/0000000/0000000001.1.001", CLAIM) == body + b"\n" + digest + b"\n"


def test_a_round_record_of_format_1_never_changes():
    """Its hash stands for its bytes: the next record names it by this."""
    wanted = "020ab50dbf3f3ff15ea8e876aa694b441ca446de7f00fd0a1dbebdb8235e7c73"
    assert sha256(seal("k", record())) == wanted


def test_one_flipped_bit_anywhere_is_found():
    data = seal("k", record())
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(FormatError):
                unseal("k", bytes(damaged), RoundRecord)


@given(st.integers(0, 200), st.binary(max_size=4))
def test_what_is_cut_or_goes_on_is_found(length, more):
    data = seal("k", CLAIM)
    for damaged in (data[:length], data + more):
        if damaged != data:
            with pytest.raises(FormatError):
                unseal("k", damaged, Claim)


def test_an_object_that_was_copied_to_another_key_is_found():
    with pytest.raises(FormatError, match="do not match their digest"):
        unseal(
            "run1/log/0000000/0000000004.0",
            seal("run1/log/0000000/0000000003.0", record()),
            RoundRecord,
        )


@pytest.mark.parametrize("found", [FORMAT - 1, FORMAT + 1])
def test_an_older_or_newer_format_is_refused_by_its_number(found):
    with pytest.raises(FormatError, match=f"format {found}; this build reads {FORMAT}"):
        unseal("k", seal("k", record(format=found)), RoundRecord)


def test_a_newer_format_is_named_even_if_nothing_else_of_it_can_be_read():
    class Newer(msgspec.Struct):
        format: int
        rounds: str

    with pytest.raises(FormatError, match="format 2; this build reads 1"):
        unseal("k", seal("k", Newer(2, "many")), RoundRecord)


def test_an_object_of_another_kind_is_refused():
    life = Incarnation("a", 1, "host", 7, "cpu", (), -1, 0, "w")
    with pytest.raises(FormatError, match="is no RoundRecord"):
        unseal("k", seal("k", life), RoundRecord)


@given(st.binary(max_size=60))
def test_a_digest_makes_no_record_of_rubbish(body):
    """Whoever can compute a digest can still not make a reader raise anything else."""
    data = body + b"\n" + records._digest("k", body) + b"\n"
    with pytest.raises(FormatError):
        unseal("k", data, RoundRecord)


def test_a_ledger_adds_up_whatever_happens_to_samples():
    ledger = Ledger().train(10).train(5).merge(6).drop("late", 4).drop("late", 1).drop("left", 0)
    assert ledger == Ledger(merged=6, dropped={"late": 5}, pending=4, processed=15)
