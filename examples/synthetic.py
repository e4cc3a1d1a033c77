"""Three learners, one process, no network: committed values beside those computed by hand.

Each learner pulls the shared vector towards a centre of its own, so what a round must give is known
exactly. First Local SGD, where a commit is the weighted average of the learners' parameters; then
standard DiLoCo, where a Nesterov step is taken along the averaged delta. Both are settings of the
same algorithm. About 10 s on a laptop. You should see, and the last line says so, that both columns
agree:

    Local SGD  round 0   committed -0.06825  -0.13650   by hand -0.06825  -0.13650
"""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np

import jdiloco

SYNC_EVERY = 5
ROUNDS = 4
MEET_SECONDS = 0.5
RATE = 0.1
CENTRES = {"a": (3.0, 0.0), "b": (0.0, 2.0), "c": (-1.0, -1.0)}
SAMPLES = {"a": 8, "b": 8, "c": 16}
"""Rows of a batch. A contribution weighs samples² / steps, so learner c counts four times a."""

STANDARD = {
    "sync_every": SYNC_EVERY,
    "fragments": 1,
    "in_flight": 1,
    "overlap_steps": 0,  # Wait for each round before training on.
    "quorum_size": len(CENTRES),  # A round needs everybody.
    "follow": 0,  # Nobody publishes early because the others have.
    "merge": jdiloco.weighted_mean(),
    "beat_seconds": 1.0,
}
STANDARD_DILOCO = jdiloco.DiLoCo(outer_lr=0.7, outer_momentum=0.6, **STANDARD)
LOCAL_SGD = jdiloco.DiLoCo(outer_lr=1.0, outer_momentum=0.0, **STANDARD)


@jax.jit
def train_step(params: dict[str, jax.Array], centre: jax.Array) -> dict[str, jax.Array]:
    """One step of gradient descent on half the squared distance to the centre."""
    gradients = jax.grad(lambda p: 0.5 * jnp.sum((p["w"] - centre) ** 2))(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradients)


def learn(
    name: str, algorithm: jdiloco.DiLoCo, mailbox: str, meet: threading.Barrier, commits: dict
) -> None:
    """An ordinary training loop, with one line that makes it a learner of a run."""
    centre = jnp.asarray(CENTRES[name])
    with jdiloco.Session(
        {"w": jnp.zeros(2)},
        algorithm,
        mailbox,
        node_id=name,
        poll_interval=0.02,
        callbacks=(),
    ) as session:
        params = session.params
        # A round waits for those who are known to train. These steps take no time at all, so the
        # first round would be over before the others had been heard of.
        meet.wait()
        threading.Event().wait(MEET_SECONDS)
        for step in range(1, ROUNDS * SYNC_EVERY + 1):
            params = train_step(params, centre)
            params = session.step(params, samples=SAMPLES[name])
            if step % SYNC_EVERY == 0:
                commits[name].append(np.asarray(params["w"]))


def committed(algorithm: jdiloco.DiLoCo, mailbox: str) -> list[np.ndarray]:
    """The value after each round, from learners that run at the same time."""
    commits: dict[str, list[np.ndarray]] = {name: [] for name in CENTRES}
    meet = threading.Barrier(len(CENTRES))
    threads = [
        threading.Thread(target=learn, args=(name, algorithm, mailbox, meet, commits))
        for name in CENTRES
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *others = commits.values()
    for other in others:
        np.testing.assert_array_equal(first, other)  # Every node took the same bytes.
    return first


def by_hand(algorithm: jdiloco.DiLoCo) -> list[np.ndarray]:
    """The same rounds in NumPy."""
    anchor, momentum = np.zeros(2), np.zeros(2)
    weights = {name: (n * SYNC_EVERY) ** 2 / SYNC_EVERY for name, n in SAMPLES.items()}
    values = []
    for _ in range(ROUNDS):
        delta = np.zeros(2)
        for name, centre in CENTRES.items():
            trained = centre + (1 - RATE) ** SYNC_EVERY * (anchor - centre)
            delta += weights[name] * (anchor - trained) / sum(weights.values())
        momentum = algorithm.outer_momentum * momentum + delta
        anchor = anchor - algorithm.outer_lr * (delta + algorithm.outer_momentum * momentum)
        values.append(anchor)
    return values


def main() -> None:
    for title, algorithm in (("Local SGD", LOCAL_SGD), ("DiLoCo", STANDARD_DILOCO)):
        mailbox = f"memory://{title.replace(' ', '-').lower()}"
        pairs = zip(committed(algorithm, mailbox), by_hand(algorithm), strict=True)
        for number, (found, expected) in enumerate(pairs):
            left = "  ".join(f"{value:8.5f}" for value in found)
            right = "  ".join(f"{value:8.5f}" for value in expected)
            print(f"{title:10} round {number}   committed {left}   by hand {right}")
            np.testing.assert_allclose(found, expected, rtol=1e-5)
    print("They agree.")


if __name__ == "__main__":
    main()
