"""Whether a mailbox holds what its run committed: read from the mailbox alone, writing nothing.

Problem. A run that lasts weeks lies on storage that may lose or change an object, and is closed by
machines whose memory may flip a bit. Everybody trusts what the records name. Somebody has to be
able to ask whether all of it still holds, while the run goes on, and to be told which object is
wrong.

Design.

    chain     every record against those before it: links, versions, weights, ledgers
    lives     incarnations and claims
    rounds    contributions and payloads; rounds are closed again where their inputs are there
    work      claims on units of shared work
    saved     run checkpoints: files, and values against what the records committed
    reading   each object once; what is not there is judged last
    run       in which order, and what is held meanwhile
    report    what comes of it

Records come first, from round 0; of each only what is still, or must still be, in the mailbox is
kept. Then rounds and checkpoints in their order, so that a second closing finds the version it
starts from where the first one left it. Memory holds what a node that closes rounds holds, and one
restored checkpoint. Rounds are closed by the runtime's own closer: of the same build it gives the
same bits, of another it is held to the tolerance that two builds can keep.

Nothing is removed before the record that makes it garbage is there. So what was listed or must be
there and was not found is judged last, by records that were read after it was looked for: a run
that goes on meanwhile raises no false alarm.

What cannot be found. An object whose loss looks like something that may happen: a beat, an arrival,
the contribution to a round without a record, a late one, what is left of an attempt that came
second, the newest claim on a round when another closed it, or on a unit that no contribution
covers. The newest records, when nothing that came after them is left: a run that lost its last
round looks like one that never had it. Changed bytes of what nothing names: payloads of an attempt
that came second, a checkpoint whose listing was not written yet. A delta that was wrong before it
was sealed: a finite one of the right shape is trusted, here as in the run. And whoever may write to
the mailbox can replace a whole run by another.

Tested on real runs (`tests/runtime/test_verify.py`): whatever bit of whatever object is flipped,
that object is named and no other; truncated, swapped, missing and forged ones; runs that go on.
"""

from jdiloco.runtime.verify.reading import Progress
from jdiloco.runtime.verify.report import HOWS, Finding, Remark, Report, Stretch
from jdiloco.runtime.verify.run import verify

__all__ = ["HOWS", "Finding", "Progress", "Remark", "Report", "Stretch", "verify"]
