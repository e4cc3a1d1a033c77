"""The demo's figures: taken from journals, they add up, and they decide the claim."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from jdiloco.cli import demo_plot, demo_report
from jdiloco.cli.demo_plan import LONE, WATCH, Folder, Plan
from jdiloco.events import Committed, Dropped, Left, Published

PLAN = Plan(steps=80, nodes=2)


def report_line(step, loss, samples):
    return {"step": step, "loss": loss, "samples": samples, "time": step / 10}


def published(node, round):
    return Published(
        node=node, round=round, fragment=round % 4, version=0, steps=10, samples=40, final=False
    ).fields()


def committed(node, round, participants, rejected=()):
    return Committed(
        node=node,
        round=round,
        fragment=round % 4,
        version=1,
        participants=participants,
        rejected=rejected,
        expected=2,
        void=not participants,
        closer="node-1",
        cosine=1.0,
    ).fields()


@pytest.fixture
def journals():
    """node-1 lives to the end; node-2 is killed after two rounds."""
    left = Left(
        node="node-1",
        because="end",
        steps=80,
        processed=320.0,
        merged=290.0,
        dropped=10.0,
        pending=20.0,
    )
    dropped = Dropped(
        node="node-1", round=1, fragment=1, reason="overwritten", steps=10, samples=40
    )
    one = [
        report_line(40, 3.0, 160),
        committed("node-1", 0, ("node-1", "node-2")),
        committed("node-1", 1, ("node-1", "node-2"), ("node-3:stale",)),
        committed("node-1", 2, ("node-1",), ("node-3:stale", "node-4:nonfinite")),
        committed("node-1", 3, ()),
        dropped.fields(),
        report_line(80, 2.0, 320),
        left.fields(),
    ]
    two = [
        published("node-2", 0),
        committed("node-2", 0, ("node-1", "node-2")),
        published("node-2", 1),
        report_line(40, 3.1, 160),
    ]
    return {
        "node-1": one,
        "node-2": two,
        LONE: [report_line(80, 2.2, 320), {"held_out": 2.3, "final": True, "time": 9}],
        WATCH: [{"held_out": 2.9, "time": 4}, {"held_out": 2.1, "final": True, "time": 9}],
    }


@pytest.fixture
def report(journals):
    return demo_report.collect(PLAN, journals, {"node-1": "finished", "node-2": "killed"}, 12.0)


def test_every_round_counts_once_whoever_read_it(report):
    assert [found.round for found in report.rounds] == [0, 1, 2, 3]
    assert report.mean_participants == pytest.approx(5 / 3)  # The void round is not counted.
    assert report.rejected_by_reason == {"nonfinite": 1, "stale": 2}


def test_the_figures_of_every_node_add_up(report):
    for node in report.nodes:
        assert node.processed == node.merged + sum(node.dropped.values()) + node.pending
    assert [node.processed for node in report.nodes] == [320, 160]


def test_a_killed_node_has_its_last_known_figures(report):
    one, two = report.nodes
    assert not one.last_known
    assert two.last_known
    assert (two.rounds, two.merged, two.pending) == (2, 2 * 40 / 4, 140)


def test_a_better_committed_model_makes_the_claim_hold(report):
    assert report.holds
    assert "beats the node that trained alone by 0.200" in demo_report.verdict(report).plain
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
    assert "overwritten 10" in text


def test_the_report_is_written_as_json_and_text(report, tmp_path):
    folder = Folder(tmp_path)
    demo_report.write(report, folder)
    body = json.loads(folder.report.read_text())
    assert body["holds"] is True
    assert body["processed"] == {"node-1": 320, "node-2": 160}
    assert "node-2" in folder.report.with_suffix(".txt").read_text()


def test_the_curves_are_drawn(journals, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.png"
    demo_plot.draw(path, journals, {LONE: 0.0, WATCH: 3.0})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_smoothing_keeps_a_constant():
    assert demo_plot.smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
