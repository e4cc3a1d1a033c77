"""Aligning for real: the arithmetic of `algo`, next to the user's arrays and placed like them.

A result of a jitted call is committed to its devices if any argument is, and lies in the default
memory wherever the arguments did. So leaves that are committed and leaves that are not go through
calls of their own, arrays in the host's memory come to the device for the arithmetic, and each
result is brought to where its leaf was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdiloco.algo import alignment
from jdiloco.protocol.alignment import Alignment, Blend, Carry, How, Overwrite
from jdiloco.runtime.parameters import in_reach, moved, put

Leaves = tuple[jax.Array, ...]


def aligned(how: How, leaves: Sequence[Any], since: Leaves, committed: Leaves) -> Leaves:
    """New arrays for `leaves`, placed as they are. `since` is what the rest counts from."""
    if isinstance(how, Blend):
        return _apart(
            lambda mine, theirs: alignment.blended(mine, theirs, mixing=how.mixing),
            leaves,
            committed,
        )
    return _apart(alignment.carried, leaves, since, committed)


def snapshot(leaves: Sequence[Any]) -> Leaves:
    """Copies, placed as `leaves` are."""
    return _apart(alignment.copied, leaves)


def is_finite(leaves: Sequence[Any], since: Leaves) -> bool:
    """Whether all of what was trained since is a number; waits for the user's step to end.

    Leaves that were donated cannot be told, and count as not finite.
    """
    arrays = on_device(leaves)
    if any(array.is_deleted() for array in arrays):
        return False
    then = tuple(moved(a, like) for a, like in zip(since, arrays, strict=True))
    found = alignment.is_finite(tuple(map(in_reach, arrays)), tuple(map(in_reach, then)))
    return bool(jax.device_get(found))


def prepare(setting: Alignment, leaves: Sequence[Any], anchors: Leaves) -> None:
    """Compiles what aligning these leaves will need."""
    if isinstance(setting, Overwrite):
        return
    is_finite(leaves, anchors)
    if isinstance(setting, Blend):
        jax.block_until_ready(aligned(setting, leaves, anchors, anchors))
    else:
        for since in (anchors, snapshot(leaves)):
            jax.block_until_ready(aligned(Carry(), leaves, since, anchors))


def on_device(leaves: Sequence[Any]) -> Leaves:
    """A NumPy array goes over by itself: handed to a jitted call it would be moved implicitly."""
    return tuple(x if isinstance(x, jax.Array) else jax.device_put(x) for x in leaves)


def _apart(kernel: Callable[..., Any], leaves: Sequence[Any], *others: Leaves) -> Leaves:
    """A kernel's results for committed and for uncommitted leaves, placed as these are."""
    arrays = on_device(leaves)
    made = list(arrays)
    for committed in (False, True):
        chosen = [i for i, array in enumerate(arrays) if array.committed == committed]
        if not chosen:
            continue
        columns = [
            tuple(in_reach(moved(column[i], arrays[i])) for i in chosen)
            for column in (arrays, *others)
        ]
        for index, result in zip(chosen, kernel(*columns), strict=True):
            made[index] = _put_back(result, arrays[index])
    return tuple(made)


def _put_back(result: jax.Array, like: jax.Array) -> jax.Array:
    if like.committed and result.sharding != like.sharding:
        return put(result, like.sharding)
    return result
