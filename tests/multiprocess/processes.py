"""Real processes, each a node of one run in a folder, watched from outside."""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from jdiloco.cli.demo_process import environment
from jdiloco.protocol.keys import MANIFEST, Keys
from jdiloco.protocol.records import Manifest, RoundRecord, unseal
from jdiloco.store import FolderStore
from tests.multiprocess.node import ID_IN_USE, SETTINGS, SUPERSEDED
from tests.session.nodes import ROOT

LOOK_SECONDS = 0.05
PATIENCE = 240.0
"""For whatever has to happen in the end, on a machine with a lot else to do."""


@functools.cache
def compiled() -> Path:
    """A folder for what is compiled, for as long as these tests run.

    A node that finds its programs there starts with 2 seconds of CPU time instead of 4.
    """
    folder = tempfile.TemporaryDirectory(prefix="jdiloco-compiled-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


class Log:
    """The round records of a run, read as they come."""

    def __init__(self, folder: Path) -> None:
        self.store = FolderStore(folder)
        self.records: list[RoundRecord] = []
        self._keys: Keys | None = None

    def read(self) -> list[RoundRecord]:
        """All that are there by now."""
        if self._keys is None and (data := self.store.get(MANIFEST)) is not None:
            self._keys = Keys(unseal(MANIFEST, data, Manifest).run)
        while self._keys is not None:
            key = self._keys.record(len(self.records))
            data = self.store.get(key)
            if data is None:
                break
            self.records.append(unseal(key, data, RoundRecord))
        return self.records


@dataclasses.dataclass(eq=False)
class Process:
    """One process of a node, and what befell it."""

    name: str
    process: subprocess.Popen
    output: Path
    journal: Path
    stopped: bool = False
    fate: str = ""  # What will explain how it ends: killed, told to leave, a twin.
    _joined: bool = False

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def joined(self) -> bool:
        """Whether it has once said so."""
        if not self._joined and self.journal.exists():
            self._joined = '"Joined"' in self.journal.read_text()
        return self._joined

    @property
    def awake(self) -> bool:
        """Whether it takes part, as far as anybody can tell from here, and is to go on doing so."""
        return self.running and self.joined and not self.stopped and not self.fate

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.stopped = number is signal.SIGSTOP


class Nodes:
    """The processes of one run. Whatever happens, none outlives the block."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.log = Log(folder / "mailbox")
        self.processes: list[Process] = []
        self._later: list[tuple[float, Callable[[], object]]] = []
        for name in ("journal", "ended", "output"):
            (folder / name).mkdir(parents=True)
        (folder / SETTINGS).write_text(json.dumps(settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.process.kill()
            process.process.wait()

    # Processes

    def start(self, name: str, *options: str, fate: str = "") -> Process:
        """Starts a node; `fate` is what will explain how it ends."""
        number = len(self.processes)
        output = self.folder / "output" / f"{name}.{number}"
        arguments = [str(self.folder), name, str(number), *options]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.multiprocess.node", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(compiled()),
            )
        journal = self.folder / "journal" / f"{name}.{process.pid}"
        started = Process(name, process, output, journal, fate=fate)
        self.processes.append(started)
        return started

    def start_all(self, nodes: int) -> None:
        """Starts the first nodes, and waits until all have joined. One compiles for the others."""
        first = self.start("n0")
        self.wait(lambda: first.joined, "the first node to create the run")
        for number in range(1, nodes):
            self.start(f"n{number}")
        self.wait(lambda: len(self.awake) == nodes, "all nodes to join")

    @property
    def running(self) -> list[Process]:
        return [process for process in self.processes if process.running]

    @property
    def awake(self) -> list[Process]:
        return [process for process in self.processes if process.awake]

    def named(self, name: str) -> Process:
        """The newest process of a name."""
        return next(p for p in reversed(self.processes) if p.name == name)

    # Time

    def wait(self, true: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Looks after everything until `true()`."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.outputs()}"
            self.look()
            time.sleep(LOOK_SECONDS)

    def wait_for_round(self, round: int) -> RoundRecord:
        """The record of a round, once it is there."""
        self.wait(lambda: len(self.log.read()) > round, f"round {round}")
        return self.log.records[round]

    def look(self) -> None:
        """Does what is due, and refuses to go on when a process has ended for no good reason."""
        now = time.monotonic()
        due = [act for at, act in self._later if at <= now]
        self._later = [(at, act) for at, act in self._later if at > now]
        for act in due:
            act()
        for process in self.processes:
            if not process.running:
                assert self._may_end_so(process), f"{process}\n{process.output.read_text()}"

    def _may_end_so(self, process: Process) -> bool:
        """Of processes with one id at a time one may take up a life, whichever is first: a twin may
        also get ahead of the restart of a node that was killed soon after it woke up.
        """
        namesakes = [other for other in self.processes if other.name == process.name]
        match process.process.returncode:
            case 0:
                return process.fate == "told to leave" or (self.folder / "stop").exists()
            case -9:
                return process.fate == "killed"
            case code if code == SUPERSEDED:
                return len(namesakes) > 1
            case code:
                return code == ID_IN_USE and any(other.fate == "twin" for other in namesakes)

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    # The end

    def stop(self) -> None:
        """Nothing more happens: all that sleep wake up, all that are starting join, all end."""
        self._later.clear()
        for process in self.running:
            if process.stopped:
                process.send(signal.SIGCONT)
        self.wait(self._all_settled, "what was starting to join")
        (self.folder / "stop").touch()
        self.wait(lambda: not self.running, "all nodes to end")
        self.look()

    def _all_settled(self) -> bool:
        """Whoever runs has joined; of those with one id the older have ended."""
        names = collections.Counter(process.name for process in self.running)
        joined = all(process.joined for process in self.running)
        return joined and max(names.values(), default=0) <= 1

    def ended(self) -> dict[str, str]:
        """What every node ended with that left with the run."""
        found = [json.loads(path.read_text()) for path in (self.folder / "ended").iterdir()]
        return {values["name"]: values["digest"] for values in found}

    def told(self, kind: str = "") -> Iterator[dict]:
        """Every event of every process; the last line of one that was killed may be cut short."""
        for path in sorted((self.folder / "journal").iterdir()):
            for line in path.read_text().splitlines():
                if line.endswith("}") and (not kind or f'"{kind}"' in line):
                    yield json.loads(line)

    def outputs(self) -> str:
        """The ends of what the processes that run have printed."""
        return "\n".join(f"{p}: {p.output.read_text()[-2000:]}" for p in self.running)
