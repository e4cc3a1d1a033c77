"""Messages: named tensors and a little text as one safetensors object.

    8 bytes   length of the header, little-endian
    header    {"__metadata__": {text: text}, name: {"dtype": text, "shape": [numbers],
              "data_offsets": [start, stop]}, ...}, and blanks after it, so that the tensors start
              at a multiple of 64
    tensors   one after another, without gaps, little-endian, rows first

The format is read here rather than by the package of that name, whose NumPy loader refuses
bfloat16 and float8. Bytes come from a mailbox that others write to, so nothing in a header is
believed: every offset is held against the bytes that are there before an array is made, and a
header can make the reader allocate no more than a small multiple of its own length.

A tensor may stand there compressed (`compression`): then it is a row of U8 under its own name, and
the metadata say under `zstd` what it is: `{name: [dtype, shape]}`. Whoever reads such a message
says how many bytes it may take once it is expanded. Digests are those of the message without
compression (`plain`), so that they name values, however a node has sent them.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from jdiloco.errors import FormatError, UsageError
from jdiloco.runtime.compression import compressed, expand
from jdiloco.store.base import Buffer
from jdiloco.types import TensorSpec

HEADER_BYTES_MAX = 16 * 2**20
"""Room for about a hundred thousand tensors. Bounds what a forged header can cost its reader."""

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype("u1"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

CHUNK_BYTES = 2**20
"""How many bytes of tensors one hash in a header covers, where it holds hashes."""

_LENGTH_BYTES = 8
_FIRST_BYTES = 16 * 2**10  # Read at once of a message whose metadata is wanted: most headers.
_ALIGNMENT = 64  # What `jax.device_put` wants before it does without a copy.
_METADATA = "__metadata__"
_PACKED = "zstd"  # In the metadata: what the compressed tensors are.
_CHUNKS = "chunks"
_REPR = reprlib.Repr()
_REPR.maxstring = 60
_FIELDS = {"dtype", "shape", "data_offsets"}
_AXES_MAX = 64  # NumPy's own limit.
_SIZE_MAX = 2**58  # Elements; times the widest dtype it still fits NumPy's sizes.


class Message(msgspec.Struct, frozen=True, eq=False):
    """What a message held. The tensors are read-only views of its bytes and keep them alive."""

    metadata: dict[str, str]
    tensors: dict[str, np.ndarray]  # In the order of their bytes.


def encode_hashed(
    tensors: Mapping[str, np.ndarray], *, compression: str | None = None
) -> list[memoryview | bytes]:
    """A message whose header holds the SHA-256 of every stretch of tensor bytes.

    So whoever knows the header can read a part of it and see that it is sound; not so of one that
    is compressed, of which the hashes are those it has without compression.
    """
    hashes = " ".join(_chunk_digests(encode(tensors, {})[1:]))
    return encode(tensors, {_CHUNKS: hashes}, compression=compression)


def _chunk_digests(buffers: Iterable[memoryview | bytes]) -> Iterator[str]:
    running, room = hashlib.sha256(), CHUNK_BYTES
    for buffer in buffers:
        rest = memoryview(buffer)
        while len(rest) >= room:
            running.update(rest[:room])
            yield running.hexdigest()
            rest, running, room = rest[room:], hashlib.sha256(), CHUNK_BYTES
        running.update(rest)
        room -= len(rest)
    if room < CHUNK_BYTES:
        yield running.hexdigest()


def encode(
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    *,
    compression: str | None = None,
) -> list[memoryview | bytes]:
    """The buffers of a message, to be written one after another.

    They show the arrays' own memory: change no array before they are written. Tensors keep the
    order given and metadata is sorted, so equal inputs give equal bytes. With `compression`
    "zstd" tensors are compressed where that makes them shorter.
    """
    if _PACKED in metadata:
        raise UsageError(f"Metadata cannot have `{_PACKED}`: the format uses that name.")
    rows: dict[str, tuple[str, Sequence[int], int]] = {}
    packed: dict[str, tuple[str, Sequence[int]]] = {}
    buffers: list[memoryview | bytes] = []
    for name, array in tensors.items():
        if name == _METADATA:
            raise UsageError(f"A tensor cannot be called `{_METADATA}`: the format uses that name.")
        rows[name] = (_code(name, array.dtype), array.shape, array.nbytes)
        whole = np.ascontiguousarray(array)
        frame = None if compression is None else compressed(whole)
        if frame is not None:
            packed[name] = rows[name][:2]
            rows[name] = (_CODES[np.dtype("u1")], (len(frame),), len(frame))
        buffers.append(frame or whole.reshape(-1).view(np.uint8).data)
    said = {_PACKED: _json(packed).decode()} if packed else {}
    return [_header({**metadata, **said}, rows), *buffers]


def decode(data: Buffer, *, room: int = 0) -> Message:
    """Reads a message. Anything that is not exactly one raises FormatError and says what it is.

    `room` is how many bytes the tensors of a compressed one may take; 0 refuses it.
    """
    message = _decode(data)
    if _PACKED not in message.metadata:
        return message
    return _decode(_expanded(message, room))


def plain(data: Buffer, *, room: int) -> Buffer:
    """A message as it is without compression. Errors: `decode`."""
    message = _decode(data)
    return data if _PACKED not in message.metadata else _expanded(message, room)


def _decode(data: Buffer) -> Message:
    """Reads a message and leaves its tensors as they are."""
    view = memoryview(data).toreadonly().cast("B")
    header_stop = _header_stop(view)
    entries = _parse(bytes(view[_LENGTH_BYTES:header_stop]))
    metadata = _metadata(entries.pop(_METADATA, {}))
    layouts = [_layout(name, entry) for name, entry in entries.items()]
    layouts.sort(key=lambda layout: (layout.start, layout.stop))
    body = view[header_stop:]
    _check_cover(layouts, len(body))
    return Message(metadata, {layout.name: layout.view(body) for layout in layouts})


def read_metadata(read: Callable[[int, int], bytes | None]) -> dict[str, str]:
    """The metadata of a message, whatever it says of tensors; see `read_header`."""
    data = _header_bytes(read)
    return _metadata(_parse(data[_LENGTH_BYTES:]).get(_METADATA, {}))


def read_header(read: Callable[[int, int], bytes | None]) -> Header:
    """The header of a message of which `read(start, stop)` gives ranges, without its tensors.

    Raises FormatError when there is no message, or no header of one.
    """
    data = _header_bytes(read)
    entries = _parse(data[_LENGTH_BYTES:])
    metadata = _metadata(entries.pop(_METADATA, {}))
    return Header(data, metadata, {name: _layout(name, entry) for name, entry in entries.items()})


def _header_bytes(read: Callable[[int, int], bytes | None]) -> bytes:
    found = read(0, _FIRST_BYTES) or b""
    length = int.from_bytes(found[:_LENGTH_BYTES], "little")
    stop = _LENGTH_BYTES + min(length, HEADER_BYTES_MAX)
    if len(found) == _FIRST_BYTES < stop:
        found += read(_FIRST_BYTES, stop) or b""
    return found[: _header_stop(memoryview(found))]


def check(
    tensors: Mapping[str, np.ndarray],
    specs: Sequence[TensorSpec],
    *,
    dtypes: str | Mapping[str, str] | None = None,
) -> None:
    """Raises FormatError naming every tensor that is missing, unknown or not as `specs` say.

    `dtypes` is what was agreed for the wire in place of the parameters' own types: one for all
    tensors or one per name.
    """
    wanted = {spec.name: (spec.shape, _wire_dtype(spec, dtypes)) for spec in specs}
    found = {name: (array.shape, array.dtype.name) for name, array in tensors.items()}
    wrong = [
        f"`{name}` is {_described(found.get(name))}, wanted {_described(wanted.get(name))}"
        for name in sorted(wanted.keys() | found.keys())
        if found.get(name) != wanted.get(name)
    ]
    if wrong:
        raise FormatError(f"Tensors differ from the run's schema: {'; '.join(wrong)}.")


def digest(buffers: Iterable[Buffer]) -> str:
    """The sha256 of buffers written one after another, in hexadecimal."""
    state = hashlib.sha256()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()


def _code(name: str, dtype: np.dtype) -> str:
    code = _CODES.get(dtype)
    if code is None:
        known = ", ".join(d.name for d in _CODES)
        raise UsageError(
            f"Tensor `{name}` is {dtype.str} ({dtype.name}); messages hold little-endian {known}."
        )
    return code


def _expanded(message: Message, room: int) -> Buffer:
    """The message that was compressed, once its sizes have been held against the room there is."""
    metadata = dict(message.metadata)
    packed = _packed(metadata.pop(_PACKED), message.tensors)
    rows = {
        name: (_CODES[dtype], shape, math.prod(shape) * dtype.itemsize)
        for name, (dtype, shape) in packed.items()
    }
    total = sum(size for _, _, size in rows.values())
    if total > room:
        raise FormatError(
            f"The tensors take {total} bytes once they are expanded, wanted at most {room}."
        )
    header = _header(metadata, rows)
    whole = bytearray(len(header) + total)
    whole[: len(header)] = header
    body, start = np.frombuffer(whole, np.uint8, offset=len(header)), 0
    for name, (_, _, size) in rows.items():
        held, into = message.tensors[name].reshape(-1).view(np.uint8), body[start : start + size]
        if packed[name] == (message.tensors[name].dtype, message.tensors[name].shape):
            into[...] = held
        else:
            expand(held.data, into, packed[name][0].itemsize)
        start += size
    return whole


def _packed(
    text: str, tensors: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """What every tensor of a compressed message is once it is expanded, in the order of all."""
    found = _parse(text.encode())
    known = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    for name, said in found.items():
        if name not in known or known[name] != (np.uint8, tensors[name].reshape(-1).shape):
            raise FormatError(f"{_short(name)} is said to be compressed, and is no row of bytes.")
        if not isinstance(said, list) or len(said) != 2:
            raise FormatError(
                f"{_short(name)} is said to be {_short(said)}, wanted type and shape."
            )
        known[name] = (_dtype(name, said[0]), _shape(name, said[1]))
    return known


def _json(entries: Any) -> bytes:
    try:
        return msgspec.json.encode(entries)
    except UnicodeEncodeError as error:
        raise UsageError(f"Names and metadata must be valid Unicode: {error}.") from error


def _header(
    metadata: Mapping[str, str], rows: Mapping[str, tuple[str, Sequence[int], int]]
) -> bytes:
    """The header over tensors that follow one another: each its type, shape and bytes."""
    entries: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))}
    start = 0
    for name, (code, shape, size) in rows.items():
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": (start, start + size)}
        start += size
    text = _json(entries)
    blanks = -(_LENGTH_BYTES + len(text)) % _ALIGNMENT
    length = len(text) + blanks
    if length > HEADER_BYTES_MAX:
        raise UsageError(
            f"A header of {length} bytes for {len(entries) - 1} tensors; at most "
            f"{HEADER_BYTES_MAX} are read. Shorten the metadata or send several messages."
        )
    return length.to_bytes(_LENGTH_BYTES, "little") + text + b" " * blanks


class Layout(msgspec.Struct, frozen=True):
    """One row of a header: where a tensor's bytes are, behind it, and what they mean."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self, body: memoryview) -> np.ndarray:
        flat = np.frombuffer(body[self.start : self.stop], np.uint8)
        return flat.view(self.dtype).reshape(self.shape)


