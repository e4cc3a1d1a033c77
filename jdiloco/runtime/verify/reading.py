"""Reading a mailbox that may change meanwhile, each object once.

An object that is not there has been lost, or was swept after the mailbox was listed. Which of the
two can be told only later: nodes remove nothing before the record that makes it garbage has been
written. So what was not found is noted with the rule by which it would have to be there, and judged
once the newest records have been read after all else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

from jdiloco.errors import FormatError
from jdiloco.protocol.keys import Keys
from jdiloco.protocol.records import Sealed, is_sealed, unseal
from jdiloco.runtime.inspect import Stock
from jdiloco.runtime.run_key import store_name
from jdiloco.runtime.verify.chain import Walk
from jdiloco.runtime.verify.report import Finding, Remark
from jdiloco.store.base import Store
from jdiloco.store.signed import forged_as


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a verification has come; `bytes` is what the mailbox held at the beginning."""

    read: int
    bytes: int
    key: str  # What is read next.


Rule = Callable[[Walk], bool]
"""Whether an object must be there, given the newest records."""


def always(walk: Walk) -> bool:
    """The rule for what is never removed."""
    del walk
    return True


def never(walk: Walk) -> bool:
    """The rule for what may go at any time."""
    del walk
    return False


class Reader:
    """What has been read of a mailbox, and what was found in it."""

    def __init__(
        self, store: Store, keys: Keys, stock: Stock, progress: Callable[[Progress], object]
    ) -> None:
        self.store = store
        self.keys = keys
        self.stock = stock
        self.findings: list[Finding] = []
        self.remarks: list[Remark] = []
        self.objects = 0
        self.bytes = 0
        self._progress = progress
        self._total = sum(stock.sizes.values())
        self._absent: list[tuple[Rule, Finding]] = []

    def listed(self, key: str) -> bool:
        """Whether it was there when the mailbox was listed."""
        return key in self.stock.sizes

    def get(self, key: str, rule: Rule, means: str) -> bytes | None:
        """An object; None, noted with the rule, when it is not there."""
        self.tell(key)
        data = self.store.get(key)
        if data is None and (because := forged_as(self.store, key)):
            self.wrong(key, because, means)
        elif data is None:
            self.absent(key, rule, means)
        else:
            self.took(len(data))
        return data

    def tell(self, key: str) -> None:
        """Says what is read next."""
        self._progress(Progress(min(self.bytes, self._total), self._total, key))

    def took(self, size: int) -> None:
        """Counts an object."""
        self.objects += 1
        self.bytes += size

    def absent(self, key: str, rule: Rule, means: str) -> None:
        """Notes an object that was not there."""
        self._absent.append((rule, Finding(key, "is missing", means)))

    def wrong(self, key: str, what: str, means: str) -> None:
        """Notes an object that is not as it must be."""
        self.findings.append(Finding(key, what, means))

    def remark(self, key: str, what: str) -> None:
        """Notes what is no damage."""
        self.remarks.append(Remark(key, what))

    def judge_absent(self, walk: Walk) -> None:
        """Whatever must be there by the newest records and was not found is lost."""
        self.findings += [found for rule, found in self._absent if rule(walk)]
        self._absent.clear()

    def name_as_stored(self) -> None:
        """Where one looks for them: in a run with a key, names in the mailbox are no keys."""
        store = self.store
        self.findings = [replace(f, key=store_name(store, f.key)) for f in self.findings]
        self.remarks = [replace(r, key=store_name(store, r.key)) for r in self.remarks]


def unsealed(
    reader: Reader, key: str, data: bytes, kind: type[Sealed], means: str
) -> Sealed | None:
    """Reads a small object; None, with a finding, when it is not what somebody sealed there."""
    if not is_sealed(key, data):
        reader.wrong(key, f"holds {len(data)} bytes that do not match their digest", means)
        return None
    try:
        return unseal(key, data, kind)
    except FormatError as error:
        reader.wrong(key, f"cannot be read: {error}", means)
        return None
