"""The demo: four nodes train one model through a folder, one is killed, a fifth joins.

What the parent does; it trains nothing and imports no JAX. It starts the processes, reads their
journals, kills one node once every node has come two fifths of the way, starts another in its
place, and at the end asks for the held-out losses. The nodes know nothing of it.

The lone node starts first. Once it trains, everything it compiled is in the cache for the others.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from jdiloco.cli import demo_data, demo_plot, demo_report
from jdiloco.cli.demo_journal import Follower, Line
from jdiloco.cli.demo_plan import LONE, WATCH, Folder, Plan
from jdiloco.cli.demo_process import Child, stop
from jdiloco.cli.demo_view import View, states
from jdiloco.runtime.clock import Clock

POLL_SECONDS = 0.25
WATCH_SECONDS_MAX = 120.0
"""The last measurement takes a few seconds; after this long it is taken for hung."""


class Demo:
    """The processes of a demo and what they have said so far."""

    def __init__(self, plan: Plan, folder: Folder, view: View):
        self.plan = plan
        self.folder = folder
        self.view = view
        self.children: dict[str, Child] = {}
        self.journals: dict[str, list[Line]] = {}
        self.offsets: dict[str, float] = {}
        self._followers: dict[str, Follower] = {}
        self._clock = Clock()
        self._started = self._clock.now()
        self._reported: set[str] = set()

    @property
    def seconds(self) -> float:
        return self._clock.now() - self._started

    @property
    def endings(self) -> dict[str, str]:
        return {name: child.ending() for name, child in self.children.items()}

    @property
    def crashed(self) -> list[str]:
        """The processes that ended on an error of their own."""
        return [name for name, child in self.children.items() if child.crashed]

    def run(self) -> demo_report.Report:
        """Runs to the end and returns the figures. Whatever happens, no process is left."""
        try:
            with self.view.open():
                self._start(LONE, LONE, "0")
                while self._training():
                    self._tick()
                self._measure()
                self._tick()
        finally:
            stop(self.children.values())
        rounds = demo_report.read_rounds(self.folder.mailbox)
        return demo_report.collect(self.plan, rounds, self.journals, self.endings, self.seconds)

    def _start(self, name: str, *arguments: str) -> None:
        self.offsets[name] = self.seconds
        self.children[name] = Child.start(self.folder, name, arguments)
        self.journals.setdefault(name, [])
        self._followers.setdefault(name, Follower(self.folder.journal(name)))

    def _start_nodes(self) -> None:
        for share, name in enumerate(self.plan.names):
            self._start(name, "node", name, str(share))
        self._start(WATCH, WATCH)

    def _training(self) -> bool:
        """Whether there is something to wait for. Without any node, the lone one is of no use."""
        endings = self.endings
        if len(endings) == 1:  # The nodes are still to be started.
            return True
        nodes = [ending for name, ending in endings.items() if name not in (LONE, WATCH)]
        if "running" in nodes:
            return True
        return "finished" in nodes and endings[LONE] == "running"

    def _tick(self) -> None:
        for name, follower in self._followers.items():
            self.journals[name].extend(follower.read())
        self._report_ends()
        if len(self.children) == 1:
            if self.journals[LONE] or not self.children[LONE].running:
                self._start_nodes()
        elif self.plan.kill and self.plan.joiner not in self.children:
            self._kill_and_join()
        found = states(self.plan, self.journals, self.endings)
        self.view.show(found, self.journals, self.seconds)
        self._clock.sleep(POLL_SECONDS)

    def _report_ends(self) -> None:
        """Says once of every process that was not meant to end how it ended."""
        for name, child in self.children.items():
            if child.running or child.killed or name in self._reported:
                continue
            self._reported.add(name)
            if child.ending() != "finished":
                self.view.say(f"{name} {child.ending()}. The end of {child.log}:", "bold red")
                self.view.say(child.tail(), "red")

    def _kill_and_join(self) -> None:
        """Once every node has come far enough: SIGKILL for one, and another joins."""
        running = [name for name in self.plan.names if self.children[name].running]
        steps = {node.name: node.step for node in states(self.plan, self.journals, self.endings)}
        if len(running) < 2 or min(steps[name] for name in running) < self.plan.kill_step:
            return
        closer = newest_closer(self.journals)
        victim = closer if closer in running else running[-1]
        self.children[victim].kill()
        closing = ", which closes the rounds" if victim == closer else ""
        self.view.say(f"killed {victim}{closing}, with SIGKILL at step {steps[victim]}")
        share, joiner = self.plan.names.index(victim), self.plan.joiner
        self._start(joiner, "node", joiner, str(share))
        self.view.say(f"{joiner} joins and takes over the text of {victim}")

    def _measure(self) -> None:
        """Has the committed model measured a last time."""
        if not self.children[WATCH].running:  # Somebody killed it; that must not matter.
            self._start(WATCH, WATCH)
        watch = self.children[WATCH]
        watch.close_input()
        waited_since = self.seconds
        while watch.running and self.seconds - waited_since < WATCH_SECONDS_MAX:
            self._tick()


def newest_closer(journals: dict[str, list[Line]]) -> str | None:
    """The node that closed the newest round that anybody has read."""
    committed = [
        line for lines in journals.values() for line in lines if line.get("event") == "Committed"
    ]
    newest = max(committed, key=lambda line: line["round"], default=None)
    return newest["closer"] if newest else None


def run_demo(plan: Plan, folder: Folder, *, data: Path | None, replace: bool) -> int:
    """The command. Returns the exit code: 0 if the committed model beat the lone node."""
    demo_plot.require_matplotlib()
    folder.refuse_foreign()
    text = demo_data.read_text(data)
    folder.prepare(plan, replace=replace)
    write_data(text, plan, folder)
    console = Console()
    console.print(
        f"{plan.nodes} nodes, and `lone` which trains alone to compare with; "
        f"{len(text) / 1e6:.1f} MB of text; mailbox {folder.mailbox}"
    )
    demo = Demo(plan, folder, View(plan, console))
    try:
        with stopped_like_ctrl_c():
            report = demo.run()
    except KeyboardInterrupt:
        console.print("stopped; no process is left")
        return 128 + signal.SIGINT
    demo_report.write(report, folder)
    demo_plot.draw(folder.report.with_suffix(".png"), demo.journals, demo.offsets)
    console.print(demo_report.render(report))
    console.print(f"Written: {folder.report} and, beside it, report.txt and report.png.")
    for name in demo.crashed:
        console.print(f"{name} {demo.endings[name]}: see {folder.log(name)}", style="bold red")
    return 0 if report.holds and not demo.crashed else 1


def write_data(text: demo_data.Text, plan: Plan, folder: Folder) -> None:
    """Writes the held-out part and the shares, so that no process reads more than its own."""
    held_out, shares = demo_data.split(text, plan.nodes)
    held_out.tofile(folder.held_out)
    for number, share in enumerate(shares):
        share.tofile(folder.share(number))


@contextlib.contextmanager
def stopped_like_ctrl_c() -> Iterator[None]:
    """SIGTERM, and the closing of the terminal, end the demo as tidily as Ctrl-C does."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), _interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _interrupt(number: int, frame: object) -> None:
    del number, frame  # Part of the signature of a signal handler.
    raise KeyboardInterrupt
