"""Metrics files: strict JSON whatever is logged, nothing lost on resume, no failure ends a run."""

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax import metrics
from telescope_jax.types import LossStats

ROOT = Path(__file__).resolve().parents[1]


def strict(path: Path) -> list[dict[str, Any]]:
    """Every line by a parser that takes no NaN and no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def sink_at(path: Path, **options: Any) -> metrics.JsonlSink:
    return metrics.JsonlSink(path, clock=lambda: 12.5, **options)


def test_a_line_holds_step_time_and_every_value(tmp_path: Path):
    sink = sink_at(tmp_path / "deep" / "m.jsonl")
    sink.log(3, {"train/loss": 0.5, "ledger/trained": 7})
    # Before close: a crash loses nothing that was logged.
    assert strict(sink.path) == [
        {"step": 3, "time": 12.5, "train/loss": 0.5, "ledger/trained": 7, "metrics/non_finite": 0}
    ]
    sink.close()


SCALARS = [
    (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (np.int32(3), 3),
    (np.bool_(True), 1),
    (np.array(0.5), 0.5),
    (ml_dtypes.bfloat16(0.5), 0.5),
    (jnp.float32(0.5), 0.5),
    (jnp.bfloat16(0.5), 0.5),
    (jnp.int32(3), 3),
    (True, 1),
    (2**70, 2**70),
    (math.nan, None),
    (math.inf, None),
    (-math.inf, None),
    (np.float32("nan"), None),
    (jnp.bfloat16(math.inf), None),
    (ml_dtypes.bfloat16("nan"), None),
]


@pytest.mark.parametrize(("value", "written"), SCALARS, ids=[repr(row[0]) for row in SCALARS])
def test_any_scalar_becomes_a_number_or_null(tmp_path: Path, value: Any, written: Any):
    """MT-04: the key is kept, the line is strict JSON, the step is not lost."""
    sink = sink_at(tmp_path / "m.jsonl")
    sink.log(0, {"train/loss": value})
    (line,) = strict(sink.path)
    assert line["train/loss"] == written and type(line["train/loss"]) is type(written)
    assert line["metrics/non_finite"] == (written is None)


@given(st.dictionaries(st.sampled_from(["train/loss", "train/kl", "time/step"]), st.floats()))
def test_every_line_is_strict_json_and_counts_what_is_null(values: dict[str, float]):
    line = json.loads(json.dumps(metrics.as_line(0, 1.0, values), allow_nan=False))
    nulls = [name for name in line if line[name] is None]
    assert nulls == [name for name, value in values.items() if not math.isfinite(value)]
    assert line["metrics/non_finite"] == len(nulls)


def test_a_non_finite_metric_alarms_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """MT-04."""
    sink = sink_at(tmp_path / "m.jsonl")
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sink.log(step, {"train/loss": math.nan})
    assert [r for r in caplog.messages if "train/loss" in r] == [
        "train/loss is not finite at step 0; written as null"
    ]


def test_an_unknown_metric_is_refused_with_the_nearest_name(tmp_path: Path):
    sink = sink_at(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="did you mean train/loss"):
        sink.log(0, {"train/los": 1.0})
    with pytest.raises(ValueError, match="unknown metric 'eval/\\*/accuracy'"):
        metrics.describe("eval/*/accuracy")
    with pytest.raises(ValueError, match="unknown metric"):
        metrics.describe("eval/a/b/accuracy")
    assert "greedily" in metrics.describe("eval/sums/accuracy")
    assert strict(sink.path) == []


@pytest.mark.parametrize("value", [np.zeros(2), "0.5", None, [1.0, 2.0]])
def test_what_is_not_one_number_is_refused(value: Any):
    with pytest.raises(ValueError, match="a metric is one number"):
        metrics.scalar(value)


def test_every_loss_stat_is_a_metric():
    for name in LossStats._fields:
        metrics.describe(f"train/{name}")


def test_the_metrics_that_the_project_promises_exist():
    """What dashboards and scripts may count on, and every reason that the ledger knows."""
    promised = """train/loss train/grad_norm train/ratio_mean train/ess train/truncated_fraction
    train/kl train/entropy train/token_count rollout/reward rollout/length staleness/mean
    staleness/max time/wait_for_batch time/update time/publish engine/tokens_per_s engine/version
    eval/sums/accuracy eval/sums/sampled_accuracy rollout/no_signal_fraction"""
    reasons = """stale_in_flight stale_in_queue zero_advantage prompt_too_long engine_error
    env_error reward_error reward_timeout gave_up shutdown"""
    for name in [*promised.split(), *(f"ledger/dropped/{reason}" for reason in reasons.split())]:
        metrics.describe(name)


def test_every_name_is_an_area_and_a_name():
    assert [name for name in metrics.METRICS if "/" not in name or name != name.strip("/")] == []
    assert [name for name, meaning in metrics.METRICS.items() if not meaning] == []


def test_resuming_rewinds_the_steps_that_will_be_repeated(tmp_path: Path):
    """MT-01: steps 0 to 6 logged, checkpoint at version 5, killed, resumed."""
    path = tmp_path / "m.jsonl"
    first = sink_at(path)
    for step in range(7):
        first.log(step, {"train/loss": float(step)})
    first.log(5, {"eval/sums/accuracy": 0.5})  # of version 5, which the checkpoint holds
    first.close()

    second = sink_at(path, resume_at=5)
    for step in (5, 6, 7):
        second.log(step, {"train/loss": step + 100.0})
    second.close()

    lines = strict(path)
    assert metrics.series(lines, "train/loss") == (
        list(range(8)),
        [0.0, 1.0, 2.0, 3.0, 4.0, 105.0, 106.0, 107.0],
    )
    assert len([line for line in lines if "train/loss" in line]) == 8
    assert metrics.series(lines, "eval/sums/accuracy") == ([5], [0.5])
    assert metrics.series(lines, "metrics/restarts") == ([5], [1])
    aside = strict(tmp_path / "m.jsonl.rewound")
    assert metrics.series(aside, "train/loss") == ([5, 6], [5.0, 6.0])


def test_restarts_are_counted(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    for resume_at in (None, 0, 2, 2):
        sink = sink_at(path, resume_at=resume_at)
        sink.log(resume_at or 0, {"train/loss": 0.0})
        sink.log(1, {"train/loss": 0.0})
        sink.close()
    counts = [line["metrics/restarts"] for line in strict(path) if "metrics/restarts" in line]
    assert counts == [1, 2, 3]


def test_resuming_without_a_file_starts_one(tmp_path: Path):
    sink = sink_at(tmp_path / "m.jsonl", resume_at=4)
    assert [line["step"] for line in strict(sink.path)] == [4]


def test_a_line_cut_by_a_crash_is_set_aside(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0, "time": 1, "train/loss": 1.0}\n{"step": 1, "ti')
    assert [line["step"] for line in metrics.read(path)] == [0]
    sink_at(path, resume_at=1).close()
    assert [line["step"] for line in strict(path)] == [0, 1]
    assert (tmp_path / "m.jsonl.rewound").read_text() == '{"step": 1, "ti\n'


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path):
    """A file-size limit stands in for the full disk: the write stops in the middle of a line."""
    path = tmp_path / "m.jsonl"
    code = """
