"""DiLoCo for JAX: train one model on machines that barely talk to each other.

    Session, load             a node's place in a run; the newest committed model without joining
    export                    the newest committed model as an Orbax checkpoint for everybody
    SharedQueue, Barrier      work that nodes divide among themselves, and where they wait for it
    DiLoCo                    the settings of a run
    rda, weighted_mean        how the deltas of a round become one
    overwrite, blend, carry, adaptive              what a commit does to the steps trained since
    by_bytes, strided         how a model is cut into fragments
    diloco_outer              the same merge and outer step as an optax transformation
    merge_deltas, outer_nesterov, fp32_master      its three links
    narrow_updates            the last of them where commits are narrow (`commit_dtype`)
    jdiloco.spmd              K learners in one program
    contribution_weight       samples² / steps
    path_names, explain_routing                    what tensors are called, and how each is merged
    log_events, JsonLines     what to do with events (`jdiloco.events`); the first is the default

What can go wrong is in `jdiloco.errors`, sorted by what the caller does next.

Names are imported when they are first used, so that `jdiloco --help` does not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdiloco.algo.merges import contribution_weight, rda, weighted_mean
    from jdiloco.algo.narrowing import fp32_master, narrow_updates
    from jdiloco.algo.outer import diloco_outer, merge_deltas, outer_nesterov
    from jdiloco.algo.partition import by_bytes, strided
    from jdiloco.algo.paths import path_names
    from jdiloco.algo.routing import explain_routing
    from jdiloco.callbacks import JsonLines, log_events
    from jdiloco.protocol.alignment import adaptive, blend, carry, overwrite
    from jdiloco.runtime.algorithm import DiLoCo
    from jdiloco.runtime.export import export
    from jdiloco.runtime.queues import Barrier, SharedQueue
    from jdiloco.session import Session, load

_HOMES = {
    "Barrier": "jdiloco.runtime.queues",
    "DiLoCo": "jdiloco.runtime.algorithm",
    "JsonLines": "jdiloco.callbacks",
    "Session": "jdiloco.session",
    "SharedQueue": "jdiloco.runtime.queues",
    "adaptive": "jdiloco.protocol.alignment",
    "blend": "jdiloco.protocol.alignment",
    "by_bytes": "jdiloco.algo.partition",
    "carry": "jdiloco.protocol.alignment",
    "contribution_weight": "jdiloco.algo.merges",
    "diloco_outer": "jdiloco.algo.outer",
    "explain_routing": "jdiloco.algo.routing",
    "export": "jdiloco.runtime.export",
    "fp32_master": "jdiloco.algo.narrowing",
    "load": "jdiloco.session",
    "log_events": "jdiloco.callbacks",
    "merge_deltas": "jdiloco.algo.outer",
    "narrow_updates": "jdiloco.algo.narrowing",
    "outer_nesterov": "jdiloco.algo.outer",
    "overwrite": "jdiloco.protocol.alignment",
    "path_names": "jdiloco.algo.paths",
    "rda": "jdiloco.algo.merges",
    "strided": "jdiloco.algo.partition",
    "weighted_mean": "jdiloco.algo.merges",
}

__all__ = [
    "Barrier",
    "DiLoCo",
    "JsonLines",
    "Session",
    "SharedQueue",
    "adaptive",
    "blend",
    "by_bytes",
    "carry",
    "contribution_weight",
    "diloco_outer",
    "explain_routing",
    "export",
    "fp32_master",
    "load",
    "log_events",
    "merge_deltas",
    "narrow_updates",
    "outer_nesterov",
    "overwrite",
    "path_names",
    "rda",
    "strided",
    "weighted_mean",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jdiloco' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names alone; modules are imported by theirs."""
    return list(__all__)
