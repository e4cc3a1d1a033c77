"""Runs in buckets: as anywhere else, on a real server, through its death, and not on a bad one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time

import jax
import orbax.checkpoint as ocp
import pytest

from jdiloco import events
from jdiloco.errors import StoreIgnoresConditions, StoreUnavailable
from jdiloco.runtime.export import export
from jdiloco.session import load
from jdiloco.store import MemoryStore, Store
from jdiloco.testing.faults import FaultyStore
from tests.store import servers, stub

from . import bucket_node
from .nodes import ROOT, Recorder, algorithm, digest, records, session, together, vector

names = itertools.count()

pytestmark = pytest.mark.usefixtures("credentials")


@pytest.fixture
def mailbox(seaweed_server):
    return seaweed_server.url(f"run-{next(names)}")


def start(mailbox: str, nodes: str, count: int, rounds: int) -> subprocess.Popen[str]:
    """The program of `bucket_node`, in a process of its own."""
    command = [sys.executable, "-m", "tests.session.bucket_node", mailbox, nodes]
    return subprocess.Popen(
        [*command, str(count), str(rounds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def finish(*programs: subprocess.Popen[str], seconds: float = 200.0) -> list[dict]:
    """What each node of the programs says of itself."""
    try:
        found = []
        for program in programs:
            printed, errors = program.communicate(timeout=seconds)
            assert program.returncode == 0, errors
            assert "tester" not in printed + errors, "an access key is in the output"
            found += [json.loads(line) for line in printed.splitlines()]
        return found
    finally:
        for program in programs:
            program.kill()
            program.wait()


def in_threads(mailbox: str, nodes: tuple[str, ...], rounds: int) -> list[dict]:
    """The same program, as threads of this process."""
    run = bucket_node.train
    return together(*(lambda n=n: run(mailbox, n, len(nodes), rounds) for n in nodes), seconds=200)


def test_one_program_ends_with_the_same_bytes_in_a_folder_a_bucket_and_memory(tmp_path, mailbox):
    """In lock step the arithmetic is settled, whatever carries the bytes."""
    digests = set()
    for where in (str(tmp_path / "run"), mailbox, "memory://the-same-bytes"):
        found = in_threads(where, ("ada", "bob", "cyd"), rounds=4)
        assert all(node["events"].count("Committed") == 4 for node in found)
        log = records(where)
        assert [(r.round, len(r.participants)) for r in log] == [(n, 3) for n in range(4)]
        digests |= {node["digest"] for node in found}
        digests.add(digest(load(where, bucket_node.initial())))
        path = tmp_path / f"model-{next(names)}"
        export(where, path)
        with ocp.StandardCheckpointer() as checkpointer:
            digests.add(digest(checkpointer.restore(path)))
    assert len(digests) == 1


@pytest.mark.long
@pytest.mark.multiprocess
def test_four_processes_train_one_model_in_a_bucket(mailbox):
    """And nobody prints a key on the way."""
    nodes = ("ada", "bob", "cyd", "dan")
    found = finish(*(start(mailbox, node, 4, rounds=8) for node in nodes))
    assert len({node["digest"] for node in found}) == 1
    assert {node["digest"] for node in found} == {digest(load(mailbox, bucket_node.initial()))}
    log = records(mailbox)
    assert [record.round for record in log] == list(range(8))
    assert all(len(record.participants) == 4 for record in log)


@pytest.mark.long
def test_the_server_is_killed_within_a_round_and_nobody_stops(tmp_path):
    """Thirty seconds without it: both train on, say so, and catch up when it is back."""
    with servers.seaweed(tmp_path) as server:
        mailbox, back = server.url("run"), threading.Event()
        rounds_before: list[int] = []
        settings = algorithm(sync_every=20, quorum_size=2, beat_seconds=3.0, lease_seconds=12.0)
        seen = {"ada": Recorder(), "bob": Recorder()}
        steps: dict[str, list[float]] = {node: [] for node in seen}

        def train(node: str) -> str:
            quiet = {"poll_interval": 0.3, "callbacks": (seen[node],), "leave_with_run": True}
            with session(vector(1.0), settings, mailbox, node, **quiet) as s:
                params = s.params
                while not back.is_set():
                    params = s.step(jax.tree.map(lambda x: x * 0.99, params), samples=1)
                    steps[node].append(time.monotonic())
                    time.sleep(0.05)
            return digest(s.params)

        def strike() -> None:
            seen["ada"].wait(events.Published, 3, 90.0)
            server.kill()
            killed = time.monotonic()
            for recorder in seen.values():
                recorder.wait(events.Degraded, 1, 20.0)
            time.sleep(max(0.0, killed + 30.0 - time.monotonic()))
            server.start()
            committed = {node: len(r.of(events.Committed)) for node, r in seen.items()}
            rounds_before.append(max(committed.values()))
            for node, recorder in seen.items():
                recorder.wait(events.Recovered, 1, 60.0)
                recorder.wait(events.Committed, committed[node] + 4, 60.0)
            back.set()

        *digests, _ = together(lambda: train("ada"), lambda: train("bob"), strike, seconds=280.0)
        log = records(mailbox)
        assert len(set(digests)) == 1
    gaps = {node: max(b - a for a, b in itertools.pairwise(at)) for node, at in steps.items()}
    assert all(gap < 5.0 for gap in gaps.values()), gaps
    assert [record.round for record in log] == list(range(len(log)))
    after = [record for record in log if record.round >= rounds_before[0]]
    assert {found.node for record in after for found in record.participants} == {"ada", "bob"}


@pytest.mark.parametrize("node", ["first", "second"])
def test_a_gateway_that_ignores_conditions_is_refused_and_nothing_is_trained(rclone_server, node):
    mailbox = rclone_server.url(f"run-{next(names)}")
    refused = session(vector(1.0), algorithm(beat_seconds=3.0, lease_seconds=6.0), mailbox, node)
    with pytest.raises(StoreIgnoresConditions, match="If-None-Match"), refused:
        pass


def test_a_bucket_that_is_not_there_is_named(seaweed_server):
    mailbox = f"s3://no-such-bucket/run?endpoint={seaweed_server.endpoint}"
    with pytest.raises(StoreUnavailable, match="no such bucket"):
        load(mailbox, vector(1.0))


def test_credentials_that_may_only_read_are_told_so_before_anything_is_trained():
    with stub.running() as server:
        server.faults = lambda request: (
            stub.Fault(status=403, code="AccessDenied") if request.verb == "PUT" else None
        )
        settings = algorithm(beat_seconds=3.0, lease_seconds=6.0)
        with (
            pytest.raises(StoreUnavailable, match="read, write, list and delete"),
            session(vector(1.0), settings, server.url("run"), "ada"),
        ):
            pass
        assert server.objects == {}


class TwoWays(FaultyStore):
    """A store with a second way for small requests; both remember what went there."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), {})
        self.small = FaultyStore(self.inner, {})
        self.limits: list[float] = []

    def within(self, seconds: float) -> Store:
        self.limits.append(seconds)
        return self.small


