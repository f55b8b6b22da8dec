"""A picture of a run, from its metrics files alone: reward, held-out accuracy, staleness.

    python -m telescope_jax.plots WORKDIR [OUT.png]

Works on a run that is still going, and on one whose process is long gone.
"""

import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from telescope_jax import metrics

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, PURPLE = "#2563a8", "#d9752b", "#2f8f6b", "#7a5aa6"

Line = Mapping[str, Any]


def draw(lines: Sequence[Line], title: str = "") -> Figure:
    """Three panels over the steps of a run.

    Args:
      lines: of the metrics files, as `metrics.read` gives them.

    Raises:
      ValueError: there is no line to draw.
    """
    if not lines:
        raise ValueError("no metrics yet: the files hold no line")
    # A Figure of its own, not pyplot: pyplot keeps figures alive and picks a GUI toolkit.
    figure = Figure(figsize=(8, 8.4), dpi=150, layout="constrained", facecolor="white")
    reward, accuracy, staleness = figure.subplots(3, 1, sharex=True, height_ratios=[3, 4, 2])
    _reward(reward, lines)
    _accuracy(accuracy, lines)
    _staleness(staleness, lines)
    for axes in (reward, accuracy, staleness):
        _restarts(axes, lines)
        quiet(axes)
    staleness.set_xlabel("step", color=MUTED)
    last = max(line["step"] for line in lines)
    # Room on the right for the labels at the ends of the curves.
    staleness.set_xlim(-0.012 * max(1, last), max(1, last) * 1.16)
    figure.suptitle(title or f"{last} steps", x=0.02, ha="left", color=INK, fontsize=12)
    return figure


def save(lines: Sequence[Line], path: str | os.PathLike[str], title: str = "") -> Path:
    """Draws to a PNG, which appears at once and whole."""
    path = Path(path)
    figure = draw(lines, title)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)
    return path


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """The mean of each value and up to `window` − 1 values before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def mean_and_range(
    axes: Axes,
    curves: Sequence[tuple[Sequence[int], Sequence[float]]],
    *,
    smoothed: bool,
    color: str,
    label: str,
    dashes: str = "-",
) -> None:
    """One curve, (steps, values), a seed: their mean at each step, and from lowest to highest."""
    by_step: dict[int, list[float]] = {}
    for steps, values in curves:
        for step, value in zip(steps, values, strict=True):
            by_step.setdefault(step, []).append(value)
    if not by_step:
        return
    steps = sorted(by_step)
    window = max(1, len(steps) // 12) if smoothed else 1
    low, mean, high = (
        smooth([of(by_step[step]) for step in steps], window) for of in (min, statistics.fmean, max)
    )
    axes.plot(steps, mean, dashes, color=color, linewidth=1.8, label=label)
    if len(curves) > 1:
        axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)


def quiet(axes: Axes) -> None:
    """A frame that does not compete with the curves."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=MUTED, labelsize=8)


def _reward(axes: Axes, lines: Sequence[Line]) -> None:
    steps, rewards = metrics.series(lines, "rollout/reward")
    window = max(1, len(steps) // 12)
    title = "Reward of all finished rollouts" + (f", mean of {window} steps" if window > 1 else "")
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    if not steps:
        return _nothing(axes)
    axes.plot(steps, rewards, color=BLUE, alpha=0.25, linewidth=1)
    mean = smooth(rewards, window)
    axes.plot(steps, mean, color=BLUE, linewidth=2)
    _end_label(axes, steps[-1], float(mean[-1]), f"{mean[-1]:.2f}", BLUE)


def _accuracy(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set_title("Held-out accuracy", loc="left", color=INK, fontsize=10)
    pattern = re.compile(r"eval/([^/]+)/(sampled_)?accuracy")
    keys = dict.fromkeys(name for line in lines for name in line if pattern.fullmatch(name))
    several = len({name.split("/")[1] for name in keys}) > 1
    ends = []
    for number, name in enumerate(sorted(keys)):
        env, kind = name.split("/")[1:]
        greedy = kind == "accuracy"
        steps, values = metrics.series(lines, name)
        if not steps:
            continue
        # One environment: a colour each for greedy and sampled. Several: a colour for each
        # environment, and a dashed line for sampled.
        color = (GREEN if greedy else ORANGE) if not several else _color(number // 2)
        dashes = "-" if greedy or not several else "--"
        axes.plot(steps, values, dashes, color=color, linewidth=2, marker="o", markersize=4.5)
        word = "greedy" if greedy else "sampled"
        ends.append((values[-1], steps[-1], f"{f'{env} ' if several else ''}{word}", color))
    if not ends:
        return _nothing(axes)
    axes.set_ylim(0, 1.04)
    heights = _spread([value for value, *_ in ends], gap=0.075)
    for (value, step, word, color), height in zip(ends, heights, strict=True):
        _end_label(axes, step, height, f"{word} {value:.2f}", color)


def _staleness(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set_title(
        "Age of the trained tokens, in weight updates", loc="left", color=INK, fontsize=10
    )
    steps, mean = metrics.series(lines, "staleness/mean")
    most_steps, most = metrics.series(lines, "staleness/max")
    if not steps or not most_steps:
        return _nothing(axes)
    axes.fill_between(most_steps, most, step="mid", color=PURPLE, alpha=0.16, linewidth=0)
    axes.plot(steps, mean, color=PURPLE, linewidth=1.8)
    axes.set_ylim(0, max(1.0, max(most)) * 1.25)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    low, high = _spread([mean[-1], most[-1]], gap=0.16 * axes.get_ylim()[1])
    _end_label(axes, steps[-1], low, f"mean {mean[-1]:.1f}", PURPLE)
    _end_label(axes, most_steps[-1], high, f"max {most[-1]:.0f}", MUTED)


def _color(index: int) -> str:
    palette = (GREEN, ORANGE, BLUE, PURPLE)
    return palette[index % len(palette)]


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """The heights of labels, moved up where two would overlap; order kept."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for below, above in zip(order, order[1:], strict=False):
        placed[above] = max(placed[above], placed[below] + gap)
    return placed


def _end_label(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    # On white, so that no grid line strikes the text through.
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.annotate(
        text,
        (x, y),
        (7, 0),
        textcoords="offset points",
        color=color,
        fontsize=9,
        va="center",
        bbox=box,
    )


def _restarts(axes: Axes, lines: Sequence[Line]) -> None:
    for step in metrics.series(lines, "metrics/restarts")[0]:
        axes.axvline(step, color=MUTED, linewidth=0.8, linestyle=":")


def _nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, color=MUTED, ha="center")
    axes.set_yticks([])


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if not 2 <= len(argv) <= 3 or argv[1].startswith("-"):
        print("usage: python -m telescope_jax.plots WORKDIR [OUT.png]", file=sys.stderr)
        return 2
    workdir = Path(argv[1])
    folder = workdir / "metrics" if (workdir / "metrics").is_dir() else workdir
    try:
        lines = metrics.read(folder)
        out = save(lines, argv[2] if len(argv) == 3 else workdir / "curves.png", workdir.name)
    except (OSError, ValueError) as error:
        print(f"telescope_jax.plots: {folder}: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
