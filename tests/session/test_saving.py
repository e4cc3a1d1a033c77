"""What a save holds, which one counts, and what a run makes of nodes that resume."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jdiloco import events
from jdiloco.errors import SchemaMismatch, UsageError
from jdiloco.runtime import export
from jdiloco.session import Session, load

from .nodes import (
    ROOT,
    Recorder,
    algorithm,
    digest,
    memory,
    records,
    session,
    together,
    vector,
)

SETTINGS: dict[str, Any] = {"overlap_steps": 0, "quorum_size": 1, "beat_seconds": 0.1}
SIZE = 8


def settings(**more: Any):
    return algorithm(**{**SETTINGS, **more})


class Gone(BaseException):
    """The program ends here."""


@contextlib.contextmanager
def cut_short(s: Session) -> Iterator[Session]:
    """A session whose program ends with the block, in the middle of its data."""
    with contextlib.suppress(Gone), s:
        yield s
        raise Gone


def restore(path: Any, params: Any, how: Any, mailbox: Any, **more: Any) -> Session:
    quiet = {"poll_interval": 0.02, "callbacks": (), **more}
    return Session.restore(path, params, how, mailbox, **quiet)


def batch(index: int) -> jax.Array:
    """The `index`-th batch of a stream: one row, all of one value."""
    return jnp.full(SIZE, float(index % 7) - 3.0)


optimizer = optax.adam(optax.cosine_decay_schedule(0.1, 200))


@jax.jit
def train_step(params: Any, opt_state: Any, rows: jax.Array) -> tuple[Any, Any]:
    grads = {"w": params["w"] - rows, "v": params["v"] + rows}
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


def model() -> dict[str, jax.Array]:
    return {"w": jnp.zeros(SIZE), "v": jnp.ones(SIZE)}


def steps(
    s: Session, params: Any, opt_state: Any, until: int, save_at: dict[int, Path] | None = None
) -> tuple[Any, Any, list[int]]:
    """Trains on a stream from `s.position` on, and saves on the way; returns what it read."""
    read = []
    for index in range(s.position, until):
        params, opt_state = train_step(params, opt_state, batch(index))
        read.append(index)
        params = s.step(params, samples=1)
        if save_at and s.position in save_at:
            s.save(save_at[s.position], opt_state=opt_state)
    return params, opt_state, read


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of node `a`, and the mailbox of its run."""
    mailbox = memory()
    with session(vector(1.0), settings(), mailbox, "a") as s:
        s.step(s.params, samples=1)
        s.save(tmp_path / "save", opt_state={"m": jnp.zeros(3)})
    return tmp_path / "save", mailbox


def test_what_a_program_keeps_comes_back_leaf_for_leaf(tmp_path):
    """Optimiser states, random keys, numbers, text and bytes; and where `like` says."""
    trees: dict[str, Any] = {
        "opt_state": optimizer.init(model()),
        "key": jax.random.key(7),
        "keys": {"a": jax.random.split(jax.random.key(1, impl="rbg"), 3)},
        "data_state": {"epoch": 3, "shard": "x/y.txt", "rate": float("inf"), "state": b"\x00\xff"},
        "position": 2**80,
        "flags": (True, np.arange(3, dtype=np.int8), jnp.zeros((0, 4)), jnp.bfloat16(1.5)),
        "numbers": {"a/b": np.float64(2.5), "a": {"b": jnp.ones((), jnp.uint32)}},
    }
    mailbox = memory()
    with session(vector(1.0), settings(), mailbox, "a") as s:
        s.step(s.params, samples=1)
        s.save(tmp_path / "save", **trees)
    fresh = jax.tree.map(lambda leaf: leaf, trees)
    with restore(tmp_path / "save", vector(0.0), settings(), mailbox, like=fresh) as s:
        found = s.restored
    assert jax.tree.structure(found) == jax.tree.structure(trees)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(trees), strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, jax.Array) and jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            assert mine.dtype == theirs.dtype
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_array_equal(mine, theirs)
        assert getattr(mine, "dtype", None) == getattr(theirs, "dtype", None)


def test_orbax_alone_reads_what_was_saved(tmp_path):
    with session(model(), settings(), memory(), "a") as s:
        s.step(s.params, samples=1)
        s.save(tmp_path / "save", opt_state=optimizer.init(model()))
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "save")
    np.testing.assert_array_equal(found["params"]["v"], np.ones(SIZE))
    np.testing.assert_array_equal(found["mine"]["opt_state"]["0"]["count"], 0)


