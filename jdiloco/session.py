"""A node's place in a run, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

from jdiloco.algo.merges import COUNT_MAX
from jdiloco.callbacks import log_events
from jdiloco.errors import UsageError
from jdiloco.protocol import joining
from jdiloco.protocol.desk import Piece
from jdiloco.protocol.keys import check_node_id
from jdiloco.runtime import backends, packing, private, signals
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.backends import Backend
from jdiloco.runtime.clock import Clock
from jdiloco.runtime.compression import check_compression
from jdiloco.runtime.entry import Entry
from jdiloco.runtime.inspect import manifest_of, no_run
from jdiloco.runtime.joining import Performer, newest_values
from jdiloco.runtime.learner import Learner
from jdiloco.runtime.parameters import Holder, TreeHolder, placed
from jdiloco.runtime.pods.follower import FollowerNode
from jdiloco.runtime.private import Saved
from jdiloco.runtime.queues import Barrier, SharedQueue
from jdiloco.runtime.run_key import open_mailbox, read_run_key
from jdiloco.runtime.schema import Schema, check_same
from jdiloco.runtime.settings import Callback, Settings, check_arguments, check_model
from jdiloco.runtime.standing import Standing, standing
from jdiloco.runtime.work import Work
from jdiloco.store.base import Store


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
        check_arguments(algorithm, mailbox, callbacks)
        self._settings = Settings(
            algorithm=algorithm,
            mailbox=mailbox,
            key=read_run_key(key_file),
            role=role,
            ranks=ranks,
            poll_interval=poll_interval,
            compression=check_compression(compression),
            callbacks=tuple(callbacks),
            leave_with_run=leave_with_run,
            clock=clock or Clock(),
        )
        check_model(self._settings, params)
        self._params = params
        self._holder = _holder({} if params is None else params)
        self._in_place = not isinstance(self._holder, TreeHolder)
        self._entry = Entry(
            self._settings,
            self._holder,
            node_id=check_node_id(node_id) if node_id is not None else self._made_up_id(),
            backend=backends.chosen(backend, [] if params is None else self._tensors()),
            brings_model=params is not None,
            check_stop=self._check_stop,
            told_to_stop=lambda: self._stop_signal or 0,
        )
        self._stop_signal: int | None = None
        self._stopped_by: str | None = None
        self._open = contextlib.ExitStack()
        self._entered = self._left = False
        self._was_read = False  # A tree that nobody asked `params` for is the user's own values.
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
        if not self._settings.trains:
            raise UsageError("A syncer has nothing to go on from: open a `Session`.")
        self.algorithm.check_against(saved.algorithm)
        check_same(saved.tensors, self._entry.schema.tensors, f"The node saved in `{saved.path}`")
        if unknown := sorted(like.keys() - saved.mine.keys()):
            raise UsageError(
                f"`like` has {', '.join(unknown)}; saved were {', '.join(saved.mine) or 'none'}."
            )
        self._mine = {key: packing.unpack(key, saved.mine[key], tree) for key, tree in like.items()}
        self._params = self._saved_params(saved)
        self._entry.saved = saved

    def _saved_params(self, saved: Saved) -> Any:
        """The parameters as they were saved, as new arrays, where those of the session are."""
        whole = packing.unpack("params", saved.params, self._holder.whole(self._params))
        return self._holder.with_whole(self._params, whole)

    def _tensors(self) -> tuple[Any, ...]:
        """What this node trains of the parameters it was given."""
        names = [spec.name for spec in self._holder.specs]
        return self._holder.get(self._params, names)

    def _made_up_id(self) -> str:
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname().lower())
        host = host.encode("ascii", "ignore").decode().strip("-")[:24] or "node"
        return f"{host}-{self._settings.clock.fresh(8)}"

    # The block

    def __enter__(self) -> Session:
        if self._entered:
            raise UsageError("This session has been entered before. Make another one.")
        self._entered = True
        if self._settings.trains:
            self._holder.check(self._params)
        with contextlib.ExitStack() as stack:
            stack.enter_context(signals.listening(self._on_signal))
            # Errors are ignored because a thread that outlives the block may still write there.
            scratch = tempfile.TemporaryDirectory(prefix="jdiloco-", ignore_cleanup_errors=True)
            stack.enter_context(scratch)
            try:
                self._params = self._entry.join(self._params, Path(scratch.name))
            except BaseException as error:
                self._entry.abandon()
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
        if self._entry.syncer is not None:
            return
        with contextlib.suppress(_StopRequested):
            if self._entry.work is not None:
                self._params = self._entry.work.give_back(self._params)
            self._params = self._live().finish(
                self._params,
                flush=self.algorithm.flush_on_close,
                patience=self._settings.patience,
                with_run=self._settings.leave_with_run,
            )

    def _leave(self, because: str) -> None:
        try:
            learner = self._entry.learner
            if learner is not None and self._in_place and because != "failed":
                learner.committed(self._params)
        finally:
            self._entry.leave(because)

    # What a user calls

    @property
    def stopped_by(self) -> str | None:
        """The signal that ended the block, `"SIGTERM"` or `"SIGINT"`; None when none did."""
        return self._stopped_by

    @property
    def algorithm(self) -> DiLoCo:
        """The run's settings."""
        return self._settings.algorithm

    @property
    def node_id(self) -> str:
        """This node's id."""
        return self._entry.node_id

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
        if self._entry.rank is not None:
            return self._work_of().position
        return self._live().position

    @property
    def rank(self) -> int | None:
        """Which of the `ranks` fixed slices is this node's, from 0; None without `ranks`."""
        return self._entry.rank

    @property
    def params(self) -> Any:
        """The newest committed values this node holds, as copies, in the structure it was given.

        In the block right after it was entered, that is the run's newest; after the block, the
        newest committed version. Leaves that are not floating point are those passed last. Of a
        module it is the module itself, which holds those values at these two times and is being
        trained in between. Restored, they are as they were saved until the first step. In a pod
        every process reads them, at the same step.
        """
        learner = self._live()
        self._was_read = True
        if self._in_place:
            return self._params
        if self._entry.saved is not None and not self._left:
            return self._saved_params(self._entry.saved)
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
        self._holder.check(self._params)
        private.save(
            path,
            learner.kept(claimed=work.has_claimed),
            algorithm=self.algorithm.to_json(),
            params=packing.pack("params", self._holder.whole(self._params)),
            tensors=self._entry.schema.tensors,
            mine={key: packing.pack(key, tree) for key, tree in mine.items()},
            fresh=self._settings.clock.fresh(),
        )

    @property
    def status(self) -> Standing:
        """Who is alive, who takes part, and how far this node is; any thread may ask."""
        if self._entry.node is None:
            raise UsageError("The session has not been entered. Use it in a `with` statement.")
        if isinstance(self._entry.node, FollowerNode):
            raise UsageError(
                "Process 0 of a pod hears of the run: ask there, `jax.process_index() == 0`."
            )
        state = self._entry.learner.state if self._entry.learner is not None else None
        return standing(self._entry.node.state, state, self._entry.spent())

    @property
    def batch_size(self) -> int | None:
        """This node's share of `global_batch_size`, None where the run has none.

        Of the learners that are alive, as of the newest look at the mailbox.
        """
        self._live()
        return self._entry.share()

    def step(self, params: Any = None, *, samples: SupportsIndex, steps: SupportsIndex = 1) -> Any:
        """Counts a training step, publishes and aligns what is due, and returns the parameters.

        Returns the object it was given where nothing changed. `samples` is how many rows the call
        trained on, `steps` how many optimiser steps it covers (more than one for a `lax.scan`).
        """
        learner = self._live()
        rows, count = _count("samples", samples), _count("steps", steps)
        if self._in_place:
            self._refuse_params(params)
            self._check_stop()
            learner.step(None, samples=rows, steps=count)
            self._entry.saved = None
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
        try:
            self._params = learner.step(params, samples=rows, steps=count)
        except UsageError:
            self._params = before  # What was refused is not what this node holds.
            raise
        self._entry.saved = None
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
        if self._entry.syncer is not None:
            _check_nothing_to_train(step, data)
            self._entry.syncer.run(
                with_run=self._settings.leave_with_run, patience=self._settings.patience
            )
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
        self, step: Callable[[Any, Any], Any], item: Any, piece: Piece | None = None
    ) -> None:
        """One step, on a batch of `piece` if it is shared work."""
        made = step(self._params, item)
        params, samples = (None, made) if self._in_place else _of_step(made)
        if piece is None:
            self.step(params, samples=samples)
            return
        with self._work_of().batch_of(piece):
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
                    self._train(step, item, piece)
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
            params = self._params
        elif params is None:
            raise UsageError("Pass the parameters: `params = session.wait_at(barrier, params)`.")
        if self._left:
            raise UsageError("The block of this session has ended: nobody is to wait for it.")
        self._holder.check(params)
        self._params = work.wait_at(params, barrier)
        self._entry.saved = None
        return None if self._in_place else self._params

    def _work_of(self) -> Work:
        self._live()
        if self._entry.work is None:
            raise UsageError(
                "This node is a pod: it has no shared queue, no barrier, and `save` is not for it. "
                "Divide the data by the number that each pod is started with, and keep optimiser "
                "state and random keys with a checkpointer of your own."
            )
        return self._entry.work

    def _live(self) -> Learner:
        if self._entry.learner is None:
            if self._entry.syncer is not None:
                raise UsageError(
                    "This node is a syncer: it trains nothing and holds no parameters. Call "
                    "`session.run()`, and read the model with `jdiloco.load(mailbox, like=params)`."
                )
            raise UsageError("The session has not been entered. Use it in a `with` statement.")
        return self._entry.learner

    # Signals

    def _on_signal(self, number: int) -> None:
        self._stop_signal = number

    def _check_stop(self) -> None:
        number = self._entry.pod.stop if self._entry.pod is not None else self._stop_signal
        if number:
            self._stopped_by = signal.Signals(number).name
            raise _StopRequested(self._stopped_by)


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
