"""Run checkpoints, as a run writes them on its way; and what a run leaves in its mailbox."""

from __future__ import annotations

import gc
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdiloco import events
from jdiloco.runtime.payloads import read_anchor
from jdiloco.store import FolderStore

from .nodes import (
    Recorder,
    algorithm,
    digest,
    memory,
    node_of,
    records,
    run_keys,
    run_script,
    session,
    vector,
    wait_until,
)


def params_of(value: float = 1.0):
    return {
        "a": {"w": jnp.full((3, 4), value)},
        "b": jnp.full(5, value, jnp.bfloat16),
        "n": jnp.int32(3),
    }


def train(s, rounds: int, seen: Recorder) -> None:
    """Trains until so many further rounds are committed."""
    wanted = len(seen.of(events.Committed)) + rounds
    params = s.params
    while len(seen.of(events.Committed)) < wanted:
        params = jax.tree.map(
            lambda x: (x - 0.125).astype(x.dtype) if x.dtype != jnp.int32 else x, params
        )
        params = s.step(params, samples=1)


def checkpoints(store) -> set[str]:
    prefix = f"{run_keys(store).run}/save/"
    return {entry.key.removeprefix(prefix).split("/")[0] for entry in store.list(prefix)}


def payload_rounds(store) -> set[int]:
    prefix = f"{run_keys(store).run}/data/"
    return {int(e.key.removeprefix(prefix).split(".")[0]) for e in store.list(prefix)}


@pytest.fixture
def long_run(tmp_path):
    """A run of two fragments with a checkpoint after every cycle, and its last values."""
    store, seen = FolderStore(tmp_path), Recorder()
    settings = algorithm(fragments=2, sync_every=2, checkpoint_every=1, overlap_steps=0)
    with session(params_of(), settings, store, "a", callbacks=(seen,)) as s:
        while len(seen.of(events.Checkpointed)) < 4:
            train(s, 2, seen)
        train(s, 6, seen)
        wait_until(lambda: not node_of(s).state.saving)
    return store, settings, s.params, seen


def test_checkpoints_appear_and_what_they_cover_disappears(long_run):
    store, _, _, seen = long_run
    made = seen.of(events.Checkpointed)
    log = records(store)
    named = list(dict.fromkeys(record.checkpoint.prefix for record in log))
    assert len(named) >= 3
    assert "initial" not in "".join(checkpoints(store))
    oldest = named[-2].rpartition("/")[2]
    assert min(checkpoints(store)) >= oldest, "the two newest named ones, and what came later"
    assert min(payload_rounds(store)) > made[0].round
    contributions = [e.key for e in store.list(run_keys(store).log) if ".2." in e.key]
    kept = {int(key.rpartition("/")[2].split(".")[0]) for key in contributions}
    assert min(kept) >= len(log) - 4


def test_a_joiner_starts_from_the_newest_checkpoint_and_goes_on(long_run):
    """B78: momentum too; the payloads of the oldest rounds are long gone."""
    store, settings, last, _ = long_run
    seen = Recorder()
    with session(params_of(9.0), settings, store, "b", callbacks=(seen,)) as s:
        assert digest(s.params) == digest(last)
        before = len(records(store))
        train(s, 4, seen)
    log = records(store)
    assert len(log) >= before + 4
    assert [p.node for p in log[-1].participants] == ["b"]
    assert log[-1].version == log[-3].version + 1


RESTORE = """
    import json, sys
    import numpy as np, orbax.checkpoint as ocp
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(sys.argv[1])
    assert "jdiloco" not in sys.modules
    print(json.dumps({
        "w": np.asarray(params["a"]["w"], np.float64).tolist(),
        "b": np.asarray(params["b"], np.float64).tolist(),
    }))
"""


def test_orbax_alone_restores_the_newest_checkpoint(long_run):
    store, _, _, seen = long_run
    newest = seen.of(events.Checkpointed)[-1]
    path = f"{store.url}/{newest.prefix}/params"
    found = json.loads(run_script(RESTORE, path, environment={"JAX_PLATFORMS": "cpu"}))
    assert np.shape(found["w"]) == (3, 4)
    assert np.isfinite(found["w"]).all()
    assert np.isfinite(found["b"]).all()


def test_a_checkpoint_holds_what_its_round_committed(tmp_path):
    """Bit for bit what the payloads of that round say."""
    store, seen = FolderStore(tmp_path), Recorder()
    settings = algorithm(sync_every=1, checkpoint_every=1, overlap_steps=0)
    with session(params_of(), settings, store, "a", callbacks=(seen,)) as s:
        while not seen.of(events.Checkpointed):
            train(s, 1, seen)
        wait_until(lambda: not node_of(s).state.saving)
    newest = seen.of(events.Checkpointed)[-1]
    path = f"{store.url}/{newest.prefix}/params"
    found = json.loads(run_script(RESTORE, path, environment={"JAX_PLATFORMS": "cpu"}))
    anchor = read_anchor(store, records(store)[newest.round], s._entry.schema.tensors)
    assert anchor is not None
    np.testing.assert_array_equal(found["w"], anchor["a/w"].astype(np.float64))
    np.testing.assert_array_equal(found["b"], anchor["b"].astype(np.float64))