def test_of_several_saves_the_newest_complete_one_counts(tmp_path):
    """B88: 20 was cut short and 30 never took its place; saving at 20 works afterwards."""
    mailbox, how = memory(), settings()
    with session(vector(1.0), how, mailbox, "a") as s:
        params = s.params
        for position in (9, 10):
            params = s.step(params, samples=1)
            s.save(tmp_path / f"{position}")
        for name in ("20", "30.orbax-checkpoint-tmp-1"):
            (tmp_path / name / "params").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"20 beside it is not complete"):
        resumed = restore(tmp_path, vector(0.0), how, mailbox)
    with resumed as s:
        assert s.position == 2
        s.step(s.params, samples=1)
        with pytest.warns(UserWarning, match=r"20` held a checkpoint that is not complete"):
            s.save(tmp_path / "20")
    with restore(tmp_path, vector(0.0), how, mailbox) as s:
        assert s.position == 3


def test_a_save_that_is_cut_short_is_none_and_the_one_before_counts(tmp_path, monkeypatch):
    mailbox, how = memory(), settings()

    def ends_here(path: Path) -> None:
        raise Gone

    with session(vector(1.0), how, mailbox, "a") as s:
        params = s.step(s.params, samples=1)
        s.save(tmp_path / "1")
        s.step(params, samples=1)
        monkeypatch.setattr(export, "_bring_to_disk", ends_here)
        with pytest.raises(Gone):
            s.save(tmp_path / "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]
    with restore(tmp_path, vector(0.0), how, mailbox) as s:
        assert s.position == 1


def test_trees_that_do_not_fit_are_refused_leaf_by_leaf(saved):
    path, mailbox = saved
    with pytest.raises(UsageError, match="`like` has key; saved were opt_state"):
        restore(path, vector(0.0), settings(), mailbox, like={"key": jax.random.key(0)})
    like = {"opt_state": {"m": jnp.zeros(4), "n": 1}}
    with pytest.raises(SchemaMismatch, match=r"(?s)m: .*float32\[3\], `like` float32\[4\].*n: "):
        restore(path, vector(0.0), settings(), mailbox, like=like)


def test_what_cannot_be_saved_is_named(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with session(vector(1.0), settings(), memory(), "a") as s:
        params = s.step(s.params, samples=1)
        with pytest.raises(UsageError, match="`state` holds a function at 'f'"):
            s.save(tmp_path / "save", state={"f": lambda: 1})
        with pytest.raises(UsageError, match="nothing is replaced"):
            s.save(tmp_path / "mine")
        params["w"].delete()
        with pytest.raises(UsageError, match="donated or deleted"):
            s.save(tmp_path / "save")
    assert not (tmp_path / "save").exists()
    with pytest.raises(UsageError, match="has ended"):
        s.save(tmp_path / "save")


def test_the_data_goes_on_where_it_stopped_and_the_schedule_with_it(tmp_path):
    """B80, B86: of a stream of a hundred every batch once, and as many optimiser updates."""
    mailbox, how = memory(), settings(sync_every=10, fragments=2, flush_on_close=True)
    with cut_short(session(model(), how, mailbox, "a")) as s:
        _, opt_state, first = steps(s, s.params, optimizer.init(model()), 37)
        s.save(tmp_path / "save", opt_state=opt_state)
    like = {"opt_state": optimizer.init(model())}
    with restore(tmp_path / "save", model(), how, mailbox, like=like) as s:
        _, opt_state, second = steps(s, s.params, s.restored["opt_state"], 100)
    assert [*first, *second] == list(range(100))
    assert int(opt_state[0].count) == 100
    merged: dict[int, int] = {0: 0, 1: 0}
    for record in records(mailbox):
        merged[record.fragment] += sum(p.counters.steps for p in record.participants)
    assert merged == {0: 100, 1: 100}


def test_work_that_the_checkpoint_does_not_know_of_is_never_merged_twice(tmp_path):
    """The node went on after it saved: what was pending is lost, the values are the newest."""
    mailbox, how, told = memory(), settings(keep_rounds=9), Recorder()
    with cut_short(session(model(), how, mailbox, "a")) as s:
        steps(s, s.params, optimizer.init(model()), 11, {6: tmp_path / "save"})
    like = {"opt_state": optimizer.init(model())}
    with restore(tmp_path / "save", model(), how, mailbox, callbacks=(told,), like=like) as s:
        assert s.position == 8
        assert int(s.restored["opt_state"][0].count) == 6
        newest = load(mailbox, like=model())
        assert digest(s.params) == digest(newest)
        steps(s, s.params, s.restored["opt_state"], 16)
    lost = [event for event in told.of(events.Dropped) if event.reason == "lost"]
    assert [(event.steps, event.samples) for event in lost] == [(2, 2)]
    ends = [p.position for r in records(mailbox) for p in r.participants]
    assert ends == [4, 8, 12, 16]


@pytest.mark.parametrize("count", [1, 3])
def test_a_run_of_two_nodes_goes_on_with_another_number(count, tmp_path):
    """B90: versions and values go on, and every batch of the two is merged at most once."""
    mailbox, how = memory(), settings(lease_seconds=2.0)

    def first(name: str):
        def run() -> None:
            with cut_short(session(model(), how, mailbox, name)) as s:
                _, opt_state, _ = steps(s, s.params, optimizer.init(model()), 10)
                s.save(tmp_path / name, opt_state=opt_state)

        return run

    together(first("a"), first("b"))
    before = load(mailbox, like=model())
    version = records(mailbox)[-1].version

    def again(name: str):
        def run() -> None:
            like = {"opt_state": optimizer.init(model())}
            if (tmp_path / name).exists():
                with restore(tmp_path / name, model(), how, mailbox, like=like) as s:
                    steps(s, s.params, s.restored["opt_state"], 20)
            else:
                with session(model(), how, mailbox, name) as s:
                    steps(s, s.params, optimizer.init(model()), 10)

        return run

    assert digest(load(mailbox, like=model())) == digest(before)
    together(*(again(name) for name in "abc"[:count]))
    found = records(mailbox)
    assert [r.version for r in found if not r.void] == list(range(1, found[-1].version + 1))
    assert found[-1].version > version
    for name in "ab":
        ends = [
            (p.position - p.counters.steps, p.position)
            for r in found
            for p in r.participants
            if p.node == name
        ]
        for (_, stop), (start, _) in itertools.pairwise(sorted(ends)):
            assert start >= stop


# Real processes


PROGRAM = """
    import itertools, os, sys
    import jax, jax.numpy as jnp, optax
    import jdiloco

    mailbox, saves, until, die_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    optimizer = optax.adam(0.1)
    params = {"w": jnp.zeros(8)}
    opt_state = optimizer.init(params)
    algorithm = jdiloco.DiLoCo(
        sync_every=4, fragments=1, overlap_steps=0, beat_seconds=0.1, lease_seconds=0.5,
        outer_momentum=0.5,
    )
    common = dict(poll_interval=0.02, callbacks=())

    @jax.jit
    def train(params, opt_state, index):
        grads = {"w": params["w"] - index}
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    if os.path.isdir(saves):
        session = jdiloco.Session.restore(
            saves, params, algorithm, mailbox, like={"opt_state": opt_state}, **common
        )
        opt_state = session.restored["opt_state"]
    else:
        session = jdiloco.Session(params, algorithm, mailbox, node_id="a", **common)
    with session:
        params = session.params
        for index in range(session.position, until):
            params, opt_state = train(params, opt_state, float(index))
            params = session.step(params, samples=1)
            print("trained", index, flush=True)
            session.save(f"{saves}/{session.position}", opt_state=opt_state)
            if session.position == die_at:
                os.kill(os.getpid(), 9)
    print(*params["w"].tolist(), *opt_state[0].mu["w"].tolist())
"""


def program(mailbox: Path, saves: Path, until: int, die_at: int = -1) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), mailbox, saves, str(until), str(die_at)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout + (done.stderr if done.returncode > 0 else "")


@pytest.mark.long
def test_a_process_that_is_killed_twice_ends_as_one_that_was_not(tmp_path):
    """SIGKILL right after a save: the data, the optimiser and the run go on bit for bit."""
    status, wanted = program(tmp_path / "one", tmp_path / "saves-one", 12)
    assert status == 0, wanted
    told = ""
    for die_at in (5, 8):
        status, text = program(tmp_path / "two", tmp_path / "saves-two", 12, die_at)
        assert status == -signal.SIGKILL, text
        told += text
    status, text = program(tmp_path / "two", tmp_path / "saves-two", 12)
    assert status == 0, text
    assert (told + text).splitlines()[-1] == wanted.splitlines()[-1]
    read = [int(line.split()[1]) for line in (told + text).splitlines() if "trained" in line]
    assert read == list(range(12))
    mine, theirs = records(tmp_path / "two"), records(tmp_path / "one")
    assert [r.anchor and r.anchor.sha256 for r in mine] == [
        r.anchor and r.anchor.sha256 for r in theirs
    ]
