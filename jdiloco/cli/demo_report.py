"""What a demo found out: typed figures, the table made of them, and the claim they decide.

`read_rounds` and `collect` alone know where figures come from.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jdiloco.cli.demo_journal import Line
from jdiloco.cli.demo_plan import LONE, WATCH, Folder, Plan
from jdiloco.errors import UsageError
from jdiloco.protocol.records import Participant, RoundRecord
from jdiloco.runtime.inspect import read_run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """One merged contribution, and the node's ledger of its fragment once it was merged."""

    node: str
    merged: int  # Samples, as the next two.
    dropped: Mapping[str, int]
    pending: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """One committed round."""

    round: int
    fragment: int
    shares: tuple[Share, ...]
    rejected: tuple[tuple[str, str], ...]  # Node and reason.
    expected: int

    @property
    def void(self) -> bool:
        return not self.shares


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeFigures:
    """One node. Samples are means over the fragments: processed = merged + dropped + pending."""

    node: str
    ending: str
    steps: int  # That it trained.
    first_step: int  # Of the plan: where the run was when the node came.
    loss: float | None  # Mean training loss of its last report.
    rounds: int  # In which a contribution of it was merged.
    merged: float
    dropped: Mapping[str, float]  # By reason.
    pending: float
    last_known: bool  # It was killed or crashed, so nobody heard its last figures.

    @property
    def dropped_total(self) -> float:
        return sum(self.dropped.values(), 0.0)

    @property
    def processed(self) -> float:
        return self.merged + self.dropped_total + self.pending


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the demo shows in the end."""

    nodes: tuple[NodeFigures, ...]
    rounds: tuple[RoundFigures, ...]
    committed_loss: float | None  # On the held-out text.
    lone_loss: float | None
    lone_steps: int
    seconds: float

    @property
    def mean_participants(self) -> float:
        """Over the rounds that merged something."""
        counts = [len(found.shares) for found in self.rounds if not found.void]
        return statistics.fmean(counts) if counts else 0.0

    @property
    def rejected_by_reason(self) -> dict[str, int]:
        reasons = (reason for found in self.rounds for _, reason in found.rejected)
        return dict(sorted(collections.Counter(reasons).items()))

    @property
    def dropped_by_reason(self) -> dict[str, float]:
        """Samples of all nodes."""
        reasons = sorted({reason for node in self.nodes for reason in node.dropped})
        return {
            reason: sum((node.dropped.get(reason, 0.0) for node in self.nodes), 0.0)
            for reason in reasons
        }

    @property
    def holds(self) -> bool:
        """The claim of the demo: the committed model beats the lone node on the held-out text."""
        if self.committed_loss is None or self.lone_loss is None:
            return False
        return self.committed_loss < self.lone_loss

    def as_json(self) -> str:
        """Every figure, for programs."""
        summary = {
            "holds": self.holds,
            "mean_participants": self.mean_participants,
            "rejected": self.rejected_by_reason,
            "dropped": self.dropped_by_reason,
            "processed": {node.node: node.processed for node in self.nodes},
        }
        return json.dumps({**summary, **dataclasses.asdict(self)}, indent=2)


def read_rounds(mailbox: Path) -> tuple[RoundFigures, ...]:
    """The rounds of the run in a mailbox; none if no run was created."""
    try:
        run = read_run(mailbox.absolute())
    except UsageError:
        return ()
    return tuple(map(_round_figures, run.rounds))


def _round_figures(record: RoundRecord) -> RoundFigures:
    return RoundFigures(
        round=record.round,
        fragment=record.fragment,
        shares=tuple(map(_share, record.participants)),
        rejected=tuple((entry.node, entry.reason) for entry in record.rejected),
        expected=record.expected,
    )


def _share(participant: Participant) -> Share:
    """A contribution carries the ledger from before it; the record is what merges it."""
    ledger = participant.ledger.merge(participant.counters.samples)
    return Share(
        node=participant.node,
        merged=ledger.merged,
        dropped=ledger.dropped,
        pending=ledger.pending,
    )


def collect(
    plan: Plan,
    rounds: Sequence[RoundFigures],
    journals: Mapping[str, Sequence[Line]],
    endings: Mapping[str, str],
    seconds: float,
) -> Report:
    """The figures of a demo, from its mailbox and from what its processes wrote."""
    nodes = sorted((name for name in journals if name not in (LONE, WATCH)), key=_by_number)
    lone = journals.get(LONE, ())
    return Report(
        nodes=tuple(
            _node_figures(plan, name, journals[name], rounds, endings.get(name, ""))
            for name in nodes
        ),
        rounds=tuple(rounds),
        committed_loss=_final_loss(journals.get(WATCH, ())),
        lone_loss=_final_loss(lone),
        lone_steps=_steps(plan, lone),
        seconds=seconds,
    )


def _node_figures(
    plan: Plan, name: str, lines: Sequence[Line], rounds: Sequence[RoundFigures], ending: str
) -> NodeFigures:
    merged_in = [found for found in rounds if any(share.node == name for share in found.shares)]
    reports = [line for line in lines if "loss" in line]
    left = next((line for line in reversed(lines) if line.get("event") == "Left"), None)
    merged, dropped, pending = (
        _as_it_left(plan, left, lines) if left else _last_known(plan, name, merged_in)
    )
    return NodeFigures(
        node=name,
        ending=ending,
        steps=_steps(plan, lines),
        first_step=_first_step(plan, reports),
        loss=reports[-1]["loss"] if reports else None,
        rounds=len(merged_in),
        merged=merged,
        dropped=dropped,
        pending=pending,
        last_known=left is None,
    )


Samples = tuple[float, dict[str, float], float]
"""Merged, dropped by reason, pending."""


def _as_it_left(plan: Plan, left: Line, lines: Sequence[Line]) -> Samples:
    """What a node said when it left; the reasons are in the events before."""
    dropped: collections.Counter[str] = collections.Counter()
    for line in lines:
        if line.get("event") == "Dropped":
            dropped[line["reason"]] += line["samples"]
    by_reason = {reason: total / plan.fragments for reason, total in sorted(dropped.items())}
    return left["merged"], by_reason, left["pending"]


def _last_known(plan: Plan, name: str, rounds: Sequence[RoundFigures]) -> Samples:
    """What the last merged contributions of a node said: the newest for each fragment."""
    newest = {
        found.fragment: share for found in rounds for share in found.shares if share.node == name
    }
    shares = newest.values()
    reasons = sorted({reason for share in shares for reason in share.dropped})
    return (
        sum(share.merged for share in shares) / plan.fragments,
        {r: sum(share.dropped.get(r, 0) for share in shares) / plan.fragments for r in reasons},
        sum(share.pending for share in shares) / plan.fragments,
    )


def _steps(plan: Plan, lines: Iterable[Line]) -> int:
    """Steps trained. One that joined later began at a later step of the plan."""
    return max((line["samples"] for line in lines if "loss" in line), default=0) // plan.rows


def _first_step(plan: Plan, reports: Sequence[Line]) -> int:
    """What journals count their steps from: the step of the plan at which a node began."""
    return reports[0]["step"] - reports[0]["samples"] // plan.rows if reports else 0


def _final_loss(lines: Iterable[Line]) -> float | None:
    return next((line["held_out"] for line in lines if line.get("final")), None)


def _by_number(name: str) -> tuple[int, str]:
    number = name.rpartition("-")[2]
    return (int(number) if number.isdecimal() else 0, name)


def render(report: Report) -> RenderableType:
    """The report as tables for a terminal."""
    return Group(node_table(report), summary_table(report), verdict(report))


def node_table(report: Report) -> Table:
    """One line a node. Each adds up: processed = merged + dropped + pending."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("node")
    for heading in ("steps", "loss", "rounds", "processed", "merged", "dropped", "pending"):
        table.add_column(heading, justify="right")
    table.add_column("ending")
    for node in report.nodes:
        figures = (node.processed, node.merged, node.dropped_total, node.pending)
        table.add_row(
            node.node,
            f"{node.steps}",
            "-" if node.loss is None else f"{node.loss:.3f}",
            f"{node.rounds}",
            *(f"{value:,.0f}" for value in figures),
            node.ending + ("*" if node.last_known else ""),
        )
    table.caption = "Samples are means over the fragments: processed = merged + dropped + pending."
    if any(node.last_known for node in report.nodes):
        table.caption += "\n* It did not live to tell: the last known figures."
    late = (node for node in report.nodes if node.first_step)
    begun = ", ".join(f"{node.node} began at step {node.first_step}" for node in late)
    if begun:
        table.caption += f"\n{begun}, where the run was."
    table.caption_justify = "left"
    return table


