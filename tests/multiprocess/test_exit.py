"""The end of a program while library threads are inside JAX.

A daemon thread that is in there when the interpreter is taken down takes the process with it, most
readily on Python 3.12 and newer: an abort or a segmentation fault after everything has gone well.
Without the wait at the end of `jdiloco.runtime.workers` six of eight such programs ended so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.session.nodes import ROOT

pytestmark = pytest.mark.multiprocess

PROGRAM = """
    import sys, time
    import jax, jax.numpy as jnp
    import jdiloco.session
    from tests.session.nodes import algorithm, session

    jdiloco.session.LEAVE_SECONDS = 0.0  # The block waits for nobody.
    delay = float(sys.argv[1])
    params = {f"w{i}": jnp.full((300 + i, 500), 0.5) for i in range(12)}
    settings = algorithm(sync_every=1, checkpoint_every=1, lease_seconds=60.0)
    with session(params, settings, sys.argv[2]) as s:
        tree = s.params
        for _ in range(3):
            tree = s.step(jax.tree.map(lambda x: x * 0.9, tree), samples=1)
        print("trained", flush=True)
        time.sleep(delay)  # The first round is compiled, examined, merged; a checkpoint is written.
        raise SystemExit(0)
"""

TRIES = 8


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_program_that_ends_while_a_round_is_closed_ends_cleanly(tmp_path):
    """At any moment of the close: its exit code is its own, and nothing is printed."""
    script = textwrap.dedent(PROGRAM)
    for number in range(TRIES):
        arguments = [f"{0.08 * number}", str(tmp_path / str(number))]
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stdout) == (0, "trained\n"), (arguments, done.stderr)
        assert "Fatal" not in done.stderr, done.stderr
