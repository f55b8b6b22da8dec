"""A sweep runs each point once, resumes what was cut, and tells which point failed."""

import asyncio
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from telescope_jax import sweep, sweep_table
from telescope_jax.sweep_points import Point, SweepError, load, remember

ROOT = Path(__file__).resolve().parents[1]
TINY = str(ROOT / "experiments" / "math.py:tiny")

STUB = """
import json, pathlib, sys, time
given = dict(flag.lstrip("-").partition("=")[::2] for flag in sys.argv[1:])
out = pathlib.Path(given["workdir"])
(out / "metrics").mkdir(parents=True, exist_ok=True)
with (out / "starts").open("a") as starts:
    starts.write("x")
seed = int(given["config.seed"])
note = lambda state: (out / "run.json").write_text(json.dumps({"state": state}))
note("running")
while given.get("config.algorithm") == "ppo":
    time.sleep(0.02)
if seed == 1:
    note("stopped")
    sys.exit("a shape that does not fit")
with (out / "metrics" / "metrics.jsonl").open("w") as file:
    for step in range(3):
        line = {"step": step, "train/loss": 0.5, "rollout/reward": 0.5 + seed / 8}
        file.write(json.dumps(line) + chr(10))
note("finished")
"""
"""Stands for main: it takes the same flags and leaves the same files."""


def sweep_file(folder: Path, body: str) -> str:
    path = folder / "some_sweep.py"
    path.write_text(f"CONFIG = {TINY!r}\n\ndef get_sweep(arg=''):\n    return {body}\n")
    return str(path)


def points_of(folder: Path, body: str) -> list[Point]:
    return load(sweep_file(folder, body), folder / "out")


def run(folder: Path, points: list[Point], parallel: int = 2) -> sweep.Runner:
    stub = folder / "stub.py"
    stub.write_text(STUB)
    runner = sweep.Runner(points, parallel, [sys.executable, str(stub)])
    asyncio.run(runner.run())
    return runner


def starts(point: Point) -> int:
    return len((point.workdir / "starts").read_text())


SEEDS = "[{'seed': s} for s in (0, 1, 2)]"


def test_a_failing_point_is_named_and_the_others_go_on(tmp_path: Path, capsys):
    points = points_of(tmp_path, SEEDS)
    runner = run(tmp_path, points)
    assert runner.failed == {"seed=1": 1}
    assert [point.state() for point in points] == ["finished", "stopped", "finished"]
    assert "seed=1: FAILED with code 1" in (said := capsys.readouterr().err)
    assert "a shape that does not fit" in said


def test_the_same_command_again_runs_only_what_has_not_finished(tmp_path: Path):
    run(tmp_path, points_of(tmp_path, SEEDS))
    points = points_of(tmp_path, SEEDS)
    run(tmp_path, points)
    assert [starts(point) for point in points] == [1, 2, 1]


def test_a_point_is_its_configuration_and_runs_once_under_any_name(tmp_path: Path):
    """Listed twice, spelt out, or found again after its sweep was rewritten."""
    first = points_of(tmp_path, "[{'seed': 0}, {'seed': 0}, {'seed': 0, 'algorithm': 'dr_grpo'}]")
    assert [point.name for point in first] == ["seed=0"]  # math.py's algorithm is dr_grpo
    run(tmp_path, first)
    later = points_of(tmp_path, "[{'algorithm': 'dr_grpo', 'seed': 0}, {'seed': 2}]")
    assert [point.name for point in later] == ["seed=0", "seed=2"]
    run(tmp_path, later)
    assert [starts(point) for point in later] == [1, 1]


def test_two_points_never_share_a_folder(tmp_path: Path):
    (point,) = points_of(tmp_path, "[{'seed': 3}]")
    remember(point)
    body = "[{'seed': 3, 'number_of_steps': 9}, {'seed': 3}]"
    named = load(sweep_file(tmp_path, body), tmp_path / "out", common=["--config.algorithm=grpo"])
    names = [one.name for one in named]
    assert names == ["seed=3,number_of_steps=9", "seed=3~2"]


def test_everything_wrong_with_a_sweep_is_said_before_any_work(tmp_path: Path):
    with pytest.raises(SweepError) as refused:
        points_of(tmp_path, "[{'sed': 0}, {'seed': 1.5}, {'batch.seq_len': 1}, {'seed': 1}]")
    text = str(refused.value)
    assert "sed=0: --config.sed=0 is unknown; did you mean --config.seed or" in text
    assert "seed=1.5: --config.seed=1.5 is not a whole number" in text
    assert "seq_len=1: batch.seq_len=1 cannot hold an episode" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("CONFIG = 'x.py'", "has no get_sweep"),
        ("def get_sweep():\n    return [{}]", "sets no CONFIG"),
        ("CONFIG = 'x.py'\ndef get_sweep():\n    return {}", "must return a list of dicts"),
        ("CONFIG = 'x.py'\ndef get_sweep():\n    return []", "at least one"),
        ("CONFIG = 'x.py'\ndef get_sweep():\n    return 1 / 0", "ZeroDivisionError"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path, source: str, words: str):
    path = tmp_path / "wrong.py"
    path.write_text(source)
    with pytest.raises(SweepError, match=words):
        load(str(path), tmp_path)


