"""The picture of a demo: training losses over steps, held-out losses over seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdiloco.cli.demo_journal import Line
from jdiloco.cli.demo_plan import LONE, WATCH
from jdiloco.errors import UsageError

SMOOTHING = 0.8
"""Share of the average so far in a smoothed training loss."""


def require_matplotlib() -> None:
    """Raises before anything has started when the picture could not be drawn at the end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "`jdiloco demo` draws the loss curves with matplotlib, which is not installed. "
            "Install it with: pip install 'jdiloco[demo]'"
        )


def draw(path: Path, journals: Mapping[str, Sequence[Line]], offsets: Mapping[str, float]) -> None:
    """Writes the PNG. `offsets` holds the second of the demo at which each process started."""
    import matplotlib

    matplotlib.use("Agg")  # No window: this runs on machines without a screen.
    from matplotlib import pyplot

    figure, (training, held_out) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _draw_training(training, journals)
    _draw_held_out(held_out, journals, offsets)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_training(axes: Any, journals: Mapping[str, Sequence[Line]]) -> None:
    for name, lines in journals.items():
        reports = [line for line in lines if "loss" in line]
        if reports:
            losses = smooth([line["loss"] for line in reports])
            axes.plot([line["step"] for line in reports], losses, label=name, **_style(name))
    _zoom(axes)
    axes.set(xlabel="step", ylabel="training loss, nats a byte", title="each on its own text")
    axes.legend()


def _draw_held_out(
    axes: Any, journals: Mapping[str, Sequence[Line]], offsets: Mapping[str, float]
) -> None:
    for name, label in ((WATCH, "committed model"), (LONE, "one node alone")):
        lines = [line for line in journals.get(name, ()) if "held_out" in line]
        if lines:
            seconds = [offsets.get(name, 0.0) + line["time"] for line in lines]
            losses = [line["held_out"] for line in lines]
            axes.plot(seconds, losses, marker=".", label=label, **_style(name))
    _zoom(axes)
    axes.set(xlabel="seconds", ylabel="held-out loss, nats a byte", title="text nobody trains on")
    axes.legend()


def _zoom(axes: Any) -> None:
    """Leaves the fall of the first steps out, so that the difference at the end is seen."""
    lowest = min((min(line.get_ydata()) for line in axes.lines), default=1.0)
    axes.set_ylim(bottom=0.95 * lowest, top=1.7 * lowest)


def _style(name: str) -> dict[str, Any]:
    if name == LONE:
        return {"color": "black", "linestyle": "--"}
    return {"color": "tab:red"} if name == WATCH else {"linewidth": 1.0}


def smooth(losses: Sequence[float]) -> list[float]:
    """A running average. The first value stands for those before it."""
    smoothed: list[float] = []
    for loss in losses:
        before = smoothed[-1] if smoothed else loss
        smoothed.append(SMOOTHING * before + (1 - SMOOTHING) * loss)
    return smoothed
