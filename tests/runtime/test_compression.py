"""Compressed messages hold the same values, under the same digests, and no bomb goes off."""

from __future__ import annotations

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.errors import FormatError, UsageError
from jdiloco.protocol.keys import ContributionKey, Keys
from jdiloco.protocol.records import ContributionHead, Ledger, Payload
from jdiloco.runtime import contributions, messages, payloads, wire
from jdiloco.runtime.compression import BYTES_MIN
from jdiloco.runtime.contributions import Rejection
from jdiloco.session import Session
from jdiloco.types import Counters, TensorSpec
from tests.runtime.test_messages import DTYPES, bits, pack, trees

PLENTY = 2**40
KEYS, KEY = Keys("run1"), ContributionKey(0, "a", 1, False)
HEAD = ContributionHead("run1", 0, 0, 0, "a", 1, Counters(4, 32), Ledger(), 40)
TYPES = [*DTYPES, np.dtype(ml_dtypes.float8_e8m0fnu)]


def written(tensors: dict[str, np.ndarray], compression: str | None = "zstd") -> bytes:
    return b"".join(messages.encode(tensors, {"round": "7"}, compression=compression))


def delta(dtype: np.dtype, size: int = 5000) -> np.ndarray:
    """What training gives, near enough: all of one order."""
    values = np.random.default_rng(0).standard_normal(size) * 1e-3
    return values.astype(dtype) if dtype.itemsize > 1 else (values * 2**12).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_every_type_comes_back_bit_for_bit_from_fewer_bytes(dtype):
    tensors = {"w": delta(dtype).reshape(50, 100), "b": delta(dtype, 3), "none": delta(dtype, 0)}
    data = written(tensors)
    message = messages.decode(data, room=PLENTY)
    assert bits(message.tensors) == bits(tensors)
    assert message.metadata == {"round": "7"}
    assert len(data) < len(written(tensors, None))


@given(trees, st.integers(0, 2))
def test_a_message_is_the_same_once_it_is_expanded(tensors, repeat):
    """Byte for byte: whatever is named by its digest is named alike by every node."""
    tensors = {name: np.concatenate([a.reshape(-1)] * 40**repeat) for name, a in tensors.items()}
    plain = messages.plain(written(tensors), room=PLENTY)
    assert bytes(plain) == written(tensors, None)


@given(st.binary(min_size=BYTES_MIN, max_size=4 * BYTES_MIN))
def test_what_cannot_be_made_shorter_is_sent_as_it_is(noise):
    noise = np.frombuffer(noise, np.uint8)
    assert len(written({"w": noise})) <= len(written({"w": noise}, None)) + 64


def test_the_safetensors_package_reads_a_compressed_message():
    """A compressed tensor is a row of bytes to it, and the metadata say what they are."""
    array = delta(np.dtype(np.float32)).reshape(50, 100)
    data = written({"w": array})
    ((name, row),) = safetensors.deserialize(data)
    said = json.loads(
        json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["zstd"]
    )
    assert (name, row["dtype"], said) == ("w", "U8", {"w": ["F32", [50, 100]]})
    planes = np.frombuffer(zstandard.decompress(bytes(row["data"])), np.uint8).reshape(4, -1)
    np.testing.assert_array_equal(planes.T.reshape(-1).view(np.float32).reshape(50, 100), array)


def test_expanded_tensors_lie_side_by_side_as_closing_reads_them_best():
    tensors = messages.decode(written({"a": delta(TYPES[1]), "b": delta(TYPES[1])}), room=PLENTY)
    first, second = (array.__array_interface__["data"][0] for array in tensors.tensors.values())
    assert second - first == 4 * 5000


# Forged and damaged


def forged(frame: bytes, said: object, size: int | None = None) -> bytes:
    """A message with one tensor that is said to be compressed."""
    row = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [0, len(frame)]}
    metadata = {"zstd": said if isinstance(said, str) else json.dumps(said)}
    return pack({"__metadata__": metadata, "w": row}, frame)