def test_a_second_sweep_in_the_folder_is_refused(tmp_path: Path):
    refused = pytest.raises(SweepError, match="a sweep is running in")
    with sweep.only_sweep_in(tmp_path), refused, sweep.only_sweep_in(tmp_path):
        pass


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    refused = pytest.raises(SweepError, match="cannot be written")
    with refused, sweep.only_sweep_in(tmp_path / "file" / "out"):
        pass


def test_a_point_that_cannot_start_is_named_and_the_others_go_on(tmp_path: Path, capsys):
    points = points_of(tmp_path, "[{'seed': s} for s in (0, 2)]")
    points[0].log_file.mkdir(parents=True)  # as a full disk: an OSError
    runner = run(tmp_path, points, parallel=1)
    assert list(runner.failed) == [points[0].name] and points[1].state() == "finished"
    assert "FAILED to start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--parallel=0"], "at least 1"),
        (["--launcher=slurm", "--launcher_flags=--partition='gpu"], "No closing quotation"),
        (["--launcher_flags=--dry_run"], "slurm or xm"),
        (["--config.seed", "3"], "unknown flags: --config.seed 3"),
    ],
)
def test_a_wrong_flag_of_a_sweep_is_refused(flags: list[str], words: str, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep.main(["--sweep=experiments/sweeps/lead.py:tiny", *flags])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_a_table_submits_nothing_and_names_a_metric_that_nobody_has(tmp_path: Path, capsys):
    """`--launcher=slurm --table` submitted the points that had not finished once more."""
    command = [f"--sweep={sweep_file(tmp_path, '[{}]')}", "--launcher=slurm", "--table"]
    command += [f"--out={tmp_path / 'out'}", "--metrics=rollout/reword"]
    with pytest.raises(SystemExit):
        sweep.main(command)
    assert "nothing ran there yet" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert sweep.main(command) == 0
    said = capsys.readouterr()
    assert "0 of 1" in said.out and "rollout/reword: no point has such a metric" in said.err


def test_a_signal_is_passed_on_to_the_running_points_and_starts_no_more(tmp_path: Path):
    points = points_of(
        tmp_path, "[{'seed': s, 'algorithm': 'ppo', 'loss.old_logprobs': True} for s in (0, 2, 3)]"
    )
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    runner = sweep.Runner(points, 2, [sys.executable, str(stub)])

    async def signalled() -> None:
        running = asyncio.create_task(runner.run())
        while [point.state() for point in points[:2]] != ["running"] * 2:
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    asyncio.run(signalled())
    assert runner.stopped_by == signal.SIGTERM and runner.failed == {}
    assert points[2].state() == "new"


def test_the_table_joins_seeds_and_counts_only_what_finished(tmp_path: Path):
    points = points_of(tmp_path, "[{'tis_cap': c, 'seed': s} for c in (2, 4) for s in (0, 1, 2)]")
    run(tmp_path, points)
    sweep_table.write(points, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    assert [row["state"] for row in rows] == ["finished", "stopped", "finished"] * 2
    assert [row["rollout/reward"] for row in rows[:3]] == ["0.5", "", "0.75"]
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert table[0] == "| tis_cap | finished | rollout/reward |"
    # Mean and deviation (n - 1) of 0.5 and 0.75.
    assert table[2:] == [f"| {cap} | 2 of 3 | 0.625 ± 0.18 (2) |" for cap in (2, 4)]
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_final_value_is_the_mean_of_the_last_tenth_where_a_metric_is_noisy():
    lines = [{"step": s, "rollout/reward": float(s), "eval/sums/accuracy": s} for s in range(20)]
    assert sweep_table.final(lines, "rollout/reward") == 18.5
    assert sweep_table.final(lines, "eval/sums/accuracy") == 19
    assert sweep_table.final(lines, "train/kl") is None


@pytest.mark.deadline(200)
def test_the_command_runs_real_points_and_the_same_again_runs_none(tmp_path: Path):
    hopeless = "{'seed': 1, 'max_untrainable_groups': 1, 'loss.drop_zero_advantage': True}"
    file = sweep_file(tmp_path, f"[{{'seed': 0}}, {hopeless}]")
    command = [sys.executable, "-m", "telescope_jax.sweep", f"--sweep={file}"]
    command += [f"--out={tmp_path / 'out'}", "--config.warm_start.steps=0"]
    command += ["--config.number_of_steps=2", "--config.eval.items=4"]
    environment = os.environ | {"XLA_FLAGS": ""}

    def call() -> tuple[int, str, str]:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, table, said = call()
    assert code == 1, said
    assert "| 1 of 1 |" in table and "| 0 of 1 |" in table
    assert "failed: seed=1,max_untrainable_groups=1,drop_zero_advantage=True (code 3)" in said
    note = json.loads((tmp_path / "out" / "runs" / "seed=0" / "run.json").read_text())
    started = time.time()
    code, _, said = call()
    assert code == 1 and "seed=0: finished before" in said
    again = json.loads((tmp_path / "out" / "runs" / "seed=0" / "run.json").read_text())
    assert again == note and note["started"] < started
