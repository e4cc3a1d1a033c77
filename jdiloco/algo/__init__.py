"""The mathematics of a round: pure, jitted, for any tree of parameters.

Problem. One merge and one outer step serve two places: a run over a mailbox, where bytes are merged
on a host, and an ordinary JAX program, where `diloco_outer` is an optax optimiser under `jit`. Both
must arrive at the same numbers, for models that come in half a dozen containers.

Design.

    paths       one name for a tensor, whatever container holds it, and one order
    merges      a merge is a frozen dataclass that picks a kernel by a tensor's names
    sums        what a sum over contributions is: over an array's axis, or over mapped axes
    outer       merge_deltas -> outer_nesterov -> fp32_master, as optax transformations
    narrowing   their last link: fp32_master, or narrow_updates for commits in few bits
    checks      what the transformations refuse, with the way out
    alignment   what parameters become when a commit arrives
    partition   which tensors make a fragment: a function of names, shapes and types
    wire        eight and four bits, with scales
    routing     a table of which tensor is merged how

Every tensor passes through a few small jitted kernels. So an eager call and a `jit` around it run
the same code: one operation at a time is 30 times slower and has other last bits, because compiled
code fuses multiplications and additions. Kernels reduce with the two sums they are given (`Sums`),
over contributions and over elements, and never look at the first axis themselves: what a sum means
is decided where it is known how the data lies.

Turned down.

* A merge as a plain function: `optax.inject_hyperparams` takes callables for schedules.
* Equal weights as a default: `TrainState.apply_gradients` would merge unweighted and say nothing.
* The fp32 master inside the outer step: it goes wrong when a transformation follows it.
* Contributions as a list, `vmap` or `scan` over them: explicit meshes refuse to index or scan a
  sharded axis, and a list compiles once for every number of contributions.
* Cutting a row that is not finite out of one tensor only: the tensors of one model would then come
  from different learners. A row takes part in the whole tree or not at all.
* Raising when no row takes part: not possible under `jit`. The round is void instead.
* Names from the tree order or from `keystr`: both differ between containers of one model.

Caveats. fp32 holds RDA to 1e-6 where the mean direction is at least 0.1 long, and to about 1e-7
over its length below (the worst of 1,500 random cases was 1.5e-7); shorter than 1e-6 counts as
zero. Squares overflow in fp32 at a delta's length of
1.8e19. A leaf of the deltas that is one axis short is always seen, but `optax.masked` around the
merge is not. Two names of a shared NNX Variable are seen in the module itself, not in its State.

Tested by the numbers of the papers and of the reported faults (`tests/algo`), by random trees
against the float64 oracle in `jdiloco.testing.oracle`, and by counting compilations.
"""

from jdiloco.algo.merges import (
    Merge,
    Rda,
    WeightedMean,
    contribution_weight,
    is_direct,
    rda,
    weighted_mean,
)
from jdiloco.algo.narrowing import fp32_master, narrow_updates
from jdiloco.algo.outer import diloco_outer, merge_deltas, outer_nesterov
from jdiloco.algo.partition import ByBytes, Partition, Strided, by_bytes, plan, strided
from jdiloco.algo.paths import NamedLeaf, NamedTree, named_leaves, path_names, specs
from jdiloco.algo.routing import Routing, explain_routing

__all__ = [
    "ByBytes",
    "Merge",
    "NamedLeaf",
    "NamedTree",
    "Partition",
    "Rda",
    "Routing",
    "Strided",
    "WeightedMean",
    "by_bytes",
    "contribution_weight",
    "diloco_outer",
    "explain_routing",
    "fp32_master",
    "is_direct",
    "merge_deltas",
    "named_leaves",
    "narrow_updates",
    "outer_nesterov",
    "path_names",
    "plan",
    "rda",
    "specs",
    "strided",
    "weighted_mean",
]
