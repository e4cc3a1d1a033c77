"""A node's life on the virtual clock: it joins, trains, leaves, and may be killed at any point."""

from __future__ import annotations

from collections.abc import Callable

from jdiloco import events
from jdiloco.errors import FormatError, JDilocoError, StoreUnavailable
from jdiloco.protocol import joining, lives, member
from jdiloco.protocol.joining import Steps, Waiting
from jdiloco.protocol.keys import MANIFEST, Keys
from jdiloco.protocol.records import FORMAT, Checkpoint, Manifest, unseal
from jdiloco.protocol.rules import Life, closes, trains
from jdiloco.testing.simulate import values
from jdiloco.testing.simulate.closer import Asking, read_value, write_checkpoint
from jdiloco.testing.simulate.control import Control
from jdiloco.testing.simulate.history import Entry, Fate
from jdiloco.testing.simulate.learner import Learner
from jdiloco.testing.simulate.mailbox import Mailbox
from jdiloco.testing.simulate.performing import ask, perform
from jdiloco.testing.simulate.saves import Save
from jdiloco.testing.simulate.scenario import Death, Plan, Scenario
from jdiloco.testing.simulate.syncer import Syncer
from jdiloco.testing.simulate.values import Values
from jdiloco.testing.simulate.work import Shared
from jdiloco.testing.simulate.world import Process, Sleep, Slot, Take, World

LEAVE_SECONDS = 2.0


