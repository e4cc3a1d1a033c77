"""What a demo will do, and the folder it does it in.

Everything is counted in steps, nothing in seconds, so a slow machine runs the same demo for longer.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from jdiloco.errors import UsageError
from jdiloco.store import FolderStore

KIND = "jdiloco demo"
"""Marks `demo.json`, and with it the folder, as one that a demo made and a demo may replace."""

LONE = "lone"
"""The name of the node that trains alone and never sees the mailbox."""

WATCH = "watch"
"""The name of the process that measures the held-out loss of the committed model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of a demo. Every process of it reads the same."""

    steps: int = 1200
    """Training steps of a node, and of the lone one. 1200 take two to three minutes on 2 cores."""

    nodes: int = 4
    """Nodes at the start. One more joins after one has been killed."""

    seed: int = 0
    """Draws the first parameters and the batches."""

    kill: bool = True
    """Whether a node is killed and another joins."""

    rows: int = 4
    """Windows of text in a batch. Few, so that one node's gradients are noisy: what four nodes
    gain over one shows within minutes."""

    context: int = 64
    """Bytes the model sees. Short, so that a step takes about 25 ms of one core."""

    learning_rate: float = 1e-3
    """Peak of the inner optimiser, AdamW. Good for the run, and all but best for the lone node: it
    gains 0.03 nats from twice as much, where the committed model loses 0.06."""

    sync_every: int = 80
    """Steps between two synchronisations of a fragment."""

    fragments: int = 4
    """Fragments of the model; a round every `sync_every / fragments` steps."""

    report_every: int = 10
    """Steps between two lines of a node in its journal."""

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise UsageError(f"`nodes` must be at least 2, got {self.nodes}: one alone is `lone`.")
        if self.steps < 2 * self.sync_every:
            raise UsageError(
                f"`steps` must be at least {2 * self.sync_every}, got {self.steps}: every fragment "
                f"is synchronised once in {self.sync_every} steps."
            )

    @property
    def kill_step(self) -> int:
        """A node is killed once every node has trained this many steps."""
        return self.steps * 2 // 5

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes that are there at the start."""
        return tuple(f"node-{i + 1}" for i in range(self.nodes))

    @property
    def joiner(self) -> str:
        """The node that joins later."""
        return f"node-{self.nodes + 1}"


@dataclasses.dataclass(frozen=True)
class Folder:
    """Where everything that a demo writes lies."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "demo.json"

    @property
    def mailbox(self) -> Path:
        return self.path / "mailbox"

    @property
    def cache(self) -> Path:
        """Compiled programs. They stay, so that the next demo starts faster."""
        return self.path / "cache"

    @property
    def held_out(self) -> Path:
        return self.path / "data" / "held-out.bin"

    @property
    def report(self) -> Path:
        """The figures; the same as text, and the plot, have other suffixes."""
        return self.path / "report.json"

    def share(self, number: int) -> Path:
        """The text of one node."""
        return self.path / "data" / f"share-{number}.bin"

    def journal(self, name: str) -> Path:
        """What a process says of itself, one JSON object a line."""
        return self.path / "nodes" / f"{name}.jsonl"

    def log(self, name: str) -> Path:
        """What a process prints."""
        return self.path / "nodes" / f"{name}.log"

    def read_plan(self) -> Plan:
        body = json.loads(self.plan.read_text())
        del body["kind"]
        return Plan(**body)

    def prepare(self, plan: Plan, *, replace: bool = True) -> None:
        """Makes the folder, empty but for the plan. What an earlier demo left there goes first."""
        self.refuse_foreign()
        if self.plan.exists() and not replace:
            raise UsageError(
                f"{self.path} holds the result of an earlier demo, and `--keep` keeps it. "
                f"Name another folder with `--out`."
            )
        FolderStore(self.path).prepare()
        self._clear()
        for folder in (self.mailbox, self.path / "data", self.path / "nodes"):
            folder.mkdir(parents=True)
        body = {"kind": KIND, **dataclasses.asdict(plan)}
        self.plan.write_text(json.dumps(body, indent=2) + "\n")

    def refuse_foreign(self) -> None:
        """Raises when the path is there and no demo made it, and for what was meant as a URL."""
        scheme = self.path.parts[:1]
        if len(self.path.parts) > 1 and scheme[0].endswith(":"):
            raise UsageError(
                f"`--out` was given `{self.path}`, which begins like a URL. The results go into a "
                f"folder of this machine: give its path, as in `--out runs/demo`."
            )
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if _kind(self.plan) != KIND:
            raise UsageError(
                f"{self.path} exists and is not the folder of an earlier demo, so it will not be "
                f"replaced. Name another with `--out`."
            )

    def _clear(self) -> None:
        """Removes what a demo writes, and nothing that somebody else put beside it."""
        for folder in (self.mailbox, self.path / "data", self.path / "nodes"):
            shutil.rmtree(folder, ignore_errors=True)
        for suffix in (".json", ".txt", ".png"):
            self.report.with_suffix(suffix).unlink(missing_ok=True)


def _kind(plan: Path) -> str | None:
    try:
        body = json.loads(plan.read_text())
    except (OSError, ValueError):
        return None
    return body.get("kind") if isinstance(body, dict) else None
