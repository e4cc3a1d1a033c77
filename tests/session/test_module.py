"""Flax NNX modules: trained in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jdiloco import events
from jdiloco.errors import UsageError
from jdiloco.session import load

from .nodes import Meeting, Recorder, algorithm, digest, memory, records, session, together
from .test_step import no_compilation


class Net(nnx.Module):
    """Two layers, batch statistics, dropout, and an embedding tied to the head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(16, 1, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jax.nn.relu(self.norm(self.first(x)))))


class Tied(nnx.Module):
    """`zembed` and `ahead` are one Variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.zembed = nnx.Embed(6, 4, rngs=rngs)
        self.ahead = self.zembed.embedding
        self.mix = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, tokens):
        return self.mix(self.zembed(tokens)) @ self.ahead[...].T


def rows(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray((x.sum(1, keepdims=True) > 0).astype(np.float32))


def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def update(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss


plain = nnx.jit(update)
donating = nnx.jit(update, donate_argnums=(0, 1))


def net(seed: int = 0) -> tuple[Net, nnx.Optimizer]:
    model = Net(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize("step", [plain, donating], ids=["plain", "donating"])
def test_a_module_is_trained_in_place_without_compiling_again(step):
    seen = Recorder()
    model, optimizer = net()
    x, y = rows()
    with session(model, algorithm(fragments=2), memory(), callbacks=(seen,)) as s:
        assert s.params is model

        def until(aligns: int) -> None:
            while len(seen.of(events.Aligned)) < aligns:
                jax.block_until_ready(step(model, optimizer, x, y))
                assert s.step(samples=64) is None

        until(4)
        with no_compilation():
            until(16)
        assert s.params is model


def test_the_loss_of_a_run_of_two_nodes_falls():
    """A real small model, two nodes with different rows: everything together."""
    # Waits for its commits, so that there are some however fast the steps are; and a lease that
    # no busy machine outlasts.
    settings = algorithm(
        sync_every=5, fragments=2, overlap_steps=1, flush_on_close=True, lease_seconds=20.0
    )
    mailbox, meet = memory(), Meeting(2)

    def node(index: int):
        model, optimizer = net(seed=index)
        x, y = rows(index)
        step = nnx.jit(update)
        with session(model, settings, mailbox, f"n{index}", leave_with_run=True) as s:
            first = float(loss_of(model, x, y))
            meet(s)
            for _ in range(60):
                step(model, optimizer, x, y)
                s.step(samples=64)
        model.eval()
        return first, float(loss_of(model, x, y)), digest(nnx.state(model, nnx.Param))

    (first, last, one), (_, _, other) = together(lambda: node(0), lambda: node(1))
    assert last < 0.5 * first
    assert one == other
    loaded = load(mailbox, Net(nnx.Rngs(9)))
    assert digest(nnx.state(loaded, nnx.Param)) == one


def test_batch_statistics_and_random_states_stay_the_nodes_own():
    model, _ = net()
    with session(model, algorithm(), mailbox := memory()) as s:
        names = [spec.name for spec in s._entry.schema.tensors]
    assert names == ["first/bias", "first/kernel", "last/kernel", "norm/bias", "norm/scale"]
    assert records(mailbox) == []


def test_a_joiners_module_holds_the_runs_values():
    """B105: other seeds, equal values, and the module's own Variables."""
    mailbox = memory()
    with session(net(0)[0], algorithm(), mailbox, "a") as first:
        late, _ = net(7)
        kernel = late.first.kernel
        with session(late, algorithm(), mailbox, "b"):
            assert late.first.kernel is kernel
            ours, theirs = (nnx.state(m, nnx.Param) for m in (late, first.params))
            assert digest(ours) == digest(theirs)


