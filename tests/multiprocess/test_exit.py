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

from jdiloco.store import FolderStore
from tests.session.nodes import ROOT, run_script

pytestmark = pytest.mark.multiprocess

PROGRAM = """
    import sys, time
    import jax, jax.numpy as jnp
    from jdiloco.runtime import entry
    from tests.session.nodes import algorithm, session

    entry.LEAVE_SECONDS = 0.0  # The block waits for nobody.
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


ENDS = """
    import sys, threading, time
    from tests.session.nodes import algorithm, node_of, session, vector

    settings = algorithm(sync_every=2, beat_seconds=1.0, lease_seconds=60.0)
    began = time.monotonic()
    with session(vector(1.0), settings, sys.argv[1], "same") as s:
        joined = time.monotonic() - began
        tree = s.params
        for _ in range(6):
            tree = s.step({"w": tree["w"] * 0.9}, samples=1)
    assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
    print(node_of(s).place.life.incarnation, joined)
"""


def test_after_a_run_nothing_is_left_and_the_next_starts_at_once(tmp_path):
    """B120: no thread, no file that is no object, and no lease of a minute to wait for."""
    lives, waited = zip(*(run_script(ENDS, str(tmp_path)).split() for _ in range(2)), strict=True)
    assert lives == ("1", "2")
    assert float(waited[1]) < 20.0
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {entry.key for entry in FolderStore(tmp_path).list("")}
