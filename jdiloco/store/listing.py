"""Where a listing may begin, and which directories it has to look into."""

from __future__ import annotations

import re

_CHARACTERS = "-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
"""Those of keys, in their order. Only `-` and `.` come before `/`."""


def may_hold(directory: str, prefix: str, after: str) -> bool:
    """Whether a key that begins with `directory` can begin with `prefix` and be past `after`."""
    if not (directory.startswith(prefix) or prefix.startswith(directory)):
        return False
    return after[: len(directory)] <= directory


def safe_offset(top: str, after: str) -> str | None:
    """A key after which a listing of the directory `top` may begin and miss nothing past `after`.

    Most servers order keys as strings. SeaweedFS walks directories in the order of their names, so
    that `a/b` comes before `a-b`, and beginning after `a` it leaves out all of `a/`. What is
    returned is right in both orders: it is less than `after` in either, by as little as can be, and
    no directory that could hold anything past `after` comes before it. None: begin at the start.
    """
    above = f"{top}/" if top else ""
    if not after.startswith(above):
        return None
    kept: list[str] = []
    for part in after[len(above) :].rstrip("/").split("/"):
        # Before `a-b` comes the directory `a`, and yet it holds keys past it.
        stem = re.match(r"(?:.[^.-]*)?", part)
        assert stem is not None  # It matches anything.
        if stem[0] != part:
            return _before(above, kept, stem[0])
        kept.append(part)
    return _before(above, kept[:-1], kept[-1])


def _before(above: str, parents: list[str], part: str) -> str | None:
    """What comes right before the directory `part`, and before the key of that name."""
    lower = _CHARACTERS[: _CHARACTERS.find(part[-1])] if part else ""
    if lower:
        return above + "/".join([*parents, f"{part[:-1]}{lower[-1]}z"])
    return _before(above, parents[:-1], parents[-1]) if parents else None