def test_a_payload_that_is_gone_is_read_from_the_checkpoint(long_run):
    """S2: what two checkpoints cover may go, though it is the newest of its fragment."""
    store, settings, last, _ = long_run
    with session(params_of(), settings, store, "c") as s:
        record = node_of(s).state.chain.records[0]
        assert record is not None
        assert digest(node_of(s)._committed(record)) == digest(
            {name: _named(last)[name] for name in s._entry.schema.plan[0]}
        )


def _named(params) -> dict[str, jax.Array]:
    return {"a/w": params["a"]["w"], "b": params["b"]}


def most_held(store, *, nodes: int, checkpoint_every: int) -> tuple[int, int, int]:
    """How many versions, checkpoints and contributions a mailbox may hold, of one fragment: the
    formula of `jdiloco.protocol.sweep`, and one version that is still to be swept."""
    first: dict[int, int] = {}
    for record in records(store):
        first.setdefault(record.checkpoint.round, record.round)
    lag = max(named - round for round, named in first.items())
    return 2 * checkpoint_every + 1 + 1 + lag + 1, 3, (2 + 1 + 1) * nodes


@pytest.mark.long
def test_two_hundred_rounds_leave_a_bounded_mailbox_and_memory():
    """B77: versions, contributions and beats are swept; memory does not grow with rounds."""
    store, seen = memory(), Recorder()
    settings = algorithm(sync_every=1, checkpoint_every=5, overlap_steps=0)
    sizes, arrays = [], []
    with session(vector(1.0, 50_000), settings, store, "a", callbacks=(seen,)) as s:
        for _ in range(4):
            for _ in range(50):
                s.step({"w": s.params["w"] - 1e-3}, samples=1)
            gc.collect()
            sizes.append(sum(entry.size for entry in store.list("") if "/log/0" not in entry.key))
            arrays.append(len(jax.live_arrays()))
    assert len(records(store)) == 200
    versions, saved, reports = most_held(store, nodes=1, checkpoint_every=5)
    model = 4 * 50_000  # A version and a checkpoint hold it with its momentum.
    bound = (2 * versions + 2 * saved + reports) * model
    print(f"{[size / 1e6 for size in sizes]} MB, at most {bound / 1e6}")
    assert max(sizes) <= bound + 1e5
    assert arrays[-1] <= arrays[1] + 4


@pytest.mark.parametrize("checkpoint_every", [1, 1000])
def test_nothing_of_a_round_stays_in_memory(checkpoint_every):
    """Neither contributions nor the copies made for learners, uploads and checkpoints."""
    store, seen = memory(), Recorder()
    settings = algorithm(sync_every=1, checkpoint_every=checkpoint_every, overlap_steps=0)
    size = 60_013
    with session(vector(1.0, size), settings, store, "a", callbacks=(seen,)) as s:
        for _ in range(6):
            s.step({"w": s.params["w"] - 1e-3}, samples=1)
        node = node_of(s)
        wait_until(lambda: not (node._fetches or node._ready or node._closer._values))
        wait_until(lambda: not node.state.saving and not node._closer._measured)
        wait_until(lambda: _held(size) <= 6, 5.0)
        print(f"{_held(size)} arrays of the model's size on the host")


def _held(size: int) -> int:
    """NumPy arrays of a model's size that own their memory."""
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, dict)]
    arrays = {id(v) for d in found for v in list(d.values()) if _is_model(v, size)}
    return len(arrays)


def _is_model(value, size: int) -> bool:
    return isinstance(value, np.ndarray) and value.size >= size and value.base is None


LONG_RUN = """
    import gc, json, sys
    import jax.numpy as jnp
    from jdiloco.store import FolderStore
    from tests.session.nodes import algorithm, session, wait_until, node_of

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6

    sizes = []
    settings = algorithm(sync_every=1, checkpoint_every=5, overlap_steps=0)
    params = {"w": jnp.ones(250_000), "b": jnp.ones(8)}
    with session(params, settings, FolderStore(sys.argv[1]), "a") as s:
        params = s.params
        for round in range(1, 201):
            params = s.step({n: x - 1e-3 for n, x in params.items()}, samples=1)
            if round % 50 == 0:
                wait_until(lambda: not node_of(s).state.saving)
                sizes.append(resident())
    print(json.dumps(sizes))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_hundred_rounds_of_a_megabyte_take_no_more_memory_than_fifty(tmp_path):
    """B77: and the mailbox holds a few versions of them."""
    sizes = json.loads(run_script(LONG_RUN, str(tmp_path), seconds=280.0))
    print(f"resident after 50, 100, 150 and 200 rounds: {sizes} MB")
    assert sizes[-1] - sizes[0] < 30
    store = FolderStore(tmp_path)
    assert len(records(store)) == 200
    versions, saved, reports = most_held(store, nodes=1, checkpoint_every=5)
    assert len(payload_rounds(store)) <= versions <= 25
    assert len(checkpoints(store)) <= saved
    contributions = [e.key for e in store.list(run_keys(store).log) if ".2.a." in e.key]
    assert len(contributions) <= reports
