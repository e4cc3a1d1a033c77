"""Contributions in parts, as closers, `verify`, the sweep and `gc` meet them.

A plain node closes the rounds; what the pod has sent is written by hand.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jdiloco.protocol.keys import ContributionKey, PartKey
from jdiloco.protocol.records import (
    ContributionHead,
    Incarnation,
    Ledger,
    Payload,
    RoundRecord,
    seal,
)
from jdiloco.runtime import contributions, messages
from jdiloco.runtime.gc import collect
from jdiloco.runtime.pieces import Box, Pieces
from jdiloco.runtime.pods import parts
from jdiloco.runtime.verify import verify
from jdiloco.store import MemoryStore
from jdiloco.types import Counters

from .nodes import lock_step, memory, node_of, records, run_keys, session, vector, wait_until

HALVES: tuple[Box, ...] = (((0, 4),), ((4, 8),))


def part(box: Box, value: float) -> bytes:
    sharding: Any = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    size = box[0][1] - box[0][0]
    held = {box: np.full(size, value, np.float32)}
    return b"".join(parts.encode({"w": Pieces((8,), sharding, held)}))


def send(mailbox: MemoryStore, objects: list[bytes], *, empty_at: int = -1) -> list[str]:
    """A head to round 0 and its parts; one of them is lost. Returns the keys of the parts."""
    keys = run_keys(mailbox)
    life = keys.incarnation("pod", 1)
    born = Incarnation("pod", 1, "host", 1, "cpu", valid=(), round=-1, position=0, write_id="pod")
    mailbox.create(life, seal(life, born))
    named = []
    for process, data in enumerate(objects):
        digest = messages.digest([data])
        key = keys.part(PartKey(0, "pod", 1, process, digest))
        named.append(Payload(key, len(data), digest))
        if process != empty_at:
            mailbox.create(key, data)
    head = ContributionHead(
        run=keys.run,
        round=0,
        fragment=0,
        version=0,
        node="pod",
        incarnation=1,
        counters=Counters(2, 2),
        ledger=Ledger(pending=2, processed=2),
        position=2,
        parts=tuple(named),
    )
    key = keys.contribution(ContributionKey(0, "pod", 1, False))
    mailbox.create(key, b"".join(contributions.encode(key, head, {})))
    return [one.key for one in named]


def run(mailbox: MemoryStore, *, rounds: int, send_to: Any, **settings: Any) -> RoundRecord:
    """A node trains for some rounds; the first of them has the pod's contribution."""
    chosen = lock_step(1, **settings)
    with session(vector(1.0), chosen, mailbox, "a") as s:
        wait_until(lambda: node_of(s).state.verdict.expected)
        send_to()
        wait_until(lambda: node_of(s).state.contributions)
        wait_until(lambda: all(r.examined for r in node_of(s).state.closing.reports))
        params = s.params
        for _ in range(rounds * chosen.sync_every):
            params = s.step({"w": params["w"] - 1}, samples=1)
    return records(mailbox)[0]


def in_parts(mailbox: MemoryStore) -> list[str]:
    keys = run_keys(mailbox)
    return [e.key for e in mailbox.list("") if keys.parse_part(e.key) is not None]


def test_parts_are_merged_and_verified_and_go_with_their_head():
    mailbox = memory()
    whole = [part(box, 2.0) for box in HALVES]
    record = run(mailbox, rounds=2, keep_rounds=8, send_to=lambda: send(mailbox, whole))
    assert [(p.node, p.parts) for p in record.participants] == [("a", 0), ("pod", 2)]
    report = verify(mailbox)
    assert not report.findings
    assert report.rounds[0].how == "recomputed"
    assert len(in_parts(mailbox)) == 2

    swept = memory()
    run(swept, rounds=6, keep_rounds=1, send_to=lambda: send(swept, whole))
    assert in_parts(swept) == []
    assert not verify(swept).findings


@pytest.mark.parametrize(
    ("objects", "lost", "reason"),
    [
        ([part(HALVES[0], 2.0), part(HALVES[1], 2.0)], 1, "missing"),
        ([part(HALVES[0], 2.0)], -1, "corrupt"),
        ([part(HALVES[0], 2.0), part(HALVES[0], 3.0)], -1, "corrupt"),
        ([part(HALVES[0], 2.0), b"cposix\nsystem\n(S'touch /tmp/never'\ntR."], -1, "corrupt"),
        ([part(HALVES[0], 2.0), part(HALVES[1], np.nan)], -1, "nonfinite"),
    ],
    ids=["a part is lost", "half is nowhere", "half is there twice", "a pickle", "NaN"],
)
def test_parts_that_make_no_contribution_are_rejected_and_swept(objects, lost, reason):
    """S8: the round goes on without them."""
    mailbox = memory()
    record = run(
        mailbox, rounds=2, keep_rounds=8, send_to=lambda: send(mailbox, objects, empty_at=lost)
    )
    assert [p.node for p in record.participants] == ["a"]
    assert [(r.node, r.reason, r.parts) for r in record.rejected] == [("pod", reason, len(objects))]
    assert not verify(mailbox).findings

    swept = memory()
    run(swept, rounds=6, keep_rounds=1, send_to=lambda: send(swept, objects, empty_at=lost))
    assert in_parts(swept) == []


def test_verify_finds_a_part_that_was_lost_or_damaged_since():
    mailbox, sent = memory(), []
    whole = [part(box, 2.0) for box in HALVES]
    run(mailbox, rounds=2, keep_rounds=8, send_to=lambda: sent.extend(send(mailbox, whole)))
    mailbox.delete([sent[1]])
    (finding,) = verify(mailbox).findings
    assert finding.key == sent[1]
    assert finding.what == "is missing"
    mailbox.create(sent[1], whole[1][:-1] + b"?")
    (finding,) = verify(mailbox).findings
    assert "corrupt" in finding.what


def test_parts_of_a_contribution_that_never_came_are_remarked_on_and_collected():
    """Their pod died before it wrote the head."""
    mailbox = memory()

    def leave_behind() -> None:
        keys, data = run_keys(mailbox), part(HALVES[0], 1.0)
        key = keys.part(PartKey(0, "pod", 1, 0, messages.digest([data])))
        mailbox.create(key, data)
        head = keys.contribution(ContributionKey(0, "other", 1, False))
        mailbox.create(head, b"")  # So that `run` has something to wait for.

    run(mailbox, rounds=6, keep_rounds=1, send_to=leave_behind)
    (left,) = in_parts(mailbox)
    assert left in [remark.key for remark in verify(mailbox).remarks]
    assert left in collect(mailbox, once=True).keys
    assert in_parts(mailbox) == []
