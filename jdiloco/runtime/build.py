"""What equal bytes are promised for: one build on one kind of machine."""

from __future__ import annotations

import os
import platform

from jaxlib import version as jaxlib_version

from jdiloco.protocol.records import Build
from jdiloco.runtime.backends import host_device


def this_build() -> Build:
    """The fingerprint of where rounds are closed here: always on the host's CPU."""
    device = host_device()
    return Build(
        platform=device.platform,
        device_kind=device.device_kind,
        jaxlib=jaxlib_version.__version__,
        machine=platform.machine(),
        cpus=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
    )
