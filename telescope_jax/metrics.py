"""Every metric by name, and the sinks that keep them.

A line of a metrics file is one JSON object, `{"step": …, "time": …, "train/loss": …}`: strict JSON,
its numbers finite, or null where the value was not. A metric can go missing for many reasons and
zero is never one of them. No failure of a sink ends a run: it is counted, and said once.
"""

import difflib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

if TYPE_CHECKING:  # a plot needs no jax, which interfaces imports
    from telescope_jax.interfaces import MetricSink

METRICS: dict[str, str] = {
    # LossStats (types.py), one for one.
    "train/loss": "the loss that was differentiated, nats a loss token (see loss.normalizer)",
    "train/ratio_mean": "mean of the importance ratio ρ = π/μ over the loss tokens; near 1",
    "train/ess": "effective sample size (Σρ)²/(n Σρ²), a share in (0, 1]",
    "train/truncated_fraction": "share of the loss tokens with ρ > tis_cap",
    "train/kl": "mean of exp(d) − 1 − d with d = log π − log μ, nats",
    "train/entropy": "mean entropy of π over the loss tokens, nats",
    "train/grad_norm": "global norm of the gradient before clipping",
    "train/learning_rate": "of the last update",
    "train/token_count": "loss tokens of the step; 0 means that nothing was trained",
    "train/unscored_tokens": "tokens without a sampler log-prob, left out of the loss",
    "train/rejected_fraction": "share of the loss tokens that an importance-sampling mask removed",
    "train/clipped_fraction": "share of the loss tokens outside the ratio clip (ppo and its kin)",
    "train/skipped_updates": "updates of the step whose gradient was not finite",
    "train/compilations": "XLA compilations that the step caused; 0 after the first steps",
    "train/packing_fill": "share of the packed tokens that are real",
    "train/rows": "packed rows, padding rows included",
    # The rollouts of the batch that the step trained.
    "rollout/reward": "mean reward of all groups that finished since the line before, also those "
    "that were dropped for having no signal",
    "rollout/reward_trained": "mean reward of the batch that the step trained",
    "rollout/reward_std": "standard deviation of the reward over the batch",
    "rollout/reward/*": "mean of one part of the reward",
    "rollout/tag/*": "share of the rollouts with a grader's tag",
    "rollout/metric/*": "mean of an environment's own metric",
    "rollout/length": "mean sampled tokens",
    "rollout/length_max": "most sampled tokens",
    "rollout/turns": "mean turns of an episode",
    "rollout/unknown_tokens": "sampled ids that the tokenizer lacks: rows that pad the vocabulary",
    "rollout/length_stop_fraction": "share that ran out of max_tokens",
    "rollout/left_out/*": "rollouts of the batch that train no token, by reason",
    "rollout/duplicate_fraction": "share of the rollouts that repeat another of their group",
    "rollout/no_signal_fraction": "share of the finished groups whose rewards are all equal; "
    "p^G + (1 − p)^G is expected of a binary reward",
    "rollout/advantage_std": "standard deviation of the advantages over the batch's rollouts",
    # Ages in weight updates: the batch's step minus the version that wrote a token.
    "staleness/mean": "mean age of the loss tokens, steps",
    "staleness/max": "greatest age of a loss token, steps; at most max_off_policy_steps",
    # dispatched = trained + batched + held + in_flight + every dropped/*, at every line.
    "ledger/dispatched": "group attempts sent to the engines, so far",
    "ledger/trained": "group attempts trained, so far",
    "ledger/batched": "group attempts in batches that wait for the trainer",
    "ledger/held": "finished group attempts that wait for their batch",
    "ledger/in_flight": "group attempts that are being sampled or graded",
    "ledger/dropped": "group attempts dropped for any reason, so far",
    "ledger/dropped/stale_in_flight": "dropped while sampling: too old to train, so far",
    "ledger/dropped/stale_in_queue": "dropped while held: too old to train, so far",
    "ledger/dropped/zero_advantage": "dropped: rewards all equal, so far",
    "ledger/dropped/prompt_too_long": "dropped: the prompt leaves no room, so far",
    "ledger/dropped/engine_error": "dropped: the engine lost an answer, so far",
    "ledger/dropped/env_error": "dropped: the environment failed, so far",
    "ledger/dropped/reward_error": "dropped: the grader failed, so far",
    "ledger/dropped/reward_timeout": "dropped: the grader did not answer in time, so far",
    "ledger/dropped/gave_up": "dropped: max_attempts reached, so far",
    "ledger/dropped/shutdown": "dropped at the end of the run, so far",
    # The trainer's, one after the other: start_up + every step (of which wait_for_batch, update and
    # checkpoint are parts) + end = elapsed. The others go on meanwhile.
    "time/elapsed": "seconds since the run, or its resumption, began",
    "time/start_up": "seconds from there until the trainer asked for its first batch",
    "time/step": "seconds from the end of the step before to the end of this one",
    "time/wait_for_batch": "seconds that the trainer waited for its batch",
    "time/update": "seconds of the optimizer updates",
    "time/checkpoint": "seconds since the line before that training stood still for a checkpoint",
    "time/end": "seconds from the last step to the end, for evals and whatever was under way",
    "time/publish": "seconds of the publishes that ended since the line before; 0 = none did",
    "time/deploy": "the same of publish and load, until every server took the version",
    "time/eval": "seconds of an eval",
    "engine/version": "lowest version that a new request may meet",
    "engine/tokens": "tokens sampled since the line before",
    "engine/tokens_per_s": "sampled tokens a second since the line before",
    "engine/requests": "requests finished since the line before",
    "engine/cancelled": "requests cancelled since the line before",
    "engine/waiting": "requests that wait for a slot",
    "engine/slots_busy": "mean share of the slots that decode",
    "engine/prefills": "prompts prefilled since the line before",
    "engine/prefills_saved": "prefills spared because a group shares its prompt",
    "engine/failed": "requests that failed since the line before",
    "engine/time_decoding": "seconds of prefill and decode calls since the line before",
    "engine/time_idle": "seconds without work since the line before",
    "engine/host_share": "share of time_decoding in which the device did not work",
    "engine/time_load": "seconds of the last weight swap",
    "engine/time_swap": "seconds of it in which servers did not decode",
    "engine/servers": "servers that take requests",
    "engine/restarts": "engine processes or servers that died and were replaced, so far",
    "engine/handshake_error": "greatest difference of trainer and engine log-probs, nats",
    "eval/*/accuracy": "share of held-out items answered right, greedily",
    "eval/*/sampled_accuracy": "the same, sampled at the training temperature",
    "eval/*/brief_accuracy": "accuracy, answers over sampling.max_tokens counted as wrong",
    "eval/*/items": "held-out items",
    "eval/*/failed": "items without an answer for an infrastructure failure; not counted wrong",
    "eval/*/length": "mean sampled tokens of the greedy answers",
    "reward/calls": "gradings asked of the worker processes since the line before",
    "reward/errors": "gradings that failed since the line before",
    "reward/limits": "gradings ended at a time or memory limit since the line before",
    "reward/started": "worker processes started since the line before",
    "loop/lag_p99": "delay of the event loop since the line before, 99th percentile, seconds",
    "loop/lag_max": "greatest delay of the event loop since the line before, seconds",
    "loop/alarms": "times that the event loop was blocked for longer than a second, so far",
    "checkpoint/failures": "checkpoints that could not be written, so far",
    "metrics/non_finite": "values of this line that were NaN or infinite, and are null",
    "metrics/write_errors": "lines that could not be written (disk full), so far",
    "metrics/sink_errors": "sinks that failed and were left out, so far",
    "metrics/restarts": "times that the run was resumed, written once at each",
}
"""Name, or pattern in which `*` stands for one component -> meaning and unit."""

