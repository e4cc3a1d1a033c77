"""B75, with real arrays: a session dies after its k-th write, for every k.

The store of the session stops dead: what it has not carried out by then is never carried out, and
every later request dies too. What is left in the mailbox has to be, bit for bit, what the newest
record in it says; and another session has to go on from there. Reading changes nothing, so between
two writes there is only one state in which a process can leave a mailbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest

from jdiloco.errors import UsageError
from jdiloco.protocol.keys import MANIFEST
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.session import Session, load
from jdiloco.store import MemoryStore, Store
from jdiloco.testing.faults import (
    CRASH_BEFORE,
    Call,
    Crashed,
    FaultyStore,
    crash_after_writes,
)
from tests.whole import whole_run

from .nodes import algorithm, digest, memory, no_threads_left, node_of, records, session, wait_until

WRITES_MAX = 300
NOTHING = "no run"
BEATS = ("/live/", "creating/")
"""They come as time passes, and would make the k-th write another one in every run."""

SETTINGS = algorithm(
    sync_every=2, fragments=2, overlap_steps=0, beat_seconds=0.2, lease_seconds=0.4, quorum_size=2
)
OFTEN = dataclasses.replace(SETTINGS, checkpoint_every=1, keep_rounds=1)


def params():
    return {"a": jnp.linspace(-1.0, 2.0, 7), "b": {"w": jnp.full((3, 5), 0.3, jnp.bfloat16)}}


@jax.jit
def step(tree):
    return jax.tree.map(lambda x: (x * 0.75 - 0.1).astype(x.dtype), tree)


def train(store: Store, node: str, rounds: int, settings: DiLoCo = SETTINGS):
    """Trains a step for each of so many rounds, and waits for what each round entails."""
    with session(params(), settings, store, node) as s:
        tree = s.params
        for _ in range(rounds):
            tree = s.step(step(tree), samples=1)
            wait_for_quiet(s, store)
    return s.params


def wait_for_quiet(s: Session, store: Store) -> None:
    """Until the run checkpoint that is being written is done, or the process is dead."""

    def dead() -> bool:
        return isinstance(store, FaultyStore) and store.crashed

    wait_until(lambda: dead() or not node_of(s).state.saving)


def copy(store: MemoryStore) -> MemoryStore:
    """A store of its own with the same objects."""
    fresh = memory()
    for entry in store.list(""):
        fresh.create(entry.key, store.get(entry.key) or b"")
    return fresh


def found(store: Store) -> tuple[int, str]:
    """How many rounds have a record, and the bits of what is newest."""
    try:
        newest = load(store, params())
    except UsageError:
        return 0, NOTHING
    return len(records(store)), digest(newest)


# What happens


@dataclasses.dataclass(frozen=True)
class Story:
    """`happens` on a copy of the mailbox that `before` leaves."""

    before: Callable[[], MemoryStore]
    happens: Callable[[Store], None]
    interrupted: tuple[str, ...]
    """Parts of keys before which the process has to have died at some k."""
    settings: DiLoCo = SETTINGS


def a_run(rounds: int, settings=SETTINGS) -> MemoryStore:
    store = memory()
    train(store, "a", rounds, settings)
    return store


def a_round_without_its_record() -> MemoryStore:
    """The closer of round 2 dies between payloads and record."""

    def script(call: Call):
        return CRASH_BEFORE if call.verb == "create" and "0000000002.0" in call.key else None

    store = memory()
    with pytest.raises(Crashed):
        train(FaultyStore(store, script), "a", 4)
    return store


STORIES = {
    "creating a run": Story(
        memory,
        lambda store: train(store, "b", 1),
        ("/save/initial", "manifest", "creating/", "0000000000.b.0001.0001.anchor", "000.0"),
    ),
    "closing a round": Story(
        lambda: a_run(2),
        lambda store: train(store, "b", 1),
        ("0000000002.b.0001.0001.anchor", ".outer", "0000000002.0"),
    ),
    "taking a round over": Story(
        a_round_without_its_record,
        lambda store: train(store, "b", 1),
        ("0000000002.1.001", "0000000002.b.0001.0001.anchor", ".outer", "0000000002.0"),
    ),
    "saving and sweeping": Story(
        lambda: a_run(3, OFTEN),
        lambda store: train(store, "b", 3, OFTEN),
        ("params/", "/_CHECKPOINT_METADATA", "/data/", ".2.a", "/save/initial"),
        OFTEN,
    ),
}


class Watching(FaultyStore):
    """Notes what is found after every record."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, {})
        self.values = dict([found(inner)])

    def create(self, key, data):
        created = super().create(key, data)
        if key == "manifest" or ("/log/0" in key and key.endswith(".0")):
            self.values.update([found(self.inner)])
        return created


