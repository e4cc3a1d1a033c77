"""`jdiloco verify`: what was found in a mailbox, and how far each round could be checked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.text import Text

from jdiloco.runtime import verify as verifying
from jdiloco.runtime.verify import Report, Stretch

MEANINGS = {
    "recomputed": "recomputed bit for bit",
    "compared": "recomputed on another build, equal within the tolerance",
    "chained": "checked along the chain only",
    "void": "void: nothing was merged",
    "unread": "no record that can be read",
}
SHOWN = 20
"""Stretches of rounds, or remarks, before the rest is only counted."""


def run_verify(mailbox: str, *, key_file: Path | None = None, as_json: bool) -> int:
    """The command. Returns the exit code: 0 if nothing was found."""
    jax.config.update("jax_platforms", "cpu")  # Rounds are closed there; take nothing else.
    with _progress(quiet=as_json) as show:
        report = verifying.verify(mailbox, progress=show, key_file=key_file)
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        show_report(report, Console(soft_wrap=True))
    return 0 if report.sound else 1


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[verifying.Progress], object]]:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda progress: None
        return
    columns = (
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: verifying.Progress) -> None:
            bar.update(
                task, total=progress.bytes, completed=progress.read, description=progress.key
            )

        yield show


def show_report(report: Report, console: Console) -> None:
    """Prints a report."""
    console.print(Text(f"Run {report.run or '?'} in {report.url}", "bold"))
    read = f"{report.objects:,} objects, {report.bytes / 1e6:,.1f} MB"
    rounds = sum(stretch.rounds for stretch in report.rounds)
    console.print(Text(f"{rounds:,} rounds; read {read}"))
    for how, meaning in MEANINGS.items():
        if count := report.count(how):
            console.print(Text(f"  {count:>7,} {meaning}"))
    for stretch in _newest(report.rounds):
        console.print(Text(f"    {_named(stretch)}: {MEANINGS[stretch.how]}{_because(stretch)}"))
    if report.later:
        console.print(
            Text(f"  {report.later:>7,} committed meanwhile, checked along the chain only")
        )
    _show_remarks(report, console)
    for finding in report.findings:
        console.print(Text(f"{finding.key} {finding.what}.", "bold red"))
        console.print(Text(f"    {finding.means}"))
    found = len(report.findings)
    if found:
        things = "thing that is" if found == 1 else "things that are"
        console.print(Text(f"Found {found} {things} wrong.", "bold red"))
    else:
        console.print(Text("Nothing wrong was found.", "bold green"))


def _newest(stretches: tuple[Stretch, ...]) -> tuple[Stretch, ...]:
    return stretches[-SHOWN:]


def _named(stretch: Stretch) -> str:
    if stretch.first == stretch.last:
        return f"round {stretch.first}"
    return f"rounds {stretch.first} to {stretch.last}"


def _because(stretch: Stretch) -> str:
    return f" ({stretch.why})" if stretch.why else ""


def _show_remarks(report: Report, console: Console) -> None:
    for remark in report.remarks[:SHOWN]:
        console.print(Text(f"Remark: {remark.key}: {remark.what}.", "yellow"))
    if len(report.remarks) > SHOWN:
        console.print(Text(f"and {len(report.remarks) - SHOWN} remarks more.", "yellow"))
