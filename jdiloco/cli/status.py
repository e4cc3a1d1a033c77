"""`jdiloco status`: one screen about a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jdiloco.runtime import spending
from jdiloco.runtime.status import Commit, NodeStatus, Samples, Status, read_status
from jdiloco.store.signed import FORGED_MAX
from jdiloco.types import Spent

SETTINGS = (
    "merge",
    "sync_every",
    "fragments",
    "outer_lr",
    "outer_momentum",
    "quorum_size",
    "in_flight",
    "overlap_steps",
    "alignment",
    "beat_seconds",
    "lease_seconds",
)
"""Those that say most about how a run behaves."""

COLOURS = {
    "alive": "green",
    "silent": "red",
    "ended": "red",
    "left": "blue",
    "unknown": "yellow",
}
MANY_DROPPED = 0.2


def run_status(mailbox: str, *, wait: float, key_file: Path | None = None, as_json: bool) -> int:
    """The command. Returns the exit code."""
    status = read_status(mailbox, wait=wait, key_file=key_file)
    if as_json:
        sys.stdout.write(to_json(status) + "\n")
    else:
        show(status, Console(soft_wrap=True))  # What is copied or piped breaks nowhere.
    return 0


def to_json(status: Status) -> str:
    """A status as one line of JSON, with the sums that it is made of."""
    plain = msgspec.to_builtins(status)
    for told, source in ((plain, status), *zip(plain["nodes"], status.nodes, strict=True)):
        samples = source.samples
        told["samples"] |= {
            "processed": samples.processed,
            "share_dropped": samples.share_dropped,
        }
        told["spent"] = _figures(source.spent)
    return msgspec.json.encode(plain).decode()


def _figures(spent: Spent | None) -> dict[str, float] | None:
    """With what Amazon would charge (`spending.PRICES`), in dollars."""
    return spent and {
        **msgspec.structs.asdict(spent),
        "requests_dollars": spending.requests_dollars(spent),
        "transfer_dollars": spending.transfer_dollars(spent),
    }


def show(status: Status, console: Console) -> None:
    """Prints a status."""
    model = status.model
    console.print(Text(f"Run {status.run} in {status.url}", "bold"))
    console.print(
        Text(
            f"{model.tensors} tensors, {model.parameters:,} parameters, {_size(model.bytes)}, "
            f"{model.fragments} fragments"
        )
    )
    console.print(Text(_settings(status.settings)))
    console.print(Text(_rounds(status)))
    if status.newest is not None:
        console.print(Text(_newest(status.newest)))
    console.print(Text(_next(status)))
    console.print(_lives(status))
    console.print(_samples(status))
    console.print(Text(_ledger(status.samples), "red" if _many(status.samples) else ""))
    console.print(_spending(status))
    console.print(Text(_stored(status)))
    console.print(Text(_dollars(status)))
    if status.forged:
        console.print(Text(_forged(status.forged), "red"))
    if status.waited or all(node.alive in ("left", "ended") for node in status.nodes):
        return
    beat = float(str(status.settings.get("beat_seconds", 10)))
    console.print(
        Text(
            "Who is alive cannot be told from one look. Look twice, two beats apart: "
            f"`--wait {2 * beat:g}`.",
            "yellow",
        )
    )


def _forged(count: int) -> str:
    more = " or more" if count >= FORGED_MAX else ""
    return (
        f"{count:,}{more} objects lie there without the signature of the run's key: somebody who "
        "does not hold it writes there. Nodes take no notice of them; `jdiloco verify` names them."
    )


def _settings(settings: Mapping[str, object]) -> str:
    shown = [(name, settings[name]) for name in SETTINGS if settings.get(name) is not None]
    plain = [(n, v.get("kind") if isinstance(v, Mapping) else v) for n, v in shown]
    return ", ".join(f"{name} {value}" for name, value in plain)


def _rounds(status: Status) -> str:
    rejected = ", ".join(f"{reason} {count}" for reason, count in status.rejected.items())
    return (
        f"{status.rounds:,} rounds ({status.void} void), versions {list(status.versions)}, "
        f"{status.mean_participants:.2f} participants on average, rejected: {rejected or 'none'}"
    )


def _closer(named: str) -> str:
    """Round 0 of a run that a learner created is for whoever can close."""
    return "whoever can" if named.startswith(".") else named


def _newest(commit: Commit) -> str:
    cosine = "" if commit.cosine is None else f", cosine {commit.cosine:.3f}"
    rejected = ", ".join(f"{node} ({reason})" for node, reason in commit.rejected.items())
    return (
        f"newest: round {commit.round}, fragment {commit.fragment}, "
        f"{'void' if commit.void else f'version {commit.version}'}, closed by {commit.closer}, "
        f"{len(commit.participants)} of {commit.expected} expected merged{cosine}"
        + (f", rejected {rejected}" if rejected else "")
    )


def _next(status: Status) -> str:
    timing = status.timing
    averages = [
        f"{name} {seconds:.3g} s"
        for name, seconds in (
            ("step", timing.step),
            ("quorum", timing.quorum),
            ("commit", timing.commit),
        )
        if seconds is not None
    ]
    newest = status.checkpoint_round
    covers = "the initial values" if newest < 0 else f"round {newest}"
    return (
        f"next: round {status.next_round}, closed by {_closer(status.next_closer)}; "
        f"{status.takeovers} takeovers; newest checkpoint of {covers}"
        + (f"; on average {', '.join(averages)}" if averages else "")
    )


def _table(*columns: str, left: int) -> Table:
    """A table of nodes. Only ids are folded where the screen is narrow; `left` columns are text."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title=" ")
    table.add_column("node", overflow="fold")
    for index, heading in enumerate(columns, 1):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=True)
    return table


