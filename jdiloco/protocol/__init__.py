"""How a run is decided: pure state machines over a store of objects that are created once.

Problem. Nodes that share nothing but a store train one model. Any of them may die, hang, wake up
again or lose the answer to a request at any moment, clocks agree on nothing, and a run that lasts
weeks must neither lose a round nor merge a sample twice.

Design.

    schedule   which round is due when, and of which fragment
    keys       what everything is called: one listing answers a poll
    records    the small objects, sealed with a digest of their own key and bytes
    signing    what only those can write who hold the run's key
    rules      the numbers that decisions depend on
    lease      who is alive, on the observer's own clock
    waste      how much of what a learner trains is dropped
    tally      what records say of everybody's samples, and whether a ledger agrees
    chain      what a node knows from the records it has read, and the record that comes next
    closing    one round from open to written; sees no time, so it can be enumerated
    member     everything a node decides between polls, around `closing`
    learner    what trained steps and committed rounds lead to; runs in the user's thread
    fragment   what a record does to one fragment of a learner
    alignment  what a learner keeps of its training when it takes a version
    sweep      what may be removed by whoever closes rounds
    garbage    what may be removed by anybody, after nodes that died
    joining    finding or creating a run, reading where it stands
    lives      taking up the next life of a node
    resuming   what a node has to remember to go on after a restart
    work       units of work that nodes claim, give back, and take over from the dead
    desk       what a node has in hand of them, and what it may say of it
    effects    what goes into a member and what comes out of it

The commit of a round is the creation of its record, and nothing else is. Round records, claims, the
manifest and incarnations are contested: several may try to write them, one wins, and they are never
deleted, because a writer that was delayed would create them a second time. Everything else carries
the incarnation and the attempt of its only possible writer in its name.

A node acts on a round, in closing and in training, only after it has read that round's record or
had its own write of it confirmed. Whoever sent a record and got no clear answer sends the same
bytes again until it has read some record of that round. So leases, claims, listings and clocks may
all be wrong: they cost time, never correctness.

None of it knows of a run key. Names and bytes are signed and checked in one place outside, so that
in a run with a key everything here sees what it would see if nobody else could write.

Turned down.

* A coordinator, or leader election by compare-and-swap: a folder has no compare-and-swap, and a
  leader has to be replaced at the worst moment. The record names who closes next, and anybody may
  close all the same.
* Wall clocks in leases: machines an hour apart are common.
* A claim object for every round: a request more, and something to sweep.
* Payloads named by their hash: two closers with equal inputs would share one, and the loser's
  clean-up would take the winner's.
* Counting a round as due by a node's own steps since its start: a node that is slow or came late
  would never be due again.

Caveats. A damaged round record cannot be replaced, so a run whose store damages objects stands
still and says so. Objects of nodes that died between two steps of a sweep stay behind until
somebody calls for `garbage`.

Tested by seeded simulation of whole runs, by a death after every request of a process, and by
planted faults that the simulation must find (`tests/protocol`); by real sessions that die after
every write (`tests/session`), and by real processes in a storm of kills (`tests/multiprocess`).
"""
