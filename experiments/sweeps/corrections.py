"""The four ways to train on what another policy sampled, and the picture of a sweep over them.

    python -m experiments.sweeps.corrections runs/staleness docs/staleness.png

The picture has a column a setting and a curve a correction: the mean over the seeds, and their
range. Printed are the ends: a metric of all steps is its mean over the last tenth of them. The
reward is that of the engine's answers, which with a distorted one are not the policy's; the
held-out accuracy is what counts.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from telescope_jax import metrics, plots, sweep_table

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"use_tis": False},
    "TIS": {"use_tis": True},
    "icepop": {"use_tis": True, "loss.tis_mode": "icepop", "loss.tis_floor": 0.5},
    "decoupled PPO": {"use_tis": True, "loss.objective": "ppo", "loss.old_logprobs": True},
}
"""Name -> overrides; all with the cap 2, Config's default."""

VARIED = {"max_async_rollout", "engine.distort_int8"}
"""What a study sets beside the correction: one of them."""

COLORS = dict(zip(CORRECTIONS, ("#5c6b73", "#2563a8", "#d9752b", "#2f8f6b"), strict=True))
METRICS = {
    "rollout/reward": "reward of the sampler",
    "eval/sums/sampled_accuracy": "held-out, sampled from the policy",
    "eval/sums/accuracy": "held-out, greedy",
}


class Run(NamedTuple):
    """A finished run of the sweep."""

    setting: str
    """What was varied beside the correction, in words."""
    correction: str
    lines: sweep_table.Lines
    """Of its metrics files."""


def corrections(*names: str) -> list[dict[str, Any]]:
    """The overrides of these corrections; of all without a name."""
    return [CORRECTIONS[name] for name in names or CORRECTIONS]


def correction_of(overrides: Mapping[str, str]) -> str:
    """The name of the correction that a point was run with."""
    if overrides["use_tis"] == "False":
        return "none"
    if overrides.get("loss.objective") == "ppo":
        return "decoupled PPO"
    return "icepop" if overrides.get("loss.tis_mode") == "icepop" else "TIS"


def setting_of(overrides: Mapping[str, str]) -> str:
    """What a point varies beside the correction."""
    if "max_async_rollout" in overrides:
        return overrides["max_async_rollout"]
    if overrides["engine.distort_int8"] == "True":
        return "8 bits"
    same = float(overrides["engine.distort_temperature"]) == 1
    return "as trained" if same else f"temperature {overrides['engine.distort_temperature']}"


def finished(sweep: Path) -> list[Run]:
    """The finished runs below the sweep's folder: by lead, or the undistorted sampler first."""
    runs = []
    for path in (sweep / "points").glob("*.json"):
        overrides, folder = json.loads(path.read_text())["overrides"], sweep / "runs" / path.stem
        state = folder / "run.json"
        if "use_tis" not in overrides or not overrides.keys() & VARIED:
            raise SystemExit(f"{path} is no point of a study of corrections: it sets {overrides}")
        if state.exists() and json.loads(state.read_text()).get("state") == "finished":
            lines = metrics.read(folder / "metrics")
            runs.append(Run(setting_of(overrides), correction_of(overrides), lines))

    def place(run: Run) -> tuple[int, bool, bool]:
        lead = int(run.setting) if run.setting.isdigit() else 0
        return lead, run.setting != "as trained", run.setting == "8 bits"

    return sorted(runs, key=place)


def table(runs: Sequence[Run], metric: str) -> str:
    """Markdown: a line a setting, a column a correction."""

    lines = ["| | " + " | ".join(CORRECTIONS) + " |", "|---" * (len(CORRECTIONS) + 1) + "|"]
    for setting in dict.fromkeys(run.setting for run in runs):
        cells = []
        for name in CORRECTIONS:
            mine = [run.lines for run in runs if run[:2] == (setting, name)]
            ends = [
                x for x in (sweep_table.final(lines, metric) for lines in mine) if x is not None
            ]
            spread = f" ± {statistics.stdev(ends):.3f}" if len(ends) > 1 else ""
            few = "" if len(ends) == 3 else f" ({len(ends)})"
            cells.append(f"{statistics.fmean(ends):.3f}{spread}{few}" if ends else "—")
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: Sequence[Run]) -> Figure:
    """A row a metric, a column a setting, a curve a correction."""
    settings = list(dict.fromkeys(run.setting for run in runs))
    size = 1 + 2.3 * len(settings), 1 + 2 * len(METRICS)
    picture = Figure(figsize=size, dpi=100, layout="constrained", facecolor="white")
    panels = picture.subplots(len(METRICS), len(settings), sharex=True, sharey="row", squeeze=False)
    for row, (metric, title) in zip(panels, METRICS.items(), strict=True):
        row[0].set_ylabel(title, color=plots.INK, fontsize=8)
        for axes, setting in zip(row, settings, strict=True):
            for name, color in COLORS.items():
                mine = [run.lines for run in runs if run[:2] == (setting, name)]
                curves = [metrics.series(lines, metric) for lines in mine]
                plots.mean_and_range(
                    axes, curves, smoothed=metric.startswith(sweep_table.NOISY), color=color,
                    label=name,
                )  # fmt: skip
            plots.quiet(axes)
    leads = all(setting.isdigit() for setting in settings)
    for axes, setting in zip(panels[0], settings, strict=True):
        title = f"{setting} steps ahead" if leads else setting
        axes.set_title(title, loc="left", color=plots.INK, fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("step", color=plots.MUTED, fontsize=8)
    handles = panels[0][0].get_legend_handles_labels()[0]
    picture.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    return picture


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of the sweep")
    parser.add_argument("picture", type=Path, help="PNG to write")
    asked = parser.parse_args(argv)
    runs = finished(asked.sweep)
    if not runs:
        parser.error(f"{asked.sweep} holds no finished run of a sweep")
    for metric, title in METRICS.items():
        print(f"{title} (`{metric}`):\n\n{table(runs, metric)}\n")
    draw(runs).savefig(asked.picture)


if __name__ == "__main__":
    main()
