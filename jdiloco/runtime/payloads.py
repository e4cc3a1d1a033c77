"""A round's payloads as bytes, and where the values of a version come from.

    anchor    the fragment's tensors in the parameters' types: what learners align with
    outer     momentum, and the fp32 master behind tensors that are rounded: what closers need
    update    where commits are narrow: the way from the version before, for who holds that

The values of the newest version are always complete in the mailbox: as the anchor and outer
payloads that its record names or, once two run checkpoints cover them, in the newest checkpoint.
An update saves reading the anchor, and nothing rests on it.
"""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from jdiloco.errors import FormatError, StoreUnavailable
from jdiloco.protocol.records import Checkpoint, Payload, RoundRecord
from jdiloco.runtime import checkpoints, messages
from jdiloco.runtime.checkpoints import RunState
from jdiloco.runtime.precision import FULL, Precision
from jdiloco.runtime.schema import Schema
from jdiloco.store.base import Buffer, Entry, Store
from jdiloco.store.signed import SignedStore
from jdiloco.types import TensorSpec

Tensors = Mapping[str, np.ndarray]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Version:
    """A fragment's values with everything that the outer step needs."""

    values: Tensors  # In the parameters' types.
    momentum: Tensors  # In the run's `momentum_dtype`.
    master: Tensors  # fp32, of tensors that are rounded from one (`Precision.masters`).


def encode_anchor(values: Tensors, *, compression: str | None = None) -> Sequence[Buffer]:
    """The anchor payload."""
    return messages.encode_hashed(values, compression=compression)


def encode_outer(
    momentum: Tensors,
    master: Mapping[str, np.ndarray | None],
    *,
    compression: str | None = None,
) -> Sequence[Buffer]:
    """The outer payload."""
    held = {f"momentum/{name}": array for name, array in momentum.items()}
    wide = {f"master/{name}": array for name, array in master.items() if array is not None}
    return messages.encode({**held, **wide}, {}, compression=compression)


def encode_update(update: Tensors, *, compression: str | None = None) -> Sequence[Buffer]:
    """The update payload."""
    return messages.encode(update, {}, compression=compression)


def read_anchor(store: Store, record: RoundRecord, specs: Sequence[TensorSpec]) -> Tensors | None:
    """The values that a record committed, checked against its hash; None when they are gone."""
    data = _read(store, record.anchor)
    return None if data is None else decode_anchor(data, specs)


def read_outer(
    store: Store,
    record: RoundRecord,
    specs: Sequence[TensorSpec],
    precision: Precision = FULL,
) -> tuple[Tensors, Tensors] | None:
    """Momentum and master of a version; None when they are gone."""
    data = _read(store, record.outer)
    return None if data is None else decode_outer(data, specs, precision)


def read_update(store: Store, record: RoundRecord) -> Tensors | None:
    """The update that leads to a version, as it was sent; None when there is none, or it is gone.

    Raises FormatError for other bytes than the record names.
    """
    data = _read(store, record.update)
    return None if data is None else messages.decode(data).tensors


def decode_anchor(data: Buffer, specs: Sequence[TensorSpec]) -> Tensors:
    """The values in an anchor payload. Raises FormatError unless they are what `specs` say."""
    tensors = messages.decode(data).tensors
    messages.check(tensors, specs)
    return tensors


def decode_outer(
    data: Buffer, specs: Sequence[TensorSpec], precision: Precision = FULL
) -> tuple[Tensors, Tensors]:
    """Momentum and master in an outer payload. Errors: `decode_anchor`."""
    tensors = messages.decode(data).tensors
    momentum, master = _part(tensors, "momentum/"), _part(tensors, "master/")
    messages.check(momentum, precision.momenta(specs))
    messages.check(master, precision.masters(specs), dtypes="float32")
    return momentum, master


def _read(store: Store, payload: Payload | None) -> Buffer | None:
    if payload is None or (data := store.get(payload.key)) is None:
        return None
    if (found := named(payload, data)) is None:
        raise FormatError(
            f"{payload.key!r} holds {len(data)} bytes that do not match what its round's record "
            f"says ({payload.size} bytes, SHA-256 {payload.sha256[:12]}…). It was damaged: "
            "`jdiloco verify` says what that means for the run."
        )
    return found


def named(payload: Payload, data: bytes) -> Buffer | None:
    """The message that a record names, without compression; None when these are other bytes."""
    if _is_named(payload, data):
        return data
    try:
        found = messages.plain(data, room=payload.size)
    except FormatError:
        return None
    return found if found is not data and _is_named(payload, found) else None


