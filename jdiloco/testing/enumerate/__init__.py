"""Every interleaving of a few nodes over a few rounds, with the protocol's own code.

    found = explore(Setting(lost=1))
    print(found)
    assert not found.broken

Every decision is made by the code of production: `member.step`, the learner's machine, the joining
generators and the runtime's checks of a contribution. A state is a mailbox, what every process has
in memory and has asked for, and the faults that may still come. From the first state all others are
met, breadth first, and in each are checked

    S1, S2, S3  by what lies in the mailbox,
    S5          by what every process goes on from, in closing and in training,
    progress    from every state a way without a fault leads to a record of every round.

What is found is told by the shortest way to it, one line a move.

There is no time. A node's clock shows 0 for ever, and grace, waits and beats play no part. What
time would bring about are moves: a node thinks that another's lease has ended, at any moment and
right or wrong; a node asks again after a request without an answer. A takeover because a round is
overdue makes the same claim as one because a lease has ended.

Requests are messages. A process has at most one of each kind under way; what is created may land
at any later time, after its sender gave up or died, or never. A listing shows the mailbox as it is
when the answer comes; what was made of it may be acted upon much later.

Left out, because it cannot change what is checked:

* A request is carried out and answered in one move. Whatever its process does between the two
  touches nothing that others see before a request of its own lands, so it could be done before.
* Requests that only read what never changes are answered in the move that asks for them, as soon as
  a listing has shown that it is there: records, claims, contributions, values. So are payloads
  uploaded, which nobody looks for before a record names them. What may happen in between is what
  may happen before the next listing, or before the record is sent, which is a move of its own.
  `Setting.at_once` says which; the empty set makes each a move.
* What was left of a round that has a record, and that the record does not name, is gone at once
  (`box.without_remains`), and nobody takes over such a round: it can lead to a refused write alone.
* A lease that ended is live again after the move. Each further move could begin with the same
  judgement.
* A learner trains one step for each round that it publishes.

Parts.

    setting      what is explored
    box          a mailbox as a value
    place        a process as a value
    frozen       which values, and which states of a member, are the same
    inside       what happens in a process
    requests     what may become of a request
    births       how a run begins and how a process joins it
    moves        everything that can happen next
    properties   what must hold
    search       breadth first, traces, progress
"""

from __future__ import annotations

from jdiloco.testing.enumerate.search import Found, Search, explore
from jdiloco.testing.enumerate.setting import AT_ONCE, Setting

__all__ = ["AT_ONCE", "Found", "Search", "Setting", "explore"]
