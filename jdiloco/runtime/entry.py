"""How a node comes into its run: from a mailbox and parameters to threads and a learner."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdiloco import events
from jdiloco.errors import RunReplaced, StoreUnavailable, UsageError
from jdiloco.protocol import joining, lives, member
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.keys import MANIFEST, Keys
from jdiloco.protocol.lives import Birth
from jdiloco.protocol.records import FORMAT, Checkpoint, Manifest
from jdiloco.protocol.rules import closes, share
from jdiloco.protocol.sweep import Shelf
from jdiloco.runtime.backends import Backend
from jdiloco.runtime.checkpoints import RunState
from jdiloco.runtime.inbox import Inbox
from jdiloco.runtime.inspect import manifest_of, no_run
from jdiloco.runtime.joining import Performer, initial_state, newest_values
from jdiloco.runtime.learner import Learner
from jdiloco.runtime.news import Values
from jdiloco.runtime.node import Node, hand_out
from jdiloco.runtime.parameters import Holder
from jdiloco.runtime.place import Place, PodHead
from jdiloco.runtime.pods.follower import FollowerNode
from jdiloco.runtime.pods.pod import Pod, check_settings, is_pod, model_digest
from jdiloco.runtime.private import Saved
from jdiloco.runtime.run_key import refuse_other_key, refuse_unreadable, signed, store_name
from jdiloco.runtime.schema import Schema
from jdiloco.runtime.settings import Settings
from jdiloco.runtime.syncer import Syncer
from jdiloco.runtime.work import Work
from jdiloco.store import FolderStore, open_store, small_requests
from jdiloco.store.base import Store
from jdiloco.store.counting import CountingStore
from jdiloco.store.signed import unsigned
from jdiloco.types import Spent

LEAVE_SECONDS = 2.0
"""How long a node that is told to stop tries to say that it leaves."""


@dataclasses.dataclass(frozen=True)
class _Start:
    """Where a run is, and what a node begins from."""

    chain: Chain
    newest: Values  # The anchors of its learner.
    versions: tuple[int, ...]  # Theirs, per fragment.
    pod: PodHead | None = None


class Entry:
    """What a session has come to, step by step; as much of it as is there can be left again."""

    def __init__(
        self,
        settings: Settings,
        holder: Holder,
        *,
        node_id: str,
        backend: Backend,
        brings_model: bool,
        check_stop: Callable[[], None],
        told_to_stop: Callable[[], int],
    ) -> None:
        self.settings = settings
        self.node_id = node_id
        self.schema = Schema((), ())  # The run's, once it is found.
        if brings_model:
            self.schema = Schema.of(holder.specs, settings.algorithm)
            _warn_of_precision(self.schema)
        self.saved: Saved | None = None  # What it goes on from, until its first step.
        self.node: Node | FollowerNode | None = None
        self.learner: Learner | None = None
        self.syncer: Syncer | None = None
        self.work: Work | None = None
        self.pod: Pod | None = None  # Of several processes, if this node is one.
        self.rank: int | None = None
        self._params: Any = None
        self._holder = holder
        self.backend = backend
        self._brings_model = brings_model
        self._check_stop = check_stop
        self._told_to_stop = told_to_stop
        self._counting: CountingStore | None = None
        self._inbox: Inbox | None = None

    def join(self, params: Any, scratch: Path) -> Any:
        """Takes part from now on; returns the parameters with the run's newest values."""
        self._params = params
        self._join(scratch)
        params, self._params = self._params, None  # No array of the user is kept.
        return params

    def _join(self, scratch: Path) -> None:
        settings = self.settings
        opened = open_store(settings.mailbox)
        if isinstance(opened, FolderStore):
            opened.prepare()
        self._counting = CountingStore(opened)
        store = signed(self._counting, settings.key, self._tell_forged)
        self.pod = self._open_pod(opened, store_name(store, MANIFEST)) if is_pod() else None
        if self.pod is not None and not self.pod.is_head:
            self.node, newest = self.pod.follow(store, scratch, self._check_stop)
            self.schema, self._inbox = self.node.place.schema, self.node.inbox
            self._open_part(self.node, newest)
            return
        performer = Performer(
            store,
            settings.clock,
            scratch=scratch,
            initial=lambda prefix: self._initial_state(store, prefix),
            check_stop=self._check_joining,
            small=small_requests(store, settings.algorithm.rules().small_seconds),
            tell=self._tell_waits,
        )
        with contextlib.closing(performer):
            try:
                there = self._manifests(store, scratch) and settings.key is not None
                if there and performer.run(joining.read_manifest()) is None:
                    refuse_unreadable(store)
                self._join_run(store, performer, scratch)
            except Exception as error:
                if self.pod is not None:
                    self.pod.fail(error)
                raise

    def _open_pod(self, store: Store, manifest: str) -> Pod:
        """What this process is of its pod; all of them have been given the same."""
        settings = self.settings
        check_settings(settings.role, settings.ranks, settings.algorithm)
        if self.saved is not None:
            raise UsageError(
                "A pod goes on from no save: open a `Session` under the same `node_id`, and keep "
                "optimiser state and random keys with a checkpointer of your own."
            )
        pod = Pod(
            self._holder,
            self._params,
            settings.algorithm,
            clock=settings.clock,
            poll_seconds=settings.poll_interval,
            compression=settings.compression,
            told_to_stop=self._told_to_stop,
            spent=self.spent_here,
        )
        facts = {
            "algorithm": settings.algorithm.to_json(),
            "params": model_digest(self.schema),
            "role": settings.role,
            "poll_interval": settings.poll_interval,
            "leave_with_run": settings.leave_with_run,
            "node_id": self.node_id,
            "shardings of params": pod.layout,
            "key_file": manifest,  # Its name is made with the key.
        }
        self.node_id = pod.meet(store, facts)
        return pod

    def _check_joining(self) -> None:
        if self.pod is not None:
            self.pod.keep_up()
        self._check_stop()

    def _manifests(self, store: Store, scratch: Path) -> list[str]:
        """What is called a manifest in the mailbox. Raises RunKeyMismatch."""
        clock, seconds = self.settings.clock, self.settings.algorithm.rules().small_seconds
        behind = small_requests(unsigned(store), seconds)
        outside = Performer(
            behind, clock, scratch=scratch, check_stop=self._check_joining, tell=self._tell_waits
        )
        found = outside.run(joining.list_manifests())
        refuse_other_key(store, found)
        return found

    def _tell_forged(self, name: str, because: str) -> None:
        """Called from any thread, also while the node still joins."""
        self._tell(events.Forged(node=self.node_id, name=name, because=because))

    def _tell_waits(self, because: str) -> None:
        self._tell(events.Joining(node=self.node_id, because=because))

    def _tell(self, event: events.Event) -> None:
        if self.node is None:
            hand_out(event, self.settings.callbacks)
        else:
            self.node.tell(event)

    def _join_run(self, store: Store, performer: Performer, scratch: Path) -> None:
        manifest, data, created = self._find_run(store, performer, scratch)
        self.schema = Schema.of_manifest(manifest)
        keys, saved = Keys(manifest.run), self.saved.kept.private if self.saved else None
        taken = lives.take_up_life(keys, self._person(), self.settings.waiting, saved)
        birth = performer.run(taken)
        start = self._read(store, performer, scratch, manifest, data, birth)
        chain = start.chain
        place = Place(
            store=store,
            manifest=manifest,
            manifest_data=data,
            chain=chain,
            birth=birth,
            schema=self.schema,
            algorithm=self.settings.algorithm,
            scratch=scratch,
            pod=start.pod,
        )
        old = performer.run(joining.find_old(keys, chain.read, birth.listed))
        node = self._start_node(place, start, old)
        if created:
            node.emit(events.RunCreated(node=place.life.node, run=manifest.run))
        self._open_part(node, start.newest)
        if birth.overtaken:
            self.saved = None
        if self.saved is not None:
            self._catch_up(node, joining.newest_round(keys, birth.listed))
        node.emit(
            events.Joined(
                node=place.life.node,
                run=manifest.run,
                incarnation=place.life.incarnation,
                round=chain.round,
            )
        )
        self._open_work(node)

    def _read(
        self,
        store: Store,
        performer: Performer,
        scratch: Path,
        manifest: Manifest,
        data: bytes,
        birth: Birth,
    ) -> _Start:
        """Where the run is, and what its learner begins from."""
        if self.pod is not None:
            chain, head, newest = self.pod.place(performer, store, scratch, manifest, data, birth)
            return _Start(chain, newest, chain.versions, head)
        if self.saved is not None and not birth.overtaken:
            kept = self.saved.kept
            read = joining.read_chain_at(manifest, data, kept.private.read)
            held = tuple(fragment.version for fragment in kept.private.fragments)
            return _Start(performer.run(read), dict(kept.held), held)
        if not self.settings.trains:
            chain = performer.run(joining.read_chain(manifest, data, birth.listed))
            return _Start(chain, {}, chain.versions)
        library = performer.library(self.schema)
        chain, newest = newest_values(performer, library, manifest, data, birth.listed)
        return _Start(chain, newest, chain.versions)

    def _start_node(self, place: Place, start: _Start, old: Shelf) -> Node:
        settings = self.settings
        self.node = node = Node(
            place,
            clock=settings.clock,
            poll_seconds=settings.poll_interval,
            role=settings.role,
            callbacks=settings.callbacks,
            shelf=old,
            values=start.newest,
            versions=start.versions,
            compression=settings.compression,
            spent=self.spent,
        )
        if self.pod is not None:
            self._inbox = self.pod.inbox(node, lambda: self._share_of(node))
        return node

    def _open_work(self, node: Node) -> None:
        """What it takes of work that nodes share, if it is a learner of one process."""
        if self.learner is None or self.pod is not None:
            return
        settings = self.settings
        self.work = Work(
            node,
            self.learner,
            settings.clock,
            settings.waiting,
            patience=settings.patience,
            nonce=settings.clock.fresh(),
        )
        if settings.ranks is not None:
            self._params, self.rank = self.work.take_rank(self._params, settings.ranks)

    def _catch_up(self, node: Node, round: int) -> None:
        """Waits until what was committed meanwhile has come; it is taken up by the first step."""
        clock, patience = self.settings.clock, self.settings.patience
        read, moved = node.state.chain.read, clock.now()
        while not (member.is_up_to(node.state, round) or node.state.stopped):
            self._check_stop()
            clock.sleep(self.settings.poll_interval / 4)
            if node.state.chain.read != read:
                read, moved = node.state.chain.read, clock.now()
            elif clock.now() - moved > patience:
                raise StoreUnavailable(
                    f"What round {read + 1} committed could not be read for {patience:.0f} s."
                )

    def _open_part(self, node: Node | FollowerNode, newest: Values) -> None:
        """What the node does in the user's thread."""
        if not self.settings.trains:
            assert isinstance(node, Node), "no pod is a syncer"
            self.syncer = Syncer(node, self.settings.clock, check_stop=self._check_stop)
            self.syncer.open()
            return
        self.learner = Learner(
            node,
            self._holder,
            self.settings.clock,
            newest,
            backend=self.backend,
            check_stop=self._check_stop,
            saved=self.saved.kept if self.saved else None,
            inbox=self._inbox,
        )
        self._params = self.learner.open(self._params)
        if self.pod is not None and self._inbox is not None:
            self._inbox.agreed(lambda: True)  # So all know the share of the global batch.

    def _find_run(
        self, store: Store, performer: Performer, scratch: Path
    ) -> tuple[Manifest, bytes, bool]:
        if self.saved is not None:
            return *self._find_saved_run(store, performer, self.saved.kept.private.run), False
        if not self._brings_model:
            data = performer.run(joining.await_manifest(self.settings.waiting))
            manifest = manifest_of(store, data)
            self.settings.algorithm.check_against(manifest.algorithm)
            return manifest, data, False
        creator = joining.Creator(
            self.node_id, self.settings.clock.fresh(), self.settings.clock.fresh()
        )

        def describe(checkpoint: Checkpoint) -> Manifest:
            self._manifests(store, scratch)  # Others may have begun without the key, or with one.
            return Manifest(
                format=FORMAT,
                run=creator.run,
                algorithm=self.settings.algorithm.to_json(),
                tensors=self.schema.tensors,
                plan=self.schema.plan,
                checkpoint=checkpoint,
                closer=self.node_id if closes(self.settings.role) else "",
                write_id=creator.name,
            )

        found = joining.find_or_create(creator, self.settings.waiting, describe)
        data, created = performer.run(found)
        manifest = manifest_of(store, data)
        self.settings.algorithm.check_against(manifest.algorithm)
        self.schema.check_against(manifest)
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
        self.settings.algorithm.check_against(manifest.algorithm)
        self.schema.check_against(manifest)
        return manifest, data

    def _initial_state(self, store: Store, prefix: str) -> RunState:
        """What the run begins from, should this node create it."""
        if self.pod is not None:
            return self.pod.initial(store, prefix, self.schema)
        names = [spec.name for spec in self.schema.tensors]
        host = jax.device_get(self._holder.get(self._params, names))
        values = {name: np.array(leaf) for name, leaf in zip(names, host, strict=True)}
        return initial_state(self.schema, values)

    def _person(self) -> lives.Person:
        return lives.Person(
            node=self.node_id,
            host=socket.gethostname(),
            process=os.getpid(),
            backend=self.backend.name,
            nonce=self.settings.clock.fresh(),
        )

    # What it has spent, and its share

    def spent(self) -> Spent:
        """What this node has asked of the store."""
        here = self.spent_here()
        return here if self.pod is None else here + self.pod.spent_elsewhere

    def spent_here(self) -> Spent:
        """What this process has."""
        return Spent() if self._counting is None else self._counting.spent

    def share(self) -> int | None:
        """Its part of the global batch size; see `Session.batch_size`."""
        if self.pod is not None:
            return self.pod.share
        assert isinstance(self.node, Node)
        return self._share_of(self.node)

    def _share_of(self, node: Node) -> int | None:
        total, state = self.settings.algorithm.global_batch_size, node.state
        others = state.verdict.learners - state.verdict.paused
        return None if total is None else share(total, others, state.me)

    # Leaving

    def leave(self, because: str) -> None:
        """Ends every thread. Who is stopped or fails goes at once; else what was begun is ended."""
        part = self.learner or self.syncer
        assert part is not None
        assert self.node is not None
        hurry = because != "finished"
        if self.pod is not None and hurry:
            self.pod.close()
        if self.work is not None:
            self.work.close(LEAVE_SECONDS)
        try:
            left = part.leave(because)
        finally:
            patience = LEAVE_SECONDS if hurry else self.settings.patience
            self.node.leave(patience, hurry=hurry)
        self.node.emit(left)

    def abandon(self) -> None:
        """Joining failed."""
        self.learner = self.syncer = None
        if self.pod is not None:
            self.pod.close()
        if self.work is not None:
            self.work.close(LEAVE_SECONDS)
        if self.node is not None:
            self.node.leave(LEAVE_SECONDS, hurry=True)


def _warn_of_precision(schema: Schema) -> None:
    precision = schema.precision
    if precision.commit_dtype is not None and not precision.narrowed(schema.tensors):
        warnings.warn(
            f"`commit_dtype` is {precision.commit_dtype!r}, and no parameter has more bits than "
            "that: commits go out whole, as with None.",
            stacklevel=4,
        )
