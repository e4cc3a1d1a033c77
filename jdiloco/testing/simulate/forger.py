"""Somebody who reads everything in the mailbox, forgets nothing, and writes without the run's key.

Every forged object is a key that would move somebody, a body that says so, and an attempt to pass
both off: as they are, with the signatures of other objects, with those that another run of the same
key has given to the like, or with invented ones.
"""

from __future__ import annotations

import collections
import contextlib
import random
import re
from collections.abc import Callable, Iterator

import msgspec

from jdiloco.errors import FormatError
from jdiloco.protocol.keys import (
    CREATING,
    MANIFEST,
    BeatKey,
    ClaimKey,
    ContributionKey,
    Keys,
    Pool,
    UnitKey,
)
from jdiloco.protocol.records import (
    Claim,
    Incarnation,
    Manifest,
    RoundRecord,
    Sealed,
    WorkClaim,
    WorkMark,
    seal,
    sha256,
    unseal,
)
from jdiloco.protocol.signing import NAME_DIGITS
from jdiloco.testing.simulate.mailbox import SECRET, Mailbox
from jdiloco.testing.simulate.scenario import Forgery, Scenario
from jdiloco.testing.simulate.values import Delta
from jdiloco.testing.simulate.world import World

NAME = "mallory"
ELSEWHERE = "elsewhere"
"""Another run of the same key, in which nodes have done whatever the forger would like to see."""

LINE = 65  # Bytes of a signature at the end of an object.
_MAC = re.compile(rf"\.([0-9a-f]{{{NAME_DIGITS}}})(?=/|$)")


