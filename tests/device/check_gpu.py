"""What the library promises, on a GPU. One script, under five minutes:

    python -m tests.device.check_gpu

from a checkout, where jdiloco and a JAX that sees the GPU are installed (`pip install -e .
"jax[cuda13]"`). Without a GPU it refuses. The same on what every machine has, in half a minute, to
try the script and not the device:

    python -m tests.device.check_gpu --platform cpu --scale small

    tables      every table of the merges: weights, small inputs, lengths, embeddings
    agreement   the device, the host's CPU, float64 and the close of a mailbox give one result
    repeated    equal inputs give equal bytes, also after compiling again
    session     a node trains with its anchors in pinned memory of the host: what it commits is what
                the host computes, and nothing compiles again
    close       a fragment of 1 GiB with 8 contributions, over the speed of a plain copy

Exits with 0 if all of it holds, 1 if not, and 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import jax

from jdiloco.errors import UsageError
from jdiloco.runtime.backends import host_device
from tests.device.agreement import agreement, repeated
from tests.device.close import close
from tests.device.node import session
from tests.device.place import Failed, Place
from tests.device.tables import tables

SECONDS_MAX = 300.0

CHECKS: tuple[Callable[[Place], Iterator[str]], ...] = (
    tables, agreement, repeated, session, close,
)  # fmt: skip


def find(name: str, small: bool) -> Place | str:
    """Where to run, or why it cannot be."""
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.devices(None if name == "cpu" else name)
        return Place(devices[0], host_device(), small)
    except UsageError as error:
        return str(error)
    except RuntimeError as error:
        return (
            f"There is no {name} that JAX {jax.__version__} could see ({error}). Nothing was run. "
            'Install a JAX for it (`pip install "jax[cuda13]"`), or try the script alone on the '
            "CPU: --platform cpu --scale small"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the library promises, on a GPU.")
    parser.add_argument("--platform", choices=("gpu", "tpu", "cpu"), default="gpu")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--only", choices=[check.__name__ for check in CHECKS], action="append")
    options = parser.parse_args(arguments)
    place = find(options.platform, options.scale == "small")
    if isinstance(place, str):
        print(place, file=sys.stderr)
        return 2
    print(
        f"{place.device.device_kind} ({place.device.platform}, {options.scale}), "
        f"JAX {jax.__version__}, Python {platform.python_version()}",
        flush=True,
    )
    began, failures = time.perf_counter(), 0
    for check in CHECKS:
        if options.only and check.__name__ not in options.only:
            continue
        started = time.perf_counter()
        try:
            for line in check(place):
                print(f"  {check.__name__:<10} {line}", flush=True)
        except Failed as failure:
            failures += 1
            print(f"  {check.__name__:<10} FAILED: {failure}", flush=True)
        except Exception:  # The others are worth a run of their own on a machine that is lent.
            failures += 1
            print(f"  {check.__name__:<10} FAILED: {traceback.format_exc()}", flush=True)
        print(f"  {check.__name__:<10} {time.perf_counter() - started:.1f} s", flush=True)
    taken = time.perf_counter() - began
    late = taken > SECONDS_MAX
    print(f"{taken:.0f} s{', more than five minutes' if late else ''}; {failures} failed")
    return int(failures > 0 or late)


if __name__ == "__main__":
    sys.exit(main())
