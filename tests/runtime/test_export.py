"""`jdiloco.export`: what the run committed, where others can restore it, all of it or nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jdiloco.errors import FormatError, UsageError
from jdiloco.protocol.keys import MANIFEST
from jdiloco.runtime import messages, payloads, trees
from jdiloco.runtime.export import UNFINISHED, export
from jdiloco.runtime.inspect import find_run
from jdiloco.store import FolderStore, MemoryStore
from tests.session.nodes import ROOT, algorithm, memory, run_script, session

from .mailboxes import Objects, mailbox, mixed_model, objects_of, rda_run, records_of

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def rda() -> Objects:
    return rda_run()


@pytest.fixture(scope="module")
def newborn() -> Objects:
    """A run in which nothing was committed."""
    store = memory()
    with session(mixed_model(), algorithm(sync_every=1000), store, "a"):
        pass
    return objects_of(store)


class ReadOnly(MemoryStore):
    """A mailbox that nobody may change any more."""

    filled = False

    def create(self, key, data):
        assert not self.filled, key
        return super().create(key, data)

    def delete(self, keys):
        raise AssertionError(list(keys))


def restored(path) -> dict:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def named(tree) -> dict[str, np.ndarray]:
    """The leaves of a restored tree by path name."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in paths}


def hashes(objects: Objects) -> list[tuple[str, str]]:
    """Of every fragment's newest anchor and outer state, as the records say."""
    log = records_of(objects)
    heads = [log[head] for head in log[-1].heads]
    return [(r.anchor.sha256, r.outer.sha256) for r in heads if r.anchor and r.outer]


def plan_of(objects: Objects) -> tuple[tuple[str, ...], ...]:
    manifest = find_run(mailbox(objects))[0]
    order = [spec.name for spec in manifest.tensors]
    return tuple(tuple(sorted(names, key=order.index)) for names in manifest.plan)


# What is in it


def test_the_parameters_are_the_committed_bytes(rda, tmp_path):
    """B94: per fragment, the hash is that of the record."""
    made = export(mailbox(rda), tmp_path / "model")
    found = named(restored(tmp_path / "model"))
    log = records_of(rda)
    assert (made.round, made.versions) == (log[-1].round, log[-1].versions)
    assert (made.tensors, made.bytes) == (3, 4 * 120 + 2 * 5 + 4 * 6)
    assert {name: array.dtype.name for name, array in found.items()} == {
        "bias": "bfloat16",
        "dense/w": "float32",
        "embed": "float32",
    }
    for names, (anchor, _) in zip(plan_of(rda), hashes(rda), strict=True):
        data = payloads.encode_anchor({name: found[name] for name in names})
        assert messages.digest(data) == anchor


def test_with_the_outer_state_it_is_committed_bytes_too(rda, tmp_path):
    export(mailbox(rda), tmp_path / "model", outer=True)
    tree = restored(tmp_path / "model")
    assert set(tree) == {"params", "momentum", "master"}
    assert set(named(tree["master"])) == {"bias"}
    values, momentum, master = (named(tree[item]) for item in ("params", "momentum", "master"))
    for names, (anchor, outer) in zip(plan_of(rda), hashes(rda), strict=True):
        data = payloads.encode_anchor({name: values[name] for name in names})
        assert messages.digest(data) == anchor
        data = payloads.encode_outer(
            {name: momentum[name] for name in names},
            {name: master[name] for name in names if name in master},
        )
        assert messages.digest(data) == outer


def test_before_the_first_round_it_is_what_the_run_was_created_with(newborn, tmp_path):
    made = export(mailbox(newborn), tmp_path / "model", outer=True)
    assert (made.round, made.versions) == (-1, (0,))
    tree = restored(tmp_path / "model")
    jax.tree.map(np.testing.assert_array_equal, tree["params"], mixed_model())
    assert not any(np.any(array) for array in named(tree["momentum"]).values())


def test_orbax_tells_where_it_is_from(rda, tmp_path):
    made = export(mailbox(rda), tmp_path / "model")
    with ocp.StandardCheckpointer() as checkpointer:
        about = checkpointer.metadata(tmp_path / "model").item_metadata.custom_metadata
    assert about["jdiloco"] == {
        "run": made.run,
        "round": made.round,
        "versions": list(made.versions),
        "elsewhere": {},
    }


