"""The settings of a run, as a user writes them and as the manifest keeps them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

from jdiloco.algo import merges, partition
from jdiloco.algo.checks import check_dtype
from jdiloco.algo.merges import Merge, rda
from jdiloco.algo.outer import MOMENTA
from jdiloco.algo.partition import Partition, by_bytes
from jdiloco.algo.wire import narrows
from jdiloco.errors import RunConfigMismatch, UsageError
from jdiloco.protocol import alignment
from jdiloco.protocol.alignment import OVERWRITE, Alignment
from jdiloco.protocol.rules import Rules
from jdiloco.runtime.precision import Precision
from jdiloco.runtime.wire import FORMATS

SMALL_SYNC_EVERY = 10
"""Below this many steps successive deltas agree, and a momentum of 0.9 multiplies a step by 10."""

MOMENTUM_STICKS = 1 - 2.0**-8
"""From here on what a round takes off the momentum may be less than half a step of bfloat16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """How a run trains. Two nodes of one run must agree on every field; the manifest holds them.

    Decoupled DiLoCo is the default. Standard DiLoCo is `fragments=1, in_flight=1, overlap_steps=0,
    follow=0, merge=weighted_mean()` with `quorum_size` the number of nodes. With
    `outer_lr=1, outer_momentum=0` besides it is Local SGD: each commit is then the weighted average
    of the learners' parameters.

    Settings:
      sync_every: Steps between two syncs of one fragment (H). More saves bandwidth and lets
        learners drift further apart; 24 to 500 is usual.
      fragments: Into how many parts the model is cut (P ≤ H, at most one per tensor). More spreads
        the traffic; 1 sends everything at once, 8 to 24 is usual for a large model.
      merge: How the deltas of a round become one: `rda()` keeps their length, `weighted_mean()`
        lets disagreement shorten it.
      outer_lr: η of the outer step. 0.7 for most models; 1 with no momentum takes the merge as it
        is.
      outer_momentum: β of the outer step. Multiplies a steady delta by up to 1/(1 − β): use less
        where `sync_every` is below about 10.
      in_flight: Rounds that a learner may have published and not yet aligned (τ), at most
        `fragments`. None is the smaller of 2 and `fragments`.
      overlap_steps: Steps a learner may train past a round it published before it waits for the
        commit. 0 is standard DiLoCo's barrier; None never waits.
      follow: Publish early once this many others have reported to the round. 0 never does; None is
        one less than the quorum or than the learners there are, at least 1.
      alignment: What a commit does to the steps trained since; see below.
      quorum_size: Contributions after which a round may close. 1 never waits for anybody; the
        number of nodes waits for all that live and train. Nodes that have not come yet are not
        waited for: start them together where every round must have everybody.
      grace_seconds: How long a closable round goes on collecting. None estimates it from the time
        that the steps in flight leave, 0 closes at once: then, with a quorum of 1, a learner that
        is exactly half as fast as the others may keep step with them and come late to every round.
      round_seconds: A round with at least one contribution closes after this long. None: no such
        limit.
      partition: Which tensors make a fragment: `by_bytes()` or `strided(block_pattern)`.
      delta_dtype: Precision of deltas on the wire: None (the parameter's own), "float32",
        "bfloat16", "float16", "float8_e4m3fn" (a byte an element) or "float4_e2m1fn" (about half a
        byte). Deltas are subtracted in float32 before they are narrowed. What narrowing rounds away
        is lost, so compare a short run; published runs with four bits lost next to nothing.
      commit_dtype: Precision in which commits reach learners that hold the version before: None
        (whole, in the parameter's own type) or one of the others of `delta_dtype`. A tensor with
        more bits than that comes as an update to the anchor; what the update rounds away stays in
        an fp32 master and comes with later ones, so nothing is lost. Of float32 parameters
        "float8_e4m3fn", a good start, quarters what a learner downloads, and a closer uploads five
        bytes an element more: the master and the update. Choose it where learners are many, or
        their lines slow.
      momentum_dtype: Precision in which the outer momentum is kept: "float32", or "bfloat16", which
        saves a closer two of the bytes that it uploads for each element. Good below an
        `outer_momentum` of about 0.99: a decay of less than 0.4 % a round would be rounded away.
      flush_on_close: Whether a node that has run out of data publishes the steps of its unfinished
        rounds.
      global_batch_size: Rows of one step of all learners together; `session.batch_size` is this
        node's share of it, as many as are alive. Shares add up while all see the same learners, so
        not quite while one comes or goes, and never where there are more learners than rows: each
        has at least one. A step compiles anew for every size it meets. None: sizes are the
        program's own.
      keep_rounds: Rounds after which contributions are removed from the mailbox; until then the
        round can be recomputed from them.
      checkpoint_every: Cycles of `fragments` rounds between two run checkpoints. Fewer make joining
        quicker.
      beat_seconds: How often a node says that it is alive. At least four polls; each is one small
        object.
      lease_seconds: Silence after which a node counts as dead, and how long its death can delay a
        round. At least two beats.

    Alignments, with θ the node's parameters and Θ what was committed:

      setting         parameters become      for
      overwrite()     Θ                      lock step, and rounds that close within few steps: all
                                             nodes go on from the same values
      blend(0.5)      θ/2 + Θ/2              commits that come some steps late, where a jump hurts
      carry()         Θ + (θ − θ_snapshot)   slow stores and unlike machines: nothing that was
                                             trained is dropped
      adaptive()      carries or overwrites  runs whose learners drift apart at times

    The anchor is Θ in all of them. `Dropped` events say what an alignment costs: where more than a
    fifth is `overwritten`, `carry()` is worth a try. All but `overwrite()` wait at an alignment for
    the user's step to end, to see that what they keep is finite.
    """

    sync_every: int
    fragments: int
    merge: Merge = dataclasses.field(default_factory=rda)
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    in_flight: int | None = None
    overlap_steps: int | None = None
    follow: int | None = None
    alignment: Alignment = OVERWRITE
    quorum_size: int = 1
    grace_seconds: float | None = None
    round_seconds: float | None = None
    partition: Partition = dataclasses.field(default_factory=by_bytes)
    delta_dtype: str | None = None
    commit_dtype: str | None = None
    momentum_dtype: str = "float32"
    flush_on_close: bool = False
    global_batch_size: int | None = None
    keep_rounds: int = 2
    checkpoint_every: int = 10
    beat_seconds: float = 10.0
    lease_seconds: float = 30.0

    def __post_init__(self) -> None:
        _check_positive(self, "sync_every", "fragments", "quorum_size", "checkpoint_every")
        _check_choices(self)
        _check_fragments(self)
        merges.check_merge(self.merge)
        alignment.check_alignment(self.alignment)
        if isinstance(self.partition, type) or not isinstance(self.partition, Partition):
            raise UsageError(
                f"`partition` must be `by_bytes()` or `strided(block_pattern)`, got "
                f"{self.partition!r:.60}."
            )
        if self.outer_momentum > 0.8 and self.sync_every < SMALL_SYNC_EVERY:
            warnings.warn(
                f"`outer_momentum` {self.outer_momentum} with `sync_every` {self.sync_every}: "
                "deltas of so few steps agree, so momentum multiplies the outer step by up to "
                f"{1 / (1 - self.outer_momentum):.0f}. Use outer_momentum=0, or sync less often.",
                stacklevel=3,
            )
        if self.momentum_dtype == "bfloat16" and self.outer_momentum > MOMENTUM_STICKS:
            warnings.warn(
                f"`outer_momentum` {self.outer_momentum} with `momentum_dtype` 'bfloat16': a round "
                "takes less off the momentum than bfloat16 can tell apart, so it would never fade. "
                "Keep it in float32, or use less momentum.",
                stacklevel=3,
            )

    @property
    def precision(self) -> Precision:
        """In how many bits commits are sent and kept."""
        return Precision(self.commit_dtype, self.momentum_dtype)

    @property
    def rounds_in_flight(self) -> int:
        """`in_flight`, with its default filled in."""
        return min(2, self.fragments) if self.in_flight is None else self.in_flight

    def rules(self) -> Rules:
        """What the protocol decides by."""
        return Rules(
            sync_every=self.sync_every,
            fragments=self.fragments,
            in_flight=self.rounds_in_flight,
            overlap_steps=self.overlap_steps,
            follow=self.follow,
            alignment=self.alignment,
            quorum_size=self.quorum_size,
            grace_seconds=self.grace_seconds,
            round_seconds=self.round_seconds,
            beat_seconds=self.beat_seconds,
            lease_seconds=self.lease_seconds,
            keep_rounds=self.keep_rounds,
            checkpoint_every=self.checkpoint_every,
            updates=narrows(self.commit_dtype, "float32"),
        )

    def to_json(self) -> dict[str, Any]:
        """Every field as plain values, as the manifest keeps them."""
        fields = [field.name for field in dataclasses.fields(self)]
        plain = {name: _plain(getattr(self, name)) for name in fields}
        return {
            **plain,
            "merge": merges.to_json(self.merge),
            "partition": partition.to_json(self.partition),
            "alignment": alignment.to_json(self.alignment),
            "in_flight": self.rounds_in_flight,
        }

    def check_against(self, manifest: Mapping[str, Any]) -> None:
        """Raises RunConfigMismatch unless `manifest` (what `to_json` gave) says the same."""
        mine = self.to_json()
        pairs = {name: (manifest.get(name), mine.get(name)) for name in {*mine, *manifest}}
        lines = [
            f"  {name}: the run has {_shown(theirs)}, this node {_shown(ours)}"
            for name, (theirs, ours) in sorted(pairs.items())
            if theirs != ours
        ]
        if lines:
            listed = "\n".join(lines)
            raise RunConfigMismatch(
                f"This node's settings differ from those the run was created with:\n{listed}\n"
                "Use the run's, or another mailbox for another run."
            )


