"""How a run begins, and how a process comes into it, with the joining generators of production."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jdiloco.protocol import joining, lives
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.joining import Create, Get, List, ReadHead, Sleep
from jdiloco.protocol.keys import MANIFEST
from jdiloco.protocol.lives import Birth
from jdiloco.protocol.records import FORMAT, Checkpoint, Manifest, seal, unseal
from jdiloco.protocol.rules import Rules
from jdiloco.testing.enumerate import values
from jdiloco.testing.enumerate.box import KEYS, RUN, Box, Boxes, committed
from jdiloco.testing.enumerate.inside import Inside, Turn
from jdiloco.testing.enumerate.place import Joining
from jdiloco.testing.enumerate.setting import Setting


def founded(boxes: Boxes, setting: Setting) -> Box:
    """A mailbox that holds a run's manifest and its first checkpoint."""
    prefix = KEYS.checkpoint(-1, setting.seats[0], 1, 1)
    files, objects = [], {}
    for index in range(setting.fragments):
        data = values.encode(values.initial(index))
        objects[f"{prefix}/{index}"] = data, True
        files.append(values.named(str(index), data))
    versions = (0,) * setting.fragments
    manifest = Manifest(
        format=FORMAT,
        run=RUN,
        algorithm={},
        tensors=(),
        plan=tuple((f"w{index}",) for index in range(setting.fragments)),
        checkpoint=Checkpoint(-1, versions, prefix, tuple(files)),
        closer=setting.seats[0],
        write_id="founder",
    )
    objects[MANIFEST] = seal(MANIFEST, manifest), True
    return boxes.make(objects)


def _join(place: Joining, rules: Rules) -> joining.Steps[tuple[Birth, Chain]]:
    """All of joining; returns the life with what it knows, and the chain."""
    waiting = joining.Waiting(1.0, rules.beat_seconds, rules.lease_seconds)
    person = lives.Person(place.node, "host", 1, "enumerated", f"{place.node}{place.starts}")
    birth = yield from lives.take_up_life(KEYS, person, waiting)
    data = yield Get(MANIFEST)
    chain = yield from joining.read_chain(unseal(MANIFEST, data, Manifest), data, birth.listed)
    return birth, chain


def _next(place: Joining, rules: Rules) -> joining.Request | tuple[Birth, Chain]:
    """What a joining process asks for next, or that it has joined."""
    steps = _join(place, rules)
    request = next(steps)
    try:
        for answer in place.answers:
            request = steps.send(answer)
    except StopIteration as done:
        return done.value
    return request


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One move of a joining process."""

    what: str
    box: Box
    place: Joining | None = None
    turn: Turn | None = None  # It has joined.
    lost: bool = False


def steps(inside: Inside, boxes: Boxes, box: Box, place: Joining, rules: Rules) -> Iterator[Step]:
    """One request, with those behind it that nobody else can come between."""
    request = _next(place, rules)
    assert not isinstance(request, tuple)
    answer, after = _answer(boxes, box, request, rules)
    yield _followed(inside, boxes, after, _told(place, answer), rules, _said(request, answer))
    if isinstance(request, Create) and answer:
        late = boxes.send(box, (request.key, request.data))
        yield Step(f"gets no answer for {request.key}", late, _told(place, False), lost=True)


def join_at_once(inside: Inside, boxes: Boxes, box: Box, place: Joining, rules: Rules) -> Step:
    """All of joining, as if nobody came between."""
    step = next(steps(inside, boxes, box, place, rules))
    while step.place is not None:
        step = next(steps(inside, boxes, step.box, step.place, rules))
    return dataclasses.replace(step, what="starts and joins")


def _told(place: Joining, answer: object) -> Joining:
    return dataclasses.replace(place, answers=(*place.answers, answer))


def _answer(boxes: Boxes, box: Box, request: joining.Request, rules: Rules) -> tuple[object, Box]:
    match request:
        case List(prefix, after):
            return box.list(prefix, after), box
        case Get(key):
            return box.get(key), box
        case ReadHead(key):
            data = box.get(key)
            return None if data is None else values.read_delta(key, data).head, box
        case Create(key, data):
            return boxes.create(box, key, data)
        case joining.Delete(keys):
            return None, boxes.delete(box, keys)
        case Sleep():
            return rules.lease_seconds, box  # Whoever had the id before seems to be gone.
    raise AssertionError(f"a process that joins a run does not ask for {request}")


def _said(request: joining.Request, answer: object) -> str:
    match request:
        case List(prefix):
            return f"joins: lists {prefix}"
        case Get(key):
            return f"joins: reads {key}"
        case Create(key):
            return f"joins: creates {key}" if answer else f"joins: does not create {key}"
    return "joins: waits"


def _followed(
    inside: Inside, boxes: Boxes, box: Box, place: Joining, rules: Rules, what: str
) -> Step:
    """Goes on over what no other process can change: objects once they are there, and waits."""
    while True:
        request = _next(place, rules)
        if isinstance(request, tuple):
            return Step(what, box, turn=_joined(inside, box, place, rules, *request))
        if not isinstance(request, Get | ReadHead | Sleep):
            return Step(what, box, place)
        answer, box = _answer(boxes, box, request, rules)
        place = _told(place, answer)


def _joined(
    inside: Inside, box: Box, place: Joining, rules: Rules, birth: Birth, chain: Chain
) -> Turn:
    found = [
        committed(box, index, record, chain.checkpoint)
        for index, record in enumerate(chain.records)
    ]
    held = [value for value in found if value is not None]
    assert len(held) == len(found), "a joining process finds every fragment"  # S2 says so first.
    return inside.begin(birth, rules, chain, held)
