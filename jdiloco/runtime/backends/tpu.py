"""TPUs: memory of their own, and no float64, of which nothing that runs there has any."""

from jdiloco.runtime.backends.description import Backend

TPU = Backend(
    name="tpu",
    platforms=("tpu",),
    anchor_memory="pinned_host",
    copies_ahead=True,
)
