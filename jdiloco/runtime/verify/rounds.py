"""What a round merged and what it committed; closed a second time where everything is there.

Rounds come in order. A fragment's closer holds the version that its last round committed: from a
second closing that gave the same bytes, from the payloads, or from a run checkpoint. So every
object is read once, and memory holds no more than that of a node which closes rounds.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jdiloco.algo.merges import Merge
from jdiloco.errors import FormatError, OutOfRange
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.records import Build, Participant, Payload, Rejected, RoundRecord
from jdiloco.protocol.rules import Life
from jdiloco.runtime import contributions, messages, payloads, wire
from jdiloco.runtime.close import Closed, FragmentCloser
from jdiloco.runtime.contributions import Contribution, Rejection
from jdiloco.runtime.payloads import Tensors, Version
from jdiloco.runtime.schema import Schema
from jdiloco.runtime.verify.chain import Walk
from jdiloco.runtime.verify.lives import Lives
from jdiloco.runtime.verify.reading import Reader, Rule, never
from jdiloco.store.base import Buffer
from jdiloco.store.signed import signer_of

TOLERANCE = {"float32": 1e-6, "bfloat16": 2.0**-8}
"""Of a tensor's length: how far two builds may be apart, in the type that it is kept in."""

GONE = "its inputs are gone"
"""Why a round of long ago is not recomputed."""

DAMAGED = "its inputs are damaged"
"""Why one is not whose inputs are there; a finding says which, and in what way."""

OF_ITSELF = ("corrupt", "stale", "empty", "zero_steps", "zero_samples", "counters", "schema")
"""Rejections that follow from the contribution alone, by the checks of `contributions`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What closing a round depends on."""

    schema: Schema
    merge: Merge | None  # None: of a kind that is not known here.
    outer_lr: float
    outer_momentum: float
    delta_dtype: str | None
    keep_rounds: int
    build: Build  # On which rounds are recomputed here.


@dataclasses.dataclass(frozen=True)
class Kept:
    """A record some of whose objects are, or must be, in the mailbox."""

    record: RoundRecord
    base: int  # The round that made the version it replaced, -1 for the initial one.


class Unusable(Exception):
    """Why a round cannot be recomputed."""


