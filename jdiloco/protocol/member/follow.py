"""Round records in order, what they mean for the learner, and this node's contributions."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec

from jdiloco import events
from jdiloco.errors import FormatError
from jdiloco.protocol import chain as chains
from jdiloco.protocol import closing as closings
from jdiloco.protocol import effects as fx
from jdiloco.protocol import sweep
from jdiloco.protocol import tally as tallies
from jdiloco.protocol.closing import Phase
from jdiloco.protocol.keys import ContributionKey
from jdiloco.protocol.member.state import (
    CLOSING,
    UPLOADS,
    MemberState,
    Sending,
    Turn,
    Waits,
    later,
    mix,
)
from jdiloco.protocol.records import RoundRecord, unseal
from jdiloco.protocol.rules import Life, trains


def read_next_record(turn: Turn) -> None:
    state = turn.state
    doubt = state.closing.phase is Phase.DOUBT and turn.now >= state.waits.retry
    if state.reading or not (doubt or state.records_to > state.chain.read):
        return
    turn.set(reading=True)
    turn.add(fx.ReadRecord(state.chain.round))


def on_record_read(turn: Turn, event: fx.RecordRead) -> None:
    state = turn.state
    turn.set(reading=False)
    if event.round != state.chain.round:
        return
    if event.ok:
        turn.over("record")
    if not event.ok:
        turn.degrade("record", "a round record could not be read")
        turn.set(records_to=state.chain.read)  # The next listing shows it again.
    elif event.data is None:
        turn.set(records_to=state.chain.read)
        if state.closing.phase is Phase.DOUBT:
            turn.degrade("commit", "a round record was refused, yet nothing is there")
            turn.set(waits=later(turn))  # Some stores refuse a key that is written too often.
            write(turn, state.closing.record)
    else:
        take_record(turn, event.data)


def write(turn: Turn, data: bytes) -> None:
    """Sends a round record; the same bytes until some record of the round has been read."""
    closing = closings.writing(turn.state.closing, data)
    turn.set(closing=closing)
    turn.add(fx.WriteRecord(closing.round, data))


def take_record(turn: Turn, data: bytes) -> None:
    """The round is committed: by this node, or by whoever came first."""
    state = turn.state
    try:
        record = unseal(state.keys.record(state.chain.round), data, RoundRecord)
        followed = chains.follow(state.chain, record, data)
    except FormatError as error:
        turn.set(records_to=state.chain.read)
        turn.degrade("record", str(error))
        return
    own = data == state.closing.record  # By its bytes, not by who seems to have won.
    if own and state.waits.merging is not None:
        took = turn.now - state.waits.merging
        commit = mix(followed.timing.commit, took, count=record.round + 1)
        timing = msgspec.structs.replace(followed.timing, commit=commit)
        followed = replace(followed, timing=timing)
    turn.over(*CLOSING, *(() if own else ("checkpoint",)))
    turn.add(fx.Took(record, own))
    _discard(turn, record)
    turn.set(
        chain=followed,
        records_to=max(state.records_to, record.round),
        closing=closings.reported(
            closings.opened(followed.round, followed.named, state.me, can_close=state.can_close),
            state.contributions,
        ),
        waits=Waits(opened=turn.now),
        claiming=False,
        passed_over=tuple(
            item for item in state.passed_over if item[0] != Life(record.closer, record.incarnation)
        ),
        shelf=sweep.shelve(state.shelf, record),
    )
    _drop_sending(turn, record)
    _queue(turn, record)
    _announce(turn, record)
    _count(turn, record)
    _see_pace(turn, record)
    _sweep(turn, own=own)
    if own:
        _save(turn)


def _discard(turn: Turn, record: RoundRecord) -> None:
    """Some record of the round has been read, so what it does not name is garbage."""
    named = {payload.key for payload in record.payloads}
    lost = tuple(key for key in turn.state.attempted if key not in named)
    if lost:
        turn.add(fx.Delete(lost))
    turn.set(attempted=())


def _announce(turn: Turn, record: RoundRecord) -> None:
    turn.emit(
        events.Committed(
            node=turn.state.me.node,
            round=record.round,
            fragment=record.fragment,
            version=record.version,
            participants=tuple(p.node for p in record.participants),
            rejected=tuple(f"{r.node}:{r.reason}" for r in record.rejected),
            expected=record.expected,
            void=record.void,
            closer=record.closer,
            cosine=record.cosine if len(record.participants) > 1 else None,
        )
    )


def _count(turn: Turn, record: RoundRecord) -> None:
    """Adds up everybody's samples, and says so when a ledger is wrong."""
    tally, faults = tallies.read(turn.state.tally, record)
    turn.set(tally=tally)
    for message in faults:
        turn.emit(events.WrongLedger(node=turn.state.me.node, round=record.round, message=message))