import resource, signal, sys
from telescope_jax.metrics import JsonlSink
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = JsonlSink(sys.argv[1])
sink.log(0, {"train/loss": 0.0})
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (sink.path.stat().st_size + 10, hard))
for step in (1, 2, 3):
    sink.log(step, {"train/loss": 0.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
sink.log(4, {"train/loss": 0.0})
sink.close()
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("metrics are being lost") == 1
    lines = metrics.read(path)
    assert [line["step"] for line in lines] == [0, 4]
    assert lines[-1]["metrics/write_errors"] == 3


class Broken:
    """A tracker whose server went away."""

    def __init__(self, after: int) -> None:
        self.calls, self.after, self.closed = 0, after, 0

    def log(self, step: int, values: Any) -> None:
        self.calls += 1
        if self.calls > self.after:
            raise ConnectionError("gone")

    def close(self) -> None:
        self.closed += 1
        raise ConnectionError("still gone")


def test_a_broken_tracker_is_counted_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """MT-03: the backend dies after step 2."""
    broken = Broken(after=2)
    fanout = metrics.Fanout([broken, sink_at(tmp_path / "m.jsonl")])
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            fanout.log(step, {"train/loss": 0.0})
        fanout.close()
    lines = strict(tmp_path / "m.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line.get("metrics/sink_errors", 0) for line in lines] == [0, 0, 1, 1, 1]
    assert broken.calls == 3 and broken.closed == 1
    assert len([message for message in caplog.messages if "left out" in message]) == 1


def test_an_unknown_name_reaches_no_sink(tmp_path: Path):
    broken = Broken(after=9)
    with pytest.raises(ValueError, match="unknown metric"):
        metrics.Fanout([broken]).log(0, {"nope": 1.0})
    assert broken.calls == 0


def test_a_folder_is_read_as_one_run(tmp_path: Path):
    for name, step in (("a", 1), ("b", 0)):
        sink = sink_at(tmp_path / f"{name}.jsonl")
        sink.log(step, {"train/loss": float(step)})
        sink.close()
    (tmp_path / "a.jsonl.rewound").write_text('{"step": 9, "train/loss": 9}\n')
    assert metrics.series(metrics.read(tmp_path), "train/loss") == ([0, 1], [0.0, 1.0])
