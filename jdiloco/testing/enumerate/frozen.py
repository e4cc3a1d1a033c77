"""Which values are the same value, and which states of a member are the same state.

`frozen` makes of any value of the protocol something that can be compared and hashed, field by
field, so that a field that somebody adds counts from then on. `canonical` takes out of a member's
state what cannot matter where time stands still.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from jdiloco.protocol import lease
from jdiloco.protocol.chain import Chain
from jdiloco.protocol.closing import Closing, Report
from jdiloco.protocol.keys import Keys
from jdiloco.protocol.lease import Lease, Leases, Verdict
from jdiloco.protocol.member import MemberState
from jdiloco.protocol.records import Build, Checkpoint, RoundRecord, Timing
from jdiloco.protocol.rules import Rules

T = TypeVar("T")

HELD = 1.0
"""A hold that lasts until the move that ends it; the clock shows 0 for ever."""

UNTIMED = Timing()

_SHARED = frozenset(
    {Build, Chain, Checkpoint, Closing, Keys, Report, RoundRecord, Rules, Verdict, dict}
)
"""What many states have in common, and what is worth remembering by its identity."""

_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


class _Token:
    """Stands for one structure; equal structures have the same one."""

    __slots__ = ()


_tokens: dict[Any, _Token] = {}
_seen: dict[int, tuple[Any, _Token]] = {}  # Keeps the value, so that nobody else gets its id.
_fields: dict[type, Callable[[Any], tuple]] = {}


def frozen(value: Any) -> Any:
    """The same for equal values, other for others. Structures that are shared are read once."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return tuple([v if type(v) in _PLAIN else frozen(v) for v in value])
    if kind not in _SHARED:
        return _token(value, kind)
    if id(value) not in _seen:
        _seen[id(value)] = value, _token(value, kind)
    return _seen[id(value)][1]


def _token(value: Any, kind: type) -> _Token:
    if isinstance(value, dict):
        key: Any = frozenset((frozen(k), frozen(v)) for k, v in value.items())
    elif isinstance(value, frozenset | list):
        key = kind(frozen(item) for item in value) if kind is frozenset else frozen(tuple(value))
    elif isinstance(value, enum.Enum):
        key = value
    else:
        key = fields_of(value)
    return _tokens.setdefault((kind, key), _Token())


def fields_of(value: Any) -> tuple:
    """A structure's fields, frozen; for values that are met once and need no token."""
    kind = type(value)
    if kind not in _fields:
        if issubclass(kind, msgspec.Struct):
            names = kind.__struct_fields__
        else:
            names = tuple(field.name for field in dataclasses.fields(kind))
        if len(names) < 2:
            names = (*names, "__doc__", "__doc__")[:2]  # So that a getter gives a tuple.
        _fields[kind] = attrgetter(*names)
    found = _fields[kind](value)
    return kind, *[v if type(v) in _PLAIN else frozen(v) for v in found]


class Numbered(Generic[T]):
    """Values by number; equal ones have one number."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: T) -> int:
        key = fields_of(value)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.values)
            self.values.append(value)
        return found

    def __getitem__(self, number: int) -> T:
        return self.values[number]

    def __len__(self) -> int:
        return len(self.values)


def canonical(state: MemberState) -> MemberState:
    """The state that goes on in the same way.

    Every lease is live again (`Inside.judged` ends one for a moment), nothing is due because of the
    time, and contributions are not looked at again whose round's record is read, or that `closing`
    holds. What fails, and how often, leads to events alone.
    """
    chain = state.chain
    if chain.timing != UNTIMED:
        chain = replace(chain, timing=UNTIMED)
    leases, verdict = _all_live(state.leases, state.verdict, state.rules)
    return replace(
        state,
        chain=chain,
        leases=leases,
        verdict=verdict,
        contributions=tuple(k for k in state.contributions if k.round > state.chain.round),
        next_poll=0.0,
        next_beat=math.inf,
        hold=HELD if state.hold > 0 else 0.0,
        failures=0,
        degraded=False,
        troubles=(),
        slow=False,
        unsent=0,
        gone=0,
        polled=0.0,
        waits=replace(state.waits, accepted=None, seemed_closable=None, failed=0, retry=0.0),
    )


_live: dict[Any, tuple[Leases, Verdict]] = {}


def _all_live(leases: Leases, verdict: Verdict, rules: Rules) -> tuple[Leases, Verdict]:
    beats = tuple((life, found.beat) for life, found in sorted(leases.items()))
    known = beats, verdict.newest
    if known not in _live:
        live = {life: Lease(beat) for life, beat in beats}
        _live[known] = live, lease.judge(live, rules, before=verdict)
    return _live[known]
