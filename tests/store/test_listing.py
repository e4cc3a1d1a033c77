from hypothesis import given
from hypothesis import strategies as st

from jdiloco.store.listing import may_hold, safe_offset

part = st.text("-.09Aaz_", min_size=1, max_size=3)
key = st.lists(part, min_size=1, max_size=3).map("/".join)
after = st.text("-.09Aaz_/", max_size=8)


def walked_past(key, offset):
    """Whether a server that walks directories by name lists `key` after `offset`."""
    return key.split("/") > offset.split("/") and not key.startswith(f"{offset.rstrip('/')}/")


@given(key, after)
def test_an_offset_hides_nothing_whether_keys_are_ordered_as_strings_or_walked(key, after):
    offset = safe_offset("", after)
    if key > after and offset is not None:
        assert key > offset
        assert walked_past(key, offset)


@given(key, after)
def test_an_offset_is_one_within_the_directory_that_is_listed(key, after):
    offset = safe_offset("log", f"log/{after}")
    if f"log/{key}" > f"log/{after}" and offset is not None:
        assert offset.startswith("log/")
        assert f"log/{key}" > offset
        assert walked_past(f"log/{key}", offset)


def test_a_poll_begins_right_before_the_round_it_waits_for():
    """Nothing of the round before comes back: its record is `0000000123.0`."""
    assert safe_offset("run/log", "run/log/0000000/0000000124") == "run/log/0000000/0000000123z"
    assert safe_offset("run/log", "run/log/0000001/0000001000") == "run/log/0000001/000000100.z"


def test_what_lies_before_or_past_the_directory_gives_no_offset():
    assert safe_offset("b", "a/x") is None
    assert safe_offset("b", "c") is None
    assert safe_offset("", "-") is None


@given(key, key, after)
def test_a_directory_that_may_hold_nothing_wanted_holds_nothing_wanted(key, prefix, after):
    wanted = key.startswith(prefix) and key > after
    for length in range(1, len(key)):
        if key[length - 1] == "/" and wanted:
            assert may_hold(key[:length], prefix, after)
