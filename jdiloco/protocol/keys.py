"""The key layout: what a poll must know is in key names, and one listing answers it.

| key | what | kind |
|---|---|---|
| `manifest` | names the run, its configuration, first checkpoint, closer of round 0 | contested |
| `creating/{node}.{nonce}.{beat:08}` | somebody is creating the run | owned |
| `{run}/log/{g}/{r}.0` | round record | contested |
| `{run}/log/{g}/{r}.1.{n:03}` | n-th claim on the closing of a round | contested |
| `{run}/log/{g}/{r}.2.{node}.{inc}[.f]` | contribution; `.f`: the node is leaving | owned |
| `{run}/log/live/{node}.{inc}.{beat:08}.{phase}.{step}.{next}` | beat, body: an account | owned |
| `{run}/data/{r}.{write id}.{anchor,outer,update}` | payload of one attempt at a round | owned |
| `{run}/data/{r}.{node}.{inc}.part.{n:04}.{sha256}` | a part of a pod's contribution | owned |
| `{run}/save/{r}.{node}.{inc}/…` | files of a run checkpoint | owned |
| `{run}/node/{node}.{inc}` | incarnation | contested |
| `{run}/unit/{queue}/{unit}.{n:03}` | n-th claim on a unit of work | contested |
| `{run}/rank/{count}/{rank}.{n:03}` | n-th claim on one of `count` fixed slices | contested |
| either with `.back`, `.done` | given back; complete: by whoever holds the n-th claim | contested |
| `{run}/barrier/{name}/{node}.{inc}` | a node has come to a barrier | owned |

`r` and `unit` have ten digits, `g` is `r div 1000` in seven, `inc` and `rank` have four. Digits
sort before letters, so a listing after `{run}/log/{g}/{r}` skips every round before `r` and still
shows every beat. Contested keys are never deleted: a delayed writer would create them a second
time.
"""

from __future__ import annotations

import dataclasses
import re

from jdiloco.errors import UsageError

MANIFEST = "manifest"
CREATING = "creating/"
NODE_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
PHASES = (
    "joining",
    "training",
    "waiting",
    "resting",
    "closing",
    "finished",
    "syncing",
    "left",
)
"""`closing` is a learner that leaves training to others, `syncing` a dedicated syncer."""
MARKS = ("", "back", "done")


def check_node_id(node: str) -> str:
    """Returns `node` when it can stand in a key, and raises UsageError otherwise."""
    if not isinstance(node, str) or not NODE_ID.fullmatch(node):
        raise UsageError(
            f"Node id {node!r} cannot be part of an object's name. "
            "Use 1 to 40 of a-z, 0-9 and '-', beginning with a letter or digit."
        )
    return node


@dataclasses.dataclass(frozen=True, slots=True)
class RecordKey:
    """A round has a record."""

    round: int


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimKey:
    """Somebody claimed the closing of a round; who, is in the object."""

    round: int
    number: int  # From 1.


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class ContributionKey:
    """A learner has reported to a round."""

    round: int
    node: str
    incarnation: int
    final: bool


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class BeatKey:
    """A node was alive; the highest `beat` of its highest incarnation is its newest."""

    node: str
    incarnation: int
    beat: int
    phase: str  # One of PHASES.
    step: int
    next_round: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Units of work, numbered from 0, that nodes claim: a queue's, or the slices of `ranks`."""

    name: str
    count: int
    digits: int

    @classmethod
    def queue(cls, name: str, count: int) -> Pool:
        return cls(f"unit/{name}", count, 10)

    @classmethod
    def ranks(cls, count: int) -> Pool:
        return cls(f"rank/{count}", count, 4)

    def unit(self, unit: int) -> str:
        """What contributions call a unit."""
        return f"{self.name}/{unit:0{self.digits}}"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class UnitKey:
    """A unit was claimed; given back or completed when it is marked so."""

    unit: int
    claim: int  # From 1; the highest counts.
    mark: str = ""  # One of MARKS.


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class PartKey:
    """One process of a pod has sent its share of the pod's contribution to a round."""

    round: int
    node: str
    incarnation: int
    process: int
    sha256: str  # Of the object, in hexadecimal.


LogKey = RecordKey | ClaimKey | ContributionKey | BeatKey