ZEROS = zstandard.compress(bytes(2**30))  # 32 kB.
GOOD = zstandard.compress(bytes(4000))
FORGED = {
    "a bomb that says so": (forged(ZEROS, {"w": ["U8", [2**30]]}), "at most 4000"),
    "a bomb that says less": (forged(ZEROS, {"w": ["F32", [1000]]}), "wanted 4000"),
    "absurd": (forged(GOOD, {"w": ["F32", [2**50]]}), "at most 4000"),
    "no frame": (forged(b"abcdefgh", {"w": ["F32", [1000]]}), "zstandard frame"),
    "cut": (forged(GOOD[:-3], {"w": ["F32", [1000]]}), "cannot be expanded"),
    "more behind": (forged(GOOD + b"more", {"w": ["F32", [1000]]}), "cannot be expanded"),
    "skippable": (forged(b"\x50\x2a\x4d\x18\0\0\0\0", {"w": ["F32", [1000]]}), "wanted 4000"),
    "not JSON": (forged(GOOD, "{"), "not JSON"),
    "no object": (forged(GOOD, []), "begins with"),
    "an unknown tensor": (forged(GOOD, {"v": ["F32", [1000]]}), "no row of bytes"),
    "an unknown type": (forged(GOOD, {"w": ["I32", [1000]]}), "'I32'"),
    "no shape": (forged(GOOD, {"w": ["F32"]}), "type and shape"),
    "a negative shape": (forged(GOOD, {"w": ["F32", [-1000]]}), "whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_frame_says_what_was_found_and_allocates_little(what):
    data, sentence = FORGED[what]
    tracemalloc.start()
    with pytest.raises(FormatError, match=sentence) as caught:
        messages.decode(data, room=4000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(str(caught.value)) < 400
    assert peak < 2**20


def test_nobody_expands_what_he_did_not_expect_to_be_compressed():
    with pytest.raises(FormatError, match="at most 0"):
        messages.decode(written({"w": delta(TYPES[1])}))


@given(st.data())
def test_a_compressed_message_with_a_few_bytes_changed_is_a_message_or_a_format_error(data):
    damaged = bytearray(written({"w": delta(TYPES[1], 500), "b": np.zeros(100, np.float32)}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        message = messages.decode(bytes(damaged), room=2400)
    except FormatError:
        return
    assert sum(array.nbytes for array in message.tensors.values()) <= max(2400, len(damaged))


# Contributions and payloads

SPECS = (TensorSpec("w", (50, 100), "bfloat16"), TensorSpec("b", (70,), "float32"))


def outgoing(dtype: str | None) -> dict[str, np.ndarray]:
    as_fp32 = {s.name: delta(np.dtype(np.float32), s.size).reshape(s.shape) for s in SPECS}
    kept = {s.name: as_fp32[s.name].astype(wire.subtracted_as(dtype) or s.dtype) for s in SPECS}
    return dict(wire.outgoing(kept, dtype))


@pytest.mark.parametrize("dtype", wire.FORMATS)
def test_a_contribution_has_one_digest_compressed_or_not_and_fits_its_room(dtype):
    room, found = wire.room(SPECS, dtype), []
    for compression in (None, "zstd"):
        data = contributions.encode("k", HEAD, outgoing(dtype), compression=compression)
        one = contributions.decode("k", b"".join(data), room=room)
        contributions.check(one, KEY, KEYS, SPECS, fragment=0, version=0, delta_dtype=dtype)
        found.append((one.sha256, one.head, bits(dict(one.tensors))))
    assert found[0] == found[1]
    assert sum(array.nbytes for array in outgoing(dtype).values()) == room


def test_a_bomb_in_a_contribution_is_rejected_as_corrupt():
    with pytest.raises(Rejection, match="corrupt"):
        contributions.decode("k", forged(ZEROS, {"w": ["U8", [2**30]]}), room=10_000)


def test_a_life_may_send_again_what_one_before_it_sent_compressed():
    def sent(head: ContributionHead, compression: str | None) -> list:
        return list(contributions.encode("k", head, outgoing(None), compression=compression))

    there = b"".join(sent(HEAD, "zstd"))
    assert there != b"".join(sent(HEAD, None))
    assert contributions.are_same("k", sent(HEAD, None), there, room=wire.room(SPECS, None))
    other = ContributionHead("run1", 0, 0, 0, "a", 1, Counters(4, 31), Ledger(), 40)
    assert not contributions.are_same("k", sent(other, None), there, room=PLENTY)
    assert not contributions.are_same("k", sent(HEAD, None), None, room=PLENTY)


def test_a_record_names_a_payload_whatever_way_it_was_stored():
    values = {s.name: delta(np.dtype(s.dtype), s.size).reshape(s.shape) for s in SPECS}
    plain = b"".join(payloads.encode_anchor(values))
    payload = Payload("k", len(plain), messages.digest([plain]))
    stored = b"".join(payloads.encode_anchor(values, compression="zstd"))
    assert len(stored) < len(plain)
    for data in (plain, stored):
        found = payloads.named(payload, data)
        assert found is not None
        assert bits(dict(payloads.decode_anchor(found, SPECS))) == bits(values)
    assert payloads.named(payload, stored[:-1]) is None
    assert payloads.named(Payload("k", payload.size - 1, payload.sha256), stored) is None
    assert payloads.named(Payload("k", payload.size, "0" * 64), stored) is None


def test_any_other_compression_is_refused_by_name(tmp_path):
    import jdiloco

    settings = jdiloco.DiLoCo(sync_every=100, fragments=1)
    with pytest.raises(UsageError, match="None or 'zstd', got 'gzip'"):
        Session({"w": np.zeros(3)}, settings, tmp_path, compression="gzip")
