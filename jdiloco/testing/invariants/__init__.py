"""The protocol's properties, as functions over a simulated run.

    found = broken(simulate(17))
    assert not found, "\n".join(map(str, found))

Each function is one numbered property and yields a sentence per violation. They look at what came
to lie in the mailbox, in which order, and at what nodes did, never at what nodes believed. S6 has
no function: it says that the others hold whatever clocks, listings and answers do, which is what
the faults of a simulated run are for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jdiloco.testing.invariants.chain import (
    s1_one_record_per_round_in_one_chain,
    s2_newest_versions_are_complete,
    s4_records_can_be_recomputed,
)
from jdiloco.testing.invariants.facts import Facts, Violations
from jdiloco.testing.invariants.ledgers import s7_every_ledger_adds_up
from jdiloco.testing.invariants.merging import (
    s3_nothing_is_merged_twice,
    s5_nodes_act_on_committed_records_alone,
    s8_bad_contributions_are_rejected,
)
from jdiloco.testing.invariants.progress import (
    l1_every_round_gets_a_record,
    l2_only_silence_ends_a_lease,
    l3_training_is_never_blocked_nor_ended_by_the_store,
)
from jdiloco.testing.invariants.trust import k1_nodes_are_shown_what_nodes_wrote
from jdiloco.testing.invariants.work import (
    elected_nodes_leave_training_to_others,
    w1_every_row_is_trained_once,
    w2_shared_work_is_completed,
)
from jdiloco.testing.simulate.history import History

__all__ = ["PROPERTIES", "Broken", "Facts", "broken"]


@dataclasses.dataclass(frozen=True)
class Broken:
    """A property that a run does not have."""

    name: str  # S1 to S8, K1, W1, W2, L1 to L3, or `roles`.
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


PROPERTIES: dict[str, Callable[[Facts], Violations]] = {
    "S1": s1_one_record_per_round_in_one_chain,
    "S2": s2_newest_versions_are_complete,
    "S3": s3_nothing_is_merged_twice,
    "S4": s4_records_can_be_recomputed,
    "S5": s5_nodes_act_on_committed_records_alone,
    "S7": s7_every_ledger_adds_up,
    "S8": s8_bad_contributions_are_rejected,
    "K1": k1_nodes_are_shown_what_nodes_wrote,
    "W1": w1_every_row_is_trained_once,
    "W2": w2_shared_work_is_completed,
    "L1": l1_every_round_gets_a_record,
    "roles": elected_nodes_leave_training_to_others,
    "L2": l2_only_silence_ends_a_lease,
    "L3": l3_training_is_never_blocked_nor_ended_by_the_store,
}


def broken(history: History) -> tuple[Broken, ...]:
    """Every violation of every property."""
    facts = Facts(history)
    return tuple(Broken(name, what) for name, check in PROPERTIES.items() for what in check(facts))
