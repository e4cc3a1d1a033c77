"""What the tests of the arithmetic share: fingerprints, agreement per tensor, random stacks."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings

from jdiloco.algo.merges import merge_tree

# Examples compile programs, so a deadline would measure the compiler.
few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
more = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SEEDS = 2**32 - 1


def stacked(*rows, dtype=jnp.float32):
    """One tensor of stacked deltas."""
    return jnp.asarray(np.array(rows), dtype)


def merged(merge, rows, weights, *, name="w", jit=False):
    """The merge of one tensor."""
    run = jax.jit(merge_tree, static_argnums=0) if jit else merge_tree
    tree, _ = run(merge, {name: stacked(*rows)}, jnp.asarray(weights, jnp.float32))
    return np.asarray(tree[name])


def length(x):
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def distance(a, b):
    """How far apart two tensors are, measured against the second."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return length(a - b) / max(length(b), np.finfo(np.float64).tiny)


def fingerprint(tree):
    """A hash over types, shapes and bytes of every leaf."""
    digest = hashlib.sha256()
    for leaf in map(np.asarray, jax.tree.leaves(tree)):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def random_rows(seed, rows, shape=(50,), scale=1.0):
    """Normal values, different in every row."""
    return np.random.default_rng(seed).normal(size=(rows, *shape)).astype(np.float32) * scale
