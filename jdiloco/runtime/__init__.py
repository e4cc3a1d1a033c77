"""Where decisions meet arrays, threads and the outside world.

    clock          the one door to time and fresh names
    algorithm      the settings of a run, as a user writes them
    precision      in how many bits commits are sent and kept
    schema         the tensors of a model and the fragment plan
    parameters     where a user's tensors are, by name
    pieces         what one process holds of a tensor that others hold parts of
    backends       what depends on the kind of device: where anchors live, how deltas leave
    messages       safetensors, read without believing a header
    contributions  a delta as an object, and the checks it must pass
    payloads       what a round committed, as objects
    updates        from one version's anchor to the next one's, in few bits
    held           what a learner holds, from which an update leads on
    trees          trees of arrays in files that Orbax restores
    checkpoints    run checkpoints, by Orbax
    close          the arithmetic of closing a round
    rounds         closing for real: examine, merge, upload
    workers        library threads
    news           what a node's threads have to say to its learner
    inbox          where the learner hears it
    place          where a node stands when it starts
    node           the member's machine, driven
    pods           a node of several processes
    learner        the learner's machine, driven by the user's own loop
    syncer         what a node that trains nothing does in the user's thread
    standing       where a node stands in its run
    times          where the time of the training thread goes
    signals        SIGTERM and Ctrl-C, for every open session
    alignment      parameters and commits mixed, placed as the user's leaves are
    joining        the joining generators, driven
    private        what one node needs to go on after a restart, in a directory
    packing        a program's own trees as named arrays, and back
    export         the newest committed model, for Orbax alone
    inspect        what a mailbox says, without joining
    status         where a run stands, in figures
    gc             what of a mailbox may be removed, and removing it
    verify         whether a mailbox holds what its run committed

The protocol decides and this package obeys: nothing here chooses a round, a closer or a moment.
A library thread touches host memory and single-device arrays only; programs that span devices are
dispatched by the user's thread, because two threads with collectives can deadlock.
"""