_NODE = rf"(?P<node>{NODE_ID.pattern})"
_LOG = re.compile(
    r"[0-9]{7}/(?P<round>[0-9]{10})\.(?:(?P<record>0)|1\.(?P<claim>[0-9]{3})"
    rf"|2\.{_NODE}\.(?P<inc>[0-9]{{4,18}})(?P<final>\.f)?)"
)
_BEAT = re.compile(
    rf"live/{_NODE}\.(?P<inc>[0-9]{{4,18}})\.(?P<beat>[0-9]{{8,18}})"
    rf"\.(?P<phase>{'|'.join(PHASES)})\.(?P<step>[0-9]{{1,18}})\.(?P<next>[0-9]{{1,18}})"
)
_UNIT = re.compile(r"(?P<unit>[0-9]{4,18})\.(?P<claim>[0-9]{3,18})(?:\.(?P<mark>back|done))?")
_PAYLOAD = re.compile(
    rf"(?P<round>[0-9]{{10}})\.(?P<write>{_NODE}\.[0-9]{{4,18}}\.[0-9]{{4,18}})"
    r"\.(?P<part>anchor|outer|update)"
)
_PART = re.compile(
    rf"(?P<round>[0-9]{{10}})\.{_NODE}\.(?P<inc>[0-9]{{4,18}})"
    r"\.part\.(?P<process>[0-9]{4,18})\.(?P<sha256>[0-9a-f]{64})"
)
_INCARNATION = re.compile(rf"{_NODE}\.(?P<inc>[0-9]{{4,18}})")


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """Spells and reads the keys of one run."""

    run: str

    @property
    def log(self) -> str:
        """The prefix that a poll lists."""
        return f"{self.run}/log/"

    def after(self, round: int) -> str:
        """Where a poll starts that has read every record before `round`."""
        return f"{self.log}{round // 1000:07}/{round:010}"

    def record(self, round: int) -> str:
        return f"{self.after(round)}.0"

    def claim(self, key: ClaimKey) -> str:
        return f"{self.after(key.round)}.1.{key.number:03}"

    def contribution(self, key: ContributionKey) -> str:
        end = ".f" if key.final else ""
        return f"{self.after(key.round)}.2.{key.node}.{key.incarnation:04}{end}"

    def beat(self, key: BeatKey) -> str:
        who = f"{key.node}.{key.incarnation:04}.{key.beat:08}"
        return f"{self.log}live/{who}.{key.phase}.{key.step}.{key.next_round}"

    def payload(self, round: int, write_id: str, part: str) -> str:
        return f"{self.run}/data/{round:010}.{write_id}.{part}"

    def parse_payload(self, key: str) -> tuple[int, str, str] | None:
        """Round, write id and part of a payload's key, or None for anything else."""
        top, _, name = key.rpartition("/")
        match = _PAYLOAD.fullmatch(name) if top == f"{self.run}/data" else None
        return None if match is None else (int(match["round"]), match["write"], match["part"])

    def parts(self, round: int, node: str, incarnation: int) -> str:
        """The prefix of the parts of a pod's contribution."""
        return f"{self.run}/data/{round:010}.{node}.{incarnation:04}.part."

    def part(self, key: PartKey) -> str:
        return f"{self.parts(key.round, key.node, key.incarnation)}{key.process:04}.{key.sha256}"

    def parse_part(self, key: str) -> PartKey | None:
        """Reads the key of a part; None for anything else."""
        match = _PART.fullmatch(key.removeprefix(f"{self.run}/data/"))
        if match is None:
            return None
        numbers = (int(match["inc"]), int(match["process"]))
        found = PartKey(int(match["round"]), match["node"], *numbers, match["sha256"])
        return found if self.part(found) == key else None

    def checkpoint(self, round: int, node: str, incarnation: int, number: int) -> str:
        """The prefix of a run checkpoint; `number` counts this incarnation's tries."""
        covered = f"{round:010}" if round >= 0 else "initial"
        return f"{self.run}/save/{covered}.{node}.{incarnation:04}.{number:04}"

    @property
    def saves(self) -> str:
        """The prefix of all run checkpoints."""
        return f"{self.run}/save/"

    def round_of(self, key: str) -> int | None:
        """The round of a payload or of a checkpoint's file; -1 for the initial checkpoint."""
        name = key.removeprefix(f"{self.run}/").partition("/")[2].partition(".")[0]
        if name == "initial":
            return -1
        return int(name) if re.fullmatch(r"[0-9]{10}", name) else None

    def checkpoint_of(self, key: str) -> str:
        """The prefix of the checkpoint that a file belongs to."""
        return "/".join(key.split("/")[:3])

    def incarnations(self, node: str) -> str:
        """The prefix of a node's incarnations."""
        return f"{self.run}/node/{node}."

    def incarnation(self, node: str, incarnation: int) -> str:
        return f"{self.incarnations(node)}{incarnation:04}"

    def parse_incarnation(self, key: str) -> tuple[str, int] | None:
        """Node and number of an incarnation's key, or None for anything else."""
        match = _INCARNATION.fullmatch(key.removeprefix(f"{self.run}/node/"))
        if match is None or self.incarnation(match["node"], int(match["inc"])) != key:
            return None
        return match["node"], int(match["inc"])

    def units(self, pool: Pool, after: int = 0) -> tuple[str, str]:
        """Prefix and start of a listing that shows a pool from unit `after` on."""
        return f"{self.run}/{pool.name}/", f"{self.run}/{pool.unit(after)}"

    def unit(self, pool: Pool, key: UnitKey) -> str:
        end = f".{key.mark}" if key.mark else ""
        return f"{self.run}/{pool.unit(key.unit)}.{key.claim:03}{end}"

    def parse_unit(self, pool: Pool, key: str) -> UnitKey | None:
        """Reads a key of a pool; None for one that nobody of us wrote."""
        match = _UNIT.fullmatch(key.removeprefix(f"{self.run}/{pool.name}/"))
        if match is None:
            return None
        found = UnitKey(int(match["unit"]), int(match["claim"]), match["mark"] or "")
        return found if self.unit(pool, found) == key and found.unit < pool.count else None

    def parse_work(self, key: str) -> tuple[Pool, UnitKey] | None:
        """Pool and unit of a claim or mark of any pool; of a queue's size nothing is known."""
        kind, _, name = key.rpartition("/")[0].removeprefix(f"{self.run}/").partition("/")
        if kind == "unit" and name:
            pool = Pool.queue(name, 10**18)
        elif kind == "rank" and re.fullmatch(r"[1-9][0-9]{0,17}", name):
            pool = Pool.ranks(int(name))
        else:
            return None
        found = self.parse_unit(pool, key)
        return None if found is None else (pool, found)

    def barrier(self, name: str) -> str:
        """The prefix of what lies at a barrier."""
        return f"{self.run}/barrier/{name}/"

    def arrival(self, name: str, node: str, incarnation: int) -> str:
        return f"{self.barrier(name)}{node}.{incarnation:04}"

    def parse_arrival(self, name: str, key: str) -> str | None:
        """Which node came, or None for anything else."""
        match = _INCARNATION.fullmatch(key.removeprefix(self.barrier(name)))
        if match is None or self.arrival(name, match["node"], int(match["inc"])) != key:
            return None
        return match["node"]

    def spell(self, key: LogKey) -> str:
        """The one name of what `key` says."""
        match key:
            case RecordKey(round):
                return self.record(round)
            case ClaimKey():
                return self.claim(key)
            case ContributionKey():
                return self.contribution(key)
            case BeatKey():
                return self.beat(key)

    def parse(self, key: str) -> LogKey | None:
        """Reads a key below `log`; None for one that nobody of us wrote.

        Every key has one spelling: what would be spelled otherwise is nothing of ours, or two
        objects would stand for one thing.
        """
        found = self._read(key.removeprefix(self.log))
        return found if found is not None and self.spell(found) == key else None

    def _read(self, rest: str) -> LogKey | None:
        if match := _BEAT.fullmatch(rest):
            return BeatKey(
                node=match["node"],
                incarnation=int(match["inc"]),
                beat=int(match["beat"]),
                phase=match["phase"],
                step=int(match["step"]),
                next_round=int(match["next"]),
            )
        if not (match := _LOG.fullmatch(rest)):
            return None
        round = int(match["round"])
        if match["record"]:
            return RecordKey(round)
        if match["claim"]:
            return ClaimKey(round, int(match["claim"]))
        return ContributionKey(round, match["node"], int(match["inc"]), bool(match["final"]))


def write_id(node: str, incarnation: int, attempt: int) -> str:
    """Names one attempt. No two attempts of anybody share one."""
    return f"{node}.{incarnation:04}.{attempt:04}"
