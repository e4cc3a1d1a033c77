"""The command `jdiloco`. Each subcommand imports what it needs when it is called, so that
`jdiloco --help` answers at once and without JAX."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jdiloco.errors import JDilocoError

app = typer.Typer(
    name="jdiloco",
    help="DiLoCo for JAX: train one model on machines that barely talk to each other.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def root() -> None:
    """DiLoCo for JAX: train one model on machines that barely talk to each other."""


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of text files to train on. By default the source files of Python's "
            "standard library on this machine.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps of a node.")] = 1200,
    nodes: Annotated[int, typer.Option(help="Nodes at the start; one more joins later.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder for the mailbox and the results.")] = Path(
        "runs/demo"
    ),
    keep: Annotated[
        bool, typer.Option("--keep", help="Refuse to replace the result of an earlier demo.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Draws the first parameters and the batches.")] = 0,
    no_kill: Annotated[
        bool, typer.Option("--no-kill", help="Kill no node, and let none join.")
    ] = False,
) -> None:
    """Train one model on several nodes of this machine; kill one, let another join.

    Each node is a process with its own share of real text; they share nothing but a folder. At
    the end the committed model is compared with one node that trained alone for as many steps.
    Takes two to three minutes on two cores. The exit code is 0 if the committed model is better.
    """
    from jdiloco.cli.demo import run_demo
    from jdiloco.cli.demo_plan import Folder, Plan

    plan = Plan(steps=steps, nodes=nodes, seed=seed, kill=not no_kill)
    raise typer.Exit(run_demo(plan, Folder(out), data=data, replace=not keep))


def main() -> None:
    """Runs the command line. What the library refuses is a sentence, not a traceback."""
    try:
        app()
    except JDilocoError as error:
        typer.echo(f"jdiloco: {error}", err=True)
        sys.exit(2)