class Rounds:
    """Checks the contributions and payloads of one round after another."""

    def __init__(self, reader: Reader, settings: Settings, lives: Lives, walk: Walk) -> None:
        self._reader = reader
        self._settings = settings
        self._lives = lives
        self._walk = walk
        self._closers: dict[int, FragmentCloser] = {}
        self._loaded: dict[int, int] = {}  # The round whose version a fragment's closer holds.
        self._damaged: set[int] = set()  # Rounds with an input that is there and of no use.
        self._sent: dict[int, list[ContributionKey]] = collections.defaultdict(list)
        for key in reader.stock.contributions:
            self._sent[key.round].append(key)
        self._last_sent: dict[int, int] = {}  # Per fragment, the newest round with contributions.
        for round in sorted(self._sent):
            if round < walk.round:
                self._last_sent[round % len(settings.schema.plan)] = round

    def check(self, kept: Kept) -> tuple[str, str]:
        """Checks a round. Returns how far that went (`HOWS`), and why no further."""
        record = kept.record
        for who in record.rejected:
            self._check_rejected(record, who)
        self._check_late(record)
        if record.void:
            return "void", ""
        merged = self._merged(record)
        try:
            how, why = self._recompute(kept, merged), ""
        except Unusable as error:
            how, why = "chained", str(error)
            self._check_payloads(record)
        if how == "compared":
            why = f"closed on {_named(record.build)}; here is {_named(self._settings.build)}"
        return how, why

    def check_open(self) -> None:
        """Contributions to rounds that have no record: all that they say of themselves."""
        for round in sorted(self._sent):
            if round >= self._walk.round:
                for key in self._sent[round]:
                    self._check_alone(key, "Closers will reject it.")

    def wants(self, fragment: int, round: int) -> bool:
        """Whether a later round of the fragment can be recomputed from this version."""
        return round < self._last_sent.get(fragment, -1) and self._settings.merge is not None

    def load(self, fragment: int, round: int, version: Version) -> None:
        """Goes on from the version that `round` committed."""
        if self._loaded.get(fragment) != round and self.wants(fragment, round):
            closer = self._closer(fragment)
            closer.load(version.values, version.momentum, version.master)
            self._loaded[fragment] = round

    # Contributions

    def _merged(self, record: RoundRecord) -> list[Contribution | None]:
        """What every participant sent; None where it is gone or not as the record says."""
        return [self._participant(record, who) for who in record.participants]

    def _participant(self, record: RoundRecord, who: Participant) -> Contribution | None:
        key = ContributionKey(record.round, who.node, who.incarnation, who.final)
        name = self._reader.keys.contribution(key)
        means = "It was merged in its time; the round cannot be recomputed any more."
        data = self._contribution(key, means)
        if data is None:
            return None
        try:
            found = self._decoded(data, key, record.version - 1, self._rule(key), means)
        except Rejection as rejection:
            if rejection.reason == "missing":
                return None  # A part of it; that is noted where it was looked for.
            self._reader.wrong(name, f"was merged, and now reads as {_said(rejection)}", means)
        else:
            if not (wrong := _differences(found, who)):
                return found
            self._reader.wrong(name, f"is another than was merged: {wrong}", means)
        self._damaged.add(record.round)
        return None

    def _contribution(self, key: ContributionKey, means: str) -> bytes | None:
        name = self._reader.keys.contribution(key)
        rule = self._rule(key)
        if not self._reader.listed(name) and not rule(self._walk):
            return None
        return self._reader.get(name, rule, means)

    def _rule(self, key: ContributionKey) -> Rule:
        keep = self._settings.keep_rounds
        return lambda walk: _kept(key.round, keep, walk)

    def _decoded(
        self, data: bytes, key: ContributionKey, version: int | None, rule: Rule, means: str
    ) -> Contribution:
        """Checks all of it, its parts too, which have to be there by `rule`.

        For a version of None it may be against whatever it says itself.
        """
        name = self._reader.keys.contribution(key)
        fragment = key.round % len(self._settings.schema.plan)
        specs = self._settings.schema.fragment(fragment)
        room = wire.room(specs, self._settings.delta_dtype)
        signer = signer_of(self._reader.store)
        found = contributions.decode(name, data, room=room, signer=signer)
        return contributions.check(
            found,
            key,
            self._reader.keys,
            specs,
            fragment=fragment,
            version=found.head.version if version is None else version,
            delta_dtype=self._settings.delta_dtype,
            part=lambda part: self._reader.get(part.key, rule, means),
        )

    def _check_rejected(self, record: RoundRecord, who: Rejected) -> None:
        """The reason is the one that its bytes give, where it follows from them."""
        if who.reason == "missing":
            return
        key = ContributionKey(record.round, who.node, who.incarnation, who.final)
        name = self._reader.keys.contribution(key)
        means = "It takes part in nothing."
        data = self._contribution(key, means)
        if data is None:
            return
        version = record.version - (0 if record.void else 1)
        reason = ""
        try:
            self._decoded(data, key, version, self._rule(key), means)
        except Rejection as rejection:
            reason = rejection.reason
        if reason == "missing":
            return  # A part of it, which is noted.
        if who.reason == "superseded":
            self._check_superseded(name, Life(who.node, who.incarnation))
            damaged = reason == "corrupt"
        else:
            damaged = reason != (who.reason if who.reason in OF_ITSELF else "")
        if damaged:
            found = f"reads as `{reason}`" if reason else "reads as good"
            self._reader.wrong(name, f"was rejected as `{who.reason}`, and now {found}", means)

    def _check_superseded(self, name: str, life: Life) -> None:
        later = [
            valid
            for other, valid in self._lives.vouched.items()
            if other.node == life.node and other.incarnation > life.incarnation
        ]
        if not later:
            what = f"was rejected as `superseded`, and there is no later life of {life.node}"
            self._reader.wrong(name, what, "Its samples were dropped for no reason.")

    def _check_late(self, record: RoundRecord) -> None:
        reports = (*record.participants, *record.rejected)
        named = {ContributionKey(record.round, r.node, r.incarnation, r.final) for r in reports}
        for key in self._sent[record.round]:
            if key not in named:
                self._reader.remark(
                    self._reader.keys.contribution(key),
                    f"came after round {record.round} was closed, and takes part in nothing",
                )
                self._check_alone(key, "It takes part in nothing.")

    def _check_alone(self, key: ContributionKey, means: str) -> None:
        """A contribution of which no record says what it must be."""
        name = self._reader.keys.contribution(key)
        data = self._reader.get(name, never, means)
        if data is None:
            return
        try:
            self._decoded(data, key, None, never, means)
        except Rejection as rejection:
            if rejection.reason in ("corrupt", "schema"):
                self._reader.wrong(name, f"reads as {_said(rejection)}", means)

    # Payloads

    def _check_payloads(self, record: RoundRecord) -> None:
        """Reads what the round committed, and goes on from it where that is of use."""
        anchor, outer = self._values(record)
        if record.update is not None:
            self._payload(record, record.update, "Learners read the whole anchor in its place.")
        if anchor is None or outer is None or not self.wants(record.fragment, record.round):
            return
        version = self._version(record, anchor, outer)
        if version is not None:
            self.load(record.fragment, record.round, version)

    def _values(self, record: RoundRecord) -> tuple[Buffer | None, Buffer | None]:
        """Anchor and outer state of a round that is not void."""
        assert record.anchor is not None
        assert record.outer is not None
        means = self._means(record)
        return (
            self._payload(record, record.anchor, means),
            self._payload(record, record.outer, means),
        )

    def _payload(self, record: RoundRecord, payload: Payload, means: str) -> Buffer | None:
        """The message that a record names, without compression."""

        def rule(walk: Walk) -> bool:
            return record.round in walk.heads or record.round > walk.covered

        if not self._reader.listed(payload.key) and not rule(self._walk):
            return None
        data = self._reader.get(payload.key, rule, means)
        if data is None:
            return None
        if (found := payloads.named(payload, data)) is not None:
            return found
        what = f"holds {len(data)} bytes that are not those its record names ({payload.size} bytes)"
        self._reader.wrong(payload.key, what, means)
        return None

    def _means(self, record: RoundRecord) -> str:
        if record.round not in self._walk.heads:
            return "A newer version has replaced it; its next round cannot be recomputed."
        newest = self._walk.named[-1]
        where = "the newest checkpoint holds it too"
        if newest.versions[record.fragment] != record.version:
            where = "no checkpoint holds it yet"
        return (
            f"It is the newest version of fragment {record.fragment}: nodes cannot join, take over "
            f"or align with it before the next one ({where})."
        )

    def _version(self, record: RoundRecord, anchor: Buffer, outer: Buffer) -> Version | None:
        specs = self._settings.schema.fragment(record.fragment)
        try:
            values = payloads.decode_anchor(anchor, specs)
            precision = self._settings.schema.precision
            return Version(values, *payloads.decode_outer(outer, specs, precision))
        except FormatError as error:
            self._reader.wrong(
                self._reader.keys.record(record.round),
                f"names payloads that are no values of this run: {error}",
                self._means(record),
            )
            return None

    # Closing a second time

    def _recompute(self, kept: Kept, merged: list[Contribution | None]) -> str:
        """Closes the round again and holds the result against what was committed."""
        record = kept.record
        sent = [one for one in merged if one is not None]
        if self._settings.merge is None:
            raise Unusable("its merge is of a kind that is not known here")
        if not sent or len(sent) < len(merged):
            some = "some of its inputs are gone" if sent else GONE
            raise Unusable(DAMAGED if record.round in self._damaged else some)
        if self._loaded.pop(record.fragment, None) != kept.base:
            raise Unusable("the version that it replaced is not there any more")
        try:
            closed = self._closed(record, sent)
        except OutOfRange as error:
            self._disagree(record, f"committed values where its inputs give none: {error}")
            raise Unusable("its inputs give no values that can be held") from None
        same = record.build == self._settings.build
        return self._same_bits(record, closed) if same else self._about_equal(record, closed)

    def _closed(self, record: RoundRecord, sent: list[Contribution]) -> Closed:
        closer = self._closer(record.fragment)
        specs = self._settings.schema.fragment(record.fragment)
        dtype = self._settings.delta_dtype
        measured = [closer.measure(wire.incoming(one.tensors, specs, dtype)) for one in sent]
        for one, who in zip(measured, record.participants, strict=True):
            if not one.finite:
                self._disagree(record, f"merged a delta of {who.node} that is not finite")
                raise Unusable("its inputs are not finite")
        return closer.close(
            measured,
            [who.weight for who in record.participants],
            final=all(who.final for who in record.participants),
        )

    def _same_bits(self, record: RoundRecord, closed: Closed) -> str:
        made = {
            "anchor": payloads.encode_anchor(closed.anchor),
            "outer": payloads.encode_outer(closed.momentum, closed.master),
        }
        if closed.update:
            made["update"] = payloads.encode_update(closed.update)
        digests = {part: messages.digest(buffers) for part, buffers in made.items()}
        named = {"anchor": record.anchor, "outer": record.outer, "update": record.update}
        wrong = [
            part
            for part, payload in named.items()
            if digests.get(part) != (None if payload is None else payload.sha256)
        ]
        if closed.mean_cosine != record.cosine:
            wrong.append("cosine")
        if not wrong:
            self._loaded[record.fragment] = record.round
        del made, closed
        self._check_payloads(record)
        if wrong:
            self._disagree(record, f"names {_listed(wrong)} that its inputs do not give")
            raise Unusable("its inputs give other values")
        return "recomputed"

    def _about_equal(self, record: RoundRecord, closed: Closed) -> str:
        made = Version(*map(_copied, (closed.anchor, closed.momentum, closed.master)))
        del closed  # Its views would make the next close copy.
        anchor, outer = self._values(record)
        if anchor is None or outer is None:
            raise Unusable("it was closed on another build, and what it committed is gone")
        version = self._version(record, anchor, outer)
        if version is None:
            raise Unusable("what it committed cannot be read")
        self.load(record.fragment, record.round, version)
        if far := _far_apart(made, version):
            self._disagree(record, f"differs from what its inputs give: {_listed(far)}")
            raise Unusable("its inputs give other values")
        return "compared"

    def _disagree(self, record: RoundRecord, what: str) -> None:
        means = (
            f"{record.closer} computed something else than this build: look at that machine and "
            "its memory. Every later version of the fragment rests on it."
        )
        self._reader.wrong(self._reader.keys.record(record.round), what, means)

    def _closer(self, fragment: int) -> FragmentCloser:
        settings = self._settings
        if fragment not in self._closers:
            assert settings.merge is not None
            self._closers[fragment] = FragmentCloser(
                settings.schema.fragment(fragment),
                settings.merge,
                outer_lr=settings.outer_lr,
                outer_momentum=settings.outer_momentum,
                precision=settings.schema.precision,
            )
        return self._closers[fragment]


