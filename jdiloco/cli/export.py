"""`jdiloco export`: the newest committed model, and how to restore it."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import msgspec
import typer

from jdiloco.runtime.export import Exported, export

RESTORE = """\
import orbax.checkpoint as ocp

with ocp.StandardCheckpointer() as checkpointer:
    {name} = checkpointer.restore("{directory}")"""


def run_export(
    mailbox: str, directory: Path, *, outer: bool, key_file: Path | None = None, as_json: bool
) -> int:
    """The command. Returns the exit code."""
    jax.config.update("jax_platforms", "cpu")  # Orbax starts JAX; take no accelerator for it.
    made = export(mailbox, directory, outer=outer, key_file=key_file)
    if as_json:
        sys.stdout.write(msgspec.json.encode(made).decode() + "\n")
        return 0
    typer.echo(_told(made))
    typer.echo()
    typer.echo(RESTORE.format(name="tree" if outer else "params", directory=made.directory))
    return 0


def _told(made: Exported) -> str:
    when = f"after round {made.round}" if made.round >= 0 else "before its first round"
    return (
        f"Run {made.run} {when}: {made.tensors} tensors, {made.bytes / 1e6:,.1f} MB of parameters, "
        f"in {made.directory}"
    )
