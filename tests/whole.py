"""What anybody can check of a run from outside: its mailbox alone, without the code that wrote it.

log = whole_run(mailbox)     # Every round record, in order.
"""

from __future__ import annotations

import collections
import itertools
import os

from jdiloco.protocol.keys import MANIFEST, ContributionKey, Keys, RecordKey
from jdiloco.protocol.records import DROPS, Checkpoint, Manifest, RoundRecord, sha256, unseal
from jdiloco.runtime import contributions
from jdiloco.store import Store, open_store


def whole_run(mailbox: str | os.PathLike[str] | Store) -> list[RoundRecord]:
    """The records of a run in which no round is missing, or an assertion that says what is wrong.

    The records form one chain by hash; the newest version of every fragment is there; what recent
    records merged is there under the hash they name; and every participant's ledger adds up.
    """
    store = open_store(mailbox)
    data = store.get(MANIFEST)
    assert data is not None, "there is no run"
    manifest = unseal(MANIFEST, data, Manifest)
    keys = Keys(manifest.run)
    log = _chain(store, keys, manifest, data)
    for fragment in range(len(manifest.plan)):
        _newest_is_there(store, log, fragment, manifest)
    for record in log[-2:]:
        _inputs_are_there(store, keys, record)
    _ledgers_add_up(log)
    return log


def _chain(store: Store, keys: Keys, manifest: Manifest, data: bytes) -> list[RoundRecord]:
    listed = [keys.parse(entry.key) for entry in store.list(keys.log)]
    rounds = sorted(key.round for key in listed if isinstance(key, RecordKey))
    assert rounds == list(range(len(rounds))), f"rounds are missing: {rounds}"
    previous, bases = sha256(data), [sha256(data)] * len(manifest.plan)
    versions, log = [0] * len(bases), []
    for round in rounds:
        body = store.get(keys.record(round))
        assert body is not None
        record = unseal(keys.record(round), body, RoundRecord)
        fragment = round % len(bases)
        versions[fragment] += not record.void
        assert (record.round, record.fragment) == (round, fragment)
        assert (record.previous, record.base) == (previous, bases[fragment]), f"round {round}"
        assert list(record.versions) == versions, f"round {round}"
        previous = sha256(body)
        if not record.void:
            bases[fragment] = previous
        log.append(record)
    return log


def _newest_is_there(
    store: Store, log: list[RoundRecord], fragment: int, manifest: Manifest
) -> None:
    """As payloads, or in the newest checkpoint."""
    head = next((r for r in reversed(log) if r.fragment == fragment and not r.void), None)
    payloads = [head.anchor, head.outer] if head else []
    found = [p and (body := store.get(p.key)) and sha256(body) == p.sha256 for p in payloads]
    if head and all(found):
        return
    newest = log[-1].checkpoint if log else manifest.checkpoint
    assert newest.versions[fragment] == (head.version if head else 0), f"fragment {fragment} gone"
    _checkpoint_is_there(store, newest)


def _checkpoint_is_there(store: Store, checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        body = store.get(f"{checkpoint.prefix}/{file.key}")
        assert body is not None, f"{checkpoint.prefix}/{file.key} is gone"
        assert sha256(body) == file.sha256


def _inputs_are_there(store: Store, keys: Keys, record: RoundRecord) -> None:
    for who in record.participants:
        key = keys.contribution(ContributionKey(record.round, who.node, who.incarnation, who.final))
        body = store.get(key)
        assert body is not None, f"{key} is gone"
        assert contributions.decode(key, body).sha256 == who.sha256


def _ledgers_add_up(log: list[RoundRecord]) -> None:
    merged: collections.Counter[tuple[str, int, int]] = collections.Counter()
    for record, who in itertools.chain.from_iterable(
        ((record, who) for who in record.participants) for record in log
    ):
        ledger, life = who.ledger, (who.node, who.incarnation, record.fragment)
        place = f"round {record.round}, {who.node}.{who.incarnation}: {ledger}"
        dropped = sum(ledger.dropped.values())
        assert ledger.processed == ledger.merged + dropped + ledger.pending, place
        assert ledger.merged == merged[life], f"{place}, but {merged[life]} were merged before"
        assert ledger.pending == who.counters.samples, place
        assert ledger.dropped.keys() <= set(DROPS), place
        merged[life] += who.counters.samples