def _lives(status: Status) -> Table:
    table = _table("state", "lives", "step", "next", "rounds", "rejected", left=2)
    for node in status.nodes:
        table.add_row(
            node.node,
            Text(_state(node), COLOURS[node.alive]),
            str(node.lives),
            *("-" if value is None else str(value) for value in (node.step, node.next_round)),
            str(node.rounds),
            str(node.rejected),
        )
    return table


def _samples(status: Status) -> Table:
    table = _table("processed", "merged", "dropped", "pending", left=1)
    for node in status.nodes:
        samples = node.samples
        share = f"{samples.dropped_total:,.0f} ({samples.share_dropped:.0%})"
        table.add_row(
            node.node,
            f"{samples.processed:,.0f}",
            f"{samples.merged:,.0f}",
            Text(share, "red" if _many(samples) else ""),
            f"{samples.pending:,.0f}",
        )
    return table


def _spending(status: Status) -> Table:
    table = _table("writes", "reads", "lists", "sent", "received", "requests $", left=1)
    for node in status.nodes:
        spent = node.spent
        table.add_row(node.node, *(_spent(spent) if spent else "------"))
    return table


def _spent(spent: Spent) -> list[str]:
    return [
        *(f"{count:,}" for count in (spent.creates, spent.gets, spent.lists)),
        _size(spent.sent),
        _size(spent.received),
        f"{spending.requests_dollars(spent):.4f}",
    ]


def _state(node: NodeStatus) -> str:
    """Its last words, and whether it has said anything since."""
    if node.ended_by is not None:
        return f"ended by {node.ended_by.partition('.')[0]}"
    if node.phase is None:
        return "gone"  # What it said last has been swept, as that of whoever left is.
    return node.phase if node.alive in ("left", "unknown") else f"{node.phase}, {node.alive}"


def _many(samples: Samples) -> bool:
    return samples.share_dropped > MANY_DROPPED


def _ledger(samples: Samples) -> str:
    dropped = ", ".join(f"{reason} {count:,.0f}" for reason, count in samples.dropped.items())
    return (
        f"samples (means over fragments, as of merged contributions): "
        f"{samples.processed:,.0f} = {samples.merged:,.0f} merged + "
        f"{samples.dropped_total:,.0f} dropped ({dropped or 'none'}; {samples.share_dropped:.0%}) "
        f"+ {samples.pending:,.0f} pending"
    )


def _stored(status: Status) -> str:
    objects = sum(count for count, _ in status.stored.values())
    size = sum(size for _, size in status.stored.values())
    kinds = ", ".join(
        f"{kind} {count} ({_size(held)})" for kind, (count, held) in status.stored.items()
    )
    return f"mailbox: {objects:,} objects, {_size(size)}: {kinds}"


def _dollars(status: Status) -> str:
    spent, stored = status.spent, sum(size for _, size in status.stored.values())
    unknown = [node.node for node in status.nodes if node.spent is None]
    missing = f" Nothing is known of {', '.join(unknown)}." if unknown else ""
    return (
        f"What Amazon would charge, an estimate: {spending.requests_dollars(spent):.2f} $ for "
        f"{spent.requests:,} requests, as far as nodes have said, "
        f"{spending.transfer_dollars(spent):.2f} $ for what nodes outside the bucket's region "
        f"would have received ({_size(spent.received)}), and "
        f"{spending.storage_dollars(stored):.2f} $ a month for what lies there now. "
        f"Prices: {spending.PRICES}.{missing}"
    )


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
