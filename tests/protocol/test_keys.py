"""The key layout: what is spelled is read back, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdiloco.errors import UsageError
from jdiloco.protocol.keys import (
    PHASES,
    BeatKey,
    ClaimKey,
    ContributionKey,
    Keys,
    RecordKey,
    check_node_id,
)

KEYS = Keys("run1")

rounds = st.integers(0, 10**10 - 1)
counts = st.integers(1, 10**12)
nodes = st.from_regex(r"[a-z0-9][a-z0-9-]{0,39}", fullmatch=True)
log_keys = st.one_of(
    st.builds(RecordKey, rounds),
    st.builds(ClaimKey, rounds, st.integers(1, 999)),
    st.builds(ContributionKey, rounds, nodes, counts, st.booleans()),
    st.builds(BeatKey, nodes, counts, counts, st.sampled_from(PHASES), counts, counts),
)


@given(log_keys)
def test_what_is_spelled_is_read_back(key):
    assert KEYS.parse(KEYS.spell(key)) == key


@given(st.text(max_size=80))
def test_a_text_means_something_only_if_it_is_spelled_so(text):
    for name in (text, KEYS.log + text, f"{KEYS.log}live/{text}"):
        found = KEYS.parse(name)
        assert found is None or KEYS.spell(found) == name


@pytest.mark.parametrize(
    "name",
    [
        "0000000/0000000001.0",  # Not under the run.
        "run2/log/0000000/0000000001.0",
        "run1/log/0000007/0000000001.0",  # In another group.
        "run1/log/0000000/0000000001.0.tmp",
        "run1/log/0000000/0000000001.0\n",
        "run1/log/0000000/000000000١.0",
        "run1/log/0000000/0000000001.1.0001",  # A zero too many.
        "run1/log/0000000/0000000001.2.../../x.0001",
        "run1/log/0000000/0000000001.2.-a.0001",
        "run1/log/0000000/0000000001.2.A.0001",
        "run1/log/0000000/0000000001.2.a.0001.f.f",
        "run1/log/live/a.0001.00000001.training.007.1",
        "run1/log/live/a.0001.00000001.sleeping.7.1",
        "run1/log/live/a.0001.00000001.training.-7.1",
        "run1/log/live/a.0001.00000001.training." + "9" * 5000 + ".1",
        "",
    ],
)
def test_hostile_names_are_nobodys(name):
    assert KEYS.parse(name) is None


@pytest.mark.parametrize("name", ["run1/node/a.0001x", "run1/node/../a.0001", "run1/node/a.00001"])
def test_hostile_names_are_no_incarnations(name):
    assert KEYS.parse_incarnation(name) is None
    assert KEYS.parse_incarnation("run1/node/a-1.0012") == ("a-1", 12)


@given(rounds, rounds, nodes)
def test_a_listing_skips_what_has_been_read_and_shows_every_beat(read, other, node):
    """Digits sort before letters; the round that is read next is not skipped."""
    after = KEYS.after(read)
    assert (KEYS.record(other) > after) == (other >= read)
    contribution = KEYS.contribution(ContributionKey(other, node, 1, False))
    assert (contribution > after) == (other >= read)
    assert KEYS.beat(BeatKey(node, 1, 1, "training", 0, 0)) > after


def test_a_record_comes_before_the_claims_and_contributions_of_its_round():
    names = [
        KEYS.record(7),
        KEYS.claim(ClaimKey(7, 1)),
        KEYS.claim(ClaimKey(7, 2)),
        KEYS.contribution(ContributionKey(7, "a", 1, False)),
        KEYS.record(8),
    ]
    assert names == sorted(names)


@pytest.mark.parametrize("node", ["", "A", "a/b", "../x", "-a", "a" * 41, "a.b", "é", "a\n"])
def test_a_node_id_that_cannot_stand_in_a_key_is_refused(node):
    with pytest.raises(UsageError, match="Node id"):
        check_node_id(node)