def _see_pace(turn: Turn, record: RoundRecord) -> None:
    """Rounds are closed in order, one after another: says so when that is slower than training."""
    state = turn.state
    step, commit = state.chain.timing.step, state.chain.timing.commit
    if step is None or commit is None:
        return
    cycle = step * state.rules.sync_every
    between = cycle / state.rules.fragments
    steps = math.ceil(commit * state.rules.fragments / step) if step > 0 else 0
    fitting = int(cycle / commit) if commit > 0 else 0
    if commit > between and not state.slow:
        turn.emit(
            events.ClosingSlow(
                node=state.me.node,
                round=record.round,
                commit_seconds=commit,
                between_seconds=between,
                advice=f"sync_every={steps} or more"
                + (f", or fragments={fitting} or fewer" if fitting else ""),
            )
        )
    turn.set(slow=commit > between)


def _queue(turn: Turn, record: RoundRecord) -> None:
    """Queues a record; of several versions of a fragment only the newest needs its values."""
    if not trains(turn.state.role):
        return
    queue = list(turn.state.queue)
    started = 1 if turn.state.delivering else 0
    if not record.void:
        for index in range(started, len(queue)):
            if queue[index][0].fragment == record.fragment:
                queue[index] = (queue[index][0], False)
    turn.set(queue=(*queue, (record, not record.void)))


def deliver(turn: Turn) -> None:
    """Hands the oldest record to the learner; the next one follows its answer.

    First those are read that are known to be there: a newer version makes older values needless.
    """
    state = turn.state
    if state.delivering or not state.queue or state.records_to > state.chain.read:
        return
    record, values = state.queue[0]
    turn.set(delivering=True)
    turn.add(fx.Deliver(record, values))


GONE = 3
"""So often values may be gone before it is thought that nothing has replaced them."""


def on_delivered(turn: Turn, event: fx.Delivered) -> None:
    turn.set(delivering=False)
    if event.ok:
        turn.over("values")
        turn.set(queue=turn.state.queue[1:], gone=0)
        return
    turn.set(gone=turn.state.gone + event.gone)
    if event.gone and turn.state.gone < GONE:
        turn.defer()  # The next listing shows the record of what replaced them.
    else:
        turn.degrade("values", f"the values of round {event.round} could not be read")
    (record, _), *rest = turn.state.queue
    if any(newer.fragment == record.fragment and not newer.void for newer, _ in rest):
        turn.set(queue=((record, False), *rest))  # They came while these were being read.


def is_up_to(state: MemberState, round: int) -> bool:
    """Whether every record up to a round has been handed to the learner."""
    return state.chain.read >= round and not state.queue


def on_contributed(turn: Turn, event: fx.Contributed) -> None:
    head = event.head
    key = ContributionKey(head.round, head.node, head.incarnation, head.final)
    if head.round <= turn.state.chain.read:
        turn.add(fx.Forget(head.round))
    else:
        turn.set(sending=(*turn.state.sending, Sending(key)))


