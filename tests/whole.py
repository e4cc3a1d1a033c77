"""What anybody can check of a run from outside, in its mailbox alone."""

from __future__ import annotations

import os

from jdiloco.protocol.records import RoundRecord
from jdiloco.runtime.inspect import read_run
from jdiloco.runtime.verify import verify
from jdiloco.store import Store


def whole_run(mailbox: str | os.PathLike[str] | Store) -> list[RoundRecord]:
    """The records of a run in which nothing is missing or wrong, or what verifying it found.

    No round is missing; the newest was closed again from its inputs, and gave the same bits.
    """
    report = verify(mailbox)
    assert report.sound, "\n".join(map(str, report.findings))
    log = read_run(mailbox).rounds
    assert [record.round for record in log] == list(range(len(log)))
    if log:
        assert report.rounds[-1].how in ("recomputed", "void"), report.rounds
    return list(log)
