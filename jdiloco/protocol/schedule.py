"""When rounds are due, and which fragment each belongs to. Plain integers."""

from __future__ import annotations


def fragment_of(round: int, fragments: int) -> int:
    """The fragment that `round` synchronises: rounds take the fragments in turn."""
    return round % fragments


def due(round: int, *, sync_every: int, fragments: int) -> int:
    """The step at which `round` is due in lock step.

        due(r) = (r div P)·H + ⌊((r mod P) + 1)·H / P⌋

    So every fragment is due exactly once in H steps, for any P ≤ H, and nothing is due at step 0.
    `due(-1)` is 0. With P = 1 it is every H-th step.
    """
    cycle, place = divmod(round, fragments)
    return cycle * sync_every + (place + 1) * sync_every // fragments


def gap(round: int, *, sync_every: int, fragments: int) -> int:
    """Steps to train between publishing `round - 1` and `round`; at least 1 where P ≤ H."""
    before = due(round - 1, sync_every=sync_every, fragments=fragments)
    return due(round, sync_every=sync_every, fragments=fragments) - before
