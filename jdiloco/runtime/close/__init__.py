"""Closing a round on CPU: from received bytes to committed bytes, in pure JAX and NumPy.

    measure   when a contribution arrives: one pass for its norms       ‖Δᵢ‖ per tensor
    combine   once a round is closed: one pass over all contributions   u = Σ cᵢ·Δᵢ, and ‖u‖
    step      one pass over the state                                   m, Θ

A round is bound by memory, so what counts is how often a byte is touched, not the arithmetic. Over
the least that a round can do (`make bench` prints it: each contribution read twice, anchor and
momentum read and written once, at the speed of a plain copy) a round of 4 contributions takes 1.9
to 2.5, of 8 takes 1.8 to 2.0, for 1 tensor as for 300. What decided the layout, in that measure:

* Tensors copied to aligned memory first: 0.4 more, and memory for every contribution. Programs
  read them in the message instead, through a table of where each row starts (`received`). That
  serves 300 tensors as well as one; gathering them in Python took 0.4 more again.
* Anchor, momentum and u in arrays that programs replace block by block in place (`kernels`): 0.6
  less than results copied to where they belong, and what is committed lies ready, tensor by tensor.
* Blocks of 4 MiB. The second half of a step finds its block in the cache; whole fragments do not
  fit, and with blocks a quarter of the size handing them to JAX's threads takes over.
* Everything in float64 in registers: free, and exact down to where directions count as cancelled.
* Groups of 4 and 8 contributions: nothing is compiled for another number of them (`closer`).

Turned down: fp32 (2.5e-5 off where weights 1.001 and 1 nearly cancel), ‖u‖ from inner products
(worse), one program per fragment (compiles for half a minute at 300 tensors).
"""

from jdiloco.runtime.close.closer import Closed, FragmentCloser, Measured

__all__ = ["Closed", "FragmentCloser", "Measured"]
