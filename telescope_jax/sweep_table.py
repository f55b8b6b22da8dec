"""What came out of a sweep: table.csv, table.md and curves.png, from the runs' own files.

table.csv has one line a point. table.md and the picture join the points that differ in `seed` only,
as mean ± standard deviation over the seeds (n − 1); a point that has not finished, or lacks a
metric, is shown as such and counted in no mean.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from telescope_jax import metrics, plots
from telescope_jax.sweep_points import Point

USUAL = ("eval/*/accuracy", "eval/*/sampled_accuracy", "rollout/reward", "staleness/mean")
"""Columns when none are asked for; `*` is whatever environment a run has."""

NOISY = ("rollout/", "staleness/", "train/", "time/")
"""Areas whose final value is the mean of the last tenth of the steps; of others it is the last."""

COLORS = ("#2563a8", "#d9752b", "#2f8f6b", "#7a5aa6", "#b3364b", "#5c6b73", "#b8962e", "#3aa0a8")

Lines = Sequence[Mapping[str, Any]]
Key = tuple[tuple[str, Any], ...]


def write(points: Sequence[Point], folder: Path, wanted: Sequence[str] = ()) -> list[Path]:
    """Writes the three files; `wanted` names metrics, `*` standing for one component."""
    runs = _runs(points)
    names = present(runs.values(), wanted or USUAL)
    rows = [row(point, runs[point.name], names) for point in points]
    fields = list(dict.fromkeys(field for point in points for field in point.overrides))
    _replace(folder / "table.csv", csv_text(rows, [*fields, "state", "steps", *names]))
    _replace(folder / "table.md", markdown(points, rows, names))
    picture = folder / "curves.png"
    figure(points, runs, names).savefig(partial := folder / ".curves.png.new", format="png")
    partial.replace(picture)
    return [folder / "table.csv", folder / "table.md", picture]


def absent(points: Sequence[Point], wanted: Sequence[str]) -> list[str]:
    """What of `wanted` no point has."""
    runs = _runs(points).values()
    return [pattern for pattern in wanted if not present(runs, [pattern])]


def _runs(points: Sequence[Point]) -> dict[str, Lines]:
    return {p.name: metrics.read(p.metrics_file) if p.metrics_file.exists() else [] for p in points}


def present(runs: Iterable[Lines], wanted: Sequence[str]) -> list[str]:
    """The metrics of these runs that `wanted` asks for, in its order."""
    found = sorted({name for lines in runs for line in lines for name in line})
    return list(dict.fromkeys(n for pattern in wanted for n in found if _matches(n, pattern)))


def row(point: Point, lines: Lines, names: Sequence[str]) -> dict[str, Any]:
    """One point: its overrides, state, steps trained, and a number (or None) a metric."""
    trained = {line["step"] for line in lines if "train/loss" in line}
    numbers = {name: final(lines, name) for name in names}
    return {**point.overrides, "state": point.state(), "steps": len(trained), **numbers}


def final(lines: Lines, name: str) -> float | None:
    """The value that a table shows of a metric; None if the run has none."""
    _, values = metrics.series(lines, name)
    if not values:
        return None
    last = math.ceil(len(values) / 10) if name.startswith(NOISY) else 1
    return statistics.fmean(values[-last:])


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Comma-separated, one line a point; an override that a point does not set is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def settings(points: Sequence[Point]) -> dict[Key, list[int]]:
    """Overrides without the seed -> indices of its points, in order."""
    found: dict[Key, list[int]] = {}
    for index, point in enumerate(points):
        key = tuple((f, str(v)) for f, v in point.overrides.items() if f != "seed")
        found.setdefault(key, []).append(index)
    return found


def markdown(
    points: Sequence[Point], rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> str:
    """One line a setting, as mean ± standard deviation over its seeds."""
    fields = list(dict.fromkeys(field for key in settings(points) for field, _ in key))
    head = [*fields, "finished", *names]
    table = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, indices in settings(points).items():
        mine = [rows[index] for index in indices]
        done = [one for one in mine if one["state"] == "finished"]
        cells = [dict(key).get(field, "") for field in fields]
        cells.append(f"{len(done)} of {len(mine)}")
        cells += [spread([one[name] for one in done if one[name] is not None]) for name in names]
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join(table) + "\n"


def spread(values: Sequence[float]) -> str:
    """`0.95 ± 0.01 (3)`; a dash for no value."""
    if not values:
        return "—"
    mean = f"{statistics.fmean(values):.4g}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.2g} ({len(values)})"


def figure(points: Sequence[Point], runs: Mapping[str, Lines], names: Sequence[str]) -> Figure:
    """One panel a metric, one curve a setting: the mean over its seeds, and their range."""
    shown = list(names) or ["rollout/reward"]
    groups = settings(points)
    labels = [", ".join(f"{f.rpartition('.')[2]}={v}" for f, v in key) or "all" for key in groups]
    height = 0.9 + 2.7 * len(shown) + 0.2 * len(groups)  # the legend below has a line a setting
    picture = Figure(figsize=(8, height), dpi=150, layout="constrained", facecolor="white")
    panels = picture.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, name in zip(panels, shown, strict=True):
        axes.set_title(name, loc="left", color=plots.INK, fontsize=10)
        for number, (indices, label) in enumerate(zip(groups.values(), labels, strict=True)):
            plots.mean_and_range(
                axes,
                [metrics.series(runs[points[index].name], name) for index in indices],
                smoothed=name.startswith(NOISY),
                color=COLORS[number % len(COLORS)],
                label=label,
                # Beyond eight settings colours repeat, dashed.
                dashes="-" if number < len(COLORS) else "--",
            )
        plots.quiet(axes)
    panels[-1].set_xlabel("step", color=plots.MUTED)
    # Of all panels: not every setting has every metric.
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        picture.legend(
            handles=list(handles.values()), loc="outside lower left", fontsize=8, frameon=False
        )
    return picture


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(
        w in ("*", p) for p, w in zip(parts, wanted, strict=True)
    )


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
