"""What round records say of every learner's samples, and whether a ledger agrees with it.

A node that has read every record knows what was merged of each life and fragment. One that joined
late knows it of a life from the first ledger that it sees: what that one says was merged before is
taken as it is, and everything after it is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from jdiloco.protocol.records import DROPS, Ledger, RoundRecord
from jdiloco.protocol.rules import Life
from jdiloco.types import Counters

Place = tuple[Life, int]  # A life, and the fragment.


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """The newest ledger of every life and fragment, after its contribution was merged.

    `complete` says that every record was read, so whoever is not here has had nothing merged.
    """

    complete: bool
    ledgers: Mapping[Place, Ledger] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """Samples of a whole run, of every life that has had something merged: sums of means over
    fragments. What was trained after a life's newest contribution is in nobody's ledger.
    """

    processed: float = 0.0
    merged: float = 0.0
    pending: float = 0.0
    dropped: Mapping[str, float] = dataclasses.field(default_factory=dict)  # By reason.


def begin(records: Iterable[RoundRecord | None], *, complete: bool) -> Tally:
    """For a node that knows each fragment's newest record, None where there is none."""
    tally = Tally(complete)
    for record in records:
        if record is not None:
            tally, _ = read(tally, record)
    return tally


def fault(tally: Tally, life: Life, fragment: int, counters: Counters, ledger: Ledger) -> str:
    """What is wrong with the ledger of a contribution, "" for nothing."""
    if not ledger.adds_up:
        return f"{ledger.processed} samples were processed, its parts are {ledger.parts}"
    if unknown := sorted(ledger.dropped.keys() - set(DROPS)):
        return f"samples were dropped as {', '.join(map(repr, unknown))}"
    if ledger.pending != counters.samples:
        return f"{ledger.pending} samples are pending, {counters.samples} were sent"
    known = tally.ledgers.get((life, fragment), Ledger() if tally.complete else None)
    if known is None:
        return ""
    if ledger.merged != known.merged:
        return f"{ledger.merged} samples count as merged, the records merged {known.merged}"
    if not ledger.goes_on_from(known):
        return f"it went back, from {known} to {ledger}"
    return ""


def read(tally: Tally, record: RoundRecord) -> tuple[Tally, tuple[str, ...]]:
    """Takes up a record; what is wrong with its ledgers, one sentence each."""
    ledgers, faults = dict(tally.ledgers), []
    for who in record.participants:
        life = Life(who.node, who.incarnation)
        wrong = fault(tally, life, record.fragment, who.counters, who.ledger)
        if wrong:
            faults.append(f"the ledger of {life} in round {record.round}: {wrong}")
        ledgers[life, record.fragment] = who.ledger.merge(who.counters.samples)
    return dataclasses.replace(tally, ledgers=ledgers), tuple(faults)


def totals(tally: Tally, fragments: int) -> Totals:
    """The ledger of the run, as far as this node has read it."""
    dropped: dict[str, int] = {}
    for ledger in tally.ledgers.values():
        for reason, samples in ledger.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + samples
    held = tally.ledgers.values()
    return Totals(
        processed=sum(ledger.processed for ledger in held) / fragments,
        merged=sum(ledger.merged for ledger in held) / fragments,
        pending=sum(ledger.pending for ledger in held) / fragments,
        dropped={reason: samples / fragments for reason, samples in sorted(dropped.items())},
    )
