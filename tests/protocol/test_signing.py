"""What only the holders of a run key can make."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.errors import UsageError
from jdiloco.protocol.keys import (
    CREATING,
    MANIFEST,
    BeatKey,
    ClaimKey,
    ContributionKey,
    Keys,
    Pool,
    UnitKey,
    write_id,
)
from jdiloco.protocol.signing import RunKey, is_signed, names_a_manifest, run_of

SECRET = b"0123456789abcdef"
KEY = RunKey(SECRET)
KEYS = Keys("run1")
QUEUE = Pool.queue("files", 10)

EVERY_KIND = {
    "manifest": MANIFEST,
    "creating": f"{CREATING}ada.nonce.00000001",
    "record": KEYS.record(42),
    "claim": KEYS.claim(ClaimKey(42, 1)),
    "contribution": KEYS.contribution(ContributionKey(42, "ada", 1, False)),
    "final": KEYS.contribution(ContributionKey(42, "ada", 1, True)),
    "beat": KEYS.beat(BeatKey("ada", 1, 7, "training", 100, 42)),
    "payload": KEYS.payload(42, write_id("ada", 1, 3), "anchor"),
    "file": f"{KEYS.checkpoint(42, 'ada', 1, 1)}/params/_METADATA",
    "incarnation": KEYS.incarnation("ada", 1),
    "unit": KEYS.unit(QUEUE, UnitKey(3, 1)),
    "mark": KEYS.unit(QUEUE, UnitKey(3, 1, "done")),
    "rank": KEYS.unit(Pool.ranks(4), UnitKey(3, 1)),
    "arrival": KEYS.arrival("epoch", "ada", 1),
}
BY_NAME_HASH_OR_FROM_WITHIN = {
    "creating",
    "contribution",
    "final",
    "beat",
    "payload",
    "file",
    "arrival",
}

keys = st.sampled_from(sorted(EVERY_KIND.values()))
bodies = st.binary(max_size=200)


@given(keys)
def test_a_name_is_read_back(key):
    assert KEY.read_name(KEY.name(key)) == key


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_key_of_a_run_is_called_otherwise_with_a_run_key(kind):
    """So nobody who has none can take a name in advance."""
    key = EVERY_KIND[kind]
    assert KEY.name(key) != key
    assert KEY.read_name(key) is None
    assert RunKey(b"another key of 26 letters!").read_name(KEY.name(key)) is None


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_small_objects_are_signed_and_all_others_covered_otherwise(kind):
    assert is_signed(EVERY_KIND[kind]) == (kind not in BY_NAME_HASH_OR_FROM_WITHIN)


def test_a_kind_of_object_that_is_unknown_is_signed():
    assert is_signed("run1/log/0000000/0000000042.3")
    assert is_signed("run1/node/news")


@given(keys.filter(lambda key: "/save/" not in key), st.data())
def test_no_other_name_passes(key, data):
    """Whatever character of it is another; of a checkpoint the name of its directory counts."""
    name = KEY.name(key)
    at = data.draw(st.integers(0, len(name) - 1))
    other = data.draw(st.sampled_from("0a-./").filter(lambda c: c != name[at]))
    changed = name[:at] + other + name[at + 1 :]
    assert KEY.read_name(changed) in (None, changed)  # Or it is no name of a run at all.
    assert KEY.read_name(changed) != key


@given(keys, keys)
def test_the_end_of_one_name_does_not_fit_another(key, other):
    copied = f"{other}{KEY.name(key).removeprefix(key)}"
    assert (KEY.read_name(copied) == other) == (KEY.name(other) == copied)


def test_what_another_run_of_the_same_key_made_does_not_fit():
    for kind, key in EVERY_KIND.items():
        if not key.startswith(KEYS.run):
            continue
        elsewhere = key.replace(KEYS.run, "run2", 1)
        assert KEY.read_name(KEY.name(elsewhere).replace("run2", KEYS.run, 1)) is None, kind
        assert KEY.open(key, KEY.close(elsewhere, b"{}")) is None, kind


@given(keys, bodies)
def test_a_small_object_is_opened(key, body):
    assert KEY.open(key, KEY.close(key, body)) == body


@given(keys, bodies, st.data())
def test_not_once_a_bit_of_it_has_changed(key, body, data):
    closed = bytearray(KEY.close(key, body))
    closed[data.draw(st.integers(0, len(closed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert KEY.open(key, bytes(closed)) is None


@given(keys, keys.filter(lambda key: key != MANIFEST), bodies)
def test_nor_under_another_key_or_cut_short(key, other, body):
    closed = KEY.close(key, body)
    assert (KEY.open(other, closed) is None) == (other != key)
    assert KEY.open(key, closed[1:]) is None
    assert KEY.open(key, closed[:-1]) is None
    assert KEY.open(key, body) is None
    assert RunKey(b"another key of 26 letters!").open(key, closed) is None


def test_parts_cannot_be_shifted_into_each_other():
    """Each is preceded by its length, so the end of a key is not the beginning of what is said."""
    signature = KEY.sign("run1/log/a", "bc")
    assert not KEY.vouches("run1/log/ab", "c", signature)
    assert not KEY.vouches("run1/log/a", "bcd", signature)
    assert KEY.vouches("run1/log/a", "bc", signature)


def test_one_purpose_is_not_the_other():
    """A signature of a message does not open an object."""
    key = KEYS.record(1)
    assert KEY.open(key, b"x" + KEY.sign(key, "x").encode() + b"\n") is None


def test_what_is_nothing_of_a_run_is_left_alone():
    for name in ("notes.txt", "manifest.json", "backup/manifest", "doctor/1/probe"):
        assert KEY.name(name) == KEY.read_name(name) == name


def test_a_checkpoint_keeps_the_names_of_its_files():
    """The MAC is its directory's, so that a restored directory is what Orbax wrote."""
    prefix = KEYS.checkpoint(42, "ada", 1, 1)
    directory = KEY.name(f"{prefix}/").removesuffix("/")
    assert KEY.name(f"{prefix}/params/d/0") == f"{directory}/params/d/0"
    assert KEY.prefix(f"{prefix}/") == f"{directory}/"
    assert KEY.prefix(KEYS.saves) == KEYS.saves


def test_manifests_are_known_without_their_key():
    assert names_a_manifest(MANIFEST)
    assert names_a_manifest(KEY.name(MANIFEST))
    assert not names_a_manifest("manifest.json")


def test_the_run_is_the_beginning_of_a_key():
    assert run_of(KEYS.record(1)) == "run1"
    assert run_of(MANIFEST) == run_of(f"{CREATING}ada.x.00000001") == ""


def test_a_key_that_is_too_short_is_refused_without_being_shown():
    with pytest.raises(UsageError, match="15 bytes, wanted 16") as caught:
        RunKey(b"s3cret-of-15-by")
    assert "s3cret" not in str(caught.value)


def test_a_key_shows_nothing_of_itself_and_cannot_be_copied_anywhere():
    shown = f"{KEY!r} {KEY} {vars(type(KEY)).keys()}"
    assert SECRET.decode() not in shown
    with pytest.raises(UsageError, match="not copied"):
        pickle.dumps(KEY)
    with pytest.raises(UsageError, match="not copied"):
        copy.deepcopy(KEY)
