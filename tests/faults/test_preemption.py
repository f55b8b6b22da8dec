"""SIGTERM in every phase of a run: a checkpoint within the grace time, the rest on the rerun."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from telescope_jax.metrics import read as read_metrics
from tests.faults.starter import LiveRun, Starter, starter

pytestmark = pytest.mark.deadline(900)  # whole runs, on machines that may be busy

FLAGS = ("--config.number_of_steps=4", "--config.checkpoint.every=0", "--config.eval_every=0")
FLAGS += ("--config.checkpoint.grace_s=600",)  # a machine that is busy must not decide a test


@pytest.fixture(scope="module")
def starting() -> Iterator[Starter]:
    with starter() as found:
        yield found


def preempted(starting: Starter, workdir: Path, phase: str, *flags: str) -> LiveRun:
    """A run that gets a SIGTERM while `phase` goes on."""
    run = starting.run(workdir, *FLAGS, *flags, before=f"tests.faults.slow:{phase}")
    assert run.until((workdir / "phase").exists), run.text()
    run.send(signal.SIGTERM)
    return run


def checkpoints(workdir: Path) -> list[str]:
    return sorted(path.name for path in (workdir / "checkpoints").glob("step_*"))


def finish(starting: Starter, workdir: Path) -> None:
    """The same command again, in a world without faults, ends the run with every step and eval."""
    run = starting.run(workdir, *FLAGS)
    assert run.wait() == 0, run.text()
    lines = read_metrics(workdir / "metrics" / "metrics.jsonl")
    assert [line["step"] for line in lines if "train/loss" in line] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if "eval/sums/items" in line] == [0, 4]


@pytest.mark.parametrize(("phase", "step"), [("first_update", 1), ("third_update", 3)])
def test_during_an_update_it_is_finished_and_saved(
    starting: Starter, tmp_path: Path, phase: str, step: int
) -> None:
    """The first update is one that compiles."""
    run = preempted(starting, tmp_path / "run", phase)
    assert run.wait() == 143, run.text()
    assert checkpoints(tmp_path / "run") == [f"step_{step:06d}"]
    state = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (state["state"], state["exit_code"]) == ("stopped", 143)
    finish(starting, tmp_path / "run")


def test_while_the_engine_compiles_there_is_nothing_to_save(
    starting: Starter, tmp_path: Path
) -> None:
    run = preempted(starting, tmp_path / "run", "compilation", "--config.checkpoint.grace_s=2")
    assert run.wait() == 143, run.text()
    assert len(checkpoints(tmp_path / "run")) <= 1, "at most version 0"


def test_an_update_that_hangs_ends_with_the_grace_time_and_the_last_checkpoint(
    starting: Starter, tmp_path: Path
) -> None:
    flags = ("--config.checkpoint.every=1", "--config.checkpoint.grace_s=1")
    run = preempted(starting, tmp_path / "run", "hung_update", *flags)
    assert run.wait() == 143, run.text()
    assert "no end within checkpoint.grace_s=1 s of a signal, exit code 143" in run.text()
    assert checkpoints(tmp_path / "run")[-1] == "step_000002"
    finish(starting, tmp_path / "run")


def test_a_publish_that_hangs_keeps_no_checkpoint_from_being_written(
    starting: Starter, tmp_path: Path
) -> None:
    """Nor the process from ending, long before the grace time."""
    run = preempted(starting, tmp_path / "run", "publish")
    assert run.wait() == 143, run.text()
    assert checkpoints(tmp_path / "run")[-1] >= "step_000002"
    finish(starting, tmp_path / "run")


def test_during_an_eval_it_is_saved_that_the_eval_is_still_to_be_done(
    starting: Starter, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--config.checkpoint.resume_exit_code=75")
    run = starting.run(tmp_path / "run", *flags, before="tests.faults.slow:evaluation")
    metrics = tmp_path / "run" / "metrics" / "metrics.jsonl"

    def two_steps() -> bool:
        return metrics.exists() and sum("train/loss" in x for x in read_metrics(metrics)) >= 2

    assert run.until(two_steps), run.text()
    run.send(signal.SIGTERM)
    assert run.wait() == 75, run.text()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (checkpoint / "evals").is_dir()
    finish(starting, tmp_path / "run")


def test_a_second_signal_exits_at_once(starting: Starter, tmp_path: Path) -> None:
    run = preempted(starting, tmp_path / "run", "hung_update", "--config.checkpoint.grace_s=3600")
    assert run.until(lambda: "finishing the running update" in run.text())
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.text()
    assert "exit at once, exit code 130" in run.text()
