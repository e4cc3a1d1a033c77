"""A run whose commits go out in few bits: who reads what, and that everybody holds the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdiloco import events
from jdiloco.errors import RunConfigMismatch, UsageError
from jdiloco.protocol.keys import Keys
from jdiloco.runtime.export import export
from jdiloco.runtime.payloads import read_anchor, read_outer
from jdiloco.runtime.verify import verify
from jdiloco.session import Session, load
from jdiloco.store import MemoryStore, Store
from jdiloco.store.counting import CountingStore
from jdiloco.testing.faults import FAIL, Call, FaultyStore

from .nodes import (
    Meeting,
    Recorder,
    algorithm,
    digest,
    lock_step,
    memory,
    node_of,
    records,
    run_keys,
    session,
    together,
    wait_until,
)

SIZE = 4096
PARTS = ("anchor", "outer", "update")
FORMATS = ["bfloat16", "float16", "float8_e4m3fn", "float4_e2m1fn"]


def model() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "body": jnp.asarray(rng.normal(size=SIZE), jnp.float32),
        "scale": jnp.ones((), jnp.float32),
        "table": jnp.asarray(rng.normal(size=(7, 9)), jnp.bfloat16),
    }


def trained(params: Any, node: int, step: int) -> Any:
    """Never the same twice, the same for everybody who asks."""
    rng = np.random.default_rng([node, step])

    def moved(x: Any) -> jax.Array:
        wide = np.asarray(x).astype(np.float32) - 0.02 * rng.normal(size=x.shape)
        return jnp.asarray(wide, x.dtype)

    return {name: moved(x) for name, x in params.items()}


def train(s: Session, node: int, steps: int) -> list[str]:
    """Of what was committed by the end of each step, a hash."""
    params, hashes = s.params, []
    for at in range(steps):
        params = s.step(trained(params, node, at), samples=node + 1)
        hashes.append(digest(s.params))
    return hashes


class Watched(MemoryStore):
    """A node's way to a mailbox that remembers which payloads it read, and may change updates."""

    def __init__(
        self, inner: MemoryStore, change: Callable[[bytes], bytes | None] = lambda data: data
    ) -> None:
        super().__init__(inner.url.removeprefix("memory://"))
        self.change = change
        self.read: list[str] = []

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        data = super().get(key, start=start, stop=stop)
        if "/data/" in key:
            self.read.append(key.rpartition(".")[2])
        return self.change(data) if data is not None and key.endswith(".update") else data


def two_nodes(
    settings: Any,
    steps: int,
    mailbox: Store,
    its: Any,
    seen: Recorder | None = None,
    joined: Callable[[], object] = lambda: None,
) -> tuple[list[str], list[str]]:
    """One node closes; the other, which reaches the mailbox through `its`, only learns."""
    meet = Meeting(2)

    def closer() -> list[str]:
        hashes: list[str] = []
        with session(model(), settings, mailbox, "closer") as s:
            meet(s)
            hashes = train(s, 0, steps)
        return hashes

    def learner() -> list[str]:
        hashes: list[str] = []
        wait_until(lambda: mailbox.get("manifest") is not None)
        more = {"role": "learner", "callbacks": (seen,) if seen else ()}
        with session(model(), settings, its, "learner", **more) as s:
            joined()
            meet(s)
            hashes = train(s, 1, steps)
        return hashes

    found = together(closer, learner)
    return found[0], found[1]


@pytest.mark.parametrize("dtype", FORMATS)
def test_all_hold_the_same_bytes_and_so_does_who_reads_from_outside(dtype, tmp_path):
    """A closer that commits, a learner that rebuilds, `load`; and `verify` recomputes all of it."""
    settings = lock_step(
        2, sync_every=2, fragments=2, in_flight=1, commit_dtype=dtype,
        momentum_dtype="bfloat16", keep_rounds=99, checkpoint_every=99,
    )  # fmt: skip
    mailbox = memory()
    hashes, others = two_nodes(settings, 12, mailbox, mailbox)

    assert hashes == others
    assert len(set(hashes)) >= 10, "each round moved something"
    assert digest(load(mailbox, model())) == hashes[-1]
    export(mailbox, tmp_path / "model", outer=True)
    report = verify(mailbox)
    assert not report.findings
    assert {stretch.how for stretch in report.rounds} == {"recomputed"}
    assert all(record.update is not None for record in records(mailbox) if not record.void)


def test_a_learner_that_follows_reads_updates_and_nothing_else():
    """A byte for each element in place of four."""
    read = {}
    for dtype, part in (("float8_e4m3fn", "update"), (None, "anchor")):
        settings = lock_step(2, sync_every=2, commit_dtype=dtype, checkpoint_every=99)
        mailbox = memory()
        watched = Watched(mailbox)
        counting = CountingStore(watched)
        before: list[int] = []

        def joined(before: list[int] = before, counting: CountingStore = counting) -> None:
            before.append(counting.tallies["get"].bytes)

        two_nodes(settings, 12, mailbox, counting, joined=joined)
        rounds = len(records(mailbox))
        assert watched.read == [part] * rounds
        read[part] = (counting.tallies["get"].bytes - before[0]) / rounds
    assert read["anchor"] - read["update"] > 0.97 * 3 * SIZE


