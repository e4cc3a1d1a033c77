"""What the README, the pages in `docs/` and the examples say is what happens."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from tests.session.nodes import wait_until

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = sorted((ROOT / "docs").glob("*.md"))


def run(*arguments: str | Path, cwd: Path, devices: int = 1) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def blocks_of(page: str) -> list[str]:
    """The Python programs on a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def program(folder: Path, *blocks: str) -> Path:
    """Blocks of a page, one after the other, as a file that can be run."""
    path = folder / "program.py"
    path.write_text("\n".join(blocks))
    return path


def test_the_readmes_program_is_the_first_example():
    blocks = blocks_of("README.md")
    source = (ROOT / "examples" / "first_run.py").read_text()
    program = source.split('"""\n\n', maxsplit=1)[1]
    assert blocks[0] == program


def test_every_example_says_what_it_shows():
    for path in EXAMPLES:
        assert path.read_text().startswith('"""'), path


@pytest.mark.multiprocess
def test_two_terminals_train_one_model(tmp_path):
    """The README's program, started twice on one folder."""
    nodes = [run(ROOT / "examples" / "first_run.py", cwd=tmp_path) for _ in range(2)]
    losses = [re.findall(r"newest values: ([0-9.]+)", finish(node)) for node in nodes]
    assert all(float(loss[0]) < 1.0 for loss in losses), losses


@pytest.mark.multiprocess
def test_synthetic_prints_what_it_must(tmp_path):
    """Committed values agree with the averages printed beside them, or the program fails."""
    assert "agree" in finish(run(ROOT / "examples" / "synthetic.py", cwd=tmp_path))


@pytest.mark.multiprocess
def test_the_flax_learner_runs_on_two_machines(tmp_path):
    def node(rank: int) -> subprocess.Popen[str]:
        script = ROOT / "examples" / "flax_learner.py"
        options = ("--mailbox", "shared", "--rank", str(rank), "--ranks", "2", "--steps", "200")
        return run(script, *options, cwd=tmp_path)

    for out in [finish(process) for process in [node(0), node(1)]]:
        assert "loss" in out


@pytest.mark.long
@pytest.mark.multiprocess
def test_two_terminals_divide_the_files(tmp_path):
    nodes = [run(ROOT / "examples" / "shared_queue.py", cwd=tmp_path) for _ in range(2)]
    shown = [re.findall(r"on files ([0-9 ]*); loss .*: ([0-9.]+)", finish(n))[0] for n in nodes]
    assert sorted(int(file) for files, _ in shown for file in files.split()) == list(range(12))
    assert all(float(loss) < 0.1 for _, loss in shown), shown


@pytest.mark.multiprocess
@pytest.mark.parametrize("devices", [1, 8])
def test_four_learners_train_in_one_program_on_one_device_and_on_eight(tmp_path, devices):
    out = finish(run(ROOT / "examples" / "spmd_learners.py", cwd=tmp_path, devices=devices))
    shown, loss = re.findall(r"(\d+) devices, loss ([0-9.]+)", out)[0]
    assert int(shown) == devices
    assert float(loss) < 0.1


