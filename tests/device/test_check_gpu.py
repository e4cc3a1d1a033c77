"""The script for a GPU, where there is none: on the CPU, and in parts that take seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jdiloco.runtime.backends import CPU, host_device
from tests.device import agreement, check_gpu, tables
from tests.device.place import Failed, Place

ROOT = Path(__file__).parents[2]
HERE = ["--platform", "cpu", "--scale", "small"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.device.check_gpu", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_without_a_gpu_it_refuses_and_says_what_to_do(capsys):
    assert check_gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "There is no gpu that JAX" in said.err
    assert "--platform cpu --scale small" in said.err


def test_a_node_with_pinned_anchors_commits_what_the_host_computes(capsys):
    """The script's own session, on the CPU, whose host memory can be pinned as well."""
    assert check_gpu.main([*HERE, "--only", "session"]) == 0
    said = capsys.readouterr().out
    assert "as the host computes them; backend cpu, no compilation in the last" in said
    assert "0 failed" in said


def test_anchors_that_are_not_in_pinned_memory_are_noticed(capsys, monkeypatch):
    monkeypatch.setattr(Place, "backend", CPU)
    assert check_gpu.main([*HERE, "--only", "session"]) == 1
    assert "FAILED: anchors are in {'device'}" in capsys.readouterr().out


def test_a_result_that_is_not_the_tables_is_noticed(capsys, monkeypatch):
    wrong = ([(1, 0), (0, 1)], (4, 1), (0.8, 0.2), (0.970, 0.230))
    monkeypatch.setattr(tables, "SMALL", [wrong])
    assert check_gpu.main([*HERE, "--only", "tables"]) == 1
    assert "FAILED: Rda(direct_pattern='embed') of [(1, 0), (0, 1)]" in capsys.readouterr().out


def test_a_device_that_computes_otherwise_is_noticed(capsys, monkeypatch):
    """As with norms in bf16 or tf32: an error of 1e-3 is a thousand times the limit."""
    plain, host = agreement.Case.run, host_device()

    def rounded(case, device):
        found = plain(case, host)
        return found if device == host else {name: x * 1.001 for name, x in found.items()}

    monkeypatch.setattr(agreement.Case, "run", rounded)
    with pytest.raises(Failed, match=r"000\.\d\d of the limit from the host's CPU"):
        list(agreement.agreement(Place("elsewhere", host, small=True)))


@pytest.mark.long
@pytest.mark.multiprocess
def test_all_of_it_passes_on_the_cpu():
    done = run(*HERE)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("tables", "agreement", "repeated", "session", "close"):
        assert done.stdout.count(f"  {name}") >= 2, done.stdout
