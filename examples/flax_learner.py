"""One learner of a run, in Flax NNX. Start it on each machine, with its own rank:

    python flax_learner.py --mailbox /mnt/shared/run-1 --rank 0 --ranks 2
    python flax_learner.py --mailbox /mnt/shared/run-1 --rank 1 --ranks 2

The mailbox is a folder that both machines see, a network mount for instance; for two processes of
one machine, any folder. Which of them starts first, and whether one is killed and started again,
does not matter. Without what is marked (1) to (3) it is an ordinary program for one machine.

You should see the loss of both fall, a line for each round, and at the end the held-out loss of the
model that they trained together, as in

    step 100  loss 2.61
    ...
    held-out loss of the committed model: 1.87

Figures vary from run to run. Two on one machine ended between 1.84 and 1.88, about 0.05 lower than
one alone on its half of the text, in about half a minute. The two may differ a little, as the one
that leaves first may miss the last commits.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jdiloco

CONTEXT = 16
ROWS = 64


class NextByte(nnx.Module):
    """Guesses a byte of text from the sixteen before it."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.hidden = nnx.Linear(CONTEXT * 32, 256, rngs=rngs)
        self.out = nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, context: jax.Array) -> jax.Array:
        x = self.embed(context).reshape(context.shape[0], -1)
        return self.out(nnx.relu(self.hidden(x)))


def loss_of(model: NextByte, windows: jax.Array) -> jax.Array:
    """Mean cross-entropy of the last byte of each window, in nats."""
    logits = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


@nnx.jit
def train_step(model: NextByte, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    """One step, in place."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, windows)
    optimizer.update(model, gradients)
    return loss


def read_text(data: Path) -> np.ndarray:
    """The bytes of the Python files in a folder, sorted: the same on every machine."""
    files = sorted(data.glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def batches(text: np.ndarray, steps: int, *, rows: int, seed: int) -> Iterator[jax.Array]:
    """Batches of random windows of the text."""
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        starts = draw.integers(0, len(text) - CONTEXT, size=(rows, 1))
        yield jnp.asarray(text[starts + np.arange(CONTEXT + 1)], jnp.int32)


def main() -> None:
    arguments = parse_arguments()
    text, held_out = np.split(read_text(arguments.data), [-100_000])
    share = np.array_split(text, arguments.ranks)[arguments.rank]  # (1) Its own part of the data.

    model = NextByte(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    # These steps take milliseconds, so much would be trained before a commit arrives, and be
    # overwritten by it: look often, and wait where a commit is 20 steps late.
    algorithm = jdiloco.DiLoCo(sync_every=100, fragments=3, overlap_steps=20, outer_momentum=0.5)
    with jdiloco.Session(  # (2)
        model,
        algorithm,
        arguments.mailbox,
        node_id=f"rank-{arguments.rank}",
        poll_interval=0.1,
    ) as session:
        data = batches(share, arguments.steps, rows=ROWS, seed=arguments.rank)
        for step, windows in enumerate(data, 1):
            loss = train_step(model, optimizer, windows)
            session.step(samples=ROWS)  # (3) Counts, publishes and aligns, in place.
            if step % 100 == 0:
                print(f"step {step}  loss {loss:.2f}")

    # Leaving the block has put the newest committed values into the model.
    (windows,) = batches(held_out, 1, rows=4096, seed=0)
    print(f"held-out loss of the committed model: {loss_of(model, windows):.2f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One learner of a run.")
    parser.add_argument("--mailbox", required=True)
    parser.add_argument("--rank", type=int, required=True, help="0 to ranks - 1")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_path("stdlib")))
    return parser.parse_args()


if __name__ == "__main__":
    main()
