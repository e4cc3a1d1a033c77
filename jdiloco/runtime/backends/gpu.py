"""GPUs, of NVIDIA or AMD: JAX calls both "gpu".

Pinned memory is what a GPU can read and write by itself, so copies pass beside computing.
"""

from jdiloco.runtime.backends.description import Backend

GPU = Backend(
    name="gpu",
    platforms=("gpu", "cuda", "rocm"),
    anchor_memory="pinned_host",
    copies_ahead=True,
)