_PATTERNS = [
    (re.compile(re.escape(name).replace(r"\*", "[^/*]+")), name) for name in METRICS if "*" in name
]


def describe(name: str) -> str:
    """The meaning of a metric.

    Raises:
      ValueError: no such metric; names the nearest ones.
    """
    if name in METRICS and "*" not in name:
        return METRICS[name]
    for pattern, known in _PATTERNS:
        if pattern.fullmatch(name):
            return METRICS[known]
    close = " or ".join(difflib.get_close_matches(name, METRICS)) or "an entry of metrics.METRICS"
    raise ValueError(f"unknown metric {name!r}; did you mean {close}?")


def scalar(value: Any) -> int | float:
    """`value` as a Python number: numpy and jax scalars of any dtype, bool included.

    Raises:
      ValueError: not one number.
    """
    if isinstance(value, bool | int | np.integer | np.bool_):
        return int(value)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind in "OSUMm":
        raise ValueError(f"a metric is one number, not {type(value).__name__} {array.shape}")
    return int(array.item()) if array.dtype.kind in "iub" else float(array.item())


def as_line(step: int, moment: float, values: Mapping[str, Any]) -> dict[str, int | float | None]:
    """What a metrics file holds of one call: Python numbers, and None for what is not finite.

    Args:
      moment: seconds since the epoch.

    Raises:
      ValueError: a name that METRICS lacks, or a value that is not one number.
    """
    line: dict[str, int | float | None] = {"step": int(step), "time": round(moment, 3)}
    for name, value in values.items():
        describe(name)
        number = scalar(value)
        line[name] = number if math.isfinite(number) else None
    line["metrics/non_finite"] = sum(value is None for value in line.values())
    return line


