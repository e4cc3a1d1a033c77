"""A node that is stopped and goes on from what it saved."""

from __future__ import annotations

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jdiloco
from jdiloco import events
from jdiloco.algo.merges import weighted_mean
from jdiloco.errors import RunConfigMismatch, RunReplaced, SchemaMismatch, UsageError
from jdiloco.protocol.alignment import carry
from jdiloco.session import Session
from tests.whole import whole_run

from .nodes import (
    POLL,
    Recorder,
    algorithm,
    digest,
    lock_step,
    memory,
    node_of,
    records,
    session,
    wait_until,
)

ALONE = lock_step(1, sync_every=4, fragments=2, in_flight=1, outer_momentum=0.5, lease_seconds=1.0)
OPTIMIZER = optax.adam(1e-2)
QUIET = {"poll_interval": POLL, "callbacks": ()}


def start():
    rng = np.random.default_rng(0)
    return {"a": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32), "b": jnp.ones(7)}


@jax.jit
def train(params, opt_state, key):
    """A step that depends on everything that has to be saved."""
    key, noise = jax.random.split(key)
    grads = jax.tree.map(lambda p: p + jax.random.normal(noise, p.shape), params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, key


class Program:
    """A user's program: it trains, and may save after a step."""

    def __init__(self, s: Session, params, opt_state, key) -> None:
        self.s, self.params, self.opt_state, self.key = s, params, opt_state, key

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.params, self.opt_state, self.key = train(self.params, self.opt_state, self.key)
            self.params = self.s.step(self.params, samples=2)

    def digest(self) -> str:
        return digest((self.params, self.opt_state, jax.random.key_data(self.key)))

    def save(self, path) -> None:
        self.s.save(path, opt_state=self.opt_state, key=self.key)


def begin(s: Session) -> Program:
    return Program(s, s.params, OPTIMIZER.init(s.params), jax.random.key(3))


def resume(path, store, settings, **more) -> Session:
    like = {"opt_state": OPTIMIZER.init(start()), "key": jax.random.key(0)}
    return Session.restore(path, start(), settings, store, like=like, **{**QUIET, **more})


def going_on(s: Session) -> Program:
    return Program(s, s.params, s.restored["opt_state"], s.restored["key"])


def kill(s: Session) -> None:
    """The process is gone: it says nothing and writes nothing more."""
    node_of(s).place.store.inner.dead = True  # pyright: ignore[reportAttributeAccessIssue]


class Mortal(jdiloco.store.MemoryStore):
    """A store as one process sees it, which may die."""

    dead = False

    def create(self, key, data):
        if self.dead:
            raise jdiloco.errors.StoreUnavailable("dead")
        return super().create(key, data)

    def delete(self, keys):
        if not self.dead:
            super().delete(keys)


_numbers = itertools.count()


def shared() -> str:
    return f"resuming-{next(_numbers)}"


@pytest.mark.parametrize("stop", [1, 3, 5, 6, 8, 9])
def test_a_node_stopped_at_any_step_goes_on_bit_for_bit(tmp_path, stop):
    """B79, B80: what it commits, and what it holds, is what an uninterrupted run gives."""
    whole = memory()
    with session(start(), ALONE, whole, "n") as s:
        uninterrupted = begin(s)
        uninterrupted.go(16)
    name = shared()
    with session(start(), ALONE, Mortal(name), "n") as s:
        program = begin(s)
        program.go(stop)
        program.save(tmp_path / "save")
        kill(s)
    with resume(tmp_path / "save", Mortal(name), ALONE) as s:
        assert s.position == stop
        program = going_on(s)
        program.go(16 - stop)
        assert program.digest() == uninterrupted.digest()
    for a, b in zip(records(whole), records(Mortal(name)), strict=True):
        assert a.anchor is not None
        assert b.anchor is not None
        assert a.anchor.sha256 == b.anchor.sha256
    whole_run(Mortal(name))


def test_what_was_committed_meanwhile_arrives_at_its_first_step(tmp_path):
    """The others went on; the records since are read in order, and the newest values are taken."""
    name = shared()
    settings = algorithm(sync_every=4, fragments=1, follow=0, lease_seconds=0.5)
    with session(start(), settings, Mortal(name), "other") as other:
        theirs = begin(other)
        with session(start(), settings, Mortal(name), "n") as s:
            mine = begin(s)
            mine.go(1)
            mine.save(tmp_path / "save")
            kept = digest(mine.params)
            kill(s)
        while len(records(Mortal(name))) < 2:
            theirs.go(1)
            time.sleep(POLL)
        seen = Recorder()
        with resume(tmp_path / "save", Mortal(name), settings, callbacks=(seen,)) as s:
            assert digest(s.params) == kept
            mine = going_on(s)
            mine.go(1)
            newest = records(Mortal(name))[-1]
            assert s.status.versions[0] >= newest.version - 1
            assert seen.of(events.Aligned)
            dropped = seen.of(events.Dropped)
            assert [drop.reason for drop in dropped] == ["overwritten"]
            assert dropped[0].steps == 2  # The one that was saved, and the first since.
    whole_run(Mortal(name))


def test_what_the_life_before_published_after_the_save_is_not_trained_twice(tmp_path):
    """S3: its training may have been merged, so what was saved is lost and the data goes on."""
    name = shared()
    seen = Recorder()
    with session(start(), ALONE, Mortal(name), "n") as s:
        program = begin(s)
        program.go(3)
        program.save(tmp_path / "save")
        program.go(4)
        wait_until(lambda: len(records(Mortal(name))) == 3)
        kill(s)
    with resume(tmp_path / "save", Mortal(name), ALONE, callbacks=(seen,)) as s:
        assert s.position == 6
        assert digest(s.params) == digest(jdiloco.load(Mortal(name), like=start()))
        lost = [drop for drop in seen.of(events.Dropped) if drop.reason == "lost"]
        assert sum(drop.steps for drop in lost) == 4  # Fragment 0 one step, fragment 1 three.
        going_on(s).go(4)
    whole_run(Mortal(name))


def test_carried_training_goes_on_from_its_snapshot(tmp_path):
    """With `carry` the parameters at the newest snapshot are saved too."""
    name = shared()
    settings = algorithm(sync_every=2, fragments=1, alignment=carry(), follow=0, quorum_size=9)
    with session(start(), settings, Mortal(name), "n") as s:
        program = begin(s)
        program.go(1)
        program.save(tmp_path / "save")
        kill(s)
    with resume(tmp_path / "save", Mortal(name), settings) as s:
        going_on(s).go(6)
    whole_run(Mortal(name))


def test_saving_twice_keeps_what_was_current_and_training_changes_no_file(tmp_path):
    """B81."""
    store = memory()
    with session(start(), ALONE, store, "n") as s:
        program = begin(s)
        shown = []
        for step in (1, 2):
            program.go(1)
            program.save(tmp_path / str(step))
            shown.append(digest(program.params))
        program.go(5)
    for step, want in zip((1, 2), shown, strict=True):
        restored = resume(tmp_path / str(step), store, ALONE)
        assert digest(restored._params) == want


def test_a_save_that_was_interrupted_is_none_and_names_what_is_complete(tmp_path):
    """B88."""
    store = memory()
    with session(start(), ALONE, store, "n") as s:
        program = begin(s)
        program.save(tmp_path / "10")
        (tmp_path / "20.orbax-checkpoint-tmp-abc").mkdir()
        with pytest.raises(UsageError, match=r"is not complete.*Complete beside it: 10\."):
            resume(tmp_path / "20", store, ALONE)
        program.save(tmp_path / "20")
        with pytest.raises(UsageError, match="nothing is replaced"):
            program.save(tmp_path / "20")
    resume(tmp_path / "20", store, ALONE)


def test_a_plain_checkpoint_says_how_to_start_from_it(tmp_path):
    """B89."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "plain", {"params": start()})
    with pytest.raises(UsageError, match=r"not written by `session.save`.*Session\(params"):
        resume(tmp_path / "plain", memory(), ALONE)


def test_another_run_other_settings_and_another_model_are_refused_by_name(tmp_path):
    store = memory()
    with session(start(), ALONE, store, "n") as s:
        begin(s).save(tmp_path / "save")
    other = lock_step(1, sync_every=5, fragments=2, in_flight=1, outer_momentum=0.5)
    with pytest.raises(RunConfigMismatch, match="sync_every: the run has 4, this node 5"):
        resume(tmp_path / "save", store, other)
    another = {"c": jnp.ones(5), "b": jnp.ones(7)}
    with pytest.raises(SchemaMismatch, match=r"a: the run has float32\[3, 5\], this node nothing"):
        Session.restore(tmp_path / "save", another, ALONE, store, **QUIET)
    elsewhere = memory()
    with session(start(), ALONE, elsewhere, "x"):
        pass
    with pytest.raises(RunReplaced, match="what is to be restored belongs to run"):
        resume(tmp_path / "save", elsewhere, ALONE).__enter__()
    with pytest.raises(UsageError, match="There is no run"):
        resume(tmp_path / "save", memory(), ALONE).__enter__()
    with pytest.raises(UsageError, match="`node_id` is 'm'"):
        resume(tmp_path / "save", store, ALONE, node_id="m")
    with pytest.raises(UsageError, match="`like` has schedule; saved were opt_state, key"):
        Session.restore(tmp_path / "save", start(), ALONE, store, like={"schedule": 1}, **QUIET)


def test_a_module_comes_back_with_everything_in_it(tmp_path):
    """Batch statistics and random states too, which no run holds."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(3, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    settings = algorithm(sync_every=50, merge=weighted_mean())
    store = memory()
    model = Model(nnx.Rngs(0))
    with session(model, settings, store, "n") as s:
        for _ in range(3):
            model(jnp.ones((4, 3)))
            model.linear.kernel.set_value(model.linear.kernel.get_value() + 1)
            s.step(samples=4)
        s.save(tmp_path / "save", epoch=2)
        want = digest(jax.tree.map(jax.random.key_data, nnx.state(model, nnx.RngKey)))
        moments = digest(nnx.state(model, nnx.BatchStat))
        kernel = digest(model.linear.kernel.get_value())
    fresh = Model(nnx.Rngs(1))
    again = Session.restore(tmp_path / "save", fresh, settings, store, like={"epoch": 0}, **QUIET)
    assert digest(jax.tree.map(jax.random.key_data, nnx.state(fresh, nnx.RngKey))) == want
    assert digest(nnx.state(fresh, nnx.BatchStat)) == moments
    with again as s:
        assert s.restored == {"epoch": 2}
        assert digest(fresh.linear.kernel.get_value()) == kernel
        assert s.position == 3


def test_a_users_own_save_may_be_under_way(tmp_path):
    """An asynchronous checkpointer waits for operations by number, process-wide."""
    with session(start(), ALONE, memory(), "n") as s:
        program = begin(s)
        with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as theirs:
            for step in range(3):
                theirs.save(tmp_path / f"theirs-{step}", args=ocp.args.StandardSave(program.params))
                program.save(tmp_path / f"ours-{step}")
                program.go(1)
            theirs.wait_until_finished()
    assert (tmp_path / "theirs-2").is_dir()


def test_a_first_step_that_is_refused_takes_nothing_back(tmp_path):
    """What was restored is still there, with the steps that were saved in it."""
    mailbox = memory()
    with session(start(), ALONE, mailbox, "n") as s:
        params = s.params
        for _ in range(6):
            params = s.step(jax.tree.map(lambda x: x - 1.0, params), samples=1)
        s.save(tmp_path / "1")
    with Session.restore(tmp_path / "1", start(), ALONE, mailbox, **QUIET) as s:
        with pytest.raises(UsageError, match=r"Begin with `params = session.params`"):
            s.step(start(), samples=1)
        assert digest(s.params) == digest(params)
        with pytest.raises(UsageError):
            s.step(s.params, samples=-1)
        assert digest(s.params) == digest(params)
