"""`jdiloco gc`: what was removed from a mailbox."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import typer

from jdiloco.runtime.gc import Collected, collect
from jdiloco.runtime.inspect import find_run
from jdiloco.runtime.run_key import open_mailbox

NAMES = {
    "creating": "beats of nodes that wanted to create the run",
    "contribution": "contributions, older than `keep_rounds` rounds",
    "beat": "beats of nodes that are gone, or that newer beats replaced",
    "payload": "payloads that lost their round, or that checkpoints cover",
    "checkpoint": "files of run checkpoints that newer ones replaced",
    "forged": "objects that were not made with the run's key",
}


def run_gc(
    mailbox: str, *, dry_run: bool, once: bool, key_file: Path | None = None, as_json: bool
) -> int:
    """The command. Returns the exit code."""
    if not once:
        find_run(open_mailbox(mailbox, key_file))  # Or there is nothing to watch.
        typer.echo("Watching the beats to see who is gone; `--once` does without.", err=True)
    found = collect(mailbox, dry_run=dry_run, once=once, key_file=key_file)
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return 0
    show(found)
    return 0


def show(found: Collected) -> None:
    """Prints what was found."""
    typer.echo(f"Run {found.run} in {found.url}")
    for kind, (objects, size) in found.found.items():
        typer.echo(f"{objects:>9,} {size / 1e6:>11,.1f} MB  {NAMES[kind]}")
    objects, size = found.total
    verb = "Removed" if found.removed else "Would remove"
    typer.echo(
        f"{verb} {objects:,} of {found.stored[0]:,} objects, "
        f"{size / 1e6:,.1f} of {found.stored[1] / 1e6:,.1f} MB."
    )
    if not found.watched:
        typer.echo("Beats of nodes that fell silent were left: one look does not tell who is gone.")
