"""Stacks and parameters that lie on many devices."""

import os
import subprocess
import sys

import pytest


def on_eight_devices(program: str) -> str:
    """Runs a module where eight devices are pretended, and returns what it prints."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-m", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.multiprocess
def test_sharded_stacks_merge_as_on_one_device_and_state_lies_like_its_parameter():
    """On automatic and explicit axes, eager and jitted, whichever axis is sharded.

    B95: momentum and master take an eighth of their bytes on each of eight devices. B100: merge,
    outer step, blending and carrying give what they give on one.
    """
    assert "agreed" in on_eight_devices("tests.algo.sharded_program")
