"""What a commit does to the training since: the settings, and the choice that a record leads to.

With θ the parameters, Θ what was committed and α the mixing:

    setting    parameters become                        counters keep of the rest
    overwrite  Θ                                        nothing
    blend      α·θ + (1 − α)·Θ                          the share α, rounded down
    carry      Θ + (θ − what they were then)            everything
    adaptive   as carry or as overwrite                 as these

*The rest* is what was trained since the snapshot whose contribution was merged, and since the old
anchor where none was; *then* is that moment. The arithmetic is in `jdiloco.algo.alignment`.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from jdiloco.errors import UsageError
from jdiloco.types import Counters


@dataclasses.dataclass(frozen=True)
class Overwrite:
    """The committed values replace the parameters. Made by `overwrite`."""


@dataclasses.dataclass(frozen=True)
class Blend:
    """The parameters move part of the way to the committed values. Made by `blend`."""

    mixing: float

    def __post_init__(self) -> None:
        mixing = _number("mixing", self.mixing)
        if not 0 < mixing < 1:
            raise UsageError(
                f"`mixing` must be above 0 and below 1, got {mixing}: it is the share of a node's "
                "own parameters that stays. 0 would be `overwrite()`, and 1 would never take up "
                "what the run commits. 0.5 is usual."
            )
        object.__setattr__(self, "mixing", mixing)


@dataclasses.dataclass(frozen=True)
class Carry:
    """What was trained in flight is added to the committed values. Made by `carry`."""


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Carries while the learners agree and overwrites while they do not. Made by `adaptive`."""

    carry_above: float = 0.6
    overwrite_below: float = 0.4

    def __post_init__(self) -> None:
        above = _number("carry_above", self.carry_above)
        below = _number("overwrite_below", self.overwrite_below)
        if not -1 <= below <= above <= 1:
            raise UsageError(
                f"`overwrite_below` is {below} and `carry_above` {above}: both are cosines, from "
                "-1 to 1, and the first is at most the second. 0.4 and 0.6 are a good start."
            )
        object.__setattr__(self, "carry_above", above)
        object.__setattr__(self, "overwrite_below", below)


How = Overwrite | Blend | Carry
"""What one alignment does."""

Alignment = How | Adaptive

OVERWRITE = Overwrite()

_KINDS: dict[type, str] = {
    Overwrite: "overwrite",
    Blend: "blend",
    Carry: "carry",
    Adaptive: "adaptive",
}


def overwrite() -> Overwrite:
    """A commit replaces the parameters, and what was trained while it was under way is dropped.

    The papers' way, and the default. Nothing that is older than the commit stays, so a run behaves
    as its records say. What it costs is the steps between publishing and aligning, reported as
    `overwritten`: none in lock step, half of everything where a round takes as long as its steps.

    Source: Decoupled DiLoCo (arXiv 2604.21428), where α = 0.
    """
    return Overwrite()


def blend(mixing: float) -> Blend:
    """A commit moves the parameters to `α·θ + (1 − α)·Θ`, with α the mixing (above 0, below 1).

    It softens the jump to a commit that is some steps old. The steps trained since count on by
    the share α, rounded down; what is not kept is dropped as `overwritten`. It is applied once,
    however many versions were skipped.

    Limit cases: towards 0 it is `overwrite()`; towards 1 a node goes its own way.

    Raises UsageError unless 0 < mixing < 1.

    Source: Streaming DiLoCo (arXiv 2501.18512), where 0.5 is common.
    """
    return Blend(mixing)


def carry() -> Carry:
    """A commit replaces what was merged, and what was trained since is added to it.

    `Θ + (θ − θ_snapshot)`, or `Θ + (θ − old anchor)` where nothing of this node was merged: nothing
    trained is lost, and a contribution that came too late goes out again with the next one. For
    slow stores, unlike machines and short rounds. The steps carried were taken from older values,
    so they help as long as the learners go in similar directions.

    Limit case: with nothing trained since the snapshot it is `overwrite()`.

    Source: LOSCAR-SGD (arXiv 2605.20866), which reports that it beats overwriting.
    """
    return Carry()


def adaptive(carry_above: float = 0.6, overwrite_below: float = 0.4) -> Adaptive:
    """Carries while the deltas of a round agree, and overwrites while they do not.

    Per fragment it begins to carry once the mean pairwise cosine of a round's deltas is above
    `carry_above` and to overwrite once it is below `overwrite_below`; in between it goes on as
    before, so that it does not flicker. A round with a single participant says nothing of agreement
    and changes nothing. It begins by carrying: a node alone is never in disagreement.

    Raises UsageError unless -1 ≤ overwrite_below ≤ carry_above ≤ 1.

    Limit cases: `adaptive(-1, -1)` is `carry()`; with both at 1 it overwrites once two differ.
    """
    return Adaptive(carry_above, overwrite_below)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"`{name}` must be a number, got {value!r}.")
    return float(value)


def check_alignment(value: Any) -> None:
    """Raises UsageError unless `value` is one of the settings."""
    if type(value) not in _KINDS:
        raise UsageError(
            f"`alignment` must be `overwrite()`, `blend(mixing)`, `carry()` or `adaptive()`, got "
            f"{value!r}."
        )


def to_json(value: Alignment) -> dict[str, Any]:
    """The setting as it stands in a manifest, e.g. `{"kind": "blend", "mixing": 0.5}`."""
    return {"kind": kind(value), **dataclasses.asdict(value)}


def kind(value: Alignment) -> str:
    """Its name: overwrite, blend, carry or adaptive."""
    return _KINDS[type(value)]


def needs_snapshot(value: Alignment) -> bool:
    """Whether aligning may ask what the parameters were when a contribution was taken."""
    return isinstance(value, (Carry, Adaptive))


def agrees(value: Alignment, cosine: float | None, *, before: bool) -> bool:
    """Whether learners agree enough for `adaptive` to carry, after a round with this cosine.

    `before` is the answer until then; `cosine` is None where a round has no pair of deltas.
    """
    if not isinstance(value, Adaptive) or cosine is None:
        return before
    if before:
        return cosine >= value.overwrite_below
    return cosine > value.carry_above


def choose(value: Alignment, rest: Counters, *, agreed: bool) -> How:
    """What this setting does about `rest`."""
    if isinstance(value, Adaptive):
        value = Carry() if agreed else Overwrite()
    return Overwrite() if isinstance(value, Carry) and rest == Counters() else value


def kept(how: How, rest: Counters) -> Counters:
    """What counters keep of `rest`.

    Of a share that has no whole step, or no whole sample, nothing is kept: steps without samples
    have no weight and samples without steps too much.
    """
    if isinstance(how, Carry):
        return rest
    if isinstance(how, Overwrite):
        return Counters()
    share = Fraction(str(how.mixing))  # As it is written: 0.3 of ten steps are three.
    found = Counters(int(share * rest.steps), int(share * rest.samples))
    return found if found.steps and found.samples else Counters()
