"""What may be removed from a mailbox by anybody, and is of no use to anybody any more.

Whoever closes rounds sweeps (`sweep`) what it has seen itself. What nobody living has seen stays:
of closers that died, of attempts that lost, of nodes that wanted to create the run and did not, and
everything once the last node is gone. This is for that, at any time, by any number of processes:

* what `sweep` takes: contributions `keep_rounds` after their record, payloads that two named
  checkpoints cover unless they are of a fragment's newest version, checkpoints before the second
  newest that records name;
* parts of contributions as old as that, also of such as never came to be;
* payloads of attempts that lost: their round has a record, and it does not name them;
* checkpoints older than the newest named one that no record can name any more;
* beats that newer ones of their node have replaced, and the last of a node that is gone, if it has
  lived once only;
* beats of creators who are gone, and first checkpoints under the id of a run that never came to be.

Never a contested key, and of a round without a record nothing. What is garbage once stays garbage
whatever is written later, so a listing may be old and a delete may come late.

Two things are kept that look like garbage. The last beat of a node that lived more than once tells
closers to take nothing more of its earlier lives, and those who were asleep that they have been
replaced; it may go some rounds later (`sweep.stale_beats`), which takes somebody who closes rounds.
And the beat of whoever is named to close next: without it those who come back would wait for a
lease before they took over from a node that has left.

Who is gone takes time to see: the same beat in every listing for a lease timeout, counted as in
`lease`. A wrong verdict costs a node that lives a beat, which it then writes anew.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from jdiloco.errors import FormatError, RunReplaced
from jdiloco.protocol import sweep
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.joining import Delete, Get, List, Sleep, Steps, read_chain, read_record
from jdiloco.protocol.keys import CREATING, MANIFEST, BeatKey, ContributionKey, Keys
from jdiloco.protocol.records import Checkpoint, Manifest, RoundRecord
from jdiloco.protocol.rules import Life, Rules

BATCH = 500
"""Keys removed with one request."""

_FIRST = re.compile(r"[a-z0-9]+/save/initial\.[a-z0-9-]+\.0001\.0001/.+")


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a mailbox, as far as decisions depend on it."""

    listed: tuple[str, ...]  # Everything, at one moment.
    chain: Chain  # At the newest record of that listing.
    before: Checkpoint | None  # Named before the newest checkpoint; None: that is the first.
    records: Mapping[int, RoundRecord]  # Of every round after `before` that payloads are of.
    silent: frozenset[str] = frozenset()  # Beats, of nodes and of creators, that stayed the same.


Garbage = dict[str, tuple[str, ...]]
"""Keys by what they are: creating, contribution, beat, payload, checkpoint."""


def garbage(seen: Seen, keys: Keys, rules: Rules) -> Garbage:
    """Everything that may go."""
    parsed = [keys.parse(name) for name in seen.listed if name.startswith(keys.log)]
    beats = [key for key in parsed if isinstance(key, BeatKey)]
    contributions = tuple(key for key in parsed if isinstance(key, ContributionKey))
    swept, prefixes = _swept(seen, keys, rules, contributions)
    lost = _lost_attempts(seen, keys)
    old = {*prefixes, *(f"{prefix}/" for prefix in _never_named(seen, keys))}
    logged = tuple(name for name in swept if name.startswith(keys.log))
    return {
        "creating": _given_up(seen),
        "contribution": (*logged, *_old_parts(seen, keys, rules)),
        "beat": _stale_beats(beats, seen.silent, keys, seen.chain.named),
        "payload": tuple(sorted({*swept, *lost} - {*logged})),
        "checkpoint": (
            *(k for k in seen.listed if f"{keys.checkpoint_of(k)}/" in old),
            *_unborn(seen.listed, keys),
        ),
    }


def _given_up(seen: Seen) -> tuple[str, ...]:
    """Every beat of creators whose newest has stayed the same."""
    silent = {_creator(key): key for key in seen.silent if key.startswith(CREATING)}
    beats = [key for key in seen.listed if key.startswith(CREATING)]
    return tuple(key for key in beats if key <= silent.get(_creator(key), ""))


def _creator(key: str) -> str:
    return key.rpartition(".")[0]