@pytest.fixture(scope="module", params=STORIES)
def prefixes(request):
    """A story, undisturbed and with a death after every write."""
    chosen = STORIES[request.param]
    before = chosen.before()
    undisturbed = Watching(copy(before))
    chosen.happens(undisturbed)
    return Prefixes(chosen, undisturbed.values, tuple(_left_behind(chosen, before)))


@dataclasses.dataclass(frozen=True)
class Prefixes:
    story: Story
    values: dict[int, str]
    """What is newest after so many rounds, if nobody dies."""
    left: tuple[tuple[MemoryStore, str], ...]
    """Mailboxes after 0, 1, 2, … writes, and the keys of the write that the process died over."""


def counts(call: Call) -> bool:
    return call.verb == "delete" or (
        call.verb == "create" and not any(part in call.key for part in BEATS)
    )


def _left_behind(chosen: Story, before: MemoryStore) -> Iterator[tuple[MemoryStore, str]]:
    for writes in range(WRITES_MAX):
        store = FaultyStore(left := copy(before), crash_after_writes(writes, besides=BEATS))
        try:
            with no_threads_left():
                chosen.happens(store)
        except Crashed:
            yield left, next(call.key for call in reversed(store.calls) if counts(call))
            continue
        yield left, ""
        return
    raise AssertionError(f"the process had not ended after {WRITES_MAX} writes")


def test_what_is_left_is_what_the_newest_record_says_bit_for_bit(prefixes):
    """Old or new: of every round, of the run itself, and of the values when nothing commits."""
    met = set()
    for store, _ in prefixes.left:
        rounds, values = found(store)
        assert values in (prefixes.values[rounds], NOTHING)
        assert (values == NOTHING) == (store.get(MANIFEST) is None)
        met.add(rounds)
    assert met == set(prefixes.values)


def test_the_process_died_in_the_middle_of_what_the_story_is_about(prefixes):
    for part in prefixes.story.interrupted:
        assert any(part in key for _, key in prefixes.left), f"never before {part!r}"


def go_on(store: MemoryStore, node: str, settings: DiLoCo) -> None:
    """Nothing is wrong; another session trains on and ends with what the mailbox then holds."""
    rounds, values = found(store)
    if values != NOTHING:
        assert len(whole_run(store)) == rounds
    last = train(store, node, 2, settings)
    log = whole_run(store)
    assert len(log) >= rounds + 2
    assert digest(last) == found(store)[1]
    assert node in {who.node for record in log[rounds:] for who in record.participants}


def test_a_fresh_session_trains_on_from_it(prefixes):
    for index, (store, _) in enumerate(prefixes.left):
        if index % 5 == 0:
            go_on(copy(store), "bc"[index // 5 % 2], prefixes.story.settings)


@pytest.mark.long
@pytest.mark.parametrize("node", ["b", "c"])
def test_a_fresh_session_trains_on_from_every_one_of_them(prefixes, node):
    """Under the id of the dead process, and under another."""
    for store, _ in prefixes.left:
        go_on(copy(store), node, prefixes.story.settings)