def _plain(value: Any) -> Any:
    """NumPy's float64 is a Python float too, but not to JSON."""
    return float(value) if isinstance(value, float) else value


def _shown(value: Any) -> str:
    """A setting as a user would write it: `blend(mixing=0.5)`, where the manifest has a kind."""
    if not isinstance(value, Mapping) or "kind" not in value:
        return repr(value)
    fields = (f"{name}={field!r}" for name, field in value.items() if name != "kind")
    return f"{value['kind']}({', '.join(fields)})"


def _check_positive(algorithm: DiLoCo, *names: str) -> None:
    for name in names:
        value = getattr(algorithm, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"`{name}` must be an integer of at least 1, got {value!r}.")


def _check_fragments(algorithm: DiLoCo) -> None:
    fragments, sync_every = algorithm.fragments, algorithm.sync_every
    if fragments > sync_every:
        raise UsageError(
            f"`fragments` is {fragments} and `sync_every` {sync_every}: each fragment is due once "
            "in `sync_every` steps, so there can be at most one per step. Use fewer fragments."
        )
    if not 1 <= algorithm.rounds_in_flight <= fragments:
        raise UsageError(
            f"`in_flight` is {algorithm.in_flight} and `fragments` {fragments}: two rounds in "
            "flight of one fragment would start from the same version, and the second could only "
            f"be rejected. Use 1 to {fragments}."
        )


