"""The demo's figures: taken from journals, they add up, and they decide the claim."""

import dataclasses
import io
import json
import re
import sys

import pytest
from rich.console import Console

from jdiloco.cli import demo_plot, demo_report
from jdiloco.cli.demo_plan import LONE, WATCH, Folder, Plan
from jdiloco.cli.demo_report import RoundFigures, Share
from jdiloco.errors import UsageError
from jdiloco.events import Dropped, Left
from jdiloco.protocol.records import Ledger, Participant
from jdiloco.types import Counters

PLAN = Plan(steps=200, nodes=2)


def report_line(step, loss, samples):
    return {"step": step, "loss": loss, "samples": samples, "time": step / 10}


def share(node, merged, pending=0, **dropped):
    return Share(node=node, merged=merged, dropped=dropped, pending=pending)


def round_figures(number, *shares, rejected=()):
    return RoundFigures(
        round=number, fragment=number % 4, shares=shares, rejected=rejected, expected=2
    )


ROUNDS = (
    round_figures(0, share("node-1", 40), share("node-2", 40, overwritten=12)),
    round_figures(1, share("node-1", 40), share("node-2", 48, 8), rejected=(("node-3", "stale"),)),
    round_figures(2, share("node-1", 80), rejected=(("node-3", "stale"), ("node-4", "nonfinite"))),
    round_figures(3),
    round_figures(4, share("node-1", 80), share("node-2", 80, 4, overwritten=12, late=4)),
)
"""node-2 is killed after three rounds, two of them of fragment 0."""


@pytest.fixture
def journals():
    """node-1 lives to the end."""
    left = Left(
        node="node-1",
        because="finished",
        steps=80,
        processed=320.0,
        merged=290.0,
        dropped=10.0,
        pending=20.0,
    )
    dropped = Dropped(
        node="node-1", round=1, fragment=1, reason="overwritten", steps=10, samples=40
    )
    return {
        "node-1": [
            report_line(40, 3.0, 160),
            dropped.fields(),
            report_line(80, 2.0, 320),
            left.fields(),
        ],
        "node-2": [report_line(40, 3.1, 160)],
        LONE: [report_line(80, 2.2, 320), {"held_out": 2.3, "final": True, "time": 9}],
        WATCH: [{"held_out": 2.9, "time": 4}, {"held_out": 2.1, "final": True, "time": 9}],
    }


@pytest.fixture
def report(journals):
    endings = {"node-1": "finished", "node-2": "killed"}
    return demo_report.collect(PLAN, ROUNDS, journals, endings, 12.0)


def test_rejections_and_participants_are_counted_over_the_rounds(report):
    assert report.mean_participants == pytest.approx(7 / 4)  # The void round is not counted.
    assert report.rejected_by_reason == {"nonfinite": 1, "stale": 2}
    assert [node.rounds for node in report.nodes] == [4, 3]


def test_the_figures_of_every_node_add_up(report):
    for node in report.nodes:
        assert node.processed == node.merged + sum(node.dropped.values()) + node.pending
    assert report.nodes[0].processed == 320  # What it said itself when it left.


def test_a_killed_node_has_what_its_last_contributions_said(report):
    """The newest of each fragment counts: 80 and 48 merged, over four fragments."""
    one, two = report.nodes
    assert not one.last_known
    assert two.last_known
    assert (two.merged, two.pending) == ((80 + 48) / 4, (4 + 8) / 4)
    assert two.dropped == {"late": 1.0, "overwritten": 3.0}


def test_a_contribution_is_merged_by_its_record():
    """The ledger that it carries is from before."""
    participant = Participant(
        node="node-1",
        incarnation=1,
        counters=Counters(steps=10, samples=40),
        ledger=Ledger(merged=100, dropped={"late": 8}, pending=60),
        position=10,
        weight=1.0,
        sha256="",
    )
    found = demo_report._share(participant)
    assert (found.merged, found.dropped, found.pending) == (140, {"late": 8}, 20)


def test_a_mailbox_without_a_run_has_no_rounds(tmp_path):
    assert demo_report.read_rounds(tmp_path) == ()


def test_a_better_committed_model_makes_the_claim_hold(report):
    assert report.holds
    assert (
        "beats the node that trained alone, for 80 steps, by 0.200"
        in demo_report.verdict(report).plain
    )
    worse = dataclasses.replace(report, committed_loss=2.4)
    assert not worse.holds
    assert "does not beat" in demo_report.verdict(worse).plain


def test_a_missing_loss_is_no_success(report):
    missing = dataclasses.replace(report, lone_loss=None)
    assert not missing.holds
    assert "not checked" in demo_report.verdict(missing).plain


def test_the_table_fits_a_terminal_of_80_columns(report):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo_report.render(report))
    text = console.export_text()
    assert "killed*" in text
    assert "last known" in text
    assert "nonfinite 1, stale 2" in text
    assert "late 1, overwritten 13" in text


def test_a_node_that_came_later_is_said_to_have_begun_where_the_run_was(journals):
    """Its journal counts the steps of the plan, up to 80; it trained 30 of them."""
    journals["node-3"] = [report_line(60, 2.4, 40), report_line(80, 2.3, 120)]
    report = demo_report.collect(PLAN, ROUNDS, journals, {}, 12.0)
    assert [(node.steps, node.first_step) for node in report.nodes] == [(80, 0), (40, 0), (30, 50)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo_report.render(report))
    assert "\nnode-3 began at step 50, where the run was.\n" in re.sub(
        " +\n", "\n", console.export_text()
    )


def test_nobody_is_said_to_have_come_later_when_all_began_at_the_start(report):
    assert "began" not in str(demo_report.node_table(report).caption)


def test_the_report_is_written_as_json_and_text(report, tmp_path):
    folder = Folder(tmp_path)
    demo_report.write(report, folder)
    body = json.loads(folder.report.read_text())
    assert body["holds"] is True
    assert body["processed"] == {"node-1": 320.0, "node-2": 39.0}
    assert "node-2" in folder.report.with_suffix(".txt").read_text()


def test_the_curves_are_drawn(journals, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.png"
    demo_plot.draw(path, journals, {LONE: 0.0, WATCH: 3.0})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_smoothing_keeps_a_constant():
    assert demo_plot.smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])


def test_a_missing_matplotlib_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'jdiloco\[demo\]'"):
        demo_plot.require_matplotlib()
