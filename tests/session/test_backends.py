"""Where anchors live, and what a session does with devices that have memory of their own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdiloco import blend, carry, overwrite
from jdiloco.algo.merges import weighted_mean
from jdiloco.errors import UsageError
from jdiloco.protocol.records import Incarnation, unseal
from jdiloco.runtime import backends
from jdiloco.runtime.backends import CPU, GPU, TPU

from .nodes import Recorder, algorithm, memory, run_keys, run_script, session, vector
from .test_step import make_step, model, no_compilation, optimizer, placed_model, train_with_aligns

OFF_THE_DEVICE = dataclasses.replace(CPU, anchor_memory="pinned_host", copies_ahead=True)
"""What a GPU or a TPU does, on devices that are here: a CPU knows pinned memory too."""


def anchors(s) -> list[jax.Array]:
    return [anchor for leaves in s._entry.learner._anchors.of for anchor in leaves]


@pytest.mark.parametrize("setting", [overwrite(), carry(), blend(0.5)], ids=str)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "committed"])
def test_with_pinned_anchors_a_donating_step_does_not_compile_again(kind, setting):
    """Nor is anything else compiled, or moved implicitly; and anchors are where they belong."""
    settings = algorithm(fragments=3, sync_every=6, alignment=setting)
    seen, step = Recorder(), make_step()
    batch = jnp.ones((8, 16))
    params = placed_model(kind)
    with session(params, settings, memory(), callbacks=(seen,), backend=OFF_THE_DEVICE) as s:
        params = s.params
        state = optimizer.init(params)
        params, state = train_with_aligns(s, params, state, step, 6, batch, seen)
        with no_compilation(), jax.transfer_guard("disallow"):
            params, state = train_with_aligns(s, params, state, step, 24, batch, seen)
        assert {anchor.sharding.memory_kind for anchor in anchors(s)} == {"pinned_host"}
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(params)} == {"device"}
        assert {leaf.committed for leaf in jax.tree.leaves(params)} == {kind == "committed"}


def in_pinned_memory(params):
    """Parameters that a program keeps off the device between its steps."""
    return jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), params
    )


def make_offloaded_step(like):
    """`make_step` on parameters in pinned memory: they come for the step and go again."""
    inner = make_step(donate=False)

    def step(params, state, batch):
        here = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), params)
        return inner(here, state, batch)

    places = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(step, out_shardings=(places, None, None), donate_argnums=(0, 1))


@pytest.mark.parametrize("backend", [CPU, OFF_THE_DEVICE], ids=["beside", "pinned"])
@pytest.mark.parametrize("setting", [overwrite(), carry()], ids=str)
def test_parameters_that_live_in_pinned_memory_stay_there_and_nothing_compiles(setting, backend):
    settings = algorithm(fragments=3, sync_every=6, alignment=setting)
    seen, batch = Recorder(), jnp.ones((8, 16))
    start = in_pinned_memory(model())
    step = make_offloaded_step(start)
    with session(start, settings, memory(), callbacks=(seen,), backend=backend) as s:
        params = s.params
        state = optimizer.init(model())
        params, state = train_with_aligns(s, params, state, step, 6, batch, seen)
        with no_compilation(), jax.transfer_guard("disallow"):
            params, state = train_with_aligns(s, params, state, step, 20, batch, seen)
        everything = [*anchors(s), *jax.tree.leaves(params), *jax.tree.leaves(s.params)]
        assert {array.sharding.memory_kind for array in everything} == {"pinned_host"}
        assert np.isfinite(np.asarray(params["w"])).all()


@pytest.mark.parametrize("kind", ["unpinned_host", "pinned_host", "device"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
def test_where_anchors_live_changes_no_bit(kind, dtype):
    """The same training, whatever memory parameters and anchors are in."""

    def train(backend, kind: str) -> np.ndarray:
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        start = jax.device_put(jnp.linspace(0, 1, 64, dtype=dtype), where)
        settings = algorithm(sync_every=2, overlap_steps=0, fragments=1)
        with session({"w": start}, settings, memory(), backend=backend) as s:
            params = s.params
            for number in range(12):
                grown = np.asarray(params["w"]) * dtype(1 + 0.01 * number) - dtype(0.1)
                params = s.step({"w": jax.device_put(grown, where)}, samples=8)
        return np.asarray(s.params["w"])

    assert train(OFF_THE_DEVICE, kind).tobytes() == train(CPU, "device").tobytes()


def test_numpys_parameters_have_their_anchors_in_pinned_memory_too():
    settings = algorithm(
        sync_every=1, overlap_steps=0, outer_lr=1.0, outer_momentum=0.0, merge=weighted_mean()
    )
    start = {"w": np.ones(5, np.float32)}
    with session(start, settings, memory(), backend=OFF_THE_DEVICE) as s:
        params = s.params
        for _ in range(3):
            params = s.step({"w": np.asarray(params["w"]) - 0.25}, samples=1)
        assert anchors(s)[0].sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(s.params["w"], 0.25)
        assert not s.params["w"].committed


# Which one


def test_the_backend_is_that_of_the_parameters_devices():
    for leaves in ([], [np.ones(2)], [jnp.ones(2)], [jax.device_put(1.0, jax.devices()[0])]):
        assert backends.chosen(None, leaves) is CPU
    assert backends.chosen("cpu", [jnp.ones(2)]) is CPU
    assert backends.chosen(OFF_THE_DEVICE, [jnp.ones(2)]) is OFF_THE_DEVICE


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("cuda", r"`backend` is 'cuda'; there are 'cpu', 'gpu', 'tpu'.*JAX has here: \d+ cpu\."),
        ("gpu", r"'gpu', which is for 'cuda', 'gpu', 'rocm', and the parameters lie on 'cpu'.*"
                r"JAX has here: \d+ cpu\. Put the parameters"),
        (TPU, r"`backend` is 'tpu', which is for 'tpu', and the parameters lie on 'cpu'"),
        (dataclasses.replace(CPU, anchor_memory="hbm"),
         r"live in 'hbm' memory, and .* has 'device', 'pinned_host'"),
    ],
)  # fmt: skip
def test_a_wrong_backend_is_refused_and_says_what_there_is(wanted, message):
    with pytest.raises(UsageError, match=message):
        session(model(), algorithm(), memory(), backend=wanted)


def test_a_node_without_parameters_is_on_the_cpu():
    with pytest.raises(UsageError, match="without parameters a node has work for the CPU alone"):
        session(None, algorithm(), memory(), role="syncer", backend="gpu")
    session(None, algorithm(), memory(), role="syncer", backend="cpu")


class Device:
    """A device of another kind, as far as choosing a backend looks at it."""

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def addressable_memories(self):
        return [type("Memory", (), {"kind": kind}) for kind in ("device", "pinned_host")]


def leaf_on(monkeypatch, *platforms: str):
    """A parameter on devices of these platforms, which are not here."""
    places = {Device(platform) for platform in platforms}
    sharding = type("Sharding", (), {"device_set": places, "addressable_devices": places})
    monkeypatch.setattr("jdiloco.runtime.backends.choice.sharding_of", lambda leaf: sharding)
    return np.ones(2)


@pytest.mark.parametrize(("platform", "backend"), [("gpu", GPU), ("tpu", TPU), ("cpu", CPU)])
def test_each_platform_has_its_backend(monkeypatch, platform, backend):
    assert backends.chosen(None, [leaf_on(monkeypatch, platform)]) is backend


def test_parameters_on_a_platform_that_nobody_described_are_refused_until_somebody_does(
    monkeypatch,
):
    leaf = leaf_on(monkeypatch, "metal")
    with pytest.raises(UsageError, match=r"lie on 'metal', for which there is no backend; there"):
        backends.chosen(None, [leaf])
    mine = backends.Backend(name="metal", platforms=("metal",))
    assert backends.chosen(mine, [leaf]) is mine


def test_parameters_on_two_platforms_are_refused(monkeypatch):
    leaf = leaf_on(monkeypatch, "cpu", "gpu")
    with pytest.raises(UsageError, match=r"lie on 'cpu', 'gpu'. One step cannot compute with both"):
        backends.chosen(None, [leaf])


def test_a_jax_that_was_told_to_see_a_gpu_alone_is_told_to_see_the_cpu_as_well(monkeypatch):
    """`JAX_PLATFORMS=cuda` hides the device that rounds are closed on."""

    def nothing(backend=None):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", nothing)
    with pytest.raises(UsageError, match=r"no CPU device here: `JAX_PLATFORMS` is .*,cpu, where"):
        session(model(), algorithm(), memory())


def test_a_mailbox_says_which_backend_a_node_has():
    """Of a node with pinned anchors on the CPU, the name that was given to that."""
    odd = dataclasses.replace(OFF_THE_DEVICE, name="cpu-pinned")
    mailbox = memory()
    with session(vector(1.0), algorithm(), mailbox, "a", backend=odd):
        key = run_keys(mailbox).incarnation("a", 1)
        data = mailbox.get(key)
        assert data is not None
        assert unseal(key, data, Incarnation).backend == "cpu-pinned"


ALONE = """
    import sys
    import numpy as np
    import jax
    from jax._src import xla_bridge

    asked = []
    for name in ("devices", "local_devices", "default_backend"):
        def spy(*arguments, name=name, real=getattr(jax, name), **named):
            if sys._getframe(1).f_globals["__name__"].startswith("jdiloco"):
                asked.append((name, *arguments, *named.items()))
            return real(*arguments, **named)
        setattr(jax, name, spy)

    from tests.session.nodes import Recorder, algorithm, events, memory, session
    import jdiloco.callbacks, jdiloco.spmd, jdiloco.runtime.verify

    assert not xla_bridge.backends_are_initialized(), "importing starts no device"
    import jax.numpy as jnp
    seen = Recorder()
    with session({"w": jnp.ones(4)}, algorithm(sync_every=1), memory(), callbacks=(seen,)) as s:
        params = s.params
        while len(seen.of(events.Committed)) < 2:
            params = s.step({"w": params["w"] - 0.1}, samples=1)
            jax.block_until_ready(params)
    assert list(xla_bridge.backends()) == ["cpu"], list(xla_bridge.backends())
    assert set(asked) == {("local_devices", ("backend", "cpu"))}, asked
    print(sorted(m for m in sys.modules if m.startswith(("jax_cuda", "jax_rocm", "libtpu"))))
"""


@pytest.mark.multiprocess
def test_on_the_cpu_nothing_asks_for_another_platform():
    """Not even for the default one: JAX says where parameters lie."""
    assert run_script(ALONE, environment={"JAX_PLATFORMS": "cpu"}) == "[]\n"
