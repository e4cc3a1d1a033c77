"""A node's place in a run, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

import jax
import numpy as np

from jdiloco import events
from jdiloco.algo.merges import COUNT_MAX
from jdiloco.callbacks import log_events
from jdiloco.errors import RunReplaced, StoreUnavailable, UsageError
from jdiloco.protocol import joining, lives, member
from jdiloco.protocol.keys import MANIFEST, Keys, check_node_id
from jdiloco.protocol.records import FORMAT, Checkpoint, Manifest
from jdiloco.protocol.rules import ROLES, closes, share, trains
from jdiloco.runtime import backends, packing, private, signals
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.backends import Backend
from jdiloco.runtime.checkpoints import RunState
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.compression import check_compression
from jdiloco.runtime.inbox import Inbox
from jdiloco.runtime.inspect import manifest_of, no_run
from jdiloco.runtime.joining import Performer, initial_state, newest_values
from jdiloco.runtime.learner import Learner
from jdiloco.runtime.news import Values
from jdiloco.runtime.node import Node, hand_out
from jdiloco.runtime.parameters import Holder, TreeHolder, placed
from jdiloco.runtime.place import Place, PodHead
from jdiloco.runtime.pods.follower import FollowerNode
from jdiloco.runtime.pods.pod import Pod, check_settings, is_pod, model_digest
from jdiloco.runtime.private import Saved
from jdiloco.runtime.queues import Barrier, SharedQueue
from jdiloco.runtime.run_key import (
    open_mailbox,
    read_run_key,
    refuse_other_key,
    refuse_unreadable,
    signed,
    store_name,
)
from jdiloco.runtime.schema import Schema, check_same
from jdiloco.runtime.standing import Standing, standing
from jdiloco.runtime.syncer import Syncer
from jdiloco.runtime.work import Work
from jdiloco.store import FolderStore, open_store, small_requests
from jdiloco.store.base import Store
from jdiloco.store.counting import CountingStore
from jdiloco.store.signed import unsigned
from jdiloco.types import Spent

LEAVE_SECONDS = 2.0
"""How long a node that is told to stop tries to say that it leaves."""

Callback = Callable[[events.Event], None]


def _nothing() -> None:
    pass


class _StopRequested(BaseException):
    """Ends the `with` block at a step boundary, and is swallowed by its end."""


class Session:
    """Trains `params` together with every other node of the run in `mailbox`.

        with jdiloco.Session(params, algorithm, mailbox="runs/x") as session:
            params = session.params                                # the run's newest
            for batch in data:
                params, opt_state, loss = train_step(params, opt_state, batch)
                params = session.step(params, samples=batch_size)  # counts, publishes, aligns
        params = session.params                                    # the newest committed

    `params` is any pytree; leaves that are not floating point stay the node's own. With an
    `nnx.Module` the session works in place: `session.step(samples=n)`. The first node of a run
    creates it from its own values; every other takes the run's, whatever it brings.

    The session never keeps, donates or views an array of the user, so the user's step may donate
    its buffers; and an aligned leaf is placed as the leaf it replaces, so the step never compiles
    again.

    A node of role "syncer" trains nothing, needs no accelerator and may be given None for `params`;
    while it lives it closes all rounds:

        with jdiloco.Session(None, algorithm, mailbox="runs/x", role="syncer") as session:
            session.run()                                          # until a signal comes

    On SIGTERM or Ctrl-C the block ends at the next step boundary, without waiting for anybody,
    and `stopped_by` names the signal; a second one acts as if there were no session. While the node
    still joins there is no block: the program ends, with 128 and the signal's number as its status.

    Arguments:
      params: the parameters, or a Flax NNX module. None, for a syncer alone: then it waits until
        another node has created the run.
      algorithm: the run's settings; all nodes must agree on them.
      mailbox: a folder or URL that every node of the run can reach, or a `Store`.
      role: what the node does. "both" trains, and closes rounds when it is named for that.
        "learner" never closes any: a run needs a node that does. "syncer" closes and never trains;
        while it lives nobody else is named. "either" trains until it is named, then closes alone
        while another learner trains, and trains again when none does or a syncer has come.
      node_id: 1 to 40 of `a-z0-9-`, unique among living nodes. None makes one up from the host's
        name.
      ranks: gives the node one of so many fixed slices of the data, `session.rank`, that no other
        living node has. With all of them taken it waits when it enters until one is free, and goes
        on with that at `session.position`.
      poll_interval: seconds between two looks at the mailbox. Costs one listing each; a quarter of
        the beat interval or less.
      backend: how this node uses its devices: "cpu", "gpu" or "tpu", of which None takes the one
        that the parameters lie on, or a `jdiloco.runtime.backends.Backend`. On a GPU or TPU anchors
        are kept in pinned memory of the host. A node's own affair, like its devices.
      compression: "zstd" has this node compress what it sends, without loss and beside training; a
        node reads what others send whatever they chose. Saves 10 to 30 % of the bytes, for a
        second of one core a gigabyte or some: for lines that are slow or cost money.
      callbacks: functions of one event (`jdiloco.events`), called from any thread.
      key_file: the file that holds the run's key, for runs in which only those take part who have
        it (`docs/who-may-write.md`). None looks in the environment, `JDILOCO_RUN_KEY` or
        `JDILOCO_RUN_KEY_FILE`; where nothing is found there, the run has none.
      leave_with_run: whether to stay, once the data has ended, until no learner trains any more:
        then every node that does so ends with the same values. For a syncer: whether it ends with
        the last learner it has met.

    Raises RunConfigMismatch, SchemaMismatch, RunKeyMismatch, NodeIdInUse, StoreIgnoresConditions or
    StoreUnavailable when entered; NodeSuperseded or RunReplaced from `step`, and
    StoreIgnoresConditions where a record of the run was found to have been replaced.
    """

    def __init__(
        self,
        params: Any,
        algorithm: DiLoCo,
        mailbox: str | os.PathLike[str] | Store,
        *,
        role: str = "both",
        node_id: str | None = None,
        ranks: int | None = None,
        poll_interval: float = 1.0,
        backend: Backend | str | None = None,
        compression: str | None = None,
        callbacks: Iterable[Callback] = (log_events,),
        leave_with_run: bool = False,
        key_file: str | os.PathLike[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        _check_arguments(algorithm, mailbox, callbacks)
        _check_role(role, params)
        if ranks is not None and not ranks >= 1:
            raise UsageError(f"`ranks` counts slices of the data: 1 or more, not {ranks!r}.")
        if not poll_interval > 0:
            raise UsageError(f"`poll_interval` must be above 0 seconds, got {poll_interval!r}.")
        if poll_interval * 4 > algorithm.beat_seconds:
            raise UsageError(
                f"`poll_interval` is {poll_interval} s and the run's `beat_seconds` "
                f"{algorithm.beat_seconds}: a beat needs at least four polls to be seen in time. "
                "Poll more often, or beat less."
            )
        self.algorithm = algorithm
        self._stopped_by: str | None = None
        self._clock = clock or Clock()
        self._mailbox = mailbox
        self._key = read_run_key(key_file)
        self._role = role
        self._poll_interval = poll_interval
        self._compression = check_compression(compression)
        self._callbacks = tuple(callbacks)
        self._leave_with_run = leave_with_run
        self._node_id = check_node_id(node_id) if node_id is not None else self._made_up_id()
        self._params = params
        self._brings_model = params is not None
        self._holder = _holder(params if self._brings_model else {})
        self._in_place = not isinstance(self._holder, TreeHolder)
        self._schema = Schema((), ())  # The run's, once it is found.
        if self._brings_model:
            self._schema = Schema.of(self._holder.specs, algorithm)
            _warn_of_precision(self._schema)
        self._backend = backends.chosen(backend, self._tensors())
        self._stop_signal: int | None = None
        self._open = contextlib.ExitStack()
        self._entered = self._left = False
        self._was_read = False  # A tree that nobody asked `params` for is the user's own values.
        self._counting: CountingStore | None = None
        self._node: Node | FollowerNode | None = None
        self._learner: Learner | None = None
        self._work: Work | None = None
        self._ranks = ranks
        self._rank: int | None = None
        self._syncer: Syncer | None = None
        self._pod: Pod | None = None  # Of several processes, if this node is one.
        self._inbox: Inbox | None = None
        self._saved: Saved | None = None  # What it goes on from, until its first step.
        self._mine: dict[str, Any] = {}

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        params: Any,
        algorithm: DiLoCo,
        mailbox: str | os.PathLike[str] | Store,
        *,
        like: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Session:
        """A session that goes on where `save` was called, as the same node.

            with jdiloco.Session.restore(
                "saves", params, algorithm, mailbox="runs/x", like={"opt_state": opt_state}
            ) as session:
                params, opt_state = session.params, session.restored["opt_state"]
                for batch in itertools.islice(batches, session.position, None):
                    ...

        `path` is one that was given to `save`, or a directory of several whose names end with a
        number: then the highest that is complete counts. `params`, or a module, is built as when
        the node first started: its structure and its placement count, its values are replaced.
        `like` holds, for each tree that was passed to `save`, one of the same structure, and an
        array of the same shape and type wherever that has one. The other arguments are those of
        `Session`, without `node_id`, which is the saved one.

        Where the run has committed nothing meanwhile the node goes on bit for bit as if it had not
        stopped. Otherwise those commits count as arriving at its first step. Where the run holds a
        contribution of this node that was made after the save, what the save has pending may have
        been merged already: it is dropped as `lost`, `session.params` are the run's newest, and
        `session.position` lies behind that contribution; so also where the node had claimed
        shared work, which others may have gone on with. What was passed to `save` is as it was.

        Raises UsageError where there is no complete checkpoint of this kind, RunConfigMismatch or
        SchemaMismatch for another run's, and SchemaMismatch where `like` has other leaves; entering
        it raises RunReplaced where the mailbox holds another run.
        """
        saved = private.read(path)
        node = arguments.pop("node_id", None) or saved.kept.private.life.node
        if node != saved.kept.private.life.node:
            raise UsageError(
                f"`node_id` is {node!r}, and `{path}` is a save of node "
                f"{saved.kept.private.life.node!r}. Leave `node_id` out."
            )
        session = cls(params, algorithm, mailbox, node_id=node, **arguments)
        session._go_on_from(saved, dict(like or {}))
        return session

    def _go_on_from(self, saved: Saved, like: dict[str, Any]) -> None:
        if not trains(self._role):
            raise UsageError("A syncer has nothing to go on from: open a `Session`.")
        self.algorithm.check_against(saved.algorithm)
        check_same(saved.tensors, self._schema.tensors, f"The node saved in `{saved.path}`")
        if unknown := sorted(like.keys() - saved.mine.keys()):
            raise UsageError(
                f"`like` has {', '.join(unknown)}; saved were {', '.join(saved.mine) or 'none'}."
            )
        self._mine = {key: packing.unpack(key, saved.mine[key], tree) for key, tree in like.items()}
        self._params = self._saved_params(saved)
        self._saved = saved

    def _saved_params(self, saved: Saved) -> Any:
        """The parameters as they were saved, as new arrays, where those of the session are."""
        whole = packing.unpack("params", saved.params, self._holder.whole(self._params))
        return self._holder.with_whole(self._params, whole)

    def _tensors(self) -> tuple[Any, ...]:
        """What this node trains of the parameters it was given."""
        names = [spec.name for spec in self._holder.specs]
        return self._holder.get(self._params, names) if self._brings_model else ()

    def _made_up_id(self) -> str:
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname().lower())
        host = host.encode("ascii", "ignore").decode().strip("-")[:24] or "node"
        return f"{host}-{self._clock.fresh(8)}"

    # The block

    def __enter__(self) -> Session:
        if self._entered:
            raise UsageError("This session has been entered before. Make another one.")
        self._entered = True
        with contextlib.ExitStack() as stack:
            stack.enter_context(signals.listening(self._on_signal))
            # Errors are ignored because a thread that outlives the block may still write there.
            scratch = tempfile.TemporaryDirectory(prefix="jdiloco-", ignore_cleanup_errors=True)
            stack.enter_context(scratch)
            try:
                self._join(Path(scratch.name))
            except BaseException as error:
                self._abandon()
                if isinstance(error, _StopRequested):
                    # There is no block yet that could just end. The status is the usual one of a
                    # signal, so that nobody takes this for the end of the data.
                    raise SystemExit(128 + (self._stop_signal or 0)) from None
                raise
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> bool:
        stopped = kind is not None and issubclass(kind, _StopRequested)
        because = "stopped" if stopped else "failed" if kind else "finished"
        self._left = True
        with self._open:
            try:
                if kind is None:
                    self._finish()
            except BaseException:
                because = "failed"
                raise
            finally:
                self._leave("stopped" if self.stopped_by else because)
        return stopped

    def _finish(self) -> None:
        """Waits for what is in flight; a signal cuts it short."""
        if self._syncer is not None:
            return
        with contextlib.suppress(_StopRequested):
            if self._work is not None:
                self._params = self._work.give_back(self._params)
            self._params = self._live().finish(
                self._params,
                flush=self.algorithm.flush_on_close,
                patience=self._patience,
                with_run=self._leave_with_run,
            )

    @property
    def _patience(self) -> float:
        """Seconds for a closer that died to be noticed and for another to take its place."""
        return self.algorithm.rules().patience(self._poll_interval)

    def _leave(self, because: str) -> None:
        """Ends every thread. Who is stopped or fails goes at once; else what was begun is ended."""
        part = self._learner or self._syncer
        assert part is not None
        assert self._node is not None
        hurry = because != "finished"
        if self._pod is not None and hurry:
            self._pod.close()
        if self._work is not None:
            self._work.close(LEAVE_SECONDS)
        try:
            if self._learner is not None and self._in_place and because != "failed":
                self._learner.committed(self._params)
            left = part.leave(because)
        finally:
            self._node.leave(LEAVE_SECONDS if hurry else self._patience, hurry=hurry)
        self._node.emit(left)

    def _abandon(self) -> None:
        """Joining failed."""
        self._learner = self._syncer = None
        if self._pod is not None:
            self._pod.close()
        if self._work is not None:
            self._work.close(LEAVE_SECONDS)
        if self._node is not None:
            self._node.leave(LEAVE_SECONDS, hurry=True)

    # Joining

    def _join(self, scratch: Path) -> None:
        opened = open_store(self._mailbox)
        if isinstance(opened, FolderStore):
            opened.prepare()
        self._counting = CountingStore(opened)
        store = signed(self._counting, self._key, self._tell_forged)
        self._pod = self._open_pod(opened, store_name(store, MANIFEST)) if is_pod() else None
        if self._pod is not None and not self._pod.is_head:
            self._node, newest = self._pod.follow(store, scratch, self._check_stop)
            self._schema, self._inbox = self._node.place.schema, self._node.inbox
            self._open_part(self._node, newest)
            return
        performer = Performer(
            store,
            self._clock,
            scratch=scratch,
            initial=lambda prefix: self._initial_state(store, prefix),
            check_stop=self._check_joining,
            small=small_requests(store, self.algorithm.rules().small_seconds),
        )
        with contextlib.closing(performer):
            try:
                there = self._manifests(store, scratch) and self._key is not None
                if there and performer.run(joining.read_manifest()) is None:
                    refuse_unreadable(store)
                self._join_run(store, performer, scratch)
            except Exception as error:
                if self._pod is not None:
                    self._pod.fail(error)
                raise

    def _open_pod(self, store: Store, manifest: str) -> Pod:
        """What this process is of its pod; all of them have been given the same."""
        check_settings(self._role, self._ranks, self.algorithm)
        if self._saved is not None:
            raise UsageError(
                "A pod goes on from no save: open a `Session` under the same `node_id`, and keep "
                "optimiser state and random keys with a checkpointer of your own."
            )
        pod = Pod(
            self._holder,
            self._params,
            self.algorithm,
            clock=self._clock,
            poll_seconds=self._poll_interval,
            compression=self._compression,
            told_to_stop=lambda: self._stop_signal or 0,
            spent=self._spent_here,
        )
        facts = {
            "algorithm": self.algorithm.to_json(),
            "params": model_digest(self._schema),
            "role": self._role,
            "poll_interval": self._poll_interval,
            "leave_with_run": self._leave_with_run,
            "node_id": self._node_id,
            "key_file": manifest,  # Its name is made with the key.
        }
        self._node_id = pod.meet(store, facts)
        return pod

    def _check_joining(self) -> None:
        if self._pod is not None:
            self._pod.keep_up()
        self._check_stop()

    def _manifests(self, store: Store, scratch: Path) -> list[str]:
        """What is called a manifest in the mailbox. Raises RunKeyMismatch."""
        seconds = self.algorithm.rules().small_seconds
        behind = small_requests(unsigned(store), seconds)
        outside = Performer(behind, self._clock, scratch=scratch, check_stop=self._check_joining)
        found = outside.run(joining.list_manifests())
        refuse_other_key(store, found)
        return found

    def _tell_forged(self, name: str, because: str) -> None:
        """Called from any thread, also while the node still joins."""
        event = events.Forged(node=self._node_id, name=name, because=because)
        if self._node is None:
            hand_out(event, self._callbacks)
        else:
            self._node.tell(event)

    def _join_run(self, store: Store, performer: Performer, scratch: Path) -> None:
        manifest, data, created = self._find_run(store, performer, scratch)
        schema = self._schema = Schema.of_manifest(manifest)
        keys = Keys(manifest.run)
        saved = self._saved.kept if self._saved else None
        birth = performer.run(
            lives.take_up_life(
                keys, self._person(), self._waiting(), saved.private if saved else None
            )
        )
        newest: Values = {}
        head: PodHead | None = None
        held: tuple[int, ...] | None = None
        if self._pod is not None:
            chain, head, newest = self._pod.place(performer, store, scratch, manifest, data, birth)
        elif saved is not None and not birth.overtaken:
            chain = performer.run(joining.read_chain_at(manifest, data, saved.private.read))
            newest = dict(saved.held)
            held = tuple(fragment.version for fragment in saved.private.fragments)
        elif trains(self._role):
            chain, newest = newest_values(
                performer, performer.library(schema), manifest, data, birth.listed
            )
        else:
            chain = performer.run(joining.read_chain(manifest, data, birth.listed))
        old = performer.run(joining.find_old(keys, chain.read, birth.listed))
        life = birth.life
        self._node = Node(
            Place(
                store=store,
                manifest=manifest,
                manifest_data=data,
                chain=chain,
                birth=birth,
                schema=schema,
                algorithm=self.algorithm,
                scratch=scratch,
                pod=head,
            ),
            clock=self._clock,
            poll_seconds=self._poll_interval,
            role=self._role,
            callbacks=self._callbacks,
            shelf=old,
            values=newest,
            versions=chain.versions if held is None else held,
            compression=self._compression,
            spent=self._spent,
        )
        if self._pod is not None:
            node = self._node
            self._inbox = self._pod.inbox(node, lambda: self._share(node))
        if created:
            self._node.emit(events.RunCreated(node=life.node, run=manifest.run))
        self._open_part(self._node, newest)
        if birth.overtaken:
            self._saved = None
        if self._saved is not None:
            self._catch_up(self._node, joining.newest_round(keys, birth.listed))
        self._node.emit(
            events.Joined(
                node=life.node, run=manifest.run, incarnation=life.incarnation, round=chain.round
            )
        )
        if self._learner is None or self._pod is not None:
            return
        self._work = Work(
            self._node,
            self._learner,
            self._clock,
            self._waiting(),
            patience=self._patience,
            nonce=self._clock.fresh(),
        )
        if self._ranks is not None:
            self._params, self._rank = self._work.take_rank(self._params, self._ranks)

    def _catch_up(self, node: Node, round: int) -> None:
        """Waits until what was committed meanwhile has come; it is taken up by the first step."""
        read, moved = node.state.chain.read, self._clock.now()
        while not (member.is_up_to(node.state, round) or node.state.stopped):
            self._check_stop()
            self._clock.sleep(self._poll_interval / 4)
            if node.state.chain.read != read:
                read, moved = node.state.chain.read, self._clock.now()
            elif self._clock.now() - moved > self._patience:
                raise StoreUnavailable(
                    f"What round {read + 1} committed could not be read for {self._patience:.0f} s."
                )

    def _open_part(self, node: Node | FollowerNode, newest: Values) -> None:
        """What the node does in the user's thread."""
        if not trains(self._role):
            assert isinstance(node, Node), "no pod is a syncer"
            self._syncer = Syncer(node, self._clock, check_stop=self._check_stop)
            self._syncer.open()
            return
        self._learner = Learner(
            node,
            self._holder,
            self._clock,
            newest,
            backend=self._backend,
            check_stop=self._check_stop,
            saved=self._saved.kept if self._saved else None,
            inbox=self._inbox,
        )
        self._params = self._learner.open(self._params)
        if self._pod is not None and self._inbox is not None:
            self._inbox.agreed(lambda: True)  # So all know the share of the global batch.

    def _find_run(
        self, store: Store, performer: Performer, scratch: Path
    ) -> tuple[Manifest, bytes, bool]:
        if self._saved is not None:
            return *self._find_saved_run(store, performer, self._saved.kept.private.run), False
        if not self._brings_model:
            data = performer.run(joining.await_manifest(self._waiting()))
            manifest = manifest_of(store, data)
            self.algorithm.check_against(manifest.algorithm)
            return manifest, data, False
        creator = joining.Creator(self._node_id, self._clock.fresh(), self._clock.fresh())

        def describe(checkpoint: Checkpoint) -> Manifest:
            self._manifests(store, scratch)  # Others may have begun without the key, or with one.
            return Manifest(
                format=FORMAT,
                run=creator.run,
                algorithm=self.algorithm.to_json(),
                tensors=self._schema.tensors,
                plan=self._schema.plan,
                checkpoint=checkpoint,
                closer=self._node_id if closes(self._role) else "",
                write_id=creator.name,
            )

        found = joining.find_or_create(creator, self._waiting(), describe)
        data, created = performer.run(found)
        manifest = manifest_of(store, data)
        self.algorithm.check_against(manifest.algorithm)
        self._schema.check_against(manifest)
        return manifest, data, created

    def _find_saved_run(
        self, store: Store, performer: Performer, run: str
    ) -> tuple[Manifest, bytes]:
        data = performer.run(joining.read_manifest())
        if data is None:
            raise no_run(store)
        manifest = manifest_of(store, data)
        if manifest.run != run:
            raise RunReplaced(
                f"{store.url} holds run {manifest.run!r}; what is to be restored belongs to run "
                f"{run!r}. Name its mailbox, or open a `Session` to join this run."
            )
        self.algorithm.check_against(manifest.algorithm)
        self._schema.check_against(manifest)
        return manifest, data

    def _initial_state(self, store: Store, prefix: str) -> RunState:
        """What the run begins from, should this node create it."""
        if self._pod is not None:
            return self._pod.initial(store, prefix, self._schema)
        names = [spec.name for spec in self._schema.tensors]
        host = jax.device_get(self._holder.get(self._params, names))
        values = {name: np.array(leaf) for name, leaf in zip(names, host, strict=True)}
        return initial_state(self._schema, values)

    def _waiting(self) -> joining.Waiting:
        algorithm = self.algorithm
        return joining.Waiting(self._poll_interval, algorithm.beat_seconds, algorithm.lease_seconds)

    def _person(self) -> lives.Person:
        return lives.Person(
            node=self._node_id,
            host=socket.gethostname(),
            process=os.getpid(),
            backend=self._backend.name,
            nonce=self._clock.fresh(),
        )

    # What a user calls

    @property
    def stopped_by(self) -> str | None:
        """The signal that ended the block, `"SIGTERM"` or `"SIGINT"`; None when none did."""
        return self._stopped_by

    @property
    def node_id(self) -> str:
        """This node's id."""
        return self._node_id

    @property
    def position(self) -> int:
        """The batches of this node's own data that are behind it: where to go on reading.

        A batch is one optimiser step, so `step(..., steps=k)` counts k. Counts over all lives of a
        node id: a node that is started again under its `node_id` goes on after the last batch that
        anything it ever sent to the run covers, and trains on what came after that once more.

            for batch in itertools.islice(batches, session.position, None):
                params = session.step(train_step(params, batch), samples=len(batch))

        With `ranks` it counts the batches of the slice, whoever trained on them.
        """
        if self._rank is not None:
            return self._work_of().position
        return self._live().position

    @property
    def rank(self) -> int | None:
        """Which of the `ranks` fixed slices is this node's, from 0; None without `ranks`."""
        return self._rank

    @property
    def params(self) -> Any:
        """The newest committed values this node holds, as copies, in the structure it was given.

        In the block right after it was entered, that is the run's newest; after the block, the
        newest committed version. Leaves that are not floating point are those passed last. Of a
        module it is the module itself, which holds those values at these two times and is being
        trained in between. Restored, they are as they were saved until the first step.
        """
        learner = self._live()
        self._was_read = True
        if self._in_place:
            return self._params
        if self._saved is not None and not self._left:
            return self._saved_params(self._saved)
        return learner.committed(self._params)

    @property
    def restored(self) -> dict[str, Any]:
        """What was passed to `save`, in the structure of `like`; empty in a new session."""
        return self._mine

    def save(self, path: str | os.PathLike[str], **mine: Any) -> None:
        """Saves what this node needs to go on, between two steps, for `Session.restore`.

            session.save(f"saves/{step}", opt_state=opt_state, key=key)

        In it are the parameters, what the session knows of them, the place in the data
        (`session.position`), and whatever trees are passed, with leaves that are arrays, random
        keys, numbers, strings or bytes. What the run has committed is not: that is in the mailbox.
        `path` becomes an Orbax checkpoint, at once and complete; there must be nothing there yet.
        Training may go on at once: what is saved is a copy. Costs a copy of the model to host
        memory and to the disk.

        Call it after `session.step` has returned, with what it returned in use. Raises UsageError
        where nothing can be put at `path`, or a leaf cannot be saved.
        """
        learner = self._live()
        work = self._work_of()
        if self._left:
            raise UsageError("The block of this session has ended: there is nothing to go on with.")
        private.save(
            path,
            learner.kept(claimed=work.has_claimed),
            algorithm=self.algorithm.to_json(),
            params=packing.pack("params", self._holder.whole(self._params)),
            tensors=self._schema.tensors,
            mine={key: packing.pack(key, tree) for key, tree in mine.items()},
            fresh=self._clock.fresh(),
        )

    @property
    def status(self) -> Standing:
        """Who is alive, who takes part, and how far this node is; any thread may ask."""
        if self._node is None:
            raise UsageError("The session has not been entered. Use it in a `with` statement.")
        if isinstance(self._node, FollowerNode):
            raise UsageError(
                "Process 0 of a pod hears of the run: ask there, `jax.process_index() == 0`."
            )
        state = self._learner.state if self._learner is not None else None
        return standing(self._node.state, state, self._spent())

    def _spent(self) -> Spent:
        """What this node has asked of the store."""
        here = self._spent_here()
        return here if self._pod is None else here + self._pod.spent_elsewhere

    def _spent_here(self) -> Spent:
        return Spent() if self._counting is None else self._counting.spent

    @property
    def batch_size(self) -> int | None:
        """This node's share of `global_batch_size`, None where the run has none.

        Of the learners that are alive, as of the newest look at the mailbox.
        """
        self._live()
        if self._pod is not None:
            return self._pod.share
        assert isinstance(self._node, Node)
        return self._share(self._node)

    def _share(self, node: Node) -> int | None:
        total, state = self.algorithm.global_batch_size, node.state
        others = state.verdict.learners - state.verdict.paused
        return None if total is None else share(total, others, state.me)

    def step(self, params: Any = None, *, samples: SupportsIndex, steps: SupportsIndex = 1) -> Any:
        """Counts a training step, publishes and aligns what is due, and returns the parameters.

        Returns the object it was given where nothing changed. `samples` is how many rows the call
        trained on, `steps` how many optimiser steps it covers (more than one for a `lax.scan`).
        """
        learner = self._live()
        self._saved = None
        rows, count = _count("samples", samples), _count("steps", steps)
        if self._in_place:
            self._refuse_params(params)
            self._check_stop()
            self._count_work(count)
            learner.step(None, samples=rows, steps=count)
            return None
        if self._left:
            raise UsageError("The block of this session has ended. Open another to train on.")
        if not self._was_read:
            raise UsageError(
                "`step` was called before `session.params` was read, so this node trains from its "
                "own values and not from the run's. Begin with `params = session.params`."
            )
        if params is None:
            raise UsageError("Pass the parameters: `params = session.step(params, samples=n)`.")
        before, self._params = self._params, params
        self._check_stop()
        self._count_work(count)
        try:
            self._params = learner.step(params, samples=rows, steps=count)
        except UsageError:
            self._params = before  # What was refused is not what this node holds.
            raise
        return self._params

    def _refuse_params(self, params: Any) -> None:
        if params is not None:
            raise UsageError(
                f"`step` was given a {type(params).__name__}, but this session trains a module in "
                "place: call `session.step(samples=n)`. To train a split state, open the session "
                "with that state."
            )

    def run(
        self,
        step: Callable[[Any, Any], Any] | None = None,
        data: Iterable[Any] | SharedQueue | None = None,
    ) -> Any:
        """Calls `step` for each item of `data` and does the session's part after each.

        `step(params, item)` returns the parameters and the samples it trained on; for a module
        `step(module, item)` returns the samples alone. Ends with the data or with a signal. What
        `step` or `data` raise ends the block and goes on to the caller.

        `data` is any iterable, or a `SharedQueue`, whose units the nodes of the run divide among
        themselves: then it ends once every unit is complete.

        A syncer calls it with nothing, `session.run()`: it closes rounds until a signal comes or,
        with `leave_with_run`, until every learner that it has met is gone.
        """
        if self._syncer is not None:
            _check_nothing_to_train(step, data)
            self._syncer.run(with_run=self._leave_with_run, patience=self._patience)
            return None
        if step is None or data is None:
            raise UsageError("There is nothing to train on: call `session.run(step, data)`.")
        self._params = self.params
        if isinstance(data, SharedQueue):
            self._run_queue(step, data)
            return self._params
        for item in data:
            self._train(step, item)
        return self._params

    def _train(
        self, step: Callable[[Any, Any], Any], item: Any, trained: Callable[[], None] = _nothing
    ) -> None:
        """One step. `trained` is called once it is, before a contribution can cover it."""
        if self._in_place:
            samples = step(self._params, item)
            trained()
            self.step(samples=samples)
        else:
            params, samples = _of_step(step(self._params, item))
            trained()
            self.step(params, samples=samples)

    def _run_queue(self, step: Callable[[Any, Any], Any], queue: SharedQueue) -> None:
        work = self._work_of()
        counter = work.counter(queue.pool)
        try:
            while True:
                self._params, piece = work.next(self._params, counter, stay=queue.stay)
                if piece is None:
                    return
                for item in queue.after(piece.held.unit, piece.trained):
                    self._train(step, item, piece.train)
                    if piece.recalled:
                        break
                else:
                    counter.end(piece)
        except BaseException:
            counter.recall()  # Others go on with it, once what was trained has been published.
            raise

    def wait_at(self, barrier: Barrier, params: Any = None) -> Any:
        """Waits until enough nodes have come to `barrier`, and returns the parameters.

        Commits are taken up meanwhile, so what it returns may be newer than what it was given, as
        with `step`. A module is updated in place: `session.wait_at(barrier)`. Raises
        BarrierTimeout.
        """
        work = self._work_of()
        if not isinstance(barrier, Barrier):
            raise UsageError(f"Pass a `jdiloco.Barrier(name, nodes)`, not {barrier!r:.60}.")
        if self._in_place:
            self._refuse_params(params)
        elif params is None:
            raise UsageError("Pass the parameters: `params = session.wait_at(barrier, params)`.")
        else:
            self._params = params
        self._params = work.wait_at(self._params, barrier)
        return None if self._in_place else self._params

    def _work_of(self) -> Work:
        self._live()
        if self._work is None:
            raise UsageError(
                "This node is a pod: it has no shared queue, no barrier, and `save` is not for it. "
                "Divide the data by the number that each pod is started with, and keep optimiser "
                "state and random keys with a checkpointer of your own."
            )
        return self._work

    def _count_work(self, steps: int) -> None:
        if self._work is not None:
            self._work.count(steps)

    def _live(self) -> Learner:
        if self._learner is None:
            if self._syncer is not None:
                raise UsageError(
                    "This node is a syncer: it trains nothing and holds no parameters. Call "
                    "`session.run()`, and read the model with `jdiloco.load(mailbox, like=params)`."
                )
            raise UsageError("The session has not been entered. Use it in a `with` statement.")
        return self._learner

    # Signals

    def _on_signal(self, number: int) -> None:
        self._stop_signal = number

    def _check_stop(self) -> None:
        number = self._pod.stop if self._pod is not None else self._stop_signal
        if number:
            self._stopped_by = signal.Signals(number).name
            raise _StopRequested(self._stopped_by)


