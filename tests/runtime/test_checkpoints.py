"""A run checkpoint is what the run was, for this library and for Orbax alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdiloco.errors import FormatError, StoreUnavailable, UsageError
from jdiloco.protocol.records import Checkpoint, Payload, unseal
from jdiloco.runtime import checkpoints, trees
from jdiloco.runtime.checkpoints import RunState
from jdiloco.store.folder import FolderStore
from jdiloco.store.memory import MemoryStore
from jdiloco.types import TensorSpec

PREFIX = "run/save/0000000007.a.0001"


def state_of(values: dict[str, np.ndarray], round: int = 7) -> RunState:
    """A state with something to tell apart in every array."""
    return RunState(
        values=values,
        momentum={n: np.asarray(a.astype(np.float32) + 1) for n, a in values.items()},
        master={
            n: np.asarray(a.astype(np.float32) + 2)
            for n, a in values.items()
            if a.dtype.itemsize == 2
        },
        versions=(3, 4),
        round=round,
        manifest='{"format":1,"näme":"r"}'.encode(),
    )


def model(offset: float = 0.0) -> dict[str, np.ndarray]:
    return {
        "Dense_0/kernel": np.arange(8, dtype=np.float32).reshape(4, 2) + np.float32(offset),
        "Dense_0/bias": np.arange(4).astype(ml_dtypes.bfloat16),
        "layers/0/scale": np.ones((), np.float16),
        "layers/10/w": np.arange(3, dtype=np.float64),
    }


def specs_of(state: RunState) -> list[TensorSpec]:
    return [TensorSpec(n, a.shape, a.dtype.name) for n, a in state.values.items()]


def assert_same(found: RunState, wanted: RunState) -> None:
    for field in ("values", "momentum", "master"):
        ours, theirs = getattr(found, field), getattr(wanted, field)
        assert list(ours) == list(theirs)
        for name, array in ours.items():
            assert array.dtype == theirs[name].dtype, name
            assert array.shape == theirs[name].shape, name
            assert array.tobytes() == theirs[name].tobytes(), name
    assert (found.versions, found.round, found.manifest) == (
        wanted.versions,
        wanted.round,
        wanted.manifest,
    )


def there_and_back(state: RunState, scratch: Path) -> RunState:
    store = MemoryStore()
    files = checkpoints.write(state, store, PREFIX, scratch=scratch)
    return checkpoints.read(store, PREFIX, files, scratch=scratch, specs=specs_of(state))


def test_what_is_written_is_read_bit_for_bit(tmp_path):
    state = state_of(model())
    assert_same(there_and_back(state, tmp_path), state)


def test_restored_arrays_cannot_be_written_to(tmp_path):
    found = there_and_back(state_of(model()), tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        found.values["Dense_0/kernel"][0] = 1


def test_a_state_without_narrow_tensors_has_no_master(tmp_path):
    state = state_of({"w": np.ones(3, np.float32)})
    assert state.master == {}
    assert_same(there_and_back(state, tmp_path), state)


def test_tensors_without_elements_come_back_from_the_schema(tmp_path):
    empty = np.zeros((0, 3), ml_dtypes.bfloat16)
    for values in ({"a/b": empty, "w": np.ones(2, np.float32)}, {"a": empty}):
        assert_same(there_and_back(state_of(values), tmp_path), state_of(values))


def test_zeros_come_back(tmp_path):
    """The momentum of a new run is nothing else; Zarr would rather not store it."""
    state = state_of(model())
    for array in state.momentum.values():
        array[...] = 0
    assert_same(there_and_back(state, tmp_path), state)


def test_tensors_larger_than_a_chunk_and_states_larger_than_a_file_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(trees, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(trees, "FILE_BYTES", 10_000)
    draw = np.random.default_rng(0)
    values = {f"w{i}": draw.standard_normal((31, 7, 5), np.float32) for i in range(9)}
    assert_same(there_and_back(state_of(values), tmp_path), state_of(values))


AWKWARD = [
    ["a", "a/b", "a/b/c"],
    ["a.b", "a/b", "a/b.c", "a.b/c"],
    ["#0", "#1", "a", "a/#0", "#/a"],
    [
        "0",
        "1/0",
        "10/2",
        "a b/c d",
        ".",
        "..",
        "a//b",
        "/",
        "é/ß",
        "q\"/'",
        "back\\slash",
        "new\nline",
    ],
    ["params", "params/params", "value", "_METADATA", "zarr.json/c", "c/0/0"],
]


@pytest.mark.parametrize("names", AWKWARD)
def test_awkward_names_come_back(names, tmp_path):
    state = state_of({n: np.full(i + 1, i, np.float32) for i, n in enumerate(names)})
    assert_same(there_and_back(state, tmp_path), state)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.text("ab./#0 ", min_size=1, max_size=5), min_size=1, max_size=6, unique=True))
def test_any_names_come_back(tmp_path, names):
    state = state_of({n: np.full(i + 1, i, np.float32) for i, n in enumerate(names)})
    assert_same(there_and_back(state, tmp_path), state)


@given(st.sets(st.text("ab./#0", min_size=1, max_size=5), max_size=8))
def test_no_two_names_have_one_place_and_no_place_lies_in_another(names):
    places = trees.places(sorted(names))
    joined = [".".join(place) for place in places.values()]
    assert len(set(joined)) == len(names)
    for place in places.values():
        assert not any(place[:n] in places.values() for n in range(len(place)))


def test_ordinary_names_nest_by_their_parts():
    assert trees.places(["layers/0/w", "layers/0/b", "head"]) == {
        "layers/0/w": ("layers", "0", "w"),
        "layers/0/b": ("layers", "0", "b"),
        "head": ("head",),
    }


def test_files_are_named_with_size_and_hash_and_only_a_listing_lies_beside_them(tmp_path):
    store = MemoryStore()
    state = state_of(model())
    files = checkpoints.write(state, store, PREFIX, scratch=tmp_path)
    listing = f"{PREFIX}/{checkpoints.LISTING}"
    assert {(f"{PREFIX}/{f.key}", f.size) for f in files} == {
        (entry.key, entry.size) for entry in store.list("") if entry.key != listing
    }
    data = store.get(listing)
    assert data is not None
    assert unseal(listing, data, Checkpoint) == Checkpoint(
        state.round, state.versions, PREFIX, files
    )


def test_two_rounds_saved_are_two_checkpoints(tmp_path):
    """The second does not write over the first, nor does going on change either."""
    store = MemoryStore()
    values = model()
    saved = {}
    for round in (1, 2):
        values["Dense_0/kernel"] += 100
        state = state_of(values, round)
        prefix = f"run/save/{round}.a.0001"
        files = checkpoints.write(state, store, prefix, scratch=tmp_path)
        saved[prefix] = (files, specs_of(state))
    values["Dense_0/kernel"] += 100
    found = [
        checkpoints.read(store, prefix, files, scratch=tmp_path, specs=specs)
        for prefix, (files, specs) in saved.items()
    ]
    assert [s.round for s in found] == [1, 2]
    assert [s.values["Dense_0/kernel"][0, 0] for s in found] == [100, 200]


def test_training_on_while_a_checkpoint_is_written_does_not_change_it(tmp_path, monkeypatch):
    """Arrays are overwritten before the first file is written."""
    values = model()
    state = state_of(values)
    wanted = state_of(model())
    save = checkpoints._save

    def overwrite_and_save(root, trees, run):
        for array in (*state.values.values(), *state.momentum.values(), *state.master.values()):
            array[...] = 99
        save(root, trees, run)

    monkeypatch.setattr(checkpoints, "_save", overwrite_and_save)
    store = MemoryStore()
    files = checkpoints.write(state, store, PREFIX, scratch=tmp_path)
    found = checkpoints.read(store, PREFIX, files, scratch=tmp_path, specs=specs_of(wanted))
    assert_same(found, wanted)


def test_momentum_and_master_must_fit_the_values(tmp_path):
    state = state_of(model())
    del state.momentum["layers/0/scale"]
    with pytest.raises(UsageError, match="`layers/0/scale` is absent, wanted float32"):
        checkpoints.write(state, MemoryStore(), PREFIX, scratch=tmp_path)
    state = state_of({"w": np.ones(2, np.float64)})
    state.master["w"] = np.ones(2, np.float32)
    with pytest.raises(UsageError, match=r"`w` is float32\[2\], wanted absent"):
        checkpoints.write(state, MemoryStore(), PREFIX, scratch=tmp_path)
    state = state_of({"w": np.ones(2, np.float32)})
    state.master["w"] = np.ones(3, np.float32)
    with pytest.raises(UsageError, match=r"`w` is float32\[3\], wanted float32\[2\]"):
        checkpoints.write(state, MemoryStore(), PREFIX, scratch=tmp_path)


class Refusing(MemoryStore):
    """Fails from the third object on."""

    def create(self, key, data):
        if len(self.list("")) >= 2:
            raise StoreUnavailable("the line is cut")
        return super().create(key, data)


def test_the_scratch_is_empty_afterwards_also_on_errors(tmp_path):
    store = MemoryStore()
    state = state_of(model())
    files = checkpoints.write(state, store, PREFIX, scratch=tmp_path)
    checkpoints.read(store, PREFIX, files, scratch=tmp_path, specs=specs_of(state))
    with pytest.raises(StoreUnavailable, match="the line is cut"):
        checkpoints.write(state, Refusing(), PREFIX, scratch=tmp_path)
    with pytest.raises(FormatError):
        checkpoints.read(store, PREFIX, files[:1], scratch=tmp_path, specs=specs_of(state))
    with pytest.raises(FormatError):
        checkpoints.read(store, PREFIX, files, scratch=tmp_path, specs=[])
    assert list(tmp_path.iterdir()) == []


class LosingAnswers(MemoryStore):
    """Stores everything and says so every third time."""

    calls = 0

    def create(self, key, data):
        super().create(key, data)
        self.calls += 1
        if self.calls % 3:
            raise StoreUnavailable("no answer")
        return True


def test_lost_answers_do_not_stop_a_checkpoint(tmp_path):
    store = LosingAnswers()
    state = state_of(model())
    files = checkpoints.write(state, store, PREFIX, scratch=tmp_path)
    assert_same(
        checkpoints.read(store, PREFIX, files, scratch=tmp_path, specs=specs_of(state)), state
    )


# What `read` refuses.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_as(state_of(model()), tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def saved_small(tmp_path_factory):
    """One tensor: of several, Orbax leaves requests behind that fail after the first has."""
    state = state_of({"w": np.ones(3, np.float32)})
    return saved_as(state, tmp_path_factory.mktemp("small"))


def saved_as(state: RunState, scratch: Path):
    store = MemoryStore()
    files = checkpoints.write(state, store, PREFIX, scratch=scratch)
    return store, files, specs_of(state)


def copied(store, *, without: str = "", change=lambda key, data: data) -> MemoryStore:
    other = MemoryStore()
    for entry in store.list(""):
        if entry.key != without:
            other.create(entry.key, change(entry.key, store.get(entry.key)))
    return other


def test_every_single_damaged_file_is_named(saved, tmp_path):
    store, files, specs = saved
    for file in files:
        key = f"{PREFIX}/{file.key}"
        for other, sentence in [
            (copied(store, without=key), "absent"),
            (copied(store, change=lambda k, d, key=key: d + b"x" if k == key else d), "long"),
            (
                copied(store, change=lambda k, d, key=key: bytes(len(d)) if k == key else d),
                "sha256",
            ),
        ]:
            with pytest.raises(FormatError, match=sentence) as caught:
                checkpoints.read(other, PREFIX, files, scratch=tmp_path, specs=specs)
            assert f"{key} " in str(caught.value)


@pytest.mark.parametrize("key", ["../../x", "/etc/x", "params/../../x", "", ".", "a//b", "a\0b"])
def test_files_outside_the_checkpoint_are_refused(saved, key, tmp_path):
    store, files, specs = saved
    scratch = tmp_path / "a" / "scratch"
    with pytest.raises(FormatError, match="is no key"):
        checkpoints.read(
            store, PREFIX, (*files, Payload(key, 1, "0" * 64)), scratch=scratch, specs=specs
        )
    assert not scratch.exists()


def test_a_file_named_twice_is_refused(saved, tmp_path):
    store, files, specs = saved
    with pytest.raises(FormatError, match="named twice"):
        checkpoints.read(store, PREFIX, (*files, files[0]), scratch=tmp_path, specs=specs)


def test_a_checkpoint_of_another_model_names_what_differs(saved, tmp_path):
    store, files, specs = saved
    other = [s if s.name != "layers/10/w" else TensorSpec(s.name, (4,), "float64") for s in specs]
    with pytest.raises(FormatError, match=r"`layers/10/w` is float64\[3\], wanted float64\[4\]"):
        checkpoints.read(store, PREFIX, files, scratch=tmp_path, specs=other)
    with pytest.raises(FormatError, match=r"`layers/10/w` is float64\[3\], wanted absent"):
        checkpoints.read(
            store, PREFIX, files, scratch=tmp_path, specs=[s for s in specs if "10" not in s.name]
        )


def renamed(saved, change) -> tuple[MemoryStore, list[Payload]]:
    """A checkpoint whose files were changed by somebody who also named their hashes."""
    store, files, _ = saved
    other = copied(store, change=lambda key, data: change(key[len(PREFIX) + 1 :], data))
    named = []
    for file in files:
        data = other.get(f"{PREFIX}/{file.key}") or b""
        named.append(Payload(file.key, len(data), checkpoints.messages.digest([data])))
    return other, named


def test_another_format_is_named(saved, tmp_path):
    def change(key, data):
        return (
            json.dumps({**json.loads(data), "format": 9}).encode()
            if key == "run/metadata"
            else data
        )

    store, files = renamed(saved, change)
    with pytest.raises(FormatError, match="format 9; this build reads 1"):
        checkpoints.read(store, PREFIX, files, scratch=tmp_path, specs=saved[2])


@pytest.mark.parametrize("key", ["run/metadata", "params/_METADATA", "params/manifest.ocdbt"])
@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"format":1}', b"\xff" * 40])
def test_files_that_are_no_checkpoint_are_a_format_error(saved_small, key, data, tmp_path):
    store, files = renamed(saved_small, lambda k, d: data if k == key else d)
    with pytest.raises(FormatError):
        checkpoints.read(store, PREFIX, files, scratch=tmp_path, specs=saved_small[2])


# Alone with Orbax, and beside it.

PLAIN = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np, orbax.checkpoint as ocp
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec

path = Path(sys.argv[1])
with ocp.StandardCheckpointer() as checkpointer:
    params = checkpointer.restore(path / "params")
print(params["Dense_0"]["kernel"].tolist(), params["Dense_0"]["bias"].dtype)

with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    both = checkpointer.restore(path, args=ocp.args.Composite(
        master=ocp.args.StandardRestore(), run=ocp.args.JsonRestore()))
print(both.master["Dense_0"]["bias"].tolist(), both.run["round"], both.run["versions"])

mesh = jax.make_mesh((2,), ("x",))
split = NamedSharding(mesh, PartitionSpec("x"))
where = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split if a.ndim == 2 else
                                       NamedSharding(mesh, PartitionSpec()))
jax.config.update("jax_enable_x64", True)
with ocp.StandardCheckpointer() as checkpointer:
    params = checkpointer.restore(path / "params", jax.tree.map(where, params))
kernel = params["Dense_0"]["kernel"]
print([s.data.tolist() for s in kernel.addressable_shards], tuple(kernel.sharding.spec))
assert not any(name.startswith("jdiloco") for name in sys.modules)
"""


