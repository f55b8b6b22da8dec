"""Real runs of the command line under SIGKILL: what is trained is what would have been trained."""

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from telescope_jax.metrics import read as read_metrics
from tests.faults.starter import LiveRun, Starter, starter

pytestmark = pytest.mark.deadline(900)  # whole runs, on machines that may be busy

STEPS = 36
KILLS = 10
FLAGS = (
    "--config.max_async_rollout=0",
    f"--config.number_of_steps={STEPS}",
    "--config.checkpoint.every=3",
    "--config.eval_every=4",
)
OF_THE_PROCESS = ("time", "engine/", "train/compilations", "metrics/", "loop/", "reward/")
"""Metrics of the machine and of the process, not of what is trained."""


@pytest.fixture(scope="module")
def starting() -> Iterator[Starter]:
    with starter() as found:
        yield found


def final(workdir: Path, step: int = STEPS) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the host state of the checkpoint of `step`."""
    folder = max((workdir / "checkpoints").glob(f"step_{step:06d}*"))
    items: dict[str, Any] = {
        "params": ocp.args.StandardRestore(),
        "opt_state": ocp.args.StandardRestore(),
    }
    items["host"] = ocp.args.JsonRestore()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        found = reader.restore(folder, ocp.args.Composite(**items))
    leaves = jax.tree_util.tree_leaves_with_path((found["params"], found["opt_state"]))
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return arrays, dict(found["host"]["host"])


def lines(workdir: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The metric lines of training and evals, without times; none may be there twice."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    if not (workdir / "metrics" / "metrics.jsonl").exists():
        return found
    for line in read_metrics(workdir / "metrics" / "metrics.jsonl"):
        kind = "train" if "train/loss" in line else "eval" if "eval/sums/items" in line else ""
        if not kind:
            continue
        assert (kind, line["step"]) not in found, f"{kind} {line['step']} is there twice"
        found[kind, line["step"]] = {
            name: value for name, value in line.items() if not name.startswith(OF_THE_PROCESS)
        }
    return found


def events(workdir: Path) -> list[dict[str, Any]]:
    path = workdir / "events" / "events.jsonl"
    texts = path.read_text().splitlines() if path.exists() else []
    return [json.loads(text) for text in texts if text.endswith("}")]


def moment(rng: random.Random, run: LiveRun) -> bool:
    """Waits for a drawn moment of a run's life; False: it ended before."""
    metrics, checkpoints = run.workdir / "metrics" / "metrics.jsonl", run.workdir / "checkpoints"
    kind = rng.choice(["step", "step", "saving", "deploy", "start"])
    before = (metrics.stat().st_size if metrics.exists() else 0, len(events(run.workdir)))
    if kind == "start":  # before the first step: while it restores, compiles or publishes
        return run.until(lambda: len(events(run.workdir)) > before[1])
    goal = rng.randrange(1, 9)
    if not run.until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > goal):
        return False
    goal = metrics.read_bytes().count(b"\n") + goal
    if not run.until(lambda: metrics.read_bytes().count(b"\n") >= goal):
        return False
    if kind == "saving":
        return run.until(lambda: any(checkpoints.glob("*.orbax-checkpoint-tmp*")))
    if kind == "deploy":
        count = len(events(run.workdir))
        return run.until(lambda: len(events(run.workdir)) > count)
    return True


@pytest.fixture(scope="module")
def calm(starting: Starter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("calm") / "run"
    run = starting.run(workdir, *FLAGS)
    assert run.wait() == 0, run.text()
    return workdir


def test_ten_kills_leave_the_bits_of_a_run_that_was_never_killed(
    starting: Starter, calm: Path, tmp_path: Path
) -> None:
    rng, kills, runs = random.Random(5), 0, 0
    resumed_at = set()
    while kills < KILLS:
        workdir, runs, code = tmp_path / f"run{runs}", runs + 1, None
        while code is None:
            run = starting.run(workdir, *FLAGS)
            if kills < KILLS and moment(rng, run):
                run.send(signal.SIGKILL)
                assert run.wait() == -signal.SIGKILL
                kills += 1
                resumed_at |= {path.name for path in (workdir / "checkpoints").glob("step_*")}
            else:
                code = run.wait()
        assert code == 0, run.text()
        compare(workdir, calm)
    assert len(resumed_at) > 3, "the kills should be spread over the run"


def compare(workdir: Path, calm: Path) -> None:
    arrays, host = final(workdir)
    expected, expected_host = final(calm)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert host == expected_host, "prompts, books or cursors differ"
    assert lines(workdir) == lines(calm)
    assert trained(workdir) == list(range(STEPS))
    changed = [not np.array_equal(a, 0 * a) for n, a in arrays.items() if "mu" in n]
    assert any(changed), "nothing was trained, so nothing was compared"


def test_two_kills_of_a_run_whose_engine_is_a_process(starting: Starter, tmp_path: Path) -> None:
    """The same bits: the engine's process neither outlives the run nor shows in its result."""
    flags = ("--config.engine.own_process=True", "--config.number_of_steps=8", *FLAGS[:1])
    flags += ("--config.checkpoint.every=2", "--config.eval_every=0")
    calm = tmp_path / "calm"
    assert starting.run(calm, *flags).wait() == 0
    workdir = tmp_path / "run"
    for steps in (3, 6):
        run = starting.run(workdir, *flags)
        assert run.until(lambda steps=steps: len(trained(workdir)) >= steps), run.text()
        run.send(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    run = starting.run(workdir, *flags)
    assert run.wait() == 0, run.text()
    arrays, host = final(workdir, 8)
    expected, expected_host = final(calm, 8)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert host == expected_host
    assert lines(workdir) == lines(calm)


def test_a_run_goes_on_on_another_mesh_from_the_same_bits(tmp_path: Path) -> None:
    """Every array is compared with its fingerprint as it arrives on the new mesh."""
    with starter(devices=4) as starting:
        run = starting.run(tmp_path / "run", *FLAGS[:1], "--config.number_of_steps=4")
        assert run.wait() == 0, run.text()
        more = ("--config.number_of_steps=6", "--config.mesh.fsdp=2", "--config.mesh.tensor=2")
        run = starting.run(tmp_path / "run", *FLAGS[:1], *more)
        assert run.wait() == 0, run.text()
    assert "resumed from step 4" in (tmp_path / "run" / "logs" / "main.log").read_text()
    assert trained(tmp_path / "run") == list(range(6))


def trained(workdir: Path) -> list[int]:
    return [step for kind, step in lines(workdir) if kind == "train"]