@pytest.mark.multiprocess
@pytest.mark.parametrize("machines", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_train_state_with_batch_statistics_is_trained(tmp_path, machines):
    script = ROOT / "examples" / "linen_train_state.py"
    nodes = [run(script, cwd=tmp_path) for _ in range(machines)]
    for out in [finish(node) for node in nodes]:
        (wrong,) = re.findall(r"wrong side of the spiral: ([0-9.]+) %", out)
        assert float(wrong) < 5.0


@pytest.mark.multiprocess
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 8])
def test_three_ways_to_use_the_devices_of_a_node_come_to_one_loss(tmp_path, devices):
    """Parameters stay where each step keeps them: cut over the devices, or whole on each."""
    out = finish(run(ROOT / "examples" / "node_of_devices.py", cwd=tmp_path, devices=devices))
    found = re.findall(r"(\w+) +loss ([0-9.]+)   of w, each device holds \((\d+), 64\)", out)
    assert [(name, int(rows)) for name, _, rows in found] == [
        ("fsdp", 64 // devices),
        ("shard_map", 64),
        ("pmap", 64),
    ]
    losses = [float(loss) for _, loss, _ in found]
    assert max(losses) - min(losses) <= 2e-4
    assert max(losses) < 0.2


@pytest.mark.multiprocess
@pytest.mark.parametrize("devices", [1, 2])
def test_a_pod_of_two_processes_trains_beside_a_single_machine(tmp_path, devices):
    """The launch that needs no scheduler; the same program alone is a node of one process."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{found.getsockname()[1]}"

    def start(rank: int, *options: str, devices: int) -> subprocess.Popen[str]:
        shared = ("--mailbox", "shared", "--rank", str(rank))
        return run(ROOT / "examples" / "pod.py", *shared, *options, cwd=tmp_path, devices=devices)

    processes = [
        start(0, "--coordinator", where, "--processes", "2", "--process", str(i), devices=devices)
        for i in range(2)
    ]
    processes.append(start(1, "--processes", "1", devices=1))
    shown = "".join(finish(process) for process in processes)
    found = re.findall(
        r"pod (\d), (\d) processes, (\d) devices: loss ([0-9.]+).*\((\d+), 16\)", shown
    )
    assert sorted(line[:3] + line[4:] for line in found) == [
        ("0", "2", str(2 * devices), str(64 // devices)),
        ("1", "1", "1", "128"),
    ]
    assert all(float(loss) < 3.0 for *_, loss, _ in found), found  # Of 160 at the start.


@pytest.mark.multiprocess
@pytest.mark.parametrize("devices", [1, 8])
def test_every_device_is_a_learner_in_one_pmap(tmp_path, devices):
    out = finish(run(ROOT / "examples" / "pmap_learners.py", cwd=tmp_path, devices=devices))
    assert float(re.findall(rf"^{devices} learners, loss ([0-9.]+)", out)[0]) < 0.1


@pytest.mark.multiprocess
def test_merged_deltas_may_be_clipped_before_the_outer_step(tmp_path):
    out = finish(run(ROOT / "examples" / "clipped_rounds.py", cwd=tmp_path))
    shown = re.findall(r"merged delta ([0-9.]+)   loss ([0-9.e-]+)", out)
    assert float(shown[0][0]) > 1.0  # So there was something to clip.
    assert float(shown[-1][0]) < 0.1
    assert float(shown[-1][1]) < 0.01


def numbers(out: str) -> list[tuple[str, list[float]]]:
    """What the three ways print: who, and its numbers."""
    lines = [line.split() for line in out.splitlines()]
    return [(name, [float(value) for value in values]) for name, *values in lines]


@pytest.mark.multiprocess
def test_the_three_ways_give_the_same_numbers(tmp_path):
    problem, transformation, spmd, session = blocks_of("docs/which-way.md")
    (tmp_path / "nodes").mkdir()
    node = program(tmp_path / "nodes", problem, session)
    processes = [run(node, str(learner), cwd=tmp_path) for learner in range(2)]
    processes.append(run(program(tmp_path, problem, transformation, spmd), cwd=tmp_path))
    found = [line for process in processes for line in numbers(finish(process))]
    assert [name for name, _ in found] == ["session", "session", "transformation", "spmd"]
    for _, values in found:
        assert values == pytest.approx([0, 1, 2, 3, 1], abs=0.01)  # It has been learnt,
        assert values == pytest.approx(found[-1][1], abs=1e-5)  # and by all to the same values.


def test_the_picture_of_the_three_ways_names_them():
    picture = xml.parse(ROOT / "docs" / "which-way.svg")
    words = {text.strip() for text in picture.getroot().itertext()}
    assert {"diloco_outer", "jdiloco.spmd", "Session"} <= words


@pytest.mark.multiprocess
def test_a_node_that_keeps_replicas_on_a_leading_axis_passes_one_of_them(tmp_path):
    script = program(tmp_path, *blocks_of("docs/several-devices.md"))
    out = finish(run(script, cwd=tmp_path, devices=8))
    assert float(re.findall(r"8 devices, loss ([0-9.]+)", out)[0]) < 0.1


@pytest.mark.multiprocess
def test_a_node_that_is_told_to_stop_goes_on_where_it_was_when_started_again(tmp_path):
    """The program of the page on launching, with a signal as a scheduler sends it."""
    script = program(tmp_path, *blocks_of("docs/launch.md"))

    def start(steps: int) -> subprocess.Popen[str]:
        options = ("--mailbox", "shared", "--rank", "0", "--steps", str(steps))
        return run(script, *options, cwd=tmp_path)

    first = start(10**9)
    try:
        wait_until(lambda: len(list(tmp_path.glob("shared/*/log/0*/*.0"))) >= 3, 120.0)
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 143, err
    assert "goes on at batch 0" in out
    (batch,) = re.findall(r"goes on at batch (\d+)", finish(start(0)))
    assert int(batch) >= 100


def test_documents_name_files_that_exist():
    """Every path in backticks that looks like one of ours is there."""
    for document in (ROOT / "README.md", ROOT / "BUILD.md", *PAGES):
        text = document.read_text()
        named = re.findall(r"`((?:jdiloco|tests|examples|docs|\.ci)/[\w./-]+)`", text)
        missing = [name for name in named if not (ROOT / name).exists()]
        assert not missing, f"{document} names {missing}"


def test_links_between_pages_lead_somewhere_and_every_page_is_reached_from_the_readme():
    reached = set()
    for document in (ROOT / "README.md", *PAGES):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
        targets = {(document.parent / link).resolve() for link in links}
        assert all(target.exists() for target in targets), (document, links)
        if document.name == "README.md":
            reached = targets
    assert set(PAGES) <= reached
