"""The docs' table of bytes is what the program beside this file measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import bytes_table

PAGE = Path(__file__).parent.parent / "docs" / "costs.md"


def test_the_docs_show_the_bytes_that_are_measured():
    """What is plain to the digit; what is compressed within the twentieth that texts differ by."""
    shown = re.findall(r"^\| ([a-z].*) \| ([0-9.]+) \| ([0-9.]+) \|$", PAGE.read_text(), re.M)
    found = bytes_table.rows()
    assert [what for what, _, _ in shown] == list(found)
    for what, plain, zstd in shown:
        measured = found[what]
        assert float(plain) == pytest.approx(measured[0], abs=0.006), what
        assert float(zstd) == pytest.approx(measured[1], rel=0.05), what
        assert measured[1] < measured[0], what