class Node(Process):
    """One start of a node."""

    def __init__(
        self,
        world: World,
        mailbox: Mailbox,
        scenario: Scenario,
        plan: Plan,
        *,
        start: int,
        death: Death | None,
        write: Callable[[Entry], None],
        ended: Callable[[Node, bool], None],
        keep: Callable[[Save], None],
        save: Save | None,
    ) -> None:
        super().__init__(world, f"{plan.node}#{start}", plan.clock)
        self.plan = plan
        self._mailbox = mailbox
        self._scenario = scenario
        self._death = death
        self._write = write
        self._ended = ended
        self._keep = keep
        self._save = save  # Which it goes on from.
        self.killed = False
        self._skip = death.skip if death else 0
        self._requests = 0
        self._saved = Slot()
        self._control: Control | None = None

    # What befalls it

    def start(self) -> None:
        self.fate("started")
        if self._death is not None and self._death.at is not None:
            self.world.after(self._death.at - self.world.now, self.kill)
        self.run(self._live())

    def fate(self, kind: str, detail: str = "") -> None:
        self._write(Fate(self.world.now, self.name, kind, detail))

    def kill(self, detail: str = "") -> None:
        if self.alive:
            self.killed = True
            self.fate("killed", detail)
            self.die()
            self._ended(self, False)

    def lives_to_send(self, verb: str, keys: tuple[str, ...]) -> int:
        """How many of a request's keys it sends; it has died over those that are left."""
        if self._death is None:
            return len(keys)
        sent = self._may_send(self._death, verb, keys)
        self._requests += sent
        if sent < len(keys):
            self.kill(f"before {verb} {keys[sent]}")
        return sent

    def _may_send(self, death: Death, verb: str, keys: tuple[str, ...]) -> int:
        if death.after is not None:
            return min(len(keys), death.after - self._requests)
        if verb == "create" and death.before and death.before in keys[0]:
            self._skip -= 1
            return int(self._skip >= 0)
        return len(keys)

    def fall_asleep(self, seconds: float) -> None:
        if self.alive:
            self.fate("paused", f"for {seconds:.1f} s")
            self.pause(seconds)

    # What it does

    def _live(self) -> Asking:
        try:
            control, part = yield from self._join()
        except (JDilocoError, StoreUnavailable) as error:
            self._end(f"{type(error).__name__}: {error}", joined=False)
            return
        because = "finished"
        try:
            yield from part.train()
            yield from part.finish()
        except JDilocoError as error:
            because = f"{type(error).__name__}: {error}"
        part.leave("finished" if because == "finished" else "failed")
        yield from control.leave(LEAVE_SECONDS)
        self._end(because, joined=True)

    def _end(self, because: str, *, joined: bool) -> None:
        self.fate("ended", because)
        self.die()
        self._ended(self, joined)

    def _join(self) -> Asking:
        rules, name = self._scenario.rules, self.name.replace("#", "x")
        waiting = joining.Waiting(
            self._scenario.poll_seconds, rules.beat_seconds, rules.lease_seconds
        )
        creator = joining.Creator(self.plan.node, name.replace("-", ""), f"run{name}")
        found = joining.find_or_create(creator, waiting, self._describe(creator))
        data, created = yield from self._perform(found)
        manifest = unseal(MANIFEST, data, Manifest)
        person = lives.Person(self.plan.node, "host", 1, "simulated", name)
        keys = Keys(manifest.run)
        private = self._save.private if self._save else None
        birth = yield from self._perform(lives.take_up_life(keys, person, waiting, private))
        only_closes = not trains(self.plan.role)
        if private is not None and not birth.overtaken:
            read = joining.read_chain_at(manifest, data, private.read)
            chain, held = (yield from self._perform(read)), []
        elif only_closes:
            read = joining.read_chain(manifest, data, birth.listed)
            chain, held = (yield from self._perform(read)), []
        else:
            chain, held = yield from self._newest(manifest, data, birth.listed)
        old = yield from self._perform(joining.find_old(keys, chain.read, birth.listed))
        life = birth.life
        control = Control(
            self,
            self._mailbox,
            self._scenario,
            self.plan,
            birth=birth,
            chain=chain,
            old=old,
            write=self._write,
        )
        self._control = control
        if created:
            control.emit(events.RunCreated(node=life.node, run=manifest.run))
        if only_closes:
            self.fate("joined", f"as {life} at round {chain.round}")
            return control, Syncer(self, control, self._scenario, self.plan)
        learner = Learner(
            self,
            control,
            self._scenario,
            self.plan,
            run=manifest.run,
            birth=birth,
            held=held,
            rounds=list(chain.heads),
            shared=self._shared(control, keys, life, waiting),
            write=self._write,
            keep=self._keep,
            saved=self._save,
        )
        there = joining.newest_round(keys, birth.listed)
        while not member.is_up_to(control.state, there) and not control.state.stopped:
            yield Sleep(self._scenario.poll_seconds / 4)
        yield Sleep(self.plan.compile_seconds)
        self.fate("joined", f"as {life} at round {chain.round}")
        return control, learner

    def _shared(self, control: Control, keys: Keys, life: Life, waiting: Waiting) -> Shared | None:
        """The desk of a node that works on what it claims."""
        pool = self._scenario.pool(self.plan)
        if pool is None:
            return None
        return Shared(
            self,
            pool,
            life,
            keys,
            self._scenario.rules,
            waiting,
            perform=self._perform,
            wake=control.to_learner.put,
        )

    def _describe(self, creator: joining.Creator) -> Callable[[Checkpoint], Manifest]:
        def describe(checkpoint: Checkpoint) -> Manifest:
            return Manifest(
                format=FORMAT,
                run=creator.run,
                algorithm={},
                tensors=(),
                plan=tuple((f"w{i}",) for i in range(self._scenario.rules.fragments)),
                checkpoint=checkpoint,
                closer=self.plan.node if closes(self.plan.role) else "",
                write_id=creator.name,
            )

        return describe

    def _newest(self, manifest: Manifest, data: bytes, listed: tuple[str, ...]) -> Asking:
        chain = yield from self._perform(joining.read_chain(manifest, data, listed))
        while True:
            try:
                held = []
                for index, record in enumerate(chain.records):
                    task = read_value(self._mailbox, index, record, chain.checkpoint)
                    held.append((yield from task))
                return chain, held
            except FormatError:
                newer = yield from self._perform(joining.read_chain(manifest, data))
                if newer.read == chain.read:
                    raise
                chain = newer

    # Performing what joining asks for

    def _perform(self, steps: Steps) -> Asking:
        return (yield from perform(steps, self._ask))

    def _ask(self, request: joining.Request) -> Asking:
        match request:
            case joining.Look():
                assert self._control is not None
                return self._control.look(request)
            case joining.SaveInitial(prefix):
                self.run(self._save_initial(prefix))
                return None
            case joining.Saved(seconds):
                found = yield Take(self._saved, seconds)
                if found and isinstance(found[0], Exception):
                    raise found[0]
                return found[0] if found else None
        return (yield from ask(self._mailbox, request))

    def _save_initial(self, prefix: str) -> Asking:
        count = self._scenario.rules.fragments
        state = [Values(i, 0, values.initial(prefix, i)) for i in range(count)]
        try:
            self._saved.put((yield from write_checkpoint(self._mailbox, prefix, state, -1)))
        except (StoreUnavailable, FormatError) as error:
            self._saved.put(error)
