"""Whole runs of the command line, tiny: what a person or a cluster does to them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from telescope_jax.metrics import describe

ROOT = Path(__file__).resolve().parents[1]


def start(workdir: Path, *flags: str, **popen: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "telescope_jax.main"]
    command += ["--config=experiments/math.py:tiny", f"--workdir={workdir}", *flags]
    # One device, as on a laptop; the suite's eight are for meshes.
    environment = {**os.environ, "XLA_FLAGS": popen.pop("xla_flags", "")}
    popen = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | popen
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **popen)


def start_again(command: str) -> subprocess.Popen[str]:
    """What an interrupted run says."""
    popen: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "XLA_FLAGS": ""}
    return subprocess.Popen(command, shell=True, cwd=ROOT, env=environment, text=True, **popen)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=240)
    return process.returncode, output or ""


def metrics(workdir: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (workdir / "metrics" / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def trained_steps(workdir: Path) -> list[int]:
    return [line["step"] for line in metrics(workdir) if "train/loss" in line]


def wait_for(process: subprocess.Popen[str], workdir: Path, steps: int) -> None:
    path = workdir / "metrics" / "metrics.jsonl"
    while not path.exists() or len(trained_steps(workdir)) < steps:
        assert process.poll() is None, "the run ended early"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    workdir = tmp_path_factory.mktemp("run") / "with a space"
    code, output = finish(start(workdir))
    assert code == 0, output
    return workdir, output


def test_a_run_whose_rows_are_split_over_devices_trains(tmp_path: Path) -> None:
    """Every axis of the mesh but data; the layers as a loop."""
    mesh = ["--config.mesh.fsdp=2", "--config.mesh.context=2", "--config.mesh.tensor=2"]
    few = ["--config.number_of_steps=2", "--config.eval_every=0", "--config.eval.at_start=False"]
    # So short a start may earn no reward; the entropy always has a gradient.
    more = ["--config.policy.scan_layers=True", "--config.loss.entropy_coef=0.01"]
    flags = os.environ["XLA_FLAGS"]
    code, output = finish(start(tmp_path / "run", *mesh, *few, *more, xla_flags=flags))
    assert code == 0, output
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert [line["step"] for line in lines] == [0, 1]
    assert all(line["train/grad_norm"] > 0 for line in lines)
    assert lines[0]["train/kl"] < 1e-6, "the engine, on one device, computes the same log-probs"


def test_a_run_leaves_metrics_tables_a_picture_and_a_summary(finished: tuple[Path, str]) -> None:
    """MT-04, MT-10: strict JSON, known names, and books that balance on every line."""
    workdir, output = finished
    lines = metrics(workdir)
    assert trained_steps(workdir) == [0, 1, 2, 3]
    for line in lines:
        for name in line.keys() - {"step", "time"}:
            describe(name)
        if "ledger/dispatched" in line:
            places = ("trained", "batched", "held", "in_flight", "dropped")
            assert line["ledger/dispatched"] == sum(line[f"ledger/{place}"] for place in places)
    evaluated = [line["step"] for line in lines if "eval/sums/accuracy" in line]
    assert evaluated == [0, 2, 4]
    asked = ["train/loss", "train/grad_norm", "train/ratio_mean", "train/ess", "train/kl"]
    asked += ["train/truncated_fraction", "train/entropy", "train/token_count"]
    asked += [
        "rollout/reward_trained",
        "rollout/length",
        "staleness/mean",
        "staleness/max",
        "time/wait_for_batch",
    ]
    asked += ["time/update", "time/publish", "engine/tokens_per_s", "engine/version"]
    last = [line for line in lines if "train/loss" in line][-1]
    assert set(asked) <= last.keys()
    assert last["train/compilations"] == 0
    assert (workdir / "curves.png").stat().st_size > 10_000
    assert list((workdir / "rollouts").glob("*.parquet"))
    assert "held-out, greedy" in output and "step 3 |" in output
    assert output.index("config      experiments/math.py:tiny;") < output.index("\nwarm start  ")
    assert "warm_start.steps=20" in output and "telescope_jax." not in output
    assert len(output.splitlines()) < 45, "one screen before the steps, and one after them"
    trainers = ("start_up", "step", "end")
    spans = sum(line.get(f"time/{name}", 0) for line in lines for name in trainers)
    spans += sum(line["time/checkpoint"] for line in lines[-2:])  # of the end, which leaves it out
    assert spans == pytest.approx(lines[-1]["time/elapsed"], abs=0.2)
    assert json.loads((workdir / "run.json").read_text())["state"] == "finished"


def test_a_finished_run_says_so_and_how_to_go_on(finished: tuple[Path, str]) -> None:
    workdir, _ = finished
    before = metrics(workdir)
    code, output = finish(start(workdir))
    assert code == 0
    assert "holds this run with all of its 4 steps" in output and "held-out, greedy" in output
    assert "--config.number_of_steps=8" in output and "another --workdir" in output
    assert metrics(workdir) == before, "it is not started again"
    assert json.loads((workdir / "run.json").read_text())["state"] == "finished"


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(finished: tuple[Path, str]) -> None:
    workdir, _ = finished
    code, output = finish(start(workdir, "--config.number_of_steps=6"))
    assert code == 0, output
    assert trained_steps(workdir) == [0, 1, 2, 3, 4, 5]
    evaluated = [line["step"] for line in metrics(workdir) if "eval/sums/accuracy" in line]
    assert evaluated == [0, 2, 4, 6]


def test_another_configuration_is_refused_in_the_same_folder(finished: tuple[Path, str]) -> None:
    workdir, _ = finished
    code, output = finish(start(workdir, "--config.policy.rope_theta=5.0"))
    assert code == 2
    assert "policy.rope_theta=5.0, the run has 10000.0" in output


def test_sigterm_leaves_a_checkpoint_and_no_process_and_the_rerun_ends_the_run(
    tmp_path: Path,
) -> None:
    """OR-17."""
    flags = ["--config.number_of_steps=40", "--config.eval_every=0"]
    flags += ["--config.engine.own_process=True", "--config.checkpoint.every=0"]
    process = start(tmp_path / "run", *flags)
    wait_for(process, tmp_path / "run", 3)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 143, output
    (again,) = re.findall(r"^resume      (.*)$", output, re.MULTILINE)
    assert shlex.split(again)[-len(flags) - 1 :] == [f"--workdir={tmp_path / 'run'}", *flags]
    done = trained_steps(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / f"step_{len(done):06d}").is_dir()
    assert children and not psutil.wait_procs(children, timeout=15)[1]
    code, output = finish(start_again(again))
    assert code == 0, output
    assert trained_steps(tmp_path / "run") == list(range(40))


def test_a_killed_run_repeats_no_line_of_its_metrics(tmp_path: Path) -> None:
    """MT-01, also when there was no checkpoint yet."""
    flags = ["--config.number_of_steps=12", "--config.eval_every=0", "--config.checkpoint.every=0"]
    process = start(tmp_path / "run", *flags)
    wait_for(process, tmp_path / "run", 3)
    process.kill()
    process.communicate()
    code, output = finish(start(tmp_path / "run", *flags))
    assert code == 0, output
    assert trained_steps(tmp_path / "run") == list(range(12))


def test_a_signal_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    flags = ["--config.warm_start.steps=5000", "--config.warm_start.cache=False"]
    process = start(tmp_path / "run", *flags)
    log = tmp_path / "run" / "logs" / "main.log"
    while not log.exists() or "warm start: step 1," not in log.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    process.communicate()


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    """MT-03: `| head` takes a few lines and goes."""
    process = start(tmp_path / "run", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=240) == 0
    assert trained_steps(tmp_path / "run") == [0, 1, 2, 3]
