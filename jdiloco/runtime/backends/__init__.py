"""What depends on the kind of device that a node's parameters lie on. It is little.

    backend   anchors               a delta's way to the host
    cpu       beside the parameters none: it is there
    gpu       in pinned memory      copied as soon as it is subtracted
    tpu       in pinned memory      copied as soon as it is subtracted

An anchor is read once a round and would cost as much device memory as the parameters, so where the
device has memory of its own anchors stay in the host's, pinned, and come to the device inside the
program that subtracts. `copy_to_host_async` starts a delta's way back in the user's thread, which
goes on at once; the library's thread then waits for what is already under way.

What is the same everywhere, and why:

* Rounds are closed on the host's first CPU device, in float64. What is merged comes from a mailbox
  and goes to one, through memory of the host and a line that is far slower than it; a close on the
  device would take room for every contribution from the user's step, and a TPU has no float64. So a
  round has the same bytes whatever the learners train on, and `verify` needs no accelerator.
* No precision is asked for. What runs on the device is element by element, or a sum: there is no
  matrix product in `algo`, so neither bf16 passes of a TPU nor tf32 of a GPU can touch a norm,
  whatever `jax_default_matmul_precision` says. A test reads the lowered programs.
* Nothing of the device is donated: parameters are the user's, and an anchor is used again. The
  close donates its own state to itself.
* No flag of XLA is set. They are read when JAX starts, which is before there is a session, and
  nothing here needs one: a subtraction has one answer, and so has a round. (For a step that repeats
  its own bits on a GPU a user sets `--xla_gpu_deterministic_ops=true` in `XLA_FLAGS`.)

No module here asks JAX what other platforms there are; a process on the CPU starts none.
"""

from jdiloco.runtime.backends.choice import BACKENDS, chosen
from jdiloco.runtime.backends.cpu import CPU
from jdiloco.runtime.backends.description import Backend
from jdiloco.runtime.backends.gpu import GPU
from jdiloco.runtime.backends.host import host_device, on_host
from jdiloco.runtime.backends.tpu import TPU

__all__ = ["BACKENDS", "CPU", "GPU", "TPU", "Backend", "chosen", "host_device", "on_host"]