def _is_number(value: Any, kind: type, least: int | float) -> bool:
    """A finite Python number of at least `least`, and a whole one where `kind` is int."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    whole = kind is float or isinstance(value, int)
    return whole and math.isfinite(value) and value >= least


def _check_choices(algorithm: DiLoCo) -> None:
    settings: dict[str, Any] = dict(vars(algorithm))
    for name, kind, least in (
        ("outer_lr", float, 0.0),
        ("outer_momentum", float, 0.0),
        ("in_flight", int, 1),
        ("overlap_steps", int, 0),
        ("global_batch_size", int, 1),
        ("follow", int, 0),
        ("grace_seconds", float, 0.0),
        ("round_seconds", float, 0.0),
        ("keep_rounds", int, 0),
        ("beat_seconds", float, 0.01),
        ("lease_seconds", float, 0.02),
    ):
        value = settings[name]
        if value is None and algorithm.__dataclass_fields__[name].default is None:
            continue
        if not _is_number(value, kind, least):
            raise UsageError(
                f"`{name}` must be {'a' if kind is float else 'an'} {kind.__name__} of Python of "
                f"at least {least} (it goes into the manifest as JSON), got {value!r}."
            )
    if not isinstance(algorithm.flush_on_close, bool):
        raise UsageError(
            f"`flush_on_close` must be True or False, got {algorithm.flush_on_close!r}."
        )
    if algorithm.outer_momentum >= 1:
        raise UsageError(f"`outer_momentum` must be below 1, got {algorithm.outer_momentum}.")
    if algorithm.lease_seconds < 2 * algorithm.beat_seconds:
        raise UsageError(
            f"`lease_seconds` is {algorithm.lease_seconds} and `beat_seconds` "
            f"{algorithm.beat_seconds}: one late beat would end a lease. Use at least two beats."
        )
    for name, known in (
        ("delta_dtype", FORMATS),
        ("commit_dtype", FORMATS),
        ("momentum_dtype", MOMENTA),
    ):
        check_dtype(name, settings[name], known)
