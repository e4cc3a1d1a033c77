"""What real nodes ask of their store: as often as simulated ones (`protocol/test_costs.py`)."""

import re
import time

from jdiloco.testing.faults import FaultyStore

from .nodes import Meeting, lock_step, memory, session, together, vector

NODES, ROUNDS = 2, 8
RECORD = re.compile(r"/log/\d+/\d+\.0$")


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