def _check_arguments(algorithm: Any, mailbox: Any, callbacks: Any) -> None:
    """What a slip of the hand leaves behind; everything else is checked where it is used."""
    if not isinstance(algorithm, DiLoCo):
        raise UsageError(
            f"`algorithm` is {algorithm!r:.80}. "
            "Call Session(params, jdiloco.DiLoCo(sync_every=…, fragments=…), mailbox)."
        )
    if mailbox is None:
        raise UsageError("`mailbox` is None. Name a folder that every node of the run can reach.")
    if callable(callbacks) or not all(map(callable, callbacks)):
        raise UsageError(
            f"`callbacks` is {callbacks!r:.80}. Pass a sequence of functions of one event, "
            "`callbacks=(jdiloco.log_events,)`, or () for none."
        )


def _check_role(role: Any, params: Any) -> None:
    if role not in ROLES:
        raise UsageError(f"`role` must be one of {', '.join(map(repr, ROLES))}, got {role!r}.")
    if params is None and trains(role):
        raise UsageError(
            f"`params` is None, and a node of role {role!r} trains. Pass the parameters or the "
            "module, or use role='syncer' for a node that only closes rounds."
        )


def _of_step(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise UsageError(
        f"The step returned a {type(result).__name__}; `session.run` wants `(params, samples)`, "
        "the parameters and how many rows it trained on."
    )


def _check_nothing_to_train(step: Any, data: Any) -> None:
    if step is not None or data is not None:
        raise UsageError(
            "A syncer trains nothing: call `session.run()`, or open the session with another role."
        )


def _holder(params: Any) -> Holder:
    """NNX modules are known by their class; flax is imported only by programs that use it."""
    if isinstance(params, type):
        raise UsageError(
            f"`params` is the class {params.__name__}. Pass an instance of it, or its parameters."
        )
    flax_nnx = sys.modules.get("flax.nnx")
    if flax_nnx is not None and isinstance(params, flax_nnx.Optimizer):
        raise UsageError(
            "`params` is an nnx.Optimizer. Pass the module that it trains: optimiser state is each "
            "node's own."
        )
    if flax_nnx is not None and isinstance(params, flax_nnx.Module):
        from jdiloco.nnx import ModuleHolder

        return ModuleHolder(params)
    return TreeHolder(params)


def _warn_of_precision(schema: Schema) -> None:
    precision = schema.precision
    if precision.commit_dtype is not None and not precision.narrowed(schema.tensors):
        warnings.warn(
            f"`commit_dtype` is {precision.commit_dtype!r}, and no parameter has more bits than "
            "that: commits go out whole, as with None.",
            stacklevel=3,
        )


def load(
    mailbox: str | os.PathLike[str] | Store,
    like: Any,
    *,
    key_file: str | os.PathLike[str] | None = None,
) -> Any:
    """The newest committed model in a mailbox, in the structure of `like` (parameters, or a module
    that is set in place and returned).

    Joins nothing, writes nothing and counts as nobody. `key_file` holds the run's key; None looks
    in the environment. Raises UsageError when there is no run, RunKeyMismatch when it has another
    key, and SchemaMismatch when the run trains another model.
    """
    store = open_mailbox(mailbox, key_file)
    with tempfile.TemporaryDirectory(prefix="jdiloco-") as scratch:
        performer = Performer(store, Clock(), scratch=Path(scratch))
        data = performer.run(joining.read_manifest())
        if data is None:
            raise no_run(store)
        manifest = manifest_of(store, data)
        holder = _holder(like)
        schema = replace(Schema.of_manifest(manifest), tensors=holder.specs)
        schema.check_against(manifest)
        _, values = newest_values(performer, performer.library(schema), manifest, data)
        leaves = zip(values, holder.get(like, list(values)), strict=True)
        return holder.put(like, {name: placed(values[name], leaf) for name, leaf in leaves})


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if not 0 <= count <= COUNT_MAX:
        raise UsageError(
            f"`{name}` counts something: a whole number from 0 to {COUNT_MAX}, not {value!r}."
        )
    return count
