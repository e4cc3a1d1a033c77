"""What real nodes ask of their store: as often as simulated ones (`protocol/test_costs.py`)."""

import re
import time

import msgspec
import pytest

from jdiloco.runtime import spending
from jdiloco.runtime.status import read_status
from jdiloco.store.counting import CountingStore
from jdiloco.testing.faults import FaultyStore
from jdiloco.types import Spent

from .nodes import Meeting, lock_step, memory, records, session, together, vector

NODES, ROUNDS = 2, 8
RECORD = re.compile(r"/log/\d+/\d+\.0$")


class Billed(CountingStore):
    """A bucket as Amazon sees it, and what it had asked for before its newest beat."""

    at_beat = Spent()

    def within(self, seconds):
        return self

    def create(self, key, data):
        if "/live/" in key and data:
            self.at_beat = self.spent
        return super().create(key, data)


def test_status_shows_what_every_node_has_asked_for_up_to_its_newest_beat():
    """To the request and the byte; only what is swept at the same moment may come on top."""
    mailbox, meet = memory(), Meeting(NODES)
    stores = {node: Billed(mailbox) for node in ("ada", "bob")}
    settings = lock_step(NODES, sync_every=2, checkpoint_every=1000)
    own = {}

    def train(node: str) -> None:
        with session(vector(1.0, 300), settings, stores[node], node) as s:
            params = s.params
            meet(s)
            for _ in range(2 * ROUNDS):
                params = s.step({"w": params["w"] - 1}, samples=1)
            before = stores[node].spent
            own[node] = (before, s.status.spent, stores[node].spent)

    together(*(lambda n=n: train(n) for n in stores))
    status = read_status(mailbox)
    for node in status.nodes:
        assert node.spent is not None
        counted = stores[node.node].at_beat
        assert counted.deletes >= node.spent.deletes
        assert msgspec.structs.replace(counted, deletes=node.spent.deletes) == node.spent
        assert counted.sent > ROUNDS * 300 * 4
        before, said, after = own[node.node]
        assert before.requests <= said.requests <= after.requests
    assert status.spent.requests == sum(n.spent.requests for n in status.nodes if n.spent)


def test_what_a_life_has_spent_stays_known_when_its_beats_are_gone():
    """Then as of its last contribution that was merged; lives of one node add up."""
    mailbox, settings = memory(), lock_step(1, sync_every=2, lease_seconds=1.0)
    spent = []
    for _ in range(2):
        with session(vector(1.0), settings, mailbox, "ada") as s:
            params = s.params
            for _ in range(4):
                params = s.step({"w": params["w"] - 1}, samples=1)
        spent.append(read_status(mailbox).spent.requests)
    assert spent[1] > spent[0]
    beats = [e.key for e in mailbox.list("") if "/live/" in e.key]
    mailbox.delete(beats)
    last = {who.incarnation: who.spent for r in records(mailbox) for who in r.participants}
    assert list(last) == [1, 2]
    found = read_status(mailbox).spent
    assert found == sum((said for said in last.values() if said is not None), Spent())
    assert 0 < found.requests < spent[1]


def test_dollars_are_prices_times_figures():
    """A poll a second for a day is 0.43 $; a model of a gigabyte read abroad is 9 cents."""
    assert spending.requests_dollars(Spent(lists=24 * 3600)) == pytest.approx(0.432)
    assert spending.requests_dollars(Spent(creates=1000, gets=1000, deletes=10**6)) == (
        pytest.approx(0.0054)
    )
    assert spending.transfer_dollars(Spent(sent=10**12, received=10**9)) == pytest.approx(0.09)
    assert spending.storage_dollars(10**12) == pytest.approx(23.0)


def test_a_round_costs_a_real_node_about_five_requests_beside_polls():
    """Counted from the second commit on: no joining, no beats, no run checkpoints."""
    store, meet = FaultyStore(memory(), {}), Meeting(NODES)
    settings = lock_step(NODES, sync_every=2, checkpoint_every=1000)

    def train(node: str) -> None:
        with session(vector(1.0), settings, store, node) as s:
            params = s.params
            meet(s)
            for _ in range(2 * ROUNDS):
                params = s.step({"w": params["w"] - 1}, samples=1)
                time.sleep(0.01)

    together(*(lambda n=n: train(n) for n in ("ada", "bob")))
    written = [c.number for c in store.calls if c.verb == "create" and RECORD.search(c.key)]
    assert len(written) == ROUNDS
    between = [c for c in store.calls if written[1] < c.number <= written[-1]]
    asked = [c for c in between if c.verb != "list" and "/live/" not in c.key]
    assert len(asked) / NODES / (ROUNDS - 2) <= 4.0 + 2.0 / NODES + 0.5
