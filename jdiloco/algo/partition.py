"""How a model is cut into fragments, the sets of tensors that are synchronised together.

A plan is a function of names, shapes and types alone, so every node would make the same one. It is
made once, by the creator of a run, and stands in the manifest. A partition is a frozen dataclass
with one method, `deal(specs, fragments)`, which gives a list of tensors per fragment; `plan` then
checks the answer, so that a partition of your own goes through the same door.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jdiloco.algo.paths import natural_order
from jdiloco.errors import UsageError
from jdiloco.types import TensorSpec

BLOCKS = r"(?i:(?:^|[/.])(?:\w*layers?|\w*blocks?|h)[/._][0-9]+(?=[/.]|$))"
"""Finds `layers/0`, `blocks_1`, `gpt_neox.layers.2`, `TransformerBlock_3` and `h/4` in a name."""

Fragments = list[list[TensorSpec]]


@runtime_checkable
class Partition(Protocol):
    """What every partition has."""

    def deal(self, specs: Sequence[TensorSpec], fragments: int) -> Sequence[Sequence[TensorSpec]]:
        """Tensors per fragment. `specs` come in canonical order, at least one for each fragment."""
        ...


@dataclasses.dataclass(frozen=True)
class ByBytes:
    """Largest tensor first, each to the lightest fragment. Made by `by_bytes`."""

    def deal(self, specs: Sequence[TensorSpec], fragments: int) -> Fragments:
        """See `by_bytes`."""
        return _balance(specs, [[] for _ in range(fragments)])


@dataclasses.dataclass(frozen=True)
class Strided:
    """Transformer blocks dealt round, the rest balanced by bytes. Made by `strided`."""

    block_pattern: str = BLOCKS

    def deal(self, specs: Sequence[TensorSpec], fragments: int) -> Fragments:
        """See `strided`."""
        blocks: dict[str, list[TensorSpec]] = {}
        rest = []
        for spec in specs:
            found = re.search(self.block_pattern, spec.name)
            if found is None:
                rest.append(spec)
            else:
                # Up to the end of the match: `encoder/layers/0` is not `decoder/layers/0`.
                blocks.setdefault(spec.name[: found.end()], []).append(spec)
        self._check_enough(len(blocks), len(rest), fragments, specs)
        dealt: Fragments = [[] for _ in range(fragments)]
        for i, block in enumerate(sorted(blocks, key=natural_order)):
            dealt[i % fragments].extend(blocks[block])
        return _balance(rest, dealt)

    def _check_enough(
        self, blocks: int, rest: int, fragments: int, specs: Sequence[TensorSpec]
    ) -> None:
        if blocks == 0:
            raise UsageError(
                f"`block_pattern` {self.block_pattern!r} matches no name, e.g. not "
                f"{specs[0].name!r}. Give a regular expression that ends at a block's number, such "
                "as r'layers/[0-9]+', or use `by_bytes()`."
            )
        if fragments > blocks + rest:
            raise UsageError(
                f"`fragments` is {fragments}, but {blocks} blocks and {rest} other tensors make at "
                f"most {blocks + rest}. Use fewer fragments, or `by_bytes()`."
            )


def by_bytes() -> ByBytes:
    """Largest tensor first, each to the lightest fragment; ties by name, then by fragment.

    The heaviest fragment ends within 4/3 of the best possible one.

    Limit case: with as many fragments as tensors each tensor is its own, largest first.

    Source: Decoupled DiLoCo (arXiv 2604.21428).
    """
    return ByBytes()


def strided(block_pattern: str | Any = BLOCKS) -> Strided:
    """Block `i` goes to fragment `i mod P`; tensors outside blocks are balanced by bytes.

    `block_pattern` is a regular expression that is searched in path names; what stands in a name up
    to the end of the match tells the block, and blocks are counted in natural order. A scanned
    stack of layers is one tensor, so there is nothing to deal: use `by_bytes`.

    Limit case: 6 blocks in 3 fragments are dealt 0 and 3, 1 and 4, 2 and 5.

    Source: Streaming DiLoCo (arXiv 2501.18512).
    """
    try:
        re.compile(block_pattern)
    except (re.error, TypeError) as error:
        raise UsageError(
            f"`block_pattern` must be a regular expression, got {block_pattern!r}: {error}."
        ) from error
    return Strided(block_pattern)


def plan(
    partition: Partition, specs: Iterable[TensorSpec], fragments: int
) -> tuple[tuple[str, ...], ...]:
    """The names in each fragment, in canonical order. The order of `specs` leaves no trace.

    Raises `UsageError` unless `fragments` is from 1 to the number of tensors, and when a partition
    leaves a tensor out, gives it twice or leaves a fragment empty.

    Limit case: one fragment holds every tensor.
    """
    known = sorted(specs, key=lambda spec: natural_order(spec.name))
    if not 1 <= fragments <= len(known):
        raise UsageError(
            f"`fragments` is {fragments}, and a model of {len(known)} tensors has at most "
            f"{len(known)}: a fragment holds at least one whole tensor."
        )
    dealt = partition.deal(known, fragments)
    names = tuple(tuple(sorted((s.name for s in part), key=natural_order)) for part in dealt)
    given = sorted((name for part in names for name in part), key=natural_order)
    if given != [spec.name for spec in known] or not all(names) or len(names) != fragments:
        raise UsageError(
            f"{partition!r} must give each of {len(known)} tensors to exactly one of {fragments} "
            f"fragments and leave none empty; it made {[len(part) for part in names]}."
        )
    return names


def to_json(partition: Any) -> dict[str, Any]:
    """The partition as it stands in a manifest, e.g. `{"kind": "by_bytes"}`."""
    return {"kind": _kind(type(partition)), **dataclasses.asdict(partition)}


def from_json(value: Mapping[str, Any], *, known: Sequence[type] = ()) -> Partition:
    """The partition that `to_json` wrote; `known` lists classes of your own."""
    fields = dict(value)
    kind = fields.pop("kind", None)
    classes = {_kind(each): each for each in (ByBytes, Strided, *known)}
    try:
        return classes[kind](**fields)
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"Partition {dict(value)!r} is none of {', '.join(sorted(classes))} with their fields. "
            "Pass your own class in `known`."
        ) from error


def _kind(partition_type: type) -> str:
    ours = {ByBytes: "by_bytes", Strided: "strided"}
    return ours.get(partition_type, f"{partition_type.__module__}:{partition_type.__qualname__}")


def _balance(specs: Sequence[TensorSpec], dealt: Fragments) -> Fragments:
    """Adds each tensor, largest first, to the lightest fragment."""
    # The number of tensors breaks ties, so that tensors of no bytes reach empty fragments as well.
    loads = [(sum(spec.nbytes for spec in part), len(part)) for part in dealt]
    for spec in sorted(specs, key=lambda spec: (-spec.nbytes, natural_order(spec.name))):
        lightest = min(range(len(dealt)), key=lambda i: (*loads[i], i))
        dealt[lightest].append(spec)
        loads[lightest] = (loads[lightest][0] + spec.nbytes, loads[lightest][1] + 1)
    return dealt