class JsonlSink:
    """Appends one object a line to `path`; a line is on its way to the disk when `log` returns.

    With `resume_at`, the version that training goes on from, the lines of the steps that will be
    repeated move to `<path>.rewound`, and a line with `metrics/restarts` marks the place: a
    repeated step is never in the file twice, and nothing is lost (wandb/wandb#4482).

    A full disk costs lines, never the run: they are counted in `metrics/write_errors`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        resume_at: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path)
        self._clock = clock
        self._write_errors = 0
        self._warned: set[str] = set()
        self._line_is_cut = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        restarts = 0 if resume_at is None else self._rewind(resume_at)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        if resume_at is not None:
            self.log(resume_at, {"metrics/restarts": restarts + 1})

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line.

        Raises:
          ValueError: a name that METRICS lacks, or a value that is not one number.
        """
        lost = {"metrics/write_errors": self._write_errors} if self._write_errors else {}
        line = as_line(step, self._clock(), {**values, **lost})
        for name in [name for name, value in line.items() if value is None]:
            self._warn(name, "%s is not finite at step %d; written as null", name, step)
        self._write(json.dumps(line, allow_nan=False))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: str) -> None:
        data = (("\n" if self._line_is_cut else "") + line + "\n").encode()
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(f"{written} of {len(data)} bytes written")
            self._line_is_cut = False
        except OSError as error:
            # What was written of the line stays; the next one starts on a line of its own, and
            # `read` skips the cut one.
            self._line_is_cut = True
            self._write_errors += 1
            self._warn("write", "%s: metrics are being lost: %s", self.path, error)

    def _warn(self, key: str, message: str, *args: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logging.warning(message, *args)

    def _rewind(self, resume_at: int) -> int:
        """Moves the lines of steps that will be repeated aside; returns the restarts so far."""
        if not self.path.exists():
            return 0
        kept, moved, restarts = [], [], 0
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            values = _parse(line)
            if values is None or _is_repeated(values, resume_at):
                moved.append(line)
                continue
            restarts = max(restarts, values.get("metrics/restarts") or 0)
            kept.append(line)
        if moved:
            aside = self.path.with_name(self.path.name + ".rewound")
            with open(aside, "a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in moved)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(partial, self.path)
        return restarts


def _is_repeated(values: Mapping[str, Any], resume_at: int) -> bool:
    """Whether the resumed run will write this line again.

    Step k trains version k into k + 1, so a run resumed at version v repeats the steps from v on;
    but an eval at v, and an older restart there, are of the version itself and are done.
    """
    if values["step"] != resume_at:
        return values["step"] > resume_at
    areas = {name.partition("/")[0] for name in values if "/" in name} - {"metrics", "time"}
    return not areas <= {"eval"}


class Fanout:
    """One sink that is many. A sink that raises is closed, left out from then on, and counted.

    So a tracker whose server went away costs one warning, not one a step, and never the run.
    """

    def __init__(self, sinks: "Iterable[MetricSink]") -> None:
        self._sinks = list(sinks)
        self._errors = 0

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hands the values to every sink.

        Raises:
          ValueError: a name that METRICS lacks: a mistake of the caller, not of a sink.
        """
        for name in values:
            describe(name)
        for sink in list(self._sinks):
            extra = {"metrics/sink_errors": self._errors} if self._errors else {}
            try:
                sink.log(step, {**values, **extra})
            except Exception as error:
                self._errors += 1
                self._sinks.remove(sink)
                logging.warning("%s failed and is left out: %r", type(sink).__name__, error)
                _close(sink)

    def close(self) -> None:
        for sink in self._sinks:
            _close(sink)


def _close(sink: "MetricSink") -> None:
    try:
        sink.close()
    except Exception as error:
        logging.warning("%s could not be closed: %r", type(sink).__name__, error)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file, or of every `*.jsonl` in a folder; cut lines are left out."""
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    lines = [_parse(line) for text in texts for line in text.splitlines()]
    return [line for line in lines if line is not None]


def series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, by step; null is left out, of a repeated step the last."""
    by_step = {line["step"]: line[name] for line in lines if line.get(name) is not None}
    return sorted(by_step), [by_step[step] for step in sorted(by_step)]