def summary_table(report: Report) -> Table:
    """The figures of the whole run."""
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column()
    void = sum(found.void for found in report.rounds)
    table.add_row("held-out loss, committed model", _loss(report.committed_loss))
    table.add_row("held-out loss, one node alone", _loss(report.lone_loss))
    table.add_row("rounds", f"{len(report.rounds)}" + (f", {void} of them void" if void else ""))
    table.add_row("mean participants", f"{report.mean_participants:.2f}")
    table.add_row("rejected contributions", _by_reason(report.rejected_by_reason))
    table.add_row("dropped samples", _by_reason(report.dropped_by_reason))
    table.add_row("seconds", f"{report.seconds:.0f}")
    return table


def _loss(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f}"


def _by_reason(counts: Mapping[str, int] | Mapping[str, float]) -> str:
    shown = (f"{reason} {count:,.0f}" for reason, count in sorted(counts.items()))
    return ", ".join(shown) or "none"


def verdict(report: Report) -> Text:
    """Whether the claim of the demo holds, in a sentence."""
    if report.committed_loss is None or report.lone_loss is None:
        return Text("\nThe claim was not checked: a held-out loss is missing.", "bold red")
    by = report.lone_loss - report.committed_loss
    if report.holds:
        text = (
            f"\nThe committed model beats the node that trained alone, for {report.lone_steps:,} "
            f"steps, by {by:.3f} nats a byte."
        )
        return Text(text, "bold green")
    text = f"\nThe committed model does not beat the node that trained alone: {-by:.3f} nats worse."
    return Text(text, "bold red")


def write(report: Report, folder: Folder) -> None:
    """Writes the report as JSON and as the text of its tables."""
    folder.report.write_text(report.as_json() + "\n")
    with folder.report.with_suffix(".txt").open("w") as file:
        Console(file=file, width=110).print(render(report))