class Header(msgspec.Struct, frozen=True, eq=False):
    """What stands before the tensors of a message."""

    data: bytes
    metadata: dict[str, str]
    tensors: dict[str, Layout]

    @property
    def stop(self) -> int:
        """Where the tensors begin."""
        return len(self.data)

    @property
    def is_compressed(self) -> bool:
        """Whether the tensors stand there otherwise than their names say."""
        return _PACKED in self.metadata

    def chunks(self, size: int) -> list[str]:
        """The hashes of every stretch of the `size` bytes that follow.

        Raises FormatError unless there is one for each, and the tensors take just these bytes.
        """
        layouts = sorted(self.tensors.values(), key=lambda layout: (layout.start, layout.stop))
        _check_cover(layouts, size)
        found = self.metadata.get(_CHUNKS, "").split()
        wanted = -(-size // CHUNK_BYTES)
        if len(found) != wanted:
            raise FormatError(f"The header holds {len(found)} hashes, wanted {wanted}.")
        return found


def _header_stop(view: memoryview) -> int:
    """Where the header ends, after holding the length it claims against the bytes there are."""
    if len(view) < _LENGTH_BYTES:
        raise FormatError(f"A message of {len(view)} bytes; even an empty one has more.")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if length > min(len(view) - _LENGTH_BYTES, HEADER_BYTES_MAX):
        raise FormatError(
            f"The message claims a header of {length} bytes; it has {len(view)} bytes in all and "
            f"headers have at most {HEADER_BYTES_MAX}."
        )
    return _LENGTH_BYTES + length


def _parse(header: bytes) -> dict[str, Any]:
    if not header.startswith(b"{"):
        raise FormatError(f"A header begins with {header[:1]!r}, wanted b'{{'.")
    try:
        return json.loads(header.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # Also undecodable text and endless integers.
        raise FormatError(f"The header is not JSON: {error}.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object that says no name twice, of names that can be written again."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise FormatError(f"The header says {_short(twice)} twice.")
    "".join(found).encode()  # Refuses halves of surrogate pairs: a ValueError, as in `_parse`.
    return found


def _metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise FormatError(f"`{_METADATA}` is {_short(found)}, wanted an object of strings.")
    try:
        "".join(found.values()).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"`{_METADATA}` holds text that is not Unicode: {error}.") from error
    return found


def _layout(name: str, entry: Any) -> Layout:
    """One row, with the size its offsets span equal to what its shape and dtype need."""
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise FormatError(f"Tensor {_short(name)} is {_short(entry)}, wanted {sorted(_FIELDS)}.")
    dtype = _dtype(name, entry["dtype"])
    shape = _shape(name, entry["shape"])
    span = _naturals(name, "data_offsets", entry["data_offsets"])
    nbytes = math.prod(shape) * dtype.itemsize
    if len(span) != 2 or span[1] - span[0] != nbytes:
        raise FormatError(
            f"Tensor {_short(name)} has offsets {_short(list(span))}, wanted two that are "
            f"{_short(nbytes)} bytes apart, as {entry['dtype']} of shape {_short(shape)} is."
        )
    return Layout(name, dtype, shape, span[0], span[1])


def _dtype(name: str, found: Any) -> np.dtype:
    dtype = _DTYPES.get(found) if isinstance(found, str) else None
    if dtype is None:
        raise FormatError(
            f"Tensor {_short(name)} has dtype {_short(found)}; "
            f"this build reads {', '.join(_DTYPES)}."
        )
    return dtype


def _shape(name: str, found: Any) -> tuple[int, ...]:
    """A shape NumPy can hold: an empty array may well claim absurd lengths for its other axes."""
    shape = _naturals(name, "shape", found)
    if len(shape) > _AXES_MAX or math.prod(n for n in shape if n) > _SIZE_MAX:
        raise FormatError(
            f"Tensor {_short(name)} has shape {_short(found)}, wanted at most {_AXES_MAX} axes "
            f"with a product up to {_SIZE_MAX}."
        )
    return shape


def _naturals(name: str, field: str, found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(n) is int and n >= 0 for n in found):
        raise FormatError(
            f"Tensor {_short(name)} has {field} {_short(found)}, wanted whole numbers from 0."
        )
    return tuple(found)


def _check_cover(layouts: Sequence[Layout], size: int) -> None:
    """Tensors follow one another from the first byte to the last: no gap, no overlap, no rest."""
    at = 0
    for layout in layouts:
        if layout.start != at:
            raise FormatError(
                f"Tensor {_short(layout.name)} starts at {layout.start}, wanted {at}."
            )
        at = layout.stop
    if at != size:
        raise FormatError(f"The tensors take {at} bytes; {size} follow the header.")


def _wire_dtype(spec: TensorSpec, dtypes: str | Mapping[str, str] | None) -> str:
    if dtypes is None:
        return spec.dtype
    return dtypes if isinstance(dtypes, str) else dtypes[spec.name]


def _described(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if tensor is None else f"{tensor[1]}{list(tensor[0])}"


def _short(found: object) -> str:
    """What was found, in one line and at little cost whatever a forger wrote."""
    return _REPR.repr(found)
