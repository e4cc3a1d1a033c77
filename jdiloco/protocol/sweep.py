"""What may be removed, and by whom.

* A contribution goes `keep_rounds` rounds after the record of its round, and its parts with it.
* A payload goes once two named checkpoints cover its round and its fragment has a newer version, a
  checkpoint once two newer are named.
* Beats: all but the newest of a life, and all of a life that ended, `in_flight + 1` rounds later.
* Nothing of a round without a record is ever garbage, whoever wrote it and however long ago.

So while somebody closes, a mailbox holds at most

    (2·checkpoint_every + 1)·fragments + 1 + W   versions of a fragment, as payloads
    3                                            run checkpoints
    (keep_rounds + 1 + in_flight)·nodes          contributions

W is the number of rounds that are committed between the one a checkpoint is of and the first whose
record names it. Payloads go back to the second newest named checkpoint; the next one is due
`checkpoint_every` cycles after the newest and named W rounds later, and of each fragment the newest
version may be older. The third checkpoint is the one being written. Besides these there are what
attempts leave that lost, until their closers or `garbage` remove it, and small objects that stay.

Only owned keys are named here. They are never written again, so a delete may be repeated or come
late without harm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import replace

from jdiloco.protocol.keys import BeatKey, ContributionKey, Keys
from jdiloco.protocol.lease import Verdict
from jdiloco.protocol.records import Checkpoint, RoundRecord
from jdiloco.protocol.rules import Life, Rules


@dataclasses.dataclass(frozen=True, slots=True)
class Shelf:
    """What this node has seen in the mailbox that will be garbage one day."""

    contributions: tuple[ContributionKey, ...] = ()
    in_parts: frozenset[ContributionKey] = frozenset()  # Those of pods.
    payloads: tuple[tuple[int, str], ...] = ()  # Round, key.
    checkpoints: tuple[Checkpoint, ...] = ()  # Named ones, oldest first.
    strays: tuple[tuple[int, str], ...] = ()  # Round and prefix of checkpoints found at joining.
    ended: tuple[tuple[Life, int], ...] = ()  # A life whose lease ended, and in which round.


def shelve(shelf: Shelf, record: RoundRecord) -> Shelf:
    """Notes what a record names."""
    reports = (*record.participants, *record.rejected)
    keys = [ContributionKey(record.round, r.node, r.incarnation, r.final) for r in reports]
    in_parts = {key for key, report in zip(keys, reports, strict=True) if report.parts}
    payloads = [(record.round, payload.key) for payload in record.payloads]
    known = {checkpoint.prefix for checkpoint in shelf.checkpoints}
    new = () if record.checkpoint.prefix in known else (record.checkpoint,)
    return replace(
        shelf,
        contributions=(*shelf.contributions, *keys),
        in_parts=shelf.in_parts | in_parts,
        payloads=(*shelf.payloads, *payloads),
        checkpoints=(*shelf.checkpoints, *new),
    )


def sweep(
    shelf: Shelf, keys: Keys, rules: Rules, *, round: int, heads: tuple[int, ...]
) -> tuple[Shelf, tuple[str, ...], tuple[str, ...]]:
    """Takes what is garbage once `round` has a record: keys, and prefixes of parts and checkpoints.

    `heads` made the fragments' newest versions. Their payloads stay though checkpoints cover them:
    a learner that is about to align would otherwise have to read a whole checkpoint.
    """
    old = [key for key in shelf.contributions if key.round + rules.keep_rounds < round]
    covered = shelf.checkpoints[-2].round if len(shelf.checkpoints) >= 2 else -1
    gone = [(r, key) for r, key in shelf.payloads if r <= covered and r not in heads]
    named = [checkpoint.prefix for checkpoint in shelf.checkpoints[:-2]]
    kept = {checkpoint.prefix for checkpoint in shelf.checkpoints[-2:]}
    strays = [(r, prefix) for r, prefix in shelf.strays if r < covered and prefix not in kept]
    prefixes = tuple(f"{p}/" for p in dict.fromkeys([*named, *(prefix for _, prefix in strays)]))
    parts = [keys.parts(k.round, k.node, k.incarnation) for k in old if k in shelf.in_parts]
    shelf = replace(
        shelf,
        contributions=tuple(key for key in shelf.contributions if key not in set(old)),
        in_parts=shelf.in_parts - set(old),
        payloads=tuple(item for item in shelf.payloads if item not in set(gone)),
        checkpoints=shelf.checkpoints[-2:],
        strays=tuple(item for item in shelf.strays if item not in set(strays)),
    )
    doomed = (*(keys.contribution(key) for key in old), *(key for _, key in gone))
    return shelf, doomed, (*parts, *prefixes)


def stale_beats(
    shelf: Shelf,
    beats: Iterable[BeatKey],
    verdict: Verdict,
    rules: Rules,
    keys: Keys,
    *,
    round: int,
) -> tuple[Shelf, tuple[str, ...]]:
    """Takes the beats that nobody needs any more."""
    newest: dict[Life, int] = {}
    listed = list(beats)
    for beat in listed:
        life = Life(beat.node, beat.incarnation)
        newest[life] = max(newest.get(life, 0), beat.beat)
    since = dict(shelf.ended)
    ended = {life: since.get(life, round) for life in newest if life not in verdict.live}
    gone = {life for life, when in ended.items() if when + rules.in_flight + 1 < round}
    doomed = [
        keys.beat(beat)
        for beat in listed
        if (life := Life(beat.node, beat.incarnation)) in gone or beat.beat < newest[life]
    ]
    return replace(shelf, ended=tuple(sorted(ended.items()))), tuple(doomed)