class Forger:
    """Takes no time, and is never refused by the store."""

    def __init__(self, world: World, mailbox: Mailbox, scenario: Scenario, plan: Forgery) -> None:
        self._world = world
        self._mailbox = mailbox
        self._scenario = scenario
        self._plan = plan
        self._rng = random.Random(f"forger {scenario.seed}")  # Others draw as if there were none.
        self._looked = 0  # At so many of the names that ever lay there.
        self._names: dict[str, list[str]] = collections.defaultdict(list)  # By key.
        self._run = ""
        self._lives: list[tuple[str, int]] = []
        self._beats: collections.Counter[str] = collections.Counter()  # The highest of each node.
        self._round = 0  # To which somebody has reported.

    def start(self) -> None:
        self._world.after(self._plan.seconds, self._act)

    def _act(self) -> None:
        self._look()
        choices: list[Callable[[], object]] = [self._invent] * 4
        if self._plan.replays and self._mailbox.past:
            choices.append(self._replay)
        if self._plan.overwrites and self._mailbox.objects:
            choices.append(self._overwrite)
        self._rng.choice(choices)()
        if self._world.now < self._plan.until:
            self._world.after(self._plan.seconds, self._act)

    def _replay(self) -> None:
        """Puts back what was deleted, as it was."""
        name = self._rng.choice([*self._mailbox.past])
        self._mailbox.forge(NAME, name, self._mailbox.past[name], "again")

    def _overwrite(self) -> None:
        """Writes over one object, rather a new one, with another or with what it might say."""
        there = [*self._mailbox.objects]
        name = self._rng.choice(self._rng.choice((there, there[-5:])))
        key = _MAC.sub("", name)
        other = self._mailbox.objects[self._rng.choice(there)]
        body = dict(self._targets()).get(key, self._rng.randbytes(80))
        same = self._mailbox.objects[name][:-LINE]
        elsewhere = SECRET.close(self._elsewhere(key), self._rng.choice((body, same + b" ")))
        data = self._rng.choice((other, body + other[-LINE:], elsewhere))
        self._mailbox.forge(NAME, name, data, "written over", over=True)

    def _invent(self) -> None:
        key, body = self._rng.choice(list(self._targets()))
        how = self._rng.choice(("plain", "copied", "elsewhere", "random", "moved"))
        self._mailbox.forge(NAME, *self._dressed(how, key, body), how)

    def _dressed(self, how: str, key: str, body: bytes) -> tuple[str, bytes]:
        """A name and bytes with which this may pass."""
        if how == "plain":
            return key, body
        if how == "random":
            return f"{key}.{self._rng.randbytes(16).hex()}", self._rng.randbytes(80)
        if how == "elsewhere":
            other = self._elsewhere(key)
            name = SECRET.name(other).replace(ELSEWHERE, key.partition("/")[0], 1)
            return name, SECRET.close(other, body)
        name, data = self._other(key)
        mac = (_MAC.findall(name) or ["0" * NAME_DIGITS])[0]
        return f"{key}.{mac}", data if how == "moved" else body + data[-LINE:]

    def _other(self, key: str) -> tuple[str, bytes]:
        """Some object, rather one of the like, with its signatures."""
        there = self._mailbox.laid
        stem = ".".join(key.split(".")[:2])
        alike = [name for name in there if name.startswith(stem)]
        beside = [name for name in there if name.startswith(key.rpartition("/")[0])]
        name = self._rng.choice(self._rng.choice((alike, beside, there)) or there or [key])
        return name, self._mailbox.objects.get(name, self._mailbox.past.get(name, b""))

    def _elsewhere(self, key: str) -> str:
        """What that is called in another run; what lies above all runs is of this one alone."""
        above = key == MANIFEST or key.startswith(CREATING)
        return f"{ELSEWHERE}/{key if above else key.partition('/')[2]}"

    # What would move somebody

    def _targets(self) -> Iterator[tuple[str, bytes]]:
        """Keys with bodies; several at least, whatever has happened so far."""
        yield MANIFEST, seal(MANIFEST, Claim(NAME, 1, "nonsense"))
        yield f"{CREATING}0.x.{int(self._world.now):08}", b""
        if not self._lives:
            return
        yield from self._another_manifest()
        keys, round = Keys(self._run), self._round
        node, number = self._rng.choice(self._lives)
        yield from self._life(keys, node, number, round)
        yield from self._signs(keys, node, number, round)
        yield from self._rounds(keys, node, round)
        yield from self._work(keys)

    def _look(self) -> None:
        """What has come since: the MAC in a name is plain to see."""
        for name in self._mailbox.laid[self._looked :]:
            key = _MAC.sub("", name)
            self._names[key].append(name)
            self._run = self._run or (key.partition("/")[0] if "/node/" in key else "")
            keys = Keys(self._run)
            if (life := keys.parse_incarnation(key)) is not None:
                self._lives.append(life)
            logged = keys.parse(key)
            if isinstance(logged, BeatKey):
                self._beats[logged.node] = max(self._beats[logged.node], logged.beat)
            elif isinstance(logged, ContributionKey):
                self._round = max(self._round, logged.round)
        self._looked = len(self._mailbox.laid)

    def _another_manifest(self) -> Iterator[tuple[str, bytes]]:
        found = self._read(MANIFEST, Manifest)
        if found is not None:
            yield MANIFEST, seal(MANIFEST, msgspec.structs.replace(found, run=ELSEWHERE))

    def _life(self, keys: Keys, node: str, number: int, round: int) -> Iterator[tuple[str, bytes]]:
        """A newer life, which somebody else is said to have begun."""
        key = keys.incarnation(node, number + 1)
        life = Incarnation(node, number + 1, "", 0, "", (), round, 10**4, NAME, f"{NAME}/1")
        yield key, seal(key, life)

    def _signs(self, keys: Keys, node: str, number: int, round: int) -> Iterator[tuple[str, bytes]]:
        """That a node has left, and that one is there which is not."""
        beat = self._beats[node]
        yield keys.beat(BeatKey(node, number + 1, 1, "left", 0, round)), b""
        yield keys.beat(BeatKey(node, number, beat + 50, "left", 0, round)), b""
        yield keys.beat(BeatKey(NAME, 1, beat + 1, "training", beat + 1, round)), b""
        yield keys.beat(BeatKey(NAME, 1, beat + 1, "syncing", 0, round)), b""

    def _rounds(self, keys: Keys, node: str, round: int) -> Iterator[tuple[str, bytes]]:
        """A claim, a contribution, and a record that goes on from the newest."""
        key = keys.claim(ClaimKey(round, self._rng.choice((1, 2))))
        yield key, seal(key, Claim(self._rng.choice((node, NAME)), 1, "its lease has ended"))
        yield from self._contributions(keys, node, round)
        before = self._read(keys.record(round - 1), RoundRecord)
        if before is None:
            return
        key = keys.record(round)
        forged = msgspec.structs.replace(
            before,
            round=round,
            fragment=round % len(before.versions),
            previous=sha256(seal(keys.record(round - 1), before)),
            participants=(),
            anchor=None,
            outer=None,
            closer=NAME,
            next_closer=NAME,
            write_id=f"{NAME}.0001.0001",
        )
        yield key, seal(key, forged)

    def _contributions(self, keys: Keys, node: str, round: int) -> Iterator[tuple[str, bytes]]:
        """One that a node has sent, as if it were another's, or doubled."""
        stolen = keys.contribution(ContributionKey(round, node, 1, False))
        found = self._read(stolen, Delta)
        if found is None:
            return
        for name in (NAME, node):
            head = msgspec.structs.replace(found.head, node=name, final=name == node)
            key = keys.contribution(ContributionKey(round, name, 1, head.final))
            yield key, seal(key, msgspec.structs.replace(found, head=head, samples=1))

    def _work(self, keys: Keys) -> Iterator[tuple[str, bytes]]:
        """A unit that nobody has claimed yet, or that is said to be complete."""
        if not self._scenario.units:
            return
        pool = Pool.queue("work", len(self._scenario.units))
        unit = self._rng.randrange(pool.count)
        key = keys.unit(pool, UnitKey(unit, 1))
        yield key, seal(key, WorkClaim(NAME, 1, pool.count, 0, 0, NAME))
        key = keys.unit(pool, UnitKey(unit, 1, "done"))
        yield key, seal(key, WorkMark(NAME, 1, 1))

    def _read(self, key: str, kind: type[Sealed]) -> Sealed | None:
        """What some object says: anybody may read."""
        for name in self._names[key]:
            data = self._mailbox.objects.get(name, b"")
            for body in (data, data[:-LINE]):
                with contextlib.suppress(FormatError):
                    return unseal(key, body, kind)
        return None