@pytest.mark.multiprocess
def test_a_folder_holds_a_checkpoint_that_orbax_alone_restores_onto_any_sharding(tmp_path):
    store = FolderStore(tmp_path / "mailbox")
    checkpoints.write(state_of(model()), store, PREFIX, scratch=tmp_path / "scratch")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path / "mailbox" / PREFIX)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]] bfloat16",
        "[2.0, 3.0, 4.0, 5.0] 7 [3, 4]",
        "[[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]] ('x',)",
    ]


KILLED = """
import os, sys, signal
from pathlib import Path
import numpy as np
from jdiloco.runtime import checkpoints, trees
from jdiloco.store.folder import FolderStore

class Dying(FolderStore):
    def create(self, key, data):
        if len(self.list("")) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(key, data)

w = {"w": np.ones(3, np.float32)}
state = checkpoints.RunState(w, w, {}, (0,), -1, b"{}")
checkpoints.write(state, Dying(sys.argv[1] + "/mailbox"), "run/save/a", scratch=Path(sys.argv[1]))
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("files_done", [0, 5])
def test_a_killed_writer_leaves_nothing_that_anything_names(tmp_path, files_done):
    """Only `write`'s return value names files; a later attempt has another prefix and is whole."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(files_done)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "none",
        },  # Writing starts no backend, so none is missed.
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    store = FolderStore(tmp_path / "mailbox")
    left = store.list("run/save/a")
    assert len(left) == files_done
    assert not any(Path(entry.key).name == "_CHECKPOINT_METADATA" for entry in left)

    state = state_of({"w": np.ones(3, np.float32)})
    files = checkpoints.write(state, store, "run/save/b", scratch=tmp_path / "scratch")
    found = checkpoints.read(
        store, "run/save/b", files, scratch=tmp_path / "scratch", specs=specs_of(state)
    )
    assert_same(found, state)


def test_nothing_is_printed_logged_left_running_or_put_on_a_device(tmp_path, capfd, caplog):
    threads, arrays = threading.enumerate(), len(jax.live_arrays())
    there_and_back(state_of(model()), tmp_path)
    assert threading.enumerate() == threads
    assert len(jax.live_arrays()) == arrays
    assert capfd.readouterr() == ("", "")
    assert [r for r in caplog.records if r.levelname not in ("DEBUG", "INFO")] == []


def test_a_library_thread_writes_while_the_program_saves_with_orbax_too(tmp_path):
    """Both go through Orbax's process-wide counters at once."""
    state = state_of(model())
    found, stop = [], threading.Event()

    def library():
        found.extend(there_and_back(state, tmp_path / "scratch") for _ in range(4))
        stop.set()

    thread = threading.Thread(target=library)
    thread.start()
    tree = {"w": jax.numpy.ones(1000)}
    saves = 0
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as user:
        while not stop.is_set():
            user.save(tmp_path / f"user-{saves}", args=ocp.args.StandardSave(tree))
            saves += 1
        user.wait_until_finished()
    thread.join()
    assert saves > 1
    assert len(found) == 4
    for each in found:
        assert_same(each, state)
