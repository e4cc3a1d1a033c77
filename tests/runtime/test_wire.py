"""Deltas in a message, in every precision a run can agree on."""

from __future__ import annotations

import numpy as np
import pytest

from jdiloco.errors import FormatError
from jdiloco.runtime import messages, wire
from jdiloco.testing import oracle
from jdiloco.types import TensorSpec

SPECS = (
    TensorSpec("a", (5, 40), "float32"),
    TensorSpec("scales/a", (3,), "float32"),  # Named as if to collide.
    TensorSpec("none", (0, 4), "float32"),
    TensorSpec("one", (), "float32"),
)
SMALL = ("float8_e4m3fn", "float4_e2m1fn")


def deltas(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {s.name: np.asarray(rng.normal(size=s.shape)).astype(dtype) for s in SPECS}


def arrived(tensors, dtype):
    """Sent, written down, read again, checked."""
    data = b"".join(map(bytes, messages.encode(wire.outgoing(tensors, dtype), {})))
    found = messages.decode(data).tensors
    wire.check(found, SPECS, dtype)
    return wire.incoming(found, SPECS, dtype)


@pytest.mark.parametrize("dtype", SMALL)
def test_what_arrives_is_what_the_oracle_says(dtype):
    sent = deltas()
    found = arrived(sent, dtype)
    assert found.keys() == sent.keys()
    for name, array in sent.items():
        np.testing.assert_array_equal(found[name], oracle.on_wire(array, dtype).astype(np.float32))


def test_wide_formats_go_as_they_are():
    sent = deltas()
    assert wire.outgoing(sent, "float32") is sent
    assert wire.incoming(sent, SPECS, None) is sent


@pytest.mark.parametrize("dtype", SMALL)
def test_a_tensor_that_is_not_finite_arrives_as_not_finite(dtype):
    sent = deltas()
    sent["a"][2, 3] = np.inf
    assert np.isnan(arrived(sent, dtype)["a"]).any()


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("lost", ["values/a", "scales/a"])
def test_a_message_without_all_its_parts_is_refused_by_name(dtype, lost):
    parts = dict(wire.outgoing(deltas(), dtype))
    del parts[lost]
    with pytest.raises(FormatError, match=f"`{lost}` is absent"):
        wire.check(parts, SPECS, dtype)


def test_scales_of_another_block_size_are_refused():
    parts = dict(wire.outgoing(deltas(), "float4_e2m1fn"))
    parts["scales/a"] = parts["scales/a"][:-1]
    with pytest.raises(FormatError, match=r"`scales/a` is float8_e8m0fnu\[6\], wanted .*\[7\]"):
        wire.check(parts, SPECS, "float4_e2m1fn")


@pytest.mark.parametrize(("dtype", "bits"), [("float8_e4m3fn", 8), ("float4_e2m1fn", 4.25)])
def test_a_large_tensor_takes_so_many_bits_an_element(dtype, bits):
    sent = {"w": np.ones((1000, 320), np.float32)}
    size = sum(array.nbytes for array in wire.outgoing(sent, dtype).values())
    assert 8 * size / sent["w"].size == pytest.approx(bits, rel=1e-3)