def _swept(
    seen: Seen, keys: Keys, rules: Rules, contributions: tuple[ContributionKey, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a closer would sweep that had seen all of it."""
    chain = seen.chain
    named = (chain.checkpoint,) if seen.before is None else (seen.before, chain.checkpoint)
    shelf = sweep.Shelf(
        contributions=tuple(key for key in contributions if key.round <= chain.read),
        payloads=tuple((r, key) for r, key in _payloads(seen, keys) if r <= chain.read),
        checkpoints=named,
        strays=tuple(dict.fromkeys(_checkpoints(seen, keys))),
    )
    _, doomed, prefixes = sweep.sweep(shelf, keys, rules, round=chain.read, heads=chain.heads)
    return doomed, prefixes


def _old_parts(seen: Seen, keys: Keys, rules: Rules) -> list[str]:
    """Parts of contributions that are garbage themselves, or never came to be."""
    parsed = [(keys.parse_part(key), key) for key in seen.listed]
    last = seen.chain.read - rules.keep_rounds
    return [key for part, key in parsed if part is not None and part.round < last]


def _payloads(seen: Seen, keys: Keys) -> list[tuple[int, str]]:
    parsed = ((keys.parse_payload(key), key) for key in seen.listed)
    return [(found[0], key) for found, key in parsed if found is not None]


def _checkpoints(seen: Seen, keys: Keys) -> list[tuple[int, str]]:
    """Round and prefix of whatever lies among the run's checkpoints, once for each file."""
    files = [k for k in seen.listed if k.startswith(keys.saves) and k.count("/") >= 3]
    rounds = ((keys.round_of(key), keys.checkpoint_of(key)) for key in files)
    return [(round, prefix) for round, prefix in rounds if round is not None]


def _lost_attempts(seen: Seen, keys: Keys) -> list[str]:
    """Payloads that the record of their round does not name."""
    lost = []
    for round, key in _payloads(seen, keys):
        record = seen.records.get(round)
        if record is None:
            continue
        named = {payload.key for payload in record.payloads}
        if key not in named:
            lost.append(key)
    return lost


def _never_named(seen: Seen, keys: Keys) -> set[str]:
    """Checkpoints between the two newest that records name: later records name no older one."""
    if seen.before is None:
        return set()
    between = range(seen.before.round + 1, seen.chain.checkpoint.round)
    return {prefix for round, prefix in _checkpoints(seen, keys) if round in between}


def _stale_beats(
    beats: Iterable[BeatKey], silent: frozenset[str], keys: Keys, closer: Life
) -> tuple[str, ...]:
    """See the module for which are kept."""
    listed = sorted(beats)  # By node, incarnation, beat.
    newest = {beat.node: beat for beat in listed}

    def goes(beat: BeatKey) -> bool:
        if beat != newest[beat.node]:
            return True
        needed = beat.incarnation > 1 or Life(beat.node, beat.incarnation) == closer
        return not needed and (beat.phase == "left" or keys.beat(beat) in silent)

    return tuple(keys.beat(beat) for beat in listed if goes(beat))


def _unborn(listed: Iterable[str], keys: Keys) -> tuple[str, ...]:
    """First checkpoints under the id of another run, of which there is nothing else."""
    files: dict[str, list[str]] = {}
    came_to_be = {keys.run}
    for key in listed:
        run = key.partition("/")[0]
        if _FIRST.fullmatch(key):
            files.setdefault(run, []).append(key)
        else:
            came_to_be.add(run)
    return tuple(k for run, found in files.items() if run not in came_to_be for k in found)


# Looking


def look_through(
    manifest: Manifest, data: bytes, rules: Rules, *, once: bool = False
) -> Steps[Garbage]:
    """Finds everything that may go; `data` are the manifest's bytes.

    Takes up to a lease timeout where beats are still to be judged; `once` leaves those alone. Reads
    the newest records, and few of the older ones, however long the run is. Raises FormatError when
    one of them is damaged, and RunReplaced when the mailbox has got another run meanwhile.
    """
    keys = Keys(manifest.run)
    silent = frozenset[str]() if once else (yield from _watch(keys, rules))
    listed = tuple((yield List("")))
    logged = [name for name in listed if name.startswith(keys.log)]
    chain = yield from read_chain(manifest, data, logged)
    before = yield from _named_before(keys, chain)
    seen = Seen(listed, chain, before, {}, silent)
    covered = -1 if before is None else before.round
    rounds = {round for round, _ in _payloads(seen, keys) if covered < round <= chain.read}
    records = {}
    for round in sorted(rounds | {head for head in chain.heads if head >= 0}):
        records[round], _ = yield from read_record(keys, round)
    if (yield Get(MANIFEST)) != data:
        raise RunReplaced(
            f"The mailbox held run {manifest.run!r} and does no longer: nothing was removed. "
            "Look at what is there now, and begin again."
        )
    return garbage(dataclasses.replace(seen, records=records), keys, rules)


def remove(found: Garbage) -> Steps[None]:
    """Removes it. May be broken off anywhere, and begun again."""
    doomed = [key for keys in found.values() for key in keys]
    for start in range(0, len(doomed), BATCH):
        yield Delete(tuple(doomed[start : start + BATCH]))


def _named_before(keys: Keys, chain: Chain) -> Steps[Checkpoint | None]:
    """The checkpoint that records named before the newest; None when that is the first.

    Each record names one at least as new as the record before it, so halving finds where that
    changed.
    """
    newest = chain.checkpoint.round
    if newest < 0:
        return None
    low, high = newest, chain.read  # That of `low` names an older one, that of `high` the newest.
    older, _ = yield from read_record(keys, low)
    while high - low > 1:
        middle = (low + high) // 2
        record, _ = yield from read_record(keys, middle)
        if record.checkpoint.round < newest:
            low, older = middle, record
        else:
            high = middle
    if older.checkpoint.round >= newest:
        raise FormatError(
            f"{keys.record(low)!r} names the run checkpoint of round {older.checkpoint.round}, "
            "which cannot have been there. `jdiloco verify` says more."
        )
    return older.checkpoint


def _watch(keys: Keys, rules: Rules) -> Steps[frozenset[str]]:
    """The newest beats of nodes and creators that stayed the same for a lease timeout."""
    poll = rules.beat_seconds / 2
    first = yield from _signs(keys)
    unchanged = dict.fromkeys(first, 0.0)
    while any(seconds < rules.lease_seconds for seconds in unchanged.values()):
        passed = min((yield Sleep(poll)), 2 * poll)
        shown = yield from _signs(keys)
        unchanged = {
            who: seconds + passed
            for who, seconds in unchanged.items()
            if shown.get(who) == first[who]
        }
    return frozenset(first[who] for who in unchanged)


def _signs(keys: Keys) -> Steps[dict[str, str]]:
    """The newest beat of everybody who is to be judged."""
    parsed = [keys.parse(name) for name in (yield List(f"{keys.log}live/"))]
    newest = {beat.node: beat for beat in sorted(k for k in parsed if isinstance(k, BeatKey))}
    signs = {
        node: keys.beat(beat)
        for node, beat in newest.items()
        if beat.incarnation == 1 and beat.phase != "left"
    }
    for name in (yield List(CREATING)):  # In order, so the newest of each comes last.
        signs[_creator(name)] = name
    return signs