def test_who_joins_late_reads_whole_anchors_and_updates_from_then_on():
    settings = algorithm(sync_every=1, commit_dtype="float4_e2m1fn", overlap_steps=0)
    mailbox = memory()
    watched = Watched(mailbox)
    with session(model(), settings, mailbox, "old") as old:
        train(old, 0, 4)
        with session(model(), settings, watched, "new", role="learner") as new:
            assert watched.read == ["anchor"]
            assert digest(new.params) == digest(old.params)
            for at in range(3):
                before = len(records(mailbox))
                old.step(trained(old.params, 0, at), samples=1)
                wait_until(lambda before=before: len(records(mailbox)) > before)
                params = new.params
                while digest(new.params) != digest(old.params):
                    params = new.step(params, samples=1)
                    old.step(old.params, samples=1)
    assert set(watched.read[1:]) == {"update"}


def test_who_fell_behind_by_more_than_a_version_reads_the_whole_anchor():
    settings = algorithm(sync_every=1, commit_dtype="float8_e4m3fn", overlap_steps=0)
    mailbox, held = memory(), []

    def script(call: Call) -> Any:
        return held[0] if held and call.verb == "list" else None

    watched = Watched(mailbox)
    with session(model(), settings, mailbox, "old") as old:
        train(old, 0, 1)
        with session(model(), settings, FaultyStore(watched, script), "new", role="learner") as new:
            assert watched.read == ["anchor"]
            held.append(FAIL)  # It hears of nothing.
            train(old, 0, 3)
            held.clear()
            read = len(records(mailbox))
            wait_until(lambda: node_of(new).state.chain.read >= read - 1)
            wait_until(lambda: len(watched.read) > 1)
            assert watched.read[1] == "anchor"
            new.step(new.params, samples=1)
            assert digest(new.params) == digest_of(mailbox, new)


def digest_of(mailbox: Store, s: Session) -> str:
    """That of the version that a node of one fragment holds, as the run has committed it."""
    assert s._entry.learner is not None
    (held,) = s._entry.learner.state.fragments
    record = records(mailbox)[held.version - 1]
    assert (record.version, record.void) == (held.version, False)
    anchor = read_anchor(mailbox, record, s._entry.schema.tensors)
    assert anchor is not None
    return digest(anchor)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_an_update_that_is_damaged_is_noticed_and_the_whole_anchor_read(damage):
    """B119. One that is gone is nobody's fault: the anchor is there."""
    changes: dict[str, Callable[[bytes], bytes | None]] = {
        "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "cut": lambda data: data[:-1],
        "gone": lambda data: None,
    }
    settings = lock_step(2, sync_every=2, commit_dtype="float8_e4m3fn")
    mailbox, seen = memory(), Recorder()
    watched = Watched(mailbox, changes[damage])
    hashes, others = two_nodes(settings, 6, mailbox, watched, seen)
    assert hashes == others
    assert watched.read == ["update", "anchor"] * 3
    warned = [event.message for event in seen.of(events.Warned)]
    assert len(warned) == (0 if damage == "gone" else 3)
    assert all("do not match" in text and "whole anchor" in text for text in warned)


def test_verify_names_an_update_that_was_changed_and_nothing_else():
    settings = algorithm(sync_every=1, commit_dtype="float8_e4m3fn", overlap_steps=0)
    mailbox = memory()
    with session(model(), settings, mailbox, "n") as s:
        train(s, 0, 3)
        wait_until(lambda: len(records(mailbox)) == 3)
    update = records(mailbox)[-1].update
    assert update is not None
    data = mailbox.get(update.key)
    assert data is not None
    mailbox.delete([update.key])
    mailbox.create(update.key, data[:-1] + bytes([data[-1] ^ 1]))
    report = verify(mailbox)
    assert [finding.key for finding in report.findings] == [update.key]
    assert "whole anchor" in report.findings[0].means


def test_an_update_that_leads_elsewhere_is_noticed_by_the_digest_of_the_anchor(monkeypatch):
    """A machine whose arithmetic is not everybody's would be told from the others so."""
    from jdiloco.runtime import held, updates

    honest = updates.rebuilt

    def off_by_one_bit(*arguments: Any) -> Any:
        values = {name: array.copy() for name, array in honest(*arguments).items()}
        values["body"][0] = np.nextafter(values["body"][0], np.float32(9))
        return values

    monkeypatch.setattr(held.updates, "rebuilt", off_by_one_bit)
    settings = lock_step(2, sync_every=2, commit_dtype="float8_e4m3fn")
    mailbox, seen = memory(), Recorder()
    hashes, others = two_nodes(settings, 4, mailbox, mailbox, seen)
    assert hashes == others
    assert any("does not lead" in event.message for event in seen.of(events.Warned))


