"""A pod's contribution in parts, and payloads of which a process reads no more than its boxes."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jdiloco.errors import FormatError
from jdiloco.protocol.keys import Keys, PartKey
from jdiloco.protocol.records import Payload
from jdiloco.runtime import messages, payloads
from jdiloco.runtime.messages import CHUNK_BYTES
from jdiloco.runtime.pieces import Box, Pieces, slices_of
from jdiloco.runtime.pods import parts, ranges
from jdiloco.runtime.pods.parts import Misfit
from jdiloco.store import MemoryStore
from jdiloco.types import TensorSpec

KEYS = Keys("run")
SPECS = (TensorSpec("a/w", (4, 6), "float32"), TensorSpec("b", (), "bfloat16"))
PREFIX = KEYS.parts(3, "pod", 1)
_names = itertools.count()


def tensors() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {s.name: np.asarray(draw.normal(size=s.shape)).astype(s.dtype) for s in SPECS}


def share(whole: dict[str, np.ndarray], boxes: dict[str, list[Box]]) -> dict[str, Pieces]:
    sharding: Any = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: Pieces(
            whole[name].shape, sharding, {b: np.asarray(whole[name][slices_of(b)]) for b in found}
        )
        for name, found in boxes.items()
    }


LEFT, RIGHT = ((0, 4), (0, 3)), ((0, 4), (3, 6))


def sent(*boxes: dict[str, list[Box]]) -> tuple[list[Payload], dict[str, bytes]]:
    """Parts of these boxes, as what a head says of them and as objects."""
    objects = {}
    for process, held in enumerate(boxes):
        data = parts.encode(share(tensors(), held))
        key = parts.part_key(KEYS, 3, "pod", 1, process, data)
        objects[key] = b"".join(data)
    named = [Payload(k, len(d), messages.digest([d])) for k, d in objects.items()]
    return named, objects


def gathered(named: list[Payload], objects: dict[str, bytes]) -> dict[str, np.ndarray]:
    return parts.assembled(named, PREFIX, SPECS, None, lambda part: objects.get(part.key))


def reason(named: list[Payload], objects: dict[str, bytes]) -> str:
    with pytest.raises(Misfit) as found:
        gathered(named, objects)
    return found.value.reason


def test_parts_make_the_tensors_they_were_cut_from():
    found = gathered(*sent({"a/w": [LEFT], "b": [()]}, {"a/w": [RIGHT]}))
    for name, array in tensors().items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes()


def test_the_key_of_a_part_says_what_it_holds():
    (named, _) = sent({"a/w": [LEFT], "b": [()]})
    assert KEYS.parse_part(named[0].key) == PartKey(3, "pod", 1, 0, named[0].sha256)
    assert KEYS.parse_payload(named[0].key) is None
    assert KEYS.parse_part(KEYS.payload(3, "pod.0001.0001", "anchor")) is None


def test_a_part_that_is_gone_is_missing_and_a_damaged_one_is_corrupt():
    named, objects = sent({"a/w": [LEFT], "b": [()]}, {"a/w": [RIGHT]})
    key = named[1].key
    assert reason(named, {k: v for k, v in objects.items() if k != key}) == "missing"
    assert reason(named, {**objects, key: objects[key][:-1] + b"?"}) == "corrupt"
    assert reason(named, {**objects, key: objects[key] + b"?"}) == "corrupt"


@pytest.mark.parametrize(
    "boxes",
    [
        [{"a/w": [LEFT], "b": [()]}],  # The right half is nowhere,
        [{"a/w": [LEFT, RIGHT]}],  # and a tensor,
        [{"a/w": [LEFT], "b": [()]}, {"a/w": [LEFT]}],  # or the left half is there twice,
        [{"a/w": [LEFT, ((0, 4), (2, 5))], "b": [()]}],  # or two boxes overlap,
        [{"a/w": [((0, 2), (0, 6)), ((0, 4), (0, 3))], "b": [()]}],  # in any way,
        [{"a/w": [((0, 2), (0, 4)), ((2, 4), (1, 5)), RIGHT], "b": [()]}],
    ],
)
def test_boxes_that_do_not_fill_a_tensor_just_once_are_corrupt(boxes):
    assert reason(*sent(*boxes)) == "corrupt"


def test_what_was_never_part_of_the_schema_is_corrupt():
    for odd in ({"0/x": np.zeros(3)}, {"0,0/a/w": np.zeros((4, 6))}, {"x/b": np.zeros(())}):
        data = messages.encode({k: v.astype(np.float32) for k, v in odd.items()}, {})
        key = parts.part_key(KEYS, 3, "pod", 1, 0, data)
        size, digest = len(b"".join(data)), messages.digest(data)
        assert reason([Payload(key, size, digest)], {key: b"".join(data)}) == "corrupt"


def test_a_head_can_name_no_object_of_others_and_no_absurd_size():
    named, objects = sent({"a/w": [LEFT, RIGHT], "b": [()]})
    elsewhere = msgspec.structs.replace(named[0], key=f"{KEYS.parts(4, 'pod', 1)}0000.x")
    assert reason([elsewhere], {elsewhere.key: b""}) == "corrupt"

    def never(part: Payload) -> bytes:
        raise AssertionError("it was read")

    huge = msgspec.structs.replace(named[0], size=2**60)
    with pytest.raises(Misfit, match="corrupt"):
        parts.assembled([huge], PREFIX, SPECS, None, never)
    assert gathered(named, objects)


# Payloads


class Counting(MemoryStore):
    """Counts the bytes that were read."""

    read = 0

    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> bytes | None:
        data = super().get(key, start=start, stop=stop)
        self.read += len(data or b"")
        return data


def committed(values: dict[str, np.ndarray]) -> tuple[Counting, Payload, list[TensorSpec]]:
    buffers = payloads.encode_anchor(values)
    data = b"".join(buffers)
    store = Counting(f"pod-objects-{next(_names)}")
    store.create("k", data)
    payload = Payload("k", len(data), messages.digest(buffers), messages.digest(buffers[:1]))
    return store, payload, [TensorSpec(n, a.shape, a.dtype.name) for n, a in values.items()]


SHAPES = [(), (7,), (5, 6), (3, 4, 5), (2, 3, 4, 5), (0, 3), (600, 700)]


@pytest.mark.parametrize("parted", range(5))
def test_a_box_that_is_read_by_ranges_is_the_slice_of_the_whole(parted):
    """Along every axis, of tensors that begin at odd places and go over several stretches."""
    draw = np.random.default_rng(parted)
    types = ["float32", "bfloat16", "float16"]
    values = {
        f"t{i}": np.asarray(draw.normal(size=shape)).astype(types[(i + parted) % 3])
        for i, shape in enumerate(SHAPES)
    }
    values["odd"] = np.ones(parted, np.float16)
    values = dict(sorted(values.items()))
    store, payload, specs = committed(values)

    def box(shape: tuple[int, ...]) -> Box:
        edges = [sorted(draw.integers(0, n + 1, 2).tolist()) for n in shape]
        whole = draw.random(len(shape)) < 0.4
        return tuple(
            (0, n) if w else (a, b) for (a, b), n, w in zip(edges, shape, whole, strict=True)
        )

    wanted = {n: [box(a.shape), box(a.shape)] for n, a in values.items() for _ in [0]}
    found = ranges.read(store, payload, specs, wanted)
    assert found is not None
    for name, boxes in wanted.items():
        for one in boxes:
            assert found[name][one].tobytes() == values[name][slices_of(one)].tobytes()
            assert found[name][one].dtype == values[name].dtype


def test_whoever_wants_a_quarter_reads_a_quarter_and_holds_little_more():
    """By rows. By columns all of it passes through, and a quarter is held."""
    whole = np.arange(16 * 2**20, dtype=np.float32).reshape(4096, 4096)
    store, payload, specs = committed({"w": whole})
    for box, most in ((((1024, 2048), (0, 4096)), 17), (((0, 4096), (1024, 2048)), 65)):
        store.read = 0
        tracemalloc.start()
        found = ranges.read(store, payload, specs, {"w": [box]})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found is not None
        assert np.array_equal(found["w"][box], whole[slices_of(box)])
        assert store.read <= most * 2**20
        assert peak <= whole.nbytes / 4 + 3 * ranges.AT_ONCE * CHUNK_BYTES


def test_damage_is_seen_where_it_is_read_and_nowhere_else():
    whole = np.zeros((4, CHUNK_BYTES // 4), np.float32)
    buffers = payloads.encode_anchor({"w": whole})
    header = messages.digest(buffers[:1])
    for at, reads in ((0, False), (len(buffers[0]) + 5, False), (-1, True)):
        data = bytearray(b"".join(buffers))
        data[at] ^= 1
        store = MemoryStore(f"pod-objects-{next(_names)}")
        store.create("k", bytes(data))
        payload = Payload("k", len(data), "", header)
        specs = [TensorSpec("w", whole.shape, "float32")]
        box = ((0, 2), (0, whole.shape[1]))
        if reads:
            assert ranges.read(store, payload, specs, {"w": [box]}) is not None
            continue
        with pytest.raises(FormatError):
            ranges.read(store, payload, specs, {"w": [box]})


def test_a_payload_that_is_gone_is_none():
    _, payload, specs = committed({"w": np.ones(3, np.float32)})
    store = MemoryStore(f"pod-objects-{next(_names)}")
    assert ranges.read(store, payload, specs, {"w": [((0, 1),)]}) is None
