"""What one sees while a demo runs: a table that is drawn anew, or a line now and then."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jdiloco.cli.demo_journal import Line
from jdiloco.cli.demo_plan import LONE, WATCH, Plan

PLAIN_SECONDS = 10.0
"""Pause between two lines where there is no terminal to draw on."""

COLOURS = {"training": "green", "finished": "blue", "starting": "yellow", "waiting": "yellow"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeState:
    """What is known of a process at one moment."""

    name: str
    state: str
    step: int
    loss: float | None
    rounds: int | None  # None for the lone node: it takes part in none.


def state_of(lines: Sequence[Line], ending: str) -> str:
    """The state of a process, from the last thing it said and from how it ended."""
    if ending != "running":
        return ending
    for line in reversed(lines):
        if "loss" in line or line.get("event") == "Recovered":
            return "training"
        if line.get("event") == "Waiting":
            return f"waiting for round {line['round']}"
        if line.get("event") == "Degraded":
            return f"training, degraded: {line['because']}"
        if line.get("event") == "Joined":
            return f"joined at round {line['round']}"
    return "starting"


def states(
    plan: Plan, journals: Mapping[str, Sequence[Line]], endings: Mapping[str, str]
) -> list[NodeState]:
    """The state of every process that trains, the lone one last."""
    rounds: dict[int, Sequence[str]] = {}
    for lines in journals.values():
        for line in lines:
            if line.get("event") == "Committed":
                rounds[line["round"]] = line["participants"]
    names = [name for name in journals if name not in (LONE, WATCH)]
    found = [_node_state(name, journals[name], endings.get(name, ""), rounds) for name in names]
    lone = _node_state(LONE, journals.get(LONE, ()), endings.get(LONE, ""), None)
    return [*found, lone]


def _node_state(
    name: str, lines: Sequence[Line], ending: str, rounds: Mapping[int, Sequence[str]] | None
) -> NodeState:
    reports = [line for line in lines if "loss" in line]
    last = reports[-1] if reports else {"step": 0, "loss": None}
    taken = None if rounds is None else sum(name in found for found in rounds.values())
    return NodeState(
        name=name, state=state_of(lines, ending), step=last["step"], loss=last["loss"], rounds=taken
    )


def newest_held_out(lines: Sequence[Line]) -> str:
    """The newest held-out loss of a process, as text."""
    found = next((line["held_out"] for line in reversed(lines) if "held_out" in line), None)
    return "-" if found is None else f"{found:.3f}"


class View:
    """Shows the states and says what happens, on a terminal or as plain lines."""

    def __init__(self, plan: Plan, console: Console):
        self._plan = plan
        self._console = console
        self._live: Live | None = None
        self._plain_after = PLAIN_SECONDS

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Draws the table from here on, if there is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, auto_refresh=False) as self._live:
            yield
        self._live = None

    def say(self, text: str, style: str = "bold") -> None:
        """Says what happened, above the table."""
        self._console.print(Text(text, style))

    def show(
        self, found: Sequence[NodeState], journals: Mapping[str, Sequence[Line]], seconds: float
    ) -> None:
        """Shows the state of everything at this second."""
        losses = [newest_held_out(journals.get(name, ())) for name in (WATCH, LONE)]
        if self._live is not None:
            self._live.update(Group(self._table(found), _line_of_losses(*losses)), refresh=True)
        elif seconds >= self._plain_after:
            self._plain_after = seconds + PLAIN_SECONDS
            self._console.print(Text(_plain_line(found, losses, seconds)), soft_wrap=True)

    def _table(self, found: Sequence[NodeState]) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("node", "", "step", "loss", "rounds", "state"):
            table.add_column(heading, justify="right" if heading in ("step", "loss") else "left")
        for node in found:
            table.add_row(
                node.name,
                ProgressBar(total=self._plan.steps, completed=node.step, width=24),
                f"{node.step}/{self._plan.steps}",
                "-" if node.loss is None else f"{node.loss:.3f}",
                "" if node.rounds is None else f"{node.rounds}",
                Text(node.state, COLOURS.get(node.state.split()[0].rstrip(","), "red")),
            )
        return table


def _line_of_losses(committed: str, lone: str) -> Text:
    return Text(f"  held-out loss: committed model {committed}, one node alone {lone}")


def _plain_line(found: Sequence[NodeState], losses: Sequence[str], seconds: float) -> str:
    nodes = "  ".join(
        f"{node.name} {node.step}" + ("" if node.state == "training" else f" ({node.state})")
        for node in found
    )
    committed, lone = losses
    return f"{seconds:4.0f} s  {nodes}  held-out: committed {committed}, alone {lone}"