def test_a_node_that_resumes_goes_on_by_updates(tmp_path):
    """What it saved is a version that it holds."""
    settings = algorithm(sync_every=2, commit_dtype="float8_e4m3fn", overlap_steps=0)
    mailbox = memory()
    watched = Watched(mailbox)
    with session(model(), settings, mailbox, "old") as old:
        train(old, 0, 4)
        with session(model(), settings, mailbox, "new", role="learner") as new:
            new.save(tmp_path / "1")
        quiet = {"poll_interval": 0.02, "callbacks": (), "role": "learner"}
        restored = Session.restore(tmp_path / "1", model(), settings, watched, **quiet)
        with restored as again:
            train(old, 0, 2)
            wait_until(lambda: "update" in watched.read)
            again.step(again.params, samples=1)
            assert digest(again.params) == digest_of(mailbox, again)
    assert set(watched.read) == {"update"}


def test_who_takes_over_goes_on_with_the_rest_that_no_update_has_carried_yet():
    """Two nodes that close in turn commit what one alone does."""
    settings = algorithm(
        sync_every=1, commit_dtype="float4_e2m1fn", momentum_dtype="bfloat16", overlap_steps=0
    )
    found = []
    for names in (("a", "a", "a"), ("a", "b", "c")):
        mailbox = memory()
        for turn, name in enumerate(names):
            with session(model(), settings, mailbox, name) as s:
                params = s.params
                for at in range(2):
                    params = s.step(trained(params, 0, 2 * turn + at), samples=1)
                wait_until(lambda m=mailbox, n=2 * turn + 2: len(records(m)) == n)
        assert {record.closer for record in records(mailbox)} == set(names)
        found.append(digest(load(mailbox, model())))
        assert not verify(mailbox).findings
    assert found[0] == found[1]


def test_momentum_rests_in_the_precision_of_the_run():
    settings = algorithm(sync_every=1, momentum_dtype="bfloat16", overlap_steps=0)
    mailbox = memory()
    with session(model(), settings, mailbox, "n") as s:
        train(s, 0, 3)
        schema = s._entry.schema
    newest = records(mailbox)[-1]
    outer = read_outer(mailbox, newest, schema.fragment(0), schema.precision)
    assert outer is not None
    assert {array.dtype.name for array in outer[0].values()} == {"bfloat16"}


@pytest.mark.parametrize(
    ("setting", "other"), [("commit_dtype", "float8_e4m3fn"), ("momentum_dtype", "bfloat16")]
)
def test_nodes_that_would_commit_in_other_precisions_do_not_meet(setting, other):
    mailbox = memory()
    with session(model(), algorithm(), mailbox, "n"):
        pass
    with pytest.raises(RunConfigMismatch, match=f"{setting}: the run has .*{other}"):
        session(model(), algorithm(**{setting: other}), mailbox, "m").__enter__()


def test_precisions_that_there_are_not_are_refused_by_name():
    with pytest.raises(UsageError, match="`commit_dtype` 'int8' is not one of None, 'float32'"):
        algorithm(commit_dtype="int8")
    with pytest.raises(UsageError, match="`momentum_dtype` 'float16' is not one of 'float32'"):
        algorithm(momentum_dtype="float16")


def test_a_commit_that_narrows_nothing_is_warned_about():
    with pytest.warns(UserWarning, match="no parameter has more bits than that"):
        session({"w": jnp.ones(3, jnp.bfloat16)}, algorithm(commit_dtype="bfloat16"), memory())
    with pytest.warns(UserWarning, match="would never fade"):
        algorithm(momentum_dtype="bfloat16", outer_momentum=0.999, sync_every=50)


def test_old_updates_are_swept_with_the_anchors_of_their_rounds():
    settings = algorithm(
        sync_every=1, commit_dtype="float8_e4m3fn", overlap_steps=0, checkpoint_every=2
    )
    mailbox = memory()
    with session(model(), settings, mailbox, "n") as s:
        train(s, 0, 30)
        wait_until(lambda: node_of(s).state.chain.read >= 29)
    keys: Keys = run_keys(mailbox)
    left = [keys.parse_payload(entry.key) for entry in mailbox.list(f"{keys.run}/data/")]
    rounds = {part: {found[0] for found in left if found and found[2] == part} for part in PARTS}
    assert rounds["update"] == rounds["anchor"] == rounds["outer"]
    assert len(rounds["update"]) < 15


def test_a_small_run_with_commits_in_eight_bits_stays_near_the_same_in_full():
    """Learners that pull towards a target: as near to it after 30 rounds, to a percent."""
    target = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    left = {}
    for dtype in (None, "float8_e4m3fn", "float4_e2m1fn"):
        settings = algorithm(sync_every=2, commit_dtype=dtype, overlap_steps=0, outer_momentum=0.5)
        with session({"w": jnp.zeros(SIZE)}, settings, memory(), "n") as s:
            params = s.params
            for _ in range(60):
                params = s.step({"w": params["w"] + 0.03 * (target - params["w"])}, samples=1)
            left[dtype] = float(np.linalg.norm(np.asarray(s.params["w"]) - target))
    assert left[None] < 0.2 * float(np.linalg.norm(target))
    assert left["float8_e4m3fn"] == pytest.approx(left[None], rel=0.01)
    assert left["float4_e2m1fn"] == pytest.approx(left[None], rel=0.05)
