"""The demo's text: the same for everybody, cut without overlap."""

import itertools

import numpy as np
import pytest

from jdiloco.cli import demo_data
from jdiloco.errors import UsageError


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_the_parts_are_disjoint_and_cover_the_text(nodes):
    """Cut the positions instead of the bytes: every one turns up in one part, once."""
    positions = np.arange(100_003, dtype=np.uint32)
    held_out, shares = demo_data.split(positions, nodes)
    np.testing.assert_array_equal(np.sort(np.concatenate([held_out, *shares])), positions)
    sizes = [len(share) for share in shares]
    assert len(shares) == nodes
    assert max(sizes) - min(sizes) <= 1
    assert len(held_out) / len(positions) == pytest.approx(1 / 16, rel=0.01)


def test_the_standard_library_is_read_without_what_was_installed_beside_it():
    files = demo_data.source_files(demo_data.standard_library())
    names = [path.as_posix() for path in files]
    assert files == sorted(files)
    assert any(name.endswith("/dataclasses.py") for name in names)
    assert not any("site-packages" in name for name in names)


def test_text_files_are_told_from_others(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("words " * 300 + "é")
    (tmp_path / "sub" / "a.md").write_text("é" * 2000)  # The first 1024 bytes end in mid-letter...
    (tmp_path / "c.md").write_text("a" + "é" * 2000)  # ... in one of the two.
    (tmp_path / "image").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "latin").write_bytes(b"\xe9\xe8 caf\xe9 " * 20)
    (tmp_path / "empty").touch()
    names = [path.name for path in demo_data.text_files(tmp_path)]
    assert names == ["b.txt", "c.md", "a.md"]


def test_a_folder_without_enough_text_is_refused(tmp_path):
    (tmp_path / "note.txt").write_text("short")
    with pytest.raises(UsageError, match=r"1 text files with 5 bytes.*--data DIR"):
        demo_data.read_text(tmp_path)


def test_batches_come_from_the_share_and_repeat_for_one_seed():
    share = np.arange(200, dtype=np.uint8)
    one, again, other = (
        list(itertools.islice(demo_data.batches(share, 4, 9, seed=seed), 3)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    assert (np.diff(one, axis=-1) == 1).all()


def test_held_out_rows_reach_from_the_beginning_to_the_end():
    rows = demo_data.held_out_rows(np.arange(250, dtype=np.uint8), 5, 10)
    assert rows.shape == (5, 10)
    assert rows[0, 0] == 0
    assert rows[-1, -1] == 249
