"""The processes of a demo: started from nothing, never forked, and ended one by one by their id."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jdiloco.cli.demo_plan import Folder

STOP_SECONDS = 5.0
"""A process that was asked to stop gets this long. A node says goodbye to its mailbox in two."""

TAIL_LINES = 20
"""How much of the log of a process that crashed is shown."""


def environment(cache: Path) -> dict[str, str]:
    """The environment of a process that shares two cores with five others.

    JAX would start as many threads in each as the machine has cores; with one thread each, five
    processes need a twentieth less CPU time a step. What one has compiled the others read from the
    cache: 2 seconds of CPU time until the first step instead of 7.
    """
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }


@dataclasses.dataclass
class Child:
    """One process, and what the demo did to it."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    killed: bool = False  # By the demo itself.

    @classmethod
    def start(cls, folder: Folder, name: str, arguments: Sequence[str]) -> Child:
        """Starts `demo_node` in a session of its own, so that Ctrl-C reaches the parent alone.

        The parent holds the other end of its standard input. Should the parent die, however that
        happens, the child reads the end of it and stops.
        """
        path = str(folder.path.absolute())  # `a:b` alone could be a URL that lacks its slashes.
        command = [sys.executable, "-m", "jdiloco.cli.demo_node", path, *arguments]
        with folder.log(name).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(folder.cache.absolute()),
                start_new_session=True,
            )
        return cls(name, process, folder.log(name))

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def crashed(self) -> bool:
        """Whether it ended on an error of its own, not because somebody killed it."""
        code = self.process.poll()
        return code is not None and code > 0

    def kill(self) -> None:
        """Ends it at once, with SIGKILL: it can neither notice nor say goodbye."""
        self.killed = True
        self.process.kill()
        self.process.wait()
        self.close_input()

    def close_input(self) -> None:
        """Tells it that nothing more will come; `watch` then measures a last time and ends."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.process.poll()
        if code is None:
            return "running"
        if self.killed:
            return "killed"
        if code < 0:
            return f"killed by signal {-code}"
        return f"crashed (exit code {code})" if code else "finished"

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of what it printed."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def stop(children: Iterable[Child], seconds: float = STOP_SECONDS) -> None:
    """Asks every process that still runs to stop, and kills those that do not. A second Ctrl-C
    kills them at once."""
    children = list(children)
    running = [child for child in children if child.running]
    try:
        for child in running:
            child.process.terminate()
        for child in running:
            child.process.wait(seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        for child in running:
            if child.running:
                child.process.kill()
            child.process.wait()
        for child in children:
            child.close_input()
