"""Where a node stands in its run when it starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jdiloco.protocol.chain import Chain
from jdiloco.protocol.lives import Birth
from jdiloco.protocol.records import Manifest
from jdiloco.protocol.rules import Life
from jdiloco.runtime.algorithm import DiLoCo
from jdiloco.runtime.pods.desk import Desk
from jdiloco.runtime.pods.library import ShareLibrary
from jdiloco.runtime.schema import Schema
from jdiloco.store.base import Store


@dataclasses.dataclass(frozen=True)
class PodHead:
    """What the process that speaks for a pod does in another way than a plain node."""

    desk: Desk
    library: ShareLibrary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a node stands in its run when it starts."""

    store: Store
    manifest: Manifest
    manifest_data: bytes
    chain: Chain
    birth: Birth
    schema: Schema
    algorithm: DiLoCo
    scratch: Path
    pod: PodHead | None = None

    @property
    def life(self) -> Life:
        return self.birth.life
