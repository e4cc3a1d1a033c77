"""The command `jdiloco`. Each subcommand imports what it needs when it is called, so that
`jdiloco --help` answers at once and without JAX."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
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


def show_version(wanted: bool) -> None:
    """Prints the version that is installed, and ends."""
    if not wanted:
        return
    try:
        version = importlib.metadata.version("jdiloco")
    except importlib.metadata.PackageNotFoundError:
        version = "(run from its source, not installed)"
    typer.echo(f"jdiloco {version}")
    raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """DiLoCo for JAX: train one model on machines that barely talk to each other."""


@app.command()
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of text files to train on, with at least 200,000 bytes in all. By default "
            "the source files of Python's standard library on this machine.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps of a node, at least 160.")] = 1200,
    nodes: Annotated[
        int, typer.Option(help="Nodes at the start, at least 2; one more joins later.")
    ] = 4,
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


Mailbox = Annotated[str, typer.Argument(help="The folder or URL that the run's nodes share.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the run's key, of a run that has one. By default JDILOCO_RUN_KEY holds it, "
        "or JDILOCO_RUN_KEY_FILE names the file.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


@app.command()
def status(
    mailbox: Mailbox,
    wait: Annotated[
        float,
        typer.Option(
            help="Look twice, this many seconds apart, to tell who is alive: two beats or more.",
            min=0.0,
        ),
    ] = 0.0,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Show where a run stands. Joins nothing and writes nothing.

    Samples are means over the fragments, as of the contributions that were merged. From one look
    nobody can say who is alive: a beat tells that its writer lived, not when; see --wait.
    """
    from jdiloco.cli.status import run_status

    raise typer.Exit(run_status(mailbox, wait=wait, key_file=key_file, as_json=as_json))


@app.command()
def verify(mailbox: Mailbox, key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Check everything that lies in a mailbox. Joins nothing and writes nothing.

    Walks the chain of records, holds every object against what names it, and closes every round
    again whose inputs are still there; of a run that has a key it checks every signature. The exit
    code is 1 if anything is wrong, and 0 if not; a run may go on meanwhile.
    """
    from jdiloco.cli.verify import run_verify

    raise typer.Exit(run_verify(mailbox, key_file=key_file, as_json=as_json))


@app.command()
def export(
    mailbox: Mailbox,
    directory: Annotated[
        Path, typer.Argument(help="Where to put it; there must be nothing there yet.")
    ],
    outer: Annotated[
        bool,
        typer.Option(
            "--outer", help="Also the momentum of the outer step and the float32 master copies."
        ),
    ] = False,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Write the newest committed model as an Orbax checkpoint. Joins nothing; a run may go on.

    orbax.checkpoint alone restores it, onto any sharding: see the lines that this prints. Without
    --outer the tree is the parameters, with it params, momentum and master.
    """
    from jdiloco.cli.export import run_export

    code = run_export(mailbox, directory, outer=outer, key_file=key_file, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def gc(
    mailbox: Mailbox,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Do not wait to see who is gone: beats of silent nodes are left."
        ),
    ] = False,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove what nodes that died have left and no living node will remove.

    Takes nothing that a node could still need, so it may run at any time, beside a run or after it,
    and removes unless it is told not to. Watches the beats for up to a lease timeout, since one
    look cannot tell who is gone.
    """
    from jdiloco.cli.gc import run_gc

    code = run_gc(mailbox, dry_run=dry_run, once=once, key_file=key_file, as_json=as_json)
    raise typer.Exit(code)


@app.command()
def doctor(
    store: Annotated[
        str, typer.Argument(help="A folder, or a bucket such as s3://bucket/prefix.", metavar="URL")
    ],
    megabytes: Annotated[
        float, typer.Option(help="Size of the object that bandwidth is measured with.", min=0.001)
    ] = 8.0,
) -> None:
    """Try out whether a folder or bucket keeps the promises that a run rests on.

    Writes a few objects there, under a name of its own, and removes them. The exit code is 0 if
    the store can carry a run, 1 if it cannot, and 2 if it could not be reached.
    """
    from jdiloco.cli.doctor import run_doctor
    from jdiloco.store import open_store

    raise typer.Exit(run_doctor(open_store(store), megabytes=megabytes, show=typer.echo))


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    typer.echo(f"jdiloco: {message}", err=True)


def main() -> None:
    """Runs the command line. What the library refuses is a sentence, not a traceback."""
    warnings.showwarning = _show_warning
    try:
        app()
    except JDilocoError as error:
        typer.echo(f"jdiloco: {error}", err=True)
        sys.exit(2)
