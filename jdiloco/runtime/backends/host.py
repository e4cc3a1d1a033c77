"""The host's own device, on which rounds are closed and small formats are made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jdiloco.errors import UsageError


def host_device() -> Any:
    """The first CPU device of this process.

    Raises UsageError where `JAX_PLATFORMS` names an accelerator alone.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        found = getattr(jax.config, "jax_platforms", None)  # Made at run time.
        raise UsageError(
            f"JAX has no CPU device here: `JAX_PLATFORMS` is {found!r}. Rounds are closed on the "
            f"host's: set JAX_PLATFORMS={found},cpu, where the first one stays the default."
        ) from error


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """The settings under which programs on the host are traced and called.

    They hold for the calling thread alone and end with the block: whatever the user configured,
    arrays live on the host's device, may come and go, and NaN is a value.
    """
    with (
        jax.default_device(host_device()),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        yield
