"""A node that is a pod: several processes of one `jax.distributed` program.

    world     one small gather, the only collective
    inbox     what a learner hears: the same in every process, at the same step
    parts     a contribution as a head and a part from each process
    desk      parts on their way out
    ranges    a process's share of a payload, read without reading the payload
    library   a process's share of what is committed
    follower  the surroundings of a learner in a process that does not speak to the mailbox
    pod       joining together

Every process runs the same learner, whose decisions are a function of what it has been told. The
first, the head, has the node's threads and sees to it that all are told the same at the same step.
So a pod publishes, aligns and stops as one, bit for bit alike.

No process takes a tensor apart that others hold: each sends the boxes whose first copy it has, and
reads those that its devices hold. What is more than that in host memory:

* at a head that closes rounds (role "both", and no syncer lives): the outer state of the fragments
  it has closed, and a round's contributions, as at any node;
* at a head that creates the run: the model with its momentum, until the first checkpoint is there;
* a fragment, for a moment, where a closer compresses what it commits: it has no ranges to read.

A process that dies takes the others with it, by `jax.distributed`; the run goes on after a lease,
and the pod joins again when it is started again. Until its heartbeats have shown the death the head
still beats, but trains no step, so rounds wait for it no longer than a lease.

Turned down.

* Deciding in one process and sending decisions: every kind of effect would need a message, and a
  second machine that understands it.
* A gather at each step, or only where a round is due: the one is a collective more in every step;
  with the other a commit would wait up to `sync_every / fragments` steps for its alignment, which
  drops as many. So all look together about once in a poll interval, when nothing can have come more
  often, and where a round is due.
* The coordination service's key-value client for what processes tell one another: it is private to
  JAX. That a part has come is seen in the mailbox.
"""