def test_names_that_nest_nowhere_are_told_too(tmp_path):
    """A tensor that is called as a part of another's name."""
    store = memory()
    with session(
        {"a": {"b": np.ones(2, np.float32)}, "a/b/c": np.zeros(3, np.float32)},
        algorithm(sync_every=1000),
        store,
        "a",
    ):
        pass
    export(store, tmp_path / "model")
    with ocp.StandardCheckpointer() as checkpointer:
        about = checkpointer.metadata(tmp_path / "model").item_metadata.custom_metadata
    assert about["jdiloco"]["elsewhere"] == {"a/b": "#0"}
    np.testing.assert_array_equal(restored(tmp_path / "model")["#0"], np.ones(2))


# Whoever restores it


RESTORE = """
    import sys
    import flax.linen as nn
    import jax, jax.numpy as jnp, numpy as np
    import orbax.checkpoint as ocp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec as P

    path = sys.argv[1]
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    like = {
        "layers": {
            "0": {"kernel": jax.ShapeDtypeStruct(
                (16, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P("y", "x"))
            ), "bias": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P()))},
        }
    }
    plain = ocp.checkpoint_utils.construct_restore_args(like)

    def standard():
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, like)

    def pytree():
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(path, item=like, restore_args=plain)

    def handled():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            args = ocp.args.PyTreeRestore(item=like, restore_args=plain)
            return checkpointer.restore(path, args=args)

    def handled_standard():
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=ocp.args.StandardRestore(like))

    kernel = np.arange(128, dtype=np.float32).reshape(16, 8).astype(jnp.bfloat16)
    for restore in (standard, pytree, handled, handled_standard):
        layer = restore()["layers"]["0"]
        assert layer["kernel"].sharding == like["layers"]["0"]["kernel"].sharding, restore
        assert len(layer["kernel"].sharding.device_set) == 8
        assert layer["kernel"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(layer["kernel"]), kernel)
        np.testing.assert_array_equal(np.asarray(layer["bias"]), np.full(8, 0.5, np.float32))

    # As they come: for Linen.
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(path)
    dense = nn.Dense(8, dtype=jnp.float32)
    out = dense.apply({"params": params["layers"]["0"]}, jnp.ones((1, 16)))
    np.testing.assert_allclose(out[0], kernel.astype(np.float32).sum(0) + 0.5, rtol=1e-2)

    # For NNX, whose keys of lists are numbers.
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(16, 8, param_dtype=jnp.bfloat16, rngs=rngs)])

    net = Net(nnx.Rngs(0))
    state = nnx.state(net, nnx.Param)
    nnx.replace_by_pure_dict(state, nnx.restore_int_paths(params))
    nnx.update(net, state)
    np.testing.assert_array_equal(np.asarray(net.layers[0].kernel[...]), kernel)
    assert not any(name.partition(".")[0] == "jdiloco" for name in sys.modules)
"""

SHARDED_RUN = """
    import sys
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    import jdiloco
    from tests.session.nodes import algorithm, session

    mesh = jax.make_mesh((8,), ("m",))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    params = {"layers": [{
        "kernel": put(jnp.arange(128.0).reshape(16, 8).astype(jnp.bfloat16), "m", None),
        "bias": put(jnp.ones(8), None),
    }]}
    settings = algorithm(sync_every=1, overlap_steps=0, outer_lr=1.0, outer_momentum=0.0)
    with session(params, settings, sys.argv[1], "a") as s:
        layer = dict(s.params["layers"][0])
        layer["bias"] = layer["bias"] - 0.5
        s.step({"layers": [layer]}, samples=1)
    assert jdiloco.export(sys.argv[1], sys.argv[2]).round == 0
"""


@pytest.mark.multiprocess
def test_a_plain_flax_program_restores_it_onto_another_mesh(tmp_path):
    """Trained on a mesh of eight, restored on one of two by four; with each of Orbax's readers, and
    into Linen and NNX."""
    where, path = str(tmp_path / "run"), str(tmp_path / "model")
    run_script(SHARDED_RUN, where, path, environment=EIGHT)
    run_script(RESTORE, path, environment=EIGHT)


