"""Which backend a node has: that of the devices its parameters lie on."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import jax

from jdiloco.errors import UsageError
from jdiloco.runtime.backends.cpu import CPU
from jdiloco.runtime.backends.description import Backend, sharding_of
from jdiloco.runtime.backends.gpu import GPU
from jdiloco.runtime.backends.host import host_device
from jdiloco.runtime.backends.tpu import TPU

BACKENDS = {backend.name: backend for backend in (CPU, GPU, TPU)}


def chosen(wanted: Backend | str | Any, leaves: Iterable[Any]) -> Backend:
    """The backend of a node with these parameters; of a node without any it is the CPU.

    `wanted` is a name, a `Backend`, or None to go by the parameters. Raises UsageError where the
    parameters lie elsewhere, on no one platform, or on devices without the memory it is to use.
    """
    host_device()  # Every node needs it, and not everybody's JAX has one.
    shardings = [sharding_of(leaf) for leaf in leaves]
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    backend = _named(wanted, platforms or {"cpu"})
    if not (platforms or {"cpu"}) <= set(backend.platforms):
        where = f"the parameters lie on {_list(platforms)}"
        raise UsageError(
            f"`backend` is {backend.name!r}, which is for {_list(backend.platforms)}, and "
            f"{where if platforms else 'without parameters a node has work for the CPU alone'}. "
            f"{_there()} Put the parameters on such a device first, or leave `backend` out."
        )
    _check_memory(backend, {d for each in shardings for d in each.addressable_devices})
    return backend


def _named(wanted: Backend | str | Any, platforms: set[str]) -> Backend:
    if isinstance(wanted, Backend):
        return wanted
    if wanted is not None and wanted not in list(BACKENDS):
        raise UsageError(
            f"`backend` is {wanted!r}; there are {_list(BACKENDS)}, or a `Backend` of your own "
            f"(`jdiloco.runtime.backends`). {_there()}"
        )
    if wanted is not None:
        return BACKENDS[wanted]
    if len(platforms) > 1:
        raise UsageError(
            f"The parameters lie on {_list(platforms)}. One step cannot compute with both: put all "
            "of them on one platform."
        )
    for backend in BACKENDS.values():
        if platforms <= set(backend.platforms):
            return backend
    raise UsageError(
        f"The parameters lie on {_list(platforms)}, for which there is no backend; there are "
        f"{_list(BACKENDS)}. Describe it: `backend=Backend(name=…, platforms={tuple(platforms)})` "
        "of `jdiloco.runtime.backends`."
    )


def _check_memory(backend: Backend, devices: Iterable[Any]) -> None:
    kind = backend.anchor_memory
    for device in devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if kind is not None and kind not in kinds:
            raise UsageError(
                f"Anchors of the backend {backend.name!r} live in {kind!r} memory, and {device} "
                f"has {_list(kinds)}. Pass `backend=dataclasses.replace(…, anchor_memory=None)`."
            )


def _there() -> str:
    """What there is to choose from; asked only after a wrong choice."""
    devices = {*jax.local_devices(), *jax.local_devices(backend="cpu")}
    counts = collections.Counter(device.platform for device in devices)
    return f"JAX has here: {', '.join(f'{counts[name]} {name}' for name in sorted(counts))}."


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