def send(turn: Turn) -> None:
    """Uploads in the order of the rounds, one at a time."""
    sending = turn.state.sending
    if turn.state.unsure:  # Others may have ended this life, and gone on with its work.
        return
    if any(item.sent and not item.landed for item in sending):
        return
    for index, item in enumerate(sending):
        if not item.sent:
            sent = (*sending[:index], replace(item, sent=True), *sending[index + 1 :])
            turn.set(sending=sent)
            turn.add(fx.Upload(item.key))
            return


def on_uploaded(turn: Turn, event: fx.Uploaded) -> None:
    def after(item: Sending) -> Sending:
        if item.key != event.key:
            return item
        if event.ok:
            return replace(item, landed=True)
        return replace(item, sent=False)

    state = turn.state
    if event.ok and event.key in state.unlisted:
        turn.add(fx.Delete((state.keys.contribution(event.key),)))
    turn.set(
        sending=tuple(after(item) for item in state.sending),
        unlisted=tuple(key for key in state.unlisted if key != event.key),
    )
    turn.set(unsent=0 if event.ok else turn.state.unsent + 1)
    if event.ok:
        turn.over("upload")
    elif turn.state.unsent >= UPLOADS:
        turn.degrade("upload", f"the contribution to round {event.key.round} could not be sent")
    else:
        turn.defer()


def _drop_sending(turn: Turn, record: RoundRecord) -> None:
    """Once its round has a record a contribution is not sent again, and a late one is removed."""
    state = turn.state
    listed = {(r.node, r.incarnation) for r in (*record.participants, *record.rejected)}
    for item in state.sending:
        if item.key.round > record.round:
            continue
        turn.add(fx.Forget(item.key.round))
        if (item.key.node, item.key.incarnation) in listed:
            continue
        if item.landed:
            turn.add(fx.Delete((state.keys.contribution(item.key),)))
        elif item.sent:  # It may still land: removed when the upload answers.
            turn.set(unlisted=(*turn.state.unlisted, item.key))
    turn.set(sending=tuple(item for item in state.sending if item.key.round > record.round))


def _sweep(turn: Turn, *, own: bool) -> None:
    """Every node forgets what is garbage by now; the one that committed removes it."""
    state = turn.state
    round = state.chain.read
    shelf, keys, prefixes = sweep.sweep(
        state.shelf, state.keys, state.rules, round=round, heads=state.chain.heads
    )
    shelf, beats = sweep.stale_beats(
        shelf,
        state.beats,
        state.verdict,
        state.rules,
        state.keys,
        round=max(round, state.records_to),
    )
    turn.set(shelf=shelf)
    if not own:
        return
    if keys or beats:
        turn.add(fx.Delete((*keys, *beats)))
    turn.add(*(fx.DeleteUnder(prefix) for prefix in prefixes))


def _save(turn: Turn) -> None:
    """Whoever commits writes the next run checkpoint, when one is due and none is being written."""
    state = turn.state
    cycles = (state.chain.round - state.chain.checkpoint.round - 1) // state.rules.fragments
    if state.saving or cycles < state.rules.checkpoint_every:
        return
    number = state.save_number + 1
    me = state.me
    prefix = state.keys.checkpoint(state.chain.read, me.node, me.incarnation, number)
    turn.set(saving=True, save_number=number)
    turn.add(fx.Save(state.chain.read, state.chain.records, state.chain.versions, prefix))


def on_saved(turn: Turn, event: fx.Saved) -> None:
    state = turn.state
    turn.set(saving=False)
    if event.checkpoint is None:
        turn.degrade("checkpoint", "a run checkpoint could not be written")
        return
    turn.over("checkpoint")
    if event.checkpoint.round > state.chain.checkpoint.round:
        turn.set(chain=replace(state.chain, checkpoint=event.checkpoint))
        turn.emit(
            events.Checkpointed(
                node=state.me.node, round=event.checkpoint.round, prefix=event.checkpoint.prefix
            )
        )
