"""The text of the demo: real files, one part that nobody trains on, and disjoint shares.

The files are sorted and joined, so every process that reads the same folder has the same bytes.
The joined text is cut into `CHUNKS` chunks. Every `HELD_OUT_EVERY`-th is held out; the others, in
their order, are cut into one contiguous share per node. Shares are therefore *different* text, as
they would be on machines that each hold their own: a node that trains alone never sees the
modules of the others.

A node that joins later takes over the share of the node that was killed, and draws its batches
from it with a seed of its own.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt

from jdiloco.errors import UsageError

CHUNKS = 128
HELD_OUT_EVERY = 16
BYTES_MIN = 200_000
"""Less text than this and a share is learnt by heart within a demo."""

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
"""Not the standard library, or installed on some systems only."""

Text = UInt[np.ndarray, " _"]
"""Bytes, any number of them."""


def standard_library() -> Path:
    """The folder with the source files of the Python that runs this."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(folder: Path) -> list[Path]:
    """The Python files of the standard library in `folder`, sorted."""
    files = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return sorted(folder / path for path in files if SKIPPED_FOLDERS.isdisjoint(path.parts))


def text_files(folder: Path) -> list[Path]:
    """Every file in `folder` that is text, sorted: UTF-8 without a zero byte in its beginning."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and _is_text(path))


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(1024)
    # A character that the cut goes through is no reason to refuse a file.
    return (
        bool(start)
        and b"\0" not in start
        and "\ufffd" not in start[:-3].decode("utf-8", "replace").rstrip("\ufffd")
    )


def read_text(folder: Path | None) -> Text:
    """All bytes of the standard library, or of the text files in `folder`, joined in order."""
    files = source_files(standard_library()) if folder is None else text_files(folder)
    text = b"\n".join(path.read_bytes() for path in files)
    if len(text) < BYTES_MIN:
        place = folder or standard_library()
        raise UsageError(
            f"{place} holds {len(files)} text files with {len(text):,} bytes; the demo needs at "
            f"least {BYTES_MIN:,}. Name a folder with more text: `jdiloco demo --data DIR`."
        )
    return np.frombuffer(text, np.uint8)


def split(text: Text, nodes: int) -> tuple[Text, list[Text]]:
    """The held-out part, and one share per node. Together they are `text`, without overlap."""
    chunks = np.array_split(text, CHUNKS)
    held_out = chunks[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    kept = [chunk for i, chunk in enumerate(chunks) if (i + 1) % HELD_OUT_EVERY]
    return np.concatenate(held_out), np.array_split(np.concatenate(kept), nodes)


def batches(share: Text, rows: int, length: int, *, seed: int) -> Iterator[np.ndarray]:
    """Endless batches of random windows of `share`, of `length` bytes each."""
    draw = np.random.default_rng(seed)
    offsets = np.arange(length)
    while True:
        starts = draw.integers(0, len(share) - length, size=(rows, 1))
        yield share[starts + offsets].astype(np.int32)


def held_out_rows(held_out: Text, rows: int, length: int) -> np.ndarray:
    """`rows` windows spread evenly over the held-out text: the same for whoever asks."""
    starts = np.linspace(0, len(held_out) - length, rows).astype(np.int64)[:, None]
    return held_out[starts + np.arange(length)].astype(np.int32)