# All of it or nothing


def test_it_replaces_nothing(rda, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("years of work")
    (tmp_path / "file").write_text("years of work")
    for name, said in {"full": "directory with something", "file": "is no directory"}.items():
        with pytest.raises(UsageError, match=said):
            export(mailbox(rda), tmp_path / name)
    with pytest.raises(UsageError, match="cannot be written"):
        export(mailbox(rda), tmp_path / "file" / "below")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]


def test_an_empty_directory_is_as_good_as_none(rda, tmp_path):
    (tmp_path / "empty").mkdir()
    export(mailbox(rda), tmp_path / "empty")
    export(mailbox(rda), tmp_path / "deep" / "down")
    assert (
        named(restored(tmp_path / "empty")).keys() == named(restored(tmp_path / "deep/down")).keys()
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "empty"]


def test_a_directory_that_is_filled_meanwhile_stays_as_it_is(rda, tmp_path, monkeypatch):
    save = trees.save

    def slow(path, *args, **more):
        save(path, *args, **more)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "other").write_text("somebody else's")

    monkeypatch.setattr(trees, "save", slow)
    with pytest.raises(UsageError, match="directory with something"):
        export(mailbox(rda), tmp_path / "model")
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "other"]


def test_it_writes_nothing_to_the_mailbox_and_not_into_its_folder(rda, tmp_path):
    store = mailbox(rda, ReadOnly)
    ReadOnly.filled = True
    export(store, tmp_path / "model")
    assert objects_of(store) == rda
    folder = FolderStore(tmp_path / "run")
    for key, data in rda.items():
        folder.create(key, data)
    with pytest.raises(UsageError, match="lies in the mailbox"):
        export(folder, tmp_path / "run" / "model")
    assert objects_of(folder) == rda


def test_what_is_damaged_is_not_exported(rda, tmp_path):
    log = records_of(rda)
    anchor = log[log[-1].heads[0]].anchor
    assert anchor is not None
    with pytest.raises(FormatError, match="was damaged"):
        export(mailbox({**rda, anchor.key: b"rubbish"}), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_run_it_says_what_there_is(tmp_path):
    with pytest.raises(UsageError, match="it is empty"):
        export(memory(), tmp_path / "model")
    with pytest.raises(UsageError, match="but no `manifest`"):
        export(mailbox({f"{MANIFEST}-old": b""}), tmp_path / "model")


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from jdiloco.runtime import export, trees

    def die(*args, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    where, target, when = sys.argv[1:]
    if when == "writing":
        trees._tree_metadata = die
    elif when == "written":
        export._bring_to_disk = die
    else:
        Path.rename = die
    export.export(where, target)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("when", ["writing", "written", "renaming"])
def test_a_kill_leaves_nothing_that_looks_complete(rda, tmp_path, when):
    where = FolderStore(tmp_path / "run")
    for key, data in rda.items():
        where.create(key, data)
    target = tmp_path / "model"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), where.url, str(target), when]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == -signal.SIGKILL
    assert not target.exists()
    (left,) = [path for path in tmp_path.iterdir() if path.name != "run"]
    assert UNFINISHED in left.name
    with pytest.raises((ValueError, FileNotFoundError)):
        restored(left)
    export(where, target)
    assert named(restored(target)).keys() == {"bias", "dense/w", "embed"}


def test_the_command_says_what_it_wrote_and_how_to_restore_it(rda, tmp_path, capsys):
    from jdiloco.cli.export import run_export

    where = FolderStore(tmp_path / "run")
    for key, data in rda.items():
        where.create(key, data)
    assert run_export(where.url, tmp_path / "model", outer=False, as_json=False) == 0
    said = capsys.readouterr().out
    assert f"after round {len(records_of(rda)) - 1}: 3 tensors" in said
    lines = said[said.index("import orbax") :]
    scope: dict = {}
    exec(lines, scope)
    assert named(scope["params"]).keys() == {"bias", "dense/w", "embed"}
    assert run_export(where.url, tmp_path / "all", outer=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["round"] == len(records_of(rda)) - 1
