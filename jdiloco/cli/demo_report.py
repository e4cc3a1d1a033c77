"""What a demo found out: typed figures, the table made of them, and the claim they decide.

`collect` is the only function that knows where figures come from.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jdiloco.cli.demo_journal import Line
from jdiloco.cli.demo_plan import LONE, WATCH, Folder, Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """One committed round."""

    round: int
    fragment: int
    participants: tuple[str, ...]
    rejected: tuple[tuple[str, str], ...]  # Node and reason.
    expected: int
    void: bool
    closer: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeFigures:
    """One node. Samples are means over the fragments: processed = merged + dropped + pending."""

    node: str
    ending: str
    steps: int
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
        counts = [len(found.participants) for found in self.rounds if not found.void]
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


def collect(
    plan: Plan, journals: Mapping[str, Sequence[Line]], endings: Mapping[str, str], seconds: float
) -> Report:
    """The figures of a demo, from what its processes wrote."""
    rounds = committed_rounds(line for lines in journals.values() for line in lines)
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
        lone_steps=_steps(lone),
        seconds=seconds,
    )


def committed_rounds(lines: Iterable[Line]) -> list[RoundFigures]:
    """Every round that any node read the record of, once."""
    found = {line["round"]: line for line in lines if line.get("event") == "Committed"}
    return [_round_figures(found[number]) for number in sorted(found)]


def _round_figures(line: Line) -> RoundFigures:
    rejected = (entry.rpartition(":") for entry in line["rejected"])
    return RoundFigures(
        round=line["round"],
        fragment=line["fragment"],
        participants=tuple(line["participants"]),
        rejected=tuple((node, reason) for node, _, reason in rejected),
        expected=line["expected"],
        void=line["void"],
        closer=line["closer"],
    )


def _node_figures(
    plan: Plan, name: str, lines: Sequence[Line], rounds: Sequence[RoundFigures], ending: str
) -> NodeFigures:
    merged_rounds = {found.round for found in rounds if name in found.participants}
    reports = [line for line in lines if "loss" in line]
    left = next((line for line in reversed(lines) if line.get("event") == "Left"), None)
    dropped = _dropped(plan, lines)
    published = {line["round"]: line["samples"] for line in _events(lines, "Published")}
    merged = sum(published.get(number, 0) for number in merged_rounds) / plan.fragments
    steps = _steps(lines)
    return NodeFigures(
        node=name,
        ending=ending,
        steps=steps,
        loss=reports[-1]["loss"] if reports else None,
        rounds=len(merged_rounds),
        merged=left["merged"] if left else merged,
        dropped=dropped,
        pending=left["pending"] if left else _trained(lines) - merged - sum(dropped.values()),
        last_known=left is None,
    )


def _dropped(plan: Plan, lines: Sequence[Line]) -> dict[str, float]:
    """Dropped samples by reason: a sum over fragments, divided by their number."""
    totals: collections.Counter[str] = collections.Counter()
    for line in _events(lines, "Dropped"):
        totals[line["reason"]] += line["samples"]
    return {reason: total / plan.fragments for reason, total in sorted(totals.items())}


def _trained(lines: Sequence[Line]) -> float:
    """Samples trained by its last report."""
    return float(max((line["samples"] for line in lines if "loss" in line), default=0))


def _events(lines: Iterable[Line], kind: str) -> list[Line]:
    return [line for line in lines if line.get("event") == kind]


def _steps(lines: Iterable[Line]) -> int:
    return max((line["step"] for line in lines if "loss" in line), default=0)


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
    table.caption_justify = "left"
    return table


def summary_table(report: Report) -> Table:
    """The figures of the whole run."""
    table = Table(box=None, show_header=False)
    table.add_column()
    table.add_column()
    void = sum(found.void for found in report.rounds)
    table.add_row("held-out loss, committed model", _loss(report.committed_loss))
    table.add_row(
        f"held-out loss, one node alone, {report.lone_steps:,} steps", _loss(report.lone_loss)
    )
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
        text = f"\nThe committed model beats the node that trained alone by {by:.3f} nats a byte."
        return Text(text, "bold green")
    text = f"\nThe committed model does not beat the node that trained alone: {-by:.3f} nats worse."
    return Text(text, "bold red")


def write(report: Report, folder: Folder) -> None:
    """Writes the report as JSON and as the text of its tables."""
    folder.report.write_text(report.as_json() + "\n")
    with folder.report.with_suffix(".txt").open("w") as file:
        Console(file=file, width=110).print(render(report))
