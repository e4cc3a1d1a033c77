"""Opening and closing a pod's session: one process joins, the others are told where it stands.

    all     meet                     they have been given the same settings and model
    head    finds or creates the run, takes up the pod's next life; the others wait
            a row is exchanged again and again meanwhile, so all hear of a signal or a failure
    all     read the newest values   each its own share; from the beginning if any came too late

Where the pod creates the run, every process sends what it holds of the initial parameters, and the
head, which writes the first run checkpoint, puts them together: it has to have room for the model
once more, with its momentum.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.sharding import Sharding

from jdiloco.algo.wire import SMALL
from jdiloco.errors import FormatError, StoreUnavailable, UsageError
from jdiloco.protocol import chain as chains
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.joining import read_chain
from jdiloco.protocol.keys import MANIFEST, Keys
from jdiloco.protocol.lives import Birth
from jdiloco.protocol.records import Manifest, Payload
from jdiloco.protocol.rules import Life
from jdiloco.runtime import messages
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.checkpoints import RunState
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.inspect import manifest_of
from jdiloco.runtime.joining import BULK_WAITS, Performer, initial_state
from jdiloco.runtime.node import Node
from jdiloco.runtime.parameters import Holder
from jdiloco.runtime.pieces import Pieces, box_of, check_spread, first_copies
from jdiloco.runtime.place import Place, PodHead
from jdiloco.runtime.pods import parts
from jdiloco.runtime.pods.desk import Desk
from jdiloco.runtime.pods.follower import FollowerNode
from jdiloco.runtime.pods.inbox import Mind, Placed, Row, SharedInbox, Word, raised
from jdiloco.runtime.pods.library import Share, ShareLibrary
from jdiloco.runtime.pods.world import World
from jdiloco.runtime.schema import Schema
from jdiloco.runtime.workers import Worker
from jdiloco.store import MemoryStore
from jdiloco.store.base import Store
from jdiloco.store.settle import create_owned
from jdiloco.types import Spent

ROLES = ("both", "learner")
WORD_SECONDS = 0.1
"""How often the head tells that it still joins."""


def is_pod() -> bool:
    """Whether this process is one of several that are one JAX program."""
    return jax.process_count() > 1


def check_settings(role: str, ranks: int | None, algorithm: DiLoCo) -> None:
    """Raises UsageError for what a pod cannot do, with the way out."""
    if role not in ROLES:
        raise UsageError(
            f"`role` is {role!r}, and this node is a pod of {jax.process_count()} processes: a pod "
            "trains. Use role='both' or 'learner', and for a syncer a process of its own that does "
            "not call `jax.distributed.initialize`."
        )
    if ranks is not None:
        raise UsageError(
            "A pod takes no `ranks`: they are claimed by nodes of one process. Give each pod its "
            "part of the data by the number it is started with, and a `node_id` that stays."
        )
    if algorithm.delta_dtype in SMALL:
        raise UsageError(
            f"`delta_dtype` is {algorithm.delta_dtype!r}, whose scales take whole tensors, and no "
            "process of a pod has them. Use 'bfloat16' in a run with pods."
        )


class Pod:
    """This process's place in a pod."""

    def __init__(
        self,
        holder: Holder,
        params: Any,
        algorithm: DiLoCo,
        *,
        clock: Clock,
        poll_seconds: float,
        compression: str | None,
        told_to_stop: Callable[[], int],
        spent: Callable[[], Spent],
    ) -> None:
        self._names = [spec.name for spec in holder.specs]
        self._leaves = dict(zip(self._names, holder.get(params, self._names), strict=True))
        for name, leaf in self._leaves.items():
            check_spread(name, leaf)
        self._shardings: dict[str, Sharding] = {n: x.sharding for n, x in self._leaves.items()}
        self._algorithm = algorithm
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._compression = compression
        self._world = World()
        self._mind = Mind(self._world, told_to_stop, spent)
        self._prefix = ""  # Where the initial values are wanted.
        self._sent = frozenset[int]()  # Who has sent its share of them.
        self._has_sent = False
        self._said_at = -WORD_SECONDS
        self._joined = False
        self._desk: Desk | None = None

    @property
    def is_head(self) -> bool:
        """Whether this process speaks for the pod."""
        return self._world.is_head

    @property
    def stop(self) -> int:
        """The signal that all processes have agreed to stop for, 0 for none."""
        return self._mind.stop

    @property
    def share(self) -> int | None:
        """The pod's share of the global batch, as all processes know it."""
        return self._mind.share

    @property
    def spent_elsewhere(self) -> Spent:
        """What the other processes have asked of the store."""
        return self._mind.spent_elsewhere

    # Everybody

    @property
    def layout(self) -> str:
        """A digest of which device holds what of every tensor."""
        running = hashlib.sha256()
        for name, sharding in self._shardings.items():
            shape = self._leaves[name].shape
            for device, index in sharding.devices_indices_map(shape).items():
                running.update(f"{name} {device.id} {box_of(index or (), shape)}\n".encode())
        return running.hexdigest()

    def meet(self, store: Store, facts: Mapping[str, Any]) -> str:
        """Holds what every process was given against the others', and returns the node's id."""
        if isinstance(store, MemoryStore):
            raise UsageError(
                f"`mailbox` is {store.url}, which no other process can see, and this node is a pod."
                " Name a folder or a bucket that all its processes reach."
            )
        told = {key: str(value) for key, value in facts.items()}
        said = [word.facts for word in self._exchange(Word(facts=told))]
        for index, other in enumerate(said):
            wrong = [key for key in told if key != "node_id" and other.get(key) != said[0][key]]
            if wrong:
                raise UsageError(
                    f"Processes 0 and {index} of this node were given different {_listed(wrong)}. "
                    "Every process of a pod opens the session with the same arguments."
                )
        return said[0]["node_id"]

    def _exchange(self, word: Word) -> list[Word]:
        rows = self._mind.exchange(Row(word=word))
        return [row.word for row in rows if row.word is not None]

    def _library(self, store: Store, schema: Schema, scratch: Path) -> ShareLibrary:
        waits, sleep = BULK_WAITS, self._clock.sleep
        return ShareLibrary(store, schema, self._shardings, scratch, waits=waits, sleep=sleep)

    def _make_desk(self, store: Store, keys: Keys) -> Desk:
        self._desk = Desk(
            store,
            keys,
            self._world.index,
            now=self._clock.now,
            sleep=self._clock.sleep,
            patience=self._algorithm.lease_seconds,
            compression=self._compression,
        )
        return self._desk

    def close(self) -> None:
        """Waits for no other process any more."""
        if self._desk is not None:
            self._desk.close()

    # The head

    def keep_up(self) -> None:
        """Tells the others that the head still joins, and hears of signals and failures."""
        now = self._clock.now()
        if self._joined or now - self._said_at < WORD_SECONDS:
            return
        words = self._exchange(Word("joining", prefix=self._prefix))
        self._sent = frozenset(index for index, word in enumerate(words) if word.sent)
        self._said_at = self._clock.now()

    def fail(self, error: BaseException) -> None:
        """Tells the others that the head cannot join, unless they know."""
        if self._joined or self._mind.stop or self._mind.broken:
            return
        self._exchange(Word("failed", error=type(error).__name__, text=str(error)))

    def initial(self, store: Store, prefix: str, schema: Schema) -> RunState:
        """What the run begins from, put together from what all processes hold."""
        mine = {name: first_copies(leaf) for name, leaf in self._leaves.items()}
        senders = frozenset[int]().union(*(pieces.senders for pieces in mine.values()))
        self._prefix = prefix
        if self._world.index in senders:
            self._send_initial(store, prefix, mine)
        found = self._await_initial(store, prefix, senders)
        values = parts.assembled(
            found, f"{prefix}/", schema.tensors, None, lambda part: store.get(part.key)
        )
        store.delete([part.key for part in found])
        return initial_state(schema, values)

    def _await_initial(self, store: Store, prefix: str, senders: frozenset[int]) -> list[Payload]:
        while True:
            found, sent = {}, self._sent
            for entry in store.list(f"{prefix}/part."):
                _, process, digest = entry.key.rsplit(".", 2)
                found[int(process)] = Payload(entry.key, entry.size, digest)
            if senders <= found.keys():
                return [found[process] for process in sorted(senders)]
            if lost := sorted((senders & sent) - found.keys()):
                raise UsageError(
                    f"Process {lost[0]} of this node has sent its share of the initial values, "
                    f"which is not in {store.url}. Every process of a pod has to reach one mailbox."
                )
            if self._mind.stop or self._mind.broken:
                raise StoreUnavailable("The pod was stopped before its initial values were here.")
            self._clock.sleep(self._poll_seconds / 4)

    def place(
        self,
        performer: Performer,
        store: Store,
        scratch: Path,
        manifest: Manifest,
        data: bytes,
        birth: Birth,
    ) -> tuple[Chain, PodHead, Share]:
        """Where the run stands, once every process has read its share of the newest values."""
        library = self._library(store, Schema.of_manifest(manifest), scratch)
        listed: tuple[str, ...] | None = birth.listed
        before = None
        while True:
            chain = performer.run(read_chain(manifest, data, listed))
            if before == chain.read:
                raise FormatError(
                    f"Values of the newest records, up to round {chain.read}, are not there. "
                    "`jdiloco verify` says more."
                )
            self._exchange(Word("placed", placed=_placed(chain, data, birth)))
            newest = _read(library, chain)
            if all(word.ok for word in self._exchange(Word("read", ok=newest is not None))):
                assert newest is not None
                self._joined = True
                return chain, PodHead(self._make_desk(store, Keys(manifest.run)), library), newest
            before, listed = chain.read, None
            library.forget()

    def inbox(self, node: Node, share: Callable[[], int | None]) -> SharedInbox:
        """Where the head's learner hears from its node, and the others' from it."""
        return SharedInbox(
            node.to_learner,
            self._mind,
            heard=lambda record, wanted: None,
            share=share,
            poll_seconds=self._poll_seconds,
        )

    # The others

    def follow(
        self, store: Store, scratch: Path, check_stop: Callable[[], None]
    ) -> tuple[FollowerNode, Share]:
        """Waits until the head has joined, and returns what stands here for a node."""
        try:
            return self._follow(store, scratch, check_stop)
        except Exception as error:
            if not self._mind.broken:
                self._mind.failed = f"{type(error).__name__}: {error}"
                self._exchange(Word())  # Raises, in every process.
            raise

    def _follow(
        self, store: Store, scratch: Path, check_stop: Callable[[], None]
    ) -> tuple[FollowerNode, Share]:
        sender = Worker("create", self._failed)
        try:
            while True:
                word = self._exchange(Word(sent=self._has_sent))[0]
                check_stop()
                if word.kind == "failed":
                    self._mind.broken = True
                    raise raised(word.error, f"Process 0, which speaks for this node: {word.text}")
                if word.prefix and not self._prefix:
                    self._prefix = word.prefix
                    sender.submit(lambda: self._send_mine(store))
                if word.placed is not None and (found := self._take(store, scratch, word.placed)):
                    return found
        finally:
            sender.stop()

    def _take(
        self, store: Store, scratch: Path, placed: Placed
    ) -> tuple[FollowerNode, Share] | None:
        """None when one of the processes came too late for what it had to read."""
        data = placed.manifest.encode()
        if store.get(MANIFEST) != data:
            raise UsageError(
                f"{store.url} holds another run than the mailbox of process 0. Every process of a "
                "pod has to reach the same mailbox."
            )
        manifest = manifest_of(store, data)
        schema = Schema.of_manifest(manifest)
        chain = _chain(placed, manifest, data)
        library = self._library(store, schema, scratch)
        newest = _read(library, chain)
        if not all(word.ok for word in self._exchange(Word(ok=newest is not None))):
            library.forget()
            return None
        assert newest is not None
        birth = Birth(Life(placed.node, placed.incarnation), placed.position, 0, ())
        place = Place(
            store=store,
            manifest=manifest,
            manifest_data=data,
            chain=chain,
            birth=birth,
            schema=schema,
            algorithm=self._algorithm,
            scratch=scratch,
        )
        desk = self._make_desk(store, Keys(manifest.run))
        self._joined = True
        node = FollowerNode(
            place, self._mind, desk, library, clock=self._clock, poll_seconds=self._poll_seconds
        )
        return node, newest

    def _failed(self, error: BaseException) -> None:
        self._mind.failed = f"{type(error).__name__}: {error}"

    def _send_mine(self, store: Store) -> None:
        try:
            mine = {name: first_copies(leaf) for name, leaf in self._leaves.items()}
            if any(self._world.index in pieces.senders for pieces in mine.values()):
                self._send_initial(store, self._prefix, mine)
            self._has_sent = True
        except Exception as error:
            self._failed(error)

    def _send_initial(self, store: Store, prefix: str, mine: Mapping[str, Pieces]) -> None:
        data = parts.encode(mine)
        key = f"{prefix}/part.{self._world.index:04}.{messages.digest(data)}"
        create_owned(store, key, data, waits=BULK_WAITS, sleep=self._clock.sleep)


def model_digest(schema: Schema) -> str:
    """Says of two processes whether they brought the same model."""
    text = msgspec.json.encode([schema.tensors, schema.plan])
    return hashlib.sha256(text).hexdigest()


def _read(library: ShareLibrary, chain: Chain) -> Share | None:
    """The newest values; None when one of them has been replaced meanwhile."""
    found: dict[str, Pieces] = {}
    try:
        for index, record in enumerate(chain.records):
            found |= library.values(index, record, chain.checkpoint)
    except FormatError:
        return None
    library.forget()
    return found


def _placed(chain: Chain, data: bytes, birth: Birth) -> Placed:
    return Placed(
        node=birth.life.node,
        incarnation=birth.life.incarnation,
        position=birth.position,
        read=chain.read,
        versions=chain.versions,
        records=chain.records,
        checkpoint=chain.checkpoint,
        manifest=data.decode(),
    )


def _chain(placed: Placed, manifest: Manifest, data: bytes) -> Chain:
    """As much of the head's chain as its learner knows of."""
    begun = chains.begin(manifest, data)
    return dataclasses.replace(
        begun,
        read=placed.read,
        records=placed.records,
        versions=placed.versions,
        checkpoint=placed.checkpoint,
    )


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