def _is_named(payload: Payload, data: Buffer) -> bool:
    return len(data) == payload.size and messages.digest([data]) == payload.sha256


def _part(tensors: Tensors, prefix: str) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): array
        for name, array in tensors.items()
        if name.startswith(prefix)
    }


class Patient:
    """A store whose reads are tried again, each `waits` times more.

    A checkpoint takes dozens of requests. Begun anew whenever one of them fails, it would never be
    read from a store that answers nine in ten.
    """

    def __init__(
        self, inner: Store, waits: Sequence[float], sleep: Callable[[float], object]
    ) -> None:
        self._inner = inner
        self._waits = waits
        self._sleep = sleep

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, key: str, data: Buffer | Sequence[Buffer]) -> bool:
        return self._inner.create(key, data)

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        return self._trying(lambda: self._inner.get(key, start=start, stop=stop))

    def list(self, prefix: str, *, after: str = "") -> builtins.list[Entry]:
        return self._trying(lambda: self._inner.list(prefix, after=after))

    def delete(self, keys: Iterable[str]) -> None:
        self._inner.delete(keys)

    def _trying(self, request: Callable[[], T]) -> T:
        for wait in self._waits:
            try:
                return request()
            except StoreUnavailable:
                self._sleep(wait)
        return request()


def patient(store: Store, waits: Sequence[float], sleep: Callable[[float], object]) -> Store:
    """`store` with patience; where it has a door for signatures, behind that."""

    def wrap(inner: Store) -> Store:
        return Patient(inner, waits, sleep)

    return store.around(wrap) if isinstance(store, SignedStore) else wrap(store)


class Library:
    """Reads versions: from payloads where they are, else from the run checkpoint that covers them.

    The newest restored checkpoint is kept only while it is asked for: `forget` drops it. `waits`
    are the seconds between the tries of each request.
    """

    def __init__(
        self,
        store: Store,
        schema: Schema,
        scratch: Path,
        *,
        waits: Sequence[float],
        sleep: Callable[[float], object],
    ) -> None:
        self._store = patient(store, waits, sleep)
        self._schema = schema
        self._scratch = scratch
        self._restored: tuple[str, RunState] | None = None

    def forget(self) -> None:
        """Lets go of the restored checkpoint's memory."""
        self._restored = None

    def restore(self, checkpoint: Checkpoint) -> RunState:
        """A run checkpoint, read once."""
        if self._restored is None or self._restored[0] != checkpoint.prefix:
            state = checkpoints.read(
                self._store,
                checkpoint.prefix,
                checkpoint.files,
                scratch=self._scratch,
                specs=self._schema.tensors,
                precision=self._schema.precision,
            )
            self._restored = (checkpoint.prefix, state)
        return self._restored[1]

    def values(self, fragment: int, record: RoundRecord | None, newest: Checkpoint) -> Tensors:
        """The values that `record` committed, the initial ones for None.

        Raises FormatError when they are neither payloads nor in `newest`: then `record` is not the
        fragment's newest any more, or the mailbox has lost an object.
        """
        specs = self._schema.fragment(fragment)
        if record is not None:
            found = read_anchor(self._store, record, specs)
            if found is not None:
                return found
        return {
            spec.name: self._covering(fragment, record, newest).values[spec.name] for spec in specs
        }

    def version(self, fragment: int, record: RoundRecord | None, newest: Checkpoint) -> Version:
        """The same with momentum and master. Errors: `values`."""
        specs = self._schema.fragment(fragment)
        if record is not None:
            outer = read_outer(self._store, record, specs, self._schema.precision)
            anchor = read_anchor(self._store, record, specs)
            if outer is not None and anchor is not None:
                return Version(anchor, *outer)
        state = self._covering(fragment, record, newest)
        names = [spec.name for spec in specs]
        return Version(
            {name: state.values[name] for name in names},
            {name: state.momentum[name] for name in names},
            {name: state.master[name] for name in names if name in state.master},
        )

    def _covering(self, fragment: int, record: RoundRecord | None, newest: Checkpoint) -> RunState:
        wanted = 0 if record is None else record.version
        if newest.versions[fragment] != wanted:
            raise FormatError(
                f"Version {wanted} of fragment {fragment} is gone, and the newest checkpoint holds "
                f"version {newest.versions[fragment]}."
            )
        return self.restore(newest)