def _kept(round: int, keep_rounds: int, walk: Walk) -> bool:
    """Whether contributions to a round must be there; see `protocol.sweep`."""
    return round + keep_rounds >= walk.round - 1


def _differences(found: Contribution, who: Participant) -> str:
    """In what a contribution differs from what its record says of it."""
    fields = ("counters", "ledger", "position", "work", "final", "spent")
    wrong = [name for name in fields if getattr(found.head, name) != getattr(who, name)]
    if found.sha256 != who.sha256:
        wrong.append("its digest")
    return _listed(wrong)


def _said(rejection: Rejection) -> str:
    if rejection.reason == "corrupt":
        return "`corrupt`: its bytes do not match their digest"
    return f"`{rejection.reason}`"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _named(build: Build | None) -> str:
    if build is None:
        return "an unknown build"
    return (
        f"{build.platform} ({build.device_kind}), jaxlib {build.jaxlib}, {build.machine}, "
        f"{build.cpus} CPUs"
    )


def _copied(tensors: Tensors) -> Tensors:
    return {name: array.copy() for name, array in tensors.items()}


def _far_apart(ours: Version, theirs: Version) -> list[str]:
    """What differs by more than two builds can."""
    pairs = [
        ("anchor", {**ours.values, **ours.master}, {**theirs.values, **theirs.master}),
        ("momentum", ours.momentum, theirs.momentum),
    ]
    return [
        f"the {kind} of `{name}` by {apart:.1e}"
        for kind, mine, other in pairs
        for name, array in other.items()
        if (apart := _apart(mine[name], array)) > TOLERANCE[array.dtype.name]
    ]


def _apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """How far two arrays are apart, as a share of the length of the second."""
    wide = theirs.astype(np.float64)
    length = float(np.linalg.norm(wide))
    gap = float(np.linalg.norm(ours.astype(np.float64) - wide))
    return gap / length if length else (np.inf if gap else 0.0)
