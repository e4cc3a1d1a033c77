"""What the README and the examples say is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


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


def test_the_readmes_program_is_the_first_example():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
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


def test_documents_name_files_that_exist():
    """Every path in backticks that looks like one of ours is there."""
    for document in ("README.md", "BUILD.md"):
        named = re.findall(
            r"`((?:jdiloco|tests|examples|\.ci)/[\w./-]+)`", (ROOT / document).read_text()
        )
        missing = [name for name in named if not (ROOT / name).exists()]
        assert not missing, f"{document} names {missing}"
