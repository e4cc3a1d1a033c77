"""Runs in which somebody writes to the mailbox without the run's key.

He reads all of it, forgets nothing, and passes off whatever would move a node: as it is, with the
signatures of other objects, with those of another run of the same key, or with invented ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from jdiloco.protocol import signing
from jdiloco.protocol.signing import RunKey
from jdiloco.testing import simulate
from jdiloco.testing.invariants import broken
from jdiloco.testing.simulate import mailbox
from jdiloco.testing.simulate.history import Believed, Forged, History

Plan, Forgery = simulate.Plan, simulate.Forgery

SAFE = {"S1", "S3", "S5", "S7", "S8", "K1", "W1"}
"""What holds though nothing may get done any more."""


def attacked(seed: int, **forgery) -> simulate.Scenario:
    """A drawn run, signed and under attack."""
    return dataclasses.replace(simulate.draw(seed), signed=True, forgery=Forgery(**forgery))


def lines(history: History) -> list[str]:
    """What happened, but for what was forged."""
    return [str(entry) for entry in history.entries if not isinstance(entry, Forged)]


@pytest.mark.parametrize("seed", range(10))
def test_a_forger_changes_nothing_that_ever_happens(seed):
    """The run has the very history that it has without a key and without him, line for line."""
    history, alone = simulate.simulate(attacked(seed, replays=False)), simulate.simulate(seed)
    assert lines(history) == lines(alone)
    assert history.sent == alone.sent  # A key costs no request, and a forger none either.
    assert len(history.of(Forged)) > 10 or len(history.entries) < 100


def wrong(seeds: range, names: set[str] | None = None, **forgery) -> list[str]:
    return [
        f"seed {seed}: {found}"
        for seed in seeds
        for found in broken(simulate.simulate(attacked(seed, **forgery)))
        if names is None or found.name in names
    ]


@pytest.mark.parametrize("seed", range(10))
def test_every_property_holds_though_he_puts_back_what_nodes_have_deleted(seed):
    assert not wrong(range(seed, seed + 1))


@pytest.mark.parametrize("seed", range(10))
def test_what_is_committed_is_sound_though_he_writes_over_what_is_there(seed):
    """That may stop a run, and does no more."""
    assert not wrong(range(seed, seed + 1), SAFE, overwrites=True)


@pytest.mark.long
@pytest.mark.parametrize("first", range(10, 210, 20))
def test_the_same_holds_in_many_more_runs(first):
    seeds = range(first, first + 20)
    assert not wrong(seeds)
    assert not wrong(seeds, SAFE, overwrites=True)


# Planted faults


def two(**settings) -> Iterator[simulate.Scenario]:
    """Two nodes in lock step: as short a run as moves everybody."""
    plans = (Plan(node="a", steps=40), Plan(node="b", steps=40, starts=0.5))
    chosen = {"signed": True, "forgery": Forgery(seconds=0.1), **settings}
    for seed in range(1000):
        yield simulate.scenario(*plans, seed=seed, horizon=120.0, **chosen)


def sharing() -> Iterator[simulate.Scenario]:
    """They share a queue."""
    plans = (Plan(node="a", work="queue"), Plan(node="b", work="queue", starts=0.5))
    for seed in range(1000):
        forgery = Forgery(seconds=0.1)
        settings = {"units": (6,) * 8, "signed": True, "forgery": forgery, "horizon": 120.0}
        yield simulate.scenario(*plans, seed=seed, **settings)


def written_over() -> Iterator[simulate.Scenario]:
    return two(forgery=Forgery(seconds=0.1, overwrites=True))


def unsigned() -> Iterator[simulate.Scenario]:
    return two(signed=False)


Patch = pytest.MonkeyPatch


def name_mac_of(patch: Patch, covered: Callable[[str], str]) -> None:
    """The MAC in a name covers only a part of the key."""
    real = RunKey._name_mac
    patch.setattr(RunKey, "_name_mac", lambda self, key: real(self, covered(key)))


def names_do_not_cover_the_run(patch: Patch) -> None:
    name_mac_of(patch, lambda key: f"run/{key.partition('/')[2] or key}")


def names_cover_the_run_alone(patch: Patch) -> None:
    name_mac_of(patch, lambda key: f"{signing.run_of(key)}/{signing.run_of(key)}")


def beats_are_signed_for_their_node_alone(patch: Patch) -> None:
    """Whoever has seen one beat of a life can make any."""

    def covered(key: str) -> str:
        directory, _, last = key.rpartition("/")
        return f"{directory}/{'.'.join(last.split('.')[:2])}" if "/live/" in key else key

    name_mac_of(patch, covered)


def read_too(patch: Patch, believes: Callable[[str], bool]) -> None:
    """Some names need no MAC."""
    real = RunKey.read_name

    def read(self: RunKey, name: str) -> str | None:
        return name if believes(name) else real(self, name)

    patch.setattr(RunKey, "read_name", read)


def beats_are_not_signed(patch: Patch) -> None:
    read_too(patch, lambda name: "/live/" in name and name.count(".") < 6)


def contested_keys_can_be_guessed(patch: Patch) -> None:
    """Records and incarnations are called as in a run without a key; their bytes are signed."""
    real = RunKey.name

    def guessable(name: str) -> bool:
        return name.endswith(".0") or ("/node/" in name and name.count(".") == 1)

    read_too(patch, guessable)
    patch.setattr(RunKey, "name", lambda self, key: key if guessable(key) else real(self, key))


def units_are_not_signed(patch: Patch) -> None:
    """Neither their names nor their bytes."""
    name, opened = RunKey.name, signing.is_signed
    read_too(patch, lambda found: "/unit/" in found)
    patch.setattr(RunKey, "name", lambda self, k: k if "/unit/" in k else name(self, k))
    patch.setattr(signing, "is_signed", lambda key: "/unit/" not in key and opened(key))


def bytes_are_not_checked(patch: Patch) -> None:
    line = len(mailbox.SECRET.close("", b""))
    patch.setattr(RunKey, "open", lambda self, key, data: data[:-line])


def signatures_cover_the_bytes_alone(patch: Patch) -> None:
    real = RunKey._object_line
    patch.setattr(RunKey, "_object_line", lambda self, key, data: real(self, "", data))


def signatures_do_not_cover_the_run(patch: Patch) -> None:
    real = RunKey._object_line

    def line(self: RunKey, key: str, data: bytes) -> bytes:
        return real(self, key.partition("/")[2] or key, data)

    patch.setattr(RunKey, "_object_line", line)


def there_is_no_key(patch: Patch) -> None:
    """Of the run of `unsigned`."""
    del patch


FAULTS = [
    # fault, runs, seeds, properties of which one must say so
    (there_is_no_key, unsigned, 1, {"K1"}),
    (names_do_not_cover_the_run, two, 10, {"L1", "L2"}),
    (names_cover_the_run_alone, two, 10, {"L1", "L2"}),
    (beats_are_signed_for_their_node_alone, two, 15, {"L1", "L2"}),
    (beats_are_not_signed, two, 5, {"L1", "L2"}),
    (contested_keys_can_be_guessed, two, 5, {"L1", "L2"}),
    (units_are_not_signed, sharing, 1, {"W2"}),
    (bytes_are_not_checked, written_over, 25, {"S5"}),
    (signatures_cover_the_bytes_alone, written_over, 10, {"K1"}),
    (signatures_do_not_cover_the_run, written_over, 10, {"K1"}),
]


@pytest.mark.parametrize(
    ("fault", "runs", "seeds", "names"), FAULTS, ids=lambda v: getattr(v, "__name__", None)
)
def test_a_planted_fault_is_found(fault, runs, seeds, names, monkeypatch):
    fault(monkeypatch)
    for scenario, _ in zip(runs(), range(seeds), strict=False):
        if names & {found.name for found in broken(simulate.simulate(scenario))}:
            return
    pytest.fail(f"{fault.__name__} went unseen in {seeds} runs")


@pytest.mark.parametrize("runs", [two, sharing])
def test_the_runs_that_find_them_are_sound_without_a_fault(runs):
    for scenario, _ in zip(runs(), range(5), strict=False):
        history = simulate.simulate(scenario)
        assert not broken(history)
        assert not history.of(Believed)
        assert len(history.of(Forged)) > 50
