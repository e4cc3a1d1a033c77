"""A program as a user writes it: nodes of a run, in whatever mailbox it is told.

    python -m tests.session.bucket_node MAILBOX NODE[,NODE…] NODES ROUNDS

Starts the named nodes of a run of so many, each in a thread, trains in lock step with all of them
and prints, for each, the events it saw and a digest of what it holds in the end.
"""

from __future__ import annotations

import json
import sys
import threading

import jax
import jax.numpy as jnp

import jdiloco

from .nodes import digest, node_of

SYNC_EVERY = 4
FRAGMENTS = 2


def algorithm(nodes: int) -> jdiloco.DiLoCo:
    """Standard DiLoCo of two fragments: everybody waits for everybody."""
    return jdiloco.DiLoCo(
        sync_every=SYNC_EVERY,
        fragments=FRAGMENTS,
        in_flight=1,
        overlap_steps=0,
        quorum_size=nodes,
        follow=0,
        outer_momentum=0.5,
        beat_seconds=3.0,
        lease_seconds=60.0,
        checkpoint_every=2,
    )


def initial() -> dict[str, jax.Array]:
    """What every node brings."""
    return {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.full((70_000,), 0.25)}


@jax.jit
def train_step(params: dict[str, jax.Array], pull: jax.Array) -> dict[str, jax.Array]:
    """A step towards a place of this node's own."""
    return jax.tree.map(lambda leaf: leaf - 0.1 * (leaf - pull), params)


def train(mailbox: str, node: str, nodes: int, rounds: int) -> dict:
    """Takes part in `rounds` rounds; what this node saw and then holds."""
    pull = jnp.float32(sum(map(ord, node)) % 7)
    seen: list[str] = []

    def note(event: object) -> None:
        seen.append(type(event).__name__)

    with jdiloco.Session(
        initial(), algorithm(nodes), mailbox, node_id=node, poll_interval=0.1, callbacks=(note,)
    ) as session:
        params = session.params
        while len(begun(session)) < nodes:  # Or a round would not wait for those still unknown.
            threading.Event().wait(0.05)
        for _ in range(rounds * SYNC_EVERY // FRAGMENTS):
            params = train_step(params, pull)
            params = session.step(params, samples=8)
    return {"node": node, "digest": digest(session.params), "events": seen}


def begun(session: jdiloco.Session) -> set[str]:
    """Who is known to have joined."""
    return {beat.node for beat in node_of(session).state.beats if beat.phase != "joining"}


def main() -> None:
    mailbox, names, nodes, rounds = sys.argv[1:]
    done: list[dict] = []

    def run(node: str) -> None:
        done.append(train(mailbox, node, int(nodes), int(rounds)))

    threads = [threading.Thread(target=run, args=(node,)) for node in names.split(",")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in done:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