def test_a_shared_variable_counts_once_and_stays_shared():
    """Tied weights: one tensor, one delta, the same Variable after an align."""
    seen = Recorder()
    settings = algorithm(sync_every=1, overlap_steps=0, outer_lr=1.0, outer_momentum=0.0)
    model = Tied(nnx.Rngs(0))
    with session(model, settings, memory(), callbacks=(seen,)) as s:
        assert [spec.name for spec in s._entry.schema.tensors] == [
            "ahead",
            "mix/bias",
            "mix/kernel",
        ]
        before = np.asarray(model.ahead[...])
        model.ahead[...] = model.ahead[...] - 0.5
        s.step(samples=1)
        assert model.zembed.embedding is model.ahead
        np.testing.assert_allclose(model.zembed.embedding[...], before - 0.5, rtol=1e-6)
    jax.block_until_ready(model(jnp.arange(3)))


def test_after_the_block_a_module_holds_the_newest_committed_values():
    """B94: not what this node trained since."""
    mailbox = memory()
    model, _ = net()
    with session(model, algorithm(sync_every=1000), mailbox) as s:
        before = digest(nnx.state(model, nnx.Param))
        bias = model.first.bias
        assert bias is not None
        bias[...] = bias[...] + 1.0
        s.step(samples=1)
        assert digest(nnx.state(s.params, nnx.Param)) != before
    assert digest(nnx.state(model, nnx.Param)) == before
    assert s.params is model


def test_parameters_passed_to_a_module_session_are_refused():
    model, _ = net()
    with (
        session(model, algorithm(), memory()) as s,
        pytest.raises(UsageError, match="trains a module in place"),
    ):
        s.step(nnx.state(model), samples=1)


def test_an_optimizer_and_a_class_are_no_model():
    model, optimizer = net()
    for slip, said in (
        (optimizer, "`params` is an nnx.Optimizer. Pass the module that it trains"),
        (type(model), f"`params` is the class {type(model).__name__}. Pass an instance"),
    ):
        with pytest.raises(UsageError, match=said):
            session(slip, algorithm(), memory())


def test_a_program_that_trains_a_split_state_is_warned():
    """Its module never changes, so every delta would be zero, in silence."""
    seen = Recorder()
    model, _ = net()
    with session(model, algorithm(sync_every=2), memory(), callbacks=(seen,)) as s:
        for _ in range(2):
            s.step(samples=1)
        (warned,) = seen.wait(events.Warned)
    assert "opens the session with that state" in warned.message


def test_a_split_state_may_be_trained_as_a_tree():
    model, _ = net()
    graphdef, state = nnx.split(model, nnx.Param, ...)[:2]
    del graphdef
    with session(state, algorithm(sync_every=1, overlap_steps=0), memory()) as s:
        state = s.params
        state = jax.tree.map(lambda x: x - 0.1, state)
        state = s.step(state, samples=1)
        assert isinstance(state, nnx.State)
    assert s.params["first"]["kernel"][...].shape == (8, 16)


def test_run_calls_the_step_and_the_session():
    model, optimizer = net()
    x, y = rows()
    mailbox = memory()
    settings = algorithm(sync_every=2, overlap_steps=0)

    def step(module, item):
        plain(module, optimizer, x, y)
        return len(item)

    with session(model, settings, mailbox) as s:
        assert s.run(step, [[0] * 8] * 4) is model
    assert [r.participants[0].counters.samples for r in records(mailbox)] == [16, 16]


def test_a_run_of_a_tree_passes_parameters_along():
    mailbox = memory()
    with session({"w": jnp.ones(3)}, algorithm(sync_every=2, overlap_steps=0), mailbox) as s:
        params = s.run(lambda p, item: ({"w": p["w"] - item}, 4), [0.1, 0.2, 0.3, 0.4])
        assert set(params) == {"w"}
    assert [r.participants[0].counters.samples for r in records(mailbox)] == [8, 8]


def test_a_variable_that_holds_nothing_or_a_tree_is_no_trouble():
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.empty = nnx.Param(None)
            self.tree = nnx.Cache({"a": jnp.ones(2), "b": jnp.ones(3)})
            self.w = nnx.Param(jnp.ones(4))
            self.raw = jnp.ones(2)

    with session(Odd(), algorithm(), memory()) as s:
        assert [spec.name for spec in s._entry.schema.tensors] == ["w"]
