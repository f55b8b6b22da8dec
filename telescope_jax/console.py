"""What a person sees of a run: a live line on a terminal, one line a step elsewhere, a summary.

Everything shown is a metric: the screen holds no number that the files lack. A metric that a step
did not report is left out of its line, never shown as zero.
"""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from telescope_jax import metrics
from telescope_jax.spans import TRAINERS

ENDS = 10
"""Steps averaged at each end of a run for a before and an after."""


class _Screen(RichConsole):
    """Rich's console ends the process when its reader has gone; this one says so."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the output has gone")


def _read_by_nobody(stream: TextIO) -> None:
    """Points a broken pipe at nothing, so that what is left in its buffer fails no more."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
    except (OSError, ValueError):
        return  # not a file, or closed: nothing will be flushed


class Console:
    """A sink that shows the run.

    On a terminal one line is redrawn in place and evals scroll by above it; elsewhere (a log file,
    CI) every step is a plain line without control characters.

    Args:
      stream: standard output by default, looked up when called.
      terminal: whether to redraw; None asks the stream.
    """

    def __init__(
        self,
        number_of_steps: int,
        *,
        stream: TextIO | None = None,
        terminal: bool | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self._rich = _Screen(file=self._stream, force_terminal=terminal, highlight=False)
        self._total = number_of_steps
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def say(self, text: str) -> None:
        """Shows a text, above the live line where there is one."""
        try:
            # Not rich's markup: `[batch 8]` is text. A soft wrap leaves lines to the terminal.
            self._rich.print(text, markup=False, soft_wrap=True)
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads any more, which is no reason to stop a run
            _read_by_nobody(self._stream)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows one call of a sink: a step, evals, or both."""
        line = eval_line(step, values)
        if line:
            self.say(line)
        if not any(name.startswith(("train/", "rollout/")) for name in values):
            return
        if not self._rich.is_terminal:
            self.say(step_line(step, values))
            return
        if self._progress is None:
            self._progress = self._open(step)
        self._progress.update(
            self._task, completed=step + 1, line=" | ".join(parts(values, live=True))
        )

    def close(self) -> None:
        """Leaves the last state of the live line on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _open(self, step: int) -> Progress:
        progress = Progress(
            TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=24 if self._rich.width >= 100 else 12),
            TextColumn("{task.fields[line]} |", markup=False, table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left", table_column=Column(no_wrap=True)),
            console=self._rich,
            refresh_per_second=2,
        )
        self._task = progress.add_task("", total=self._total, completed=step, line="")
        progress.start()
        return progress


def step_line(step: int, values: Mapping[str, Any]) -> str:
    """`step 12 | reward 0.41 | stale 1.2/4 | kl 3e-4 | trunc 0.7% | 8.1k tok/s | wait 0.4 s`.

    `reward` is the batch's mean; `stale` the mean and the greatest age of its tokens.
    """
    return " | ".join([f"step {step}", *parts(values)])


def parts(values: Mapping[str, Any], *, live: bool = False) -> list[str]:
    """The pieces of a step's line; `live` keeps those that fit beside a progress bar."""
    shown = []

    def show(form: str, *names: str) -> None:
        if all(name in values for name in names):
            shown.append(form.format(*(values[name] for name in names)))

    values = {name: _Number(value) for name, value in values.items()}
    show("reward {:.2f}", "rollout/reward_trained")
    show("stale {:.1f}/{:.0f}", "staleness/mean", "staleness/max")
    if not live:
        show("kl {:short}", "train/kl")
        show("trunc {:.1%}", "train/truncated_fraction")
    show("{:si} tok/s", "engine/tokens_per_s")
    if not live:
        show("wait {:.1f} s", "time/wait_for_batch")
        if values.get("train/skipped_updates", 0):
            show("{:.0f} skipped updates", "train/skipped_updates")
    # A step that trained nothing has a loss of 0 that looks like success (MT-06).
    if values.get("train/token_count") == 0:
        shown.append("no token trained")
    return shown


class _Number(float):
    """A float with two more formats: `si` (8.1k) and `short` (3e-4); None is shown as ?."""

    def __new__(cls, value: Any) -> "_Number":
        return super().__new__(cls, math.nan if value is None else float(value))

    def __format__(self, form: str) -> str:
        if not math.isfinite(self):
            return "?" if math.isnan(self) else str(float(self))
        if form == "si":
            return si(self)
        if form == "short":
            return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", f"{self:.0e}")
        return super().__format__(form)


def si(value: float) -> str:
    """Two or three significant digits with k, M or G: 812, 8.1k, 12k, 3.4M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.6 is 1.0k, so the limit is where rounding would give four digits.
        if abs(value) >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.1f}{letter}" if abs(scaled) < 9.95 else f"{scaled:.0f}{letter}"
    return f"{value:.0f}"


def eval_line(version: int, values: Mapping[str, Any]) -> str:
    """`eval of version 30 | sums 0.62 greedy, 0.45 sampled`, or nothing."""
    pieces = []
    for name in _evals([values]):
        greedy = values.get(f"eval/{name}/accuracy")
        sampled = values.get(f"eval/{name}/sampled_accuracy")
        scores = [
            f"{_Number(score):.2f} {kind}"
            for score, kind in ((greedy, "greedy"), (sampled, "sampled"))
            if score is not None
        ]
        pieces.append(f"{name} {', '.join(scores)}")
    return " | ".join([f"eval of version {version}", *pieces]) if pieces else ""


def _evals(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    found = (re.fullmatch(r"eval/([^/]+)/(sampled_)?accuracy", name) for x in lines for name in x)
    return list(dict.fromkeys(match[1] for match in found if match))


def summary(lines: Sequence[Mapping[str, Any]], files: Mapping[str, str]) -> str:
    """One screen on a whole run, from its metrics alone (`metrics.read`).

    Args:
      files: what -> path, shown at the end.
    """
    rows: list[tuple[str, str]] = []
    for name in _evals(lines):
        for key, kind in (("accuracy", "greedy"), ("sampled_accuracy", "sampled")):
            steps, values = metrics.series(lines, f"eval/{name}/{key}")
            if values:
                change = (
                    f"{values[0]:.3f} → {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
                )
                rows.append(
                    (f"held-out, {kind}", f"{change}  {name}, steps {steps[0]} to {steps[-1]}")
                )
    _, rewards = metrics.series(lines, "rollout/reward")
    if rewards:
        ends = min(ENDS, len(rewards))
        first, last = sum(rewards[:ends]) / ends, sum(rewards[-ends:]) / ends
        rows.append(
            (
                "reward",
                f"{first:.3f} → {last:.3f}  all finished groups, first and last {ends} steps",
            )
        )
    _, ages = metrics.series(lines, "staleness/mean")
    _, oldest = metrics.series(lines, "staleness/max")
    if ages and oldest:
        rows.append(("staleness", f"mean {sum(ages) / len(ages):.2f}, max {max(oldest):.0f} steps"))
    seconds = wall_clock(lines)
    facts = _speed(lines), _time(lines, seconds), _meanwhile(lines), _ledger(lines), _trouble(lines)
    rows += [row for row in facts if row]
    rows += [(what, path) for what, path in files.items()]
    width = max((len(label) for label, _ in rows), default=0)
    steps = len(metrics.series(lines, "train/loss")[0])
    head = f"{steps} steps" + (f" in {clock(seconds)}" if seconds else "")
    return "\n".join([head, *(f"  {label:{width}}  {text}" for label, text in rows)])


def wall_clock(lines: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of all starts of the run together, each from its beginning to its last line."""
    total = latest = 0.0
    for line in lines:
        if "metrics/restarts" in line:  # the first line of a resumption
            total, latest = total + latest, 0.0
        latest = max(latest, line.get("time/elapsed") or 0.0)
    return total + latest


def _total(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(line.get(name) or 0.0 for line in lines)


def _speed(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    _, rates = metrics.series(lines, "engine/tokens_per_s")
    return ("sampling", f"{si(sum(rates) / len(rates))} tokens/s") if rates else None


def _time(lines: Sequence[Mapping[str, Any]], seconds: float) -> tuple[str, str] | None:
    """The wall clock, split by what the trainer did; the rest is what nobody measured."""
    names = ("start_up", *TRAINERS, "end")
    split = {name.replace("_", " "): _total(lines, f"time/{name}") for name in names}
    split["other"] = seconds - sum(split.values())
    shown = [f"{what} {clock(span)}" for what, span in split.items() if span >= 0.05]
    return ("time", " + ".join(shown)) if seconds else None


def _meanwhile(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """What went on beside the trainer, in no way a part of the wall clock's split."""
    spans = {name: _total(lines, f"time/{name}") for name in ("eval", "deploy")}
    shown = [f"{name} {clock(span)}" for name, span in spans.items() if span]
    return ("meanwhile", ", ".join(shown)) if shown else None


def _ledger(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    last: dict[str, float] = {}
    for line in lines:
        last |= {n: v for n, v in line.items() if n.startswith("ledger/") and v is not None}
    if "ledger/dispatched" not in last:
        return None
    states = ("trained", "batched", "held", "in_flight")
    terms = [
        f"{last[f'ledger/{state}']:.0f} {state.replace('_', ' ')}"
        for state in states
        if f"ledger/{state}" in last
    ]
    prefix = "ledger/dropped/"
    drops = {n.removeprefix(prefix): v for n, v in last.items() if n.startswith(prefix) and v}
    if drops:
        reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in drops.items())
        terms.append(f"{sum(drops.values()):.0f} dropped ({reasons})")
    return "groups", f"{last['ledger/dispatched']:.0f} dispatched = {' + '.join(terms)}"


def _trouble(lines: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    counts = {
        "skipped updates": _total(lines, "train/skipped_updates"),
        "values that were not finite": sum(line.get("metrics/non_finite") or 0 for line in lines),
        "metric lines lost": max(
            (line.get("metrics/write_errors") or 0 for line in lines), default=0
        ),
        "sinks lost": max((line.get("metrics/sink_errors") or 0 for line in lines), default=0),
        "steps without a trained token": metrics.series(lines, "train/token_count")[1].count(0),
        "engine restarts": max(metrics.series(lines, "engine/restarts")[1], default=0),
    }
    shown = [f"{count:.0f} {what}" for what, count in counts.items() if count]
    return ("trouble", ", ".join(shown)) if shown else None


def clock(seconds: float) -> str:
    """`8 s`, `1 min 43 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