def test_what_keeps_a_lease_alive_goes_another_way_than_what_is_large():
    """Listings, beats and records go the small way, which ends within a third of a beat."""
    store = TwoWays()
    settings = algorithm(sync_every=2, overlap_steps=0, beat_seconds=0.3, checkpoint_every=1)
    with session(vector(1.0), settings, store, "ada") as s:
        params = s.params
        for _ in range(8):
            params = s.step({"w": params["w"] - 1}, samples=1)
            time.sleep(0.1)
    large = ("/data/", "/save/", ".2.ada")
    assert store.limits == pytest.approx([0.1] * len(store.limits))
    for call in store.calls:
        swept = call.verb == "delete"  # Nobody waits for that.
        assert swept or any(part in call.key for part in large), call
    small = [call for call in store.small.calls if call.verb == "create"]
    assert not [call for call in small if any(part in call.key for part in large)]
    assert {"list", "create", "get"} <= {call.verb for call in store.small.calls}


@pytest.mark.long
def test_a_long_upload_costs_no_lease():
    """Each upload takes more than a lease; beats go out all the while, and nobody is degraded."""
    seen = Recorder()
    with stub.running() as server:

        def slow(request: stub.Request) -> stub.Fault | None:
            bulk = request.verb == "PUT" and (".2.ada" in request.key or "/data/" in request.key)
            return stub.Fault(wait=4.0) if bulk else None

        settings = algorithm(sync_every=2, overlap_steps=0, beat_seconds=1.5, lease_seconds=3.0)
        quiet = {"poll_interval": 0.2, "callbacks": (seen,)}
        with session(vector(1.0), settings, server.url("run"), "ada", **quiet) as s:
            server.faults = slow
            params = s.params
            for _ in range(4):
                params = s.step({"w": params["w"] - 1}, samples=1)
        beats = [r.at for r in server.requests if r.verb == "PUT" and "/live/" in r.key]
    assert not seen.of(events.Degraded)
    assert len(seen.of(events.Committed)) == 2
    assert beats[-1] - beats[0] > 2 * 4.0
    assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 3.0
