"""Removing from a mailbox what is of use to nobody any more: `protocol.garbage`, performed."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jdiloco.errors import FormatError
from jdiloco.protocol import garbage
from jdiloco.protocol.keys import CREATING
from jdiloco.protocol.records import Manifest
from jdiloco.protocol.rules import Rules
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.inspect import find_run
from jdiloco.runtime.joining import BULK_WAITS, Performer
from jdiloco.runtime.payloads import patient
from jdiloco.runtime.run_key import open_mailbox
from jdiloco.store.base import Store
from jdiloco.store.signed import strangers, unsigned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """What was found in a mailbox that is of no use any more."""

    url: str
    run: str
    removed: bool  # Or only looked at.
    watched: bool  # Whether it was found out who is gone.
    found: Mapping[str, tuple[int, int]]  # Objects and bytes, by what they are.
    keys: tuple[str, ...]
    stored: tuple[int, int]  # Objects and bytes of the whole mailbox, before.

    @property
    def total(self) -> tuple[int, int]:
        """Objects and bytes of all of it."""
        counts, sizes = zip(*self.found.values(), strict=True) if self.found else ((), ())
        return sum(counts), sum(sizes)


def collect(
    mailbox: str | os.PathLike[str] | Store,
    *,
    key_file: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    once: bool = False,
    clock: Clock | None = None,
) -> Collected:
    """Removes what no node needs and no living node will remove: `jdiloco.protocol.garbage`.

    In a run that has a key, also what lies among its objects under a name that was not made with
    the key.

    Arguments:
      key_file: the file that holds the run's key; None looks in the environment
        (`jdiloco.runtime.run_key`).
      dry_run: only look.
      once: do not wait to see who is gone: beats of nodes and creators that fell silent stay.

    Any number of processes may do so at any time, whether the run goes on or not, and be killed at
    any point. Without `once` it watches the beats for up to the run's lease timeout.

    Raises UsageError when there is no run, FormatError when a record or the manifest is damaged,
    and RunReplaced when the mailbox got another run meanwhile.
    """
    clock = clock or Clock()
    store = open_mailbox(mailbox, key_file)
    reading = patient(store, BULK_WAITS, clock.sleep)
    manifest, data = find_run(reading)
    with tempfile.TemporaryDirectory(prefix="jdiloco-") as scratch:
        performer = Performer(store, clock, scratch=Path(scratch))
        look = garbage.look_through(manifest, data, rules_of(manifest), once=once)
        doomed = performer.run(look)
        sizes = {entry.key: entry.size for entry in reading.list("")}
        among = (*strangers(reading, f"{manifest.run}/"), *strangers(reading, CREATING))
        forged = {entry.key: entry.size for entry in among}
        if not dry_run:
            performer.run(garbage.remove(doomed))
            outside = Performer(unsigned(store), clock, scratch=Path(scratch))
            outside.run(garbage.remove({"forged": tuple(forged)}))
    sizes |= forged
    doomed |= {"forged": tuple(forged)}
    there = {kind: [key for key in keys if key in sizes] for kind, keys in doomed.items()}
    return Collected(
        url=store.url,
        run=manifest.run,
        removed=not dry_run,
        watched=not once,
        found={k: (len(v), sum(sizes[key] for key in v)) for k, v in there.items() if v},
        keys=tuple(key for keys in there.values() for key in keys),
        stored=(len(sizes), sum(sizes.values())),
    )


def rules_of(manifest: Manifest) -> Rules:
    """What a run has settled of leases, sweeps and rounds."""
    said = manifest.algorithm
    names = ("sync_every", "fragments", "beat_seconds", "lease_seconds", "keep_rounds")
    try:
        return Rules(**{name: said[name] for name in names})
    except KeyError as error:
        raise FormatError(
            f"The manifest has no setting {error}: another version made it."
        ) from error
