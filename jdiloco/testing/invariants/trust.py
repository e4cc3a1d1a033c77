"""Whose word nodes take."""

from __future__ import annotations

from jdiloco.testing.invariants.facts import Facts, Violations
from jdiloco.testing.simulate.history import Believed


def k1_nodes_are_shown_what_nodes_wrote(facts: Facts) -> Violations:
    """K1: a node is shown nothing but what a node has written under that key."""
    for entry in facts.history.of(Believed):
        yield f"{entry.who} {entry.what}"
