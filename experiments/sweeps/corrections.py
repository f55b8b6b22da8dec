"""The four ways to train on what another policy sampled, and the picture of a sweep over them.

    python -m experiments.sweeps.corrections runs/staleness docs/staleness.png

The picture shows the end of every setting, mean and range over the seeds; the same numbers are
printed as a table. The reward is the mean of the last tenth of the steps, over all answers of the
engine: with a distorted one they are not the policy's, and the held-out accuracy is what counts.
"""

import argparse
import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from telescope_jax import plots

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"use_tis": False},
    "TIS": {"use_tis": True},
    "icepop": {"use_tis": True, "loss.tis_mode": "icepop", "loss.tis_floor": 0.5},
    "decoupled PPO": {"use_tis": True, "loss.objective": "ppo", "loss.old_logprobs": True},
}
"""Name -> overrides; all with the cap 2, Config's default."""

COLORS = dict(zip(CORRECTIONS, ("#5c6b73", "#2563a8", "#d9752b", "#2f8f6b"), strict=True))
METRICS = {
    "rollout/reward": "reward of the sampler",
    "eval/sums/sampled_accuracy": "held-out, sampled from the policy",
}


def corrections(*names: str) -> list[dict[str, Any]]:
    """The overrides of these corrections; of all without a name."""
    return [CORRECTIONS[name] for name in names or CORRECTIONS]


def correction_of(row: Mapping[str, str]) -> str:
    """The name of the correction that a line of table.csv was run with."""
    if row["use_tis"] == "False":
        return "none"
    if row.get("loss.objective") == "ppo":
        return "decoupled PPO"
    return "icepop" if row.get("loss.tis_mode") == "icepop" else "TIS"


def setting_of(row: Mapping[str, str]) -> str:
    """What was varied beside the correction, in words."""
    if "max_async_rollout" in row:
        return row["max_async_rollout"]
    if row["engine.distort_int8"] == "True":
        return "8 bits"
    same = float(row["engine.distort_temperature"]) == 1
    return "as trained" if same else f"temperature {row['engine.distort_temperature']}"


Ends = dict[tuple[str, str], list[float]]
"""(setting, correction) -> the last value of each finished seed."""


def ends(rows: Sequence[Mapping[str, str]], metric: str) -> Ends:
    found: Ends = {}
    for row in rows:
        if row["state"] == "finished" and row.get(metric):
            key = setting_of(row), correction_of(row)
            found.setdefault(key, []).append(float(row[metric]))
    return found


def table(found: Ends) -> str:
    """Markdown: a line a setting, a column a correction."""
    settings = list(dict.fromkeys(setting for setting, _ in found))
    lines = ["| | " + " | ".join(CORRECTIONS) + " |", "|---" * (len(CORRECTIONS) + 1) + "|"]
    for setting in settings:
        cells = []
        for name in CORRECTIONS:
            seeds = found.get((setting, name), [])
            spread = f" ± {statistics.stdev(seeds):.3f}" if len(seeds) > 1 else ""
            few = "" if len(seeds) == 3 else f" ({len(seeds)})"
            cells.append(f"{statistics.fmean(seeds):.3f}{spread}{few}" if seeds else "—")
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, str]]) -> Figure:
    """A panel a metric, a line a correction."""
    picture = Figure(figsize=(7.5, 3), dpi=80, layout="constrained", facecolor="white")
    for axes, (metric, title) in zip(
        picture.subplots(1, len(METRICS)), METRICS.items(), strict=True
    ):
        found = ends(rows, metric)
        settings = list(dict.fromkeys(setting for setting, _ in found))
        for index, (name, color) in enumerate(COLORS.items()):
            here = [(x, found[s, name]) for x, s in enumerate(settings) if (s, name) in found]
            places = [x + 0.08 * (index - 1.5) for x, _ in here]
            means = [statistics.fmean(seeds) for _, seeds in here]
            ranges = [
                [m - min(seeds) for m, (_, seeds) in zip(means, here, strict=True)],
                [max(seeds) - m for m, (_, seeds) in zip(means, here, strict=True)],
            ]
            axes.errorbar(places, means, ranges, fmt="o-", ms=3, lw=1, color=color, label=name)
        axes.set_xticks(range(len(settings)), settings, fontsize=8)
        axes.set_title(title, loc="left", color=plots.INK, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=plots.GRID, linewidth=0.8)
        axes.tick_params(length=0, colors=plots.MUTED, labelsize=8)
    picture.axes[0].legend(fontsize=7, frameon=False)
    return picture


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep, with its table.csv")
    parser.add_argument("picture", type=Path, help="PNG to write")
    asked = parser.parse_args(argv)
    with (asked.sweep / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    for metric, title in METRICS.items():
        print(f"{title} (`{metric}`):\n\n{table(ends(rows, metric))}\n")
    draw(rows).savefig(asked.picture)


if __name__ == "__main__":
    main()
