"""Two real processes of four CPU devices each, against one process, and against death."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from telescope_jax.config import MeshConfig
from telescope_jax.hosts.runtime import PEER_EXIT_CODE
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.types import WeightsRef
from telescope_jax.weights.store import OrbaxStore, unflatten
from tests.hosts.five_updates import make_learner, recorded

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(command: list[str], devices: int, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=file
        )


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Whatever a test starts ends with it."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


# Five updates -----------------------------------------------------------------------------------


def single(mesh: MeshConfig, master_dtype: str) -> tuple[list[np.ndarray], dict]:
    learner = make_learner(mesh, master_dtype)
    stats = [np.array(learner.update_now(batch)[:-1], np.float64) for batch in recorded()]
    learner.close()
    return stats, jax.device_get(learner.params)


@pytest.mark.deadline(200)
@pytest.mark.parametrize("master_dtype", ["float32", "bfloat16"])
def test_five_updates_of_two_processes_are_those_of_one(tmp_path: Path, started, master_dtype: str):
    """1e-5 relative in float32, whatever the mesh and the number of processes. And what
    two wrote, weights and checkpoint, one reads.

    In bfloat16 the draws are the same ones; a last bit of a gradient may still turn one.
    """
    rtol = 1e-5 if master_dtype == "float32" else 1e-3
    port = free_port()
    script = str(ROOT / "tests" / "hosts" / "five_updates.py")
    logs = [tmp_path / f"{process}.log" for process in range(2)]
    for process, log in enumerate(logs):
        started.append(start([script, port, str(process), str(tmp_path), master_dtype], 4, log))
    on_one_device, last = single(MeshConfig(1, 1, 1), master_dtype)
    on_eight, last_of_eight = single(MeshConfig(2, 2, 2), master_dtype)
    for process, log in zip(started, logs, strict=True):
        assert process.wait(timeout=150) == 0, log.read_text()[-3000:]

    for number, expected in enumerate(on_one_device):
        found = np.load(tmp_path / f"stats_{number}.npy")
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-7)
        np.testing.assert_allclose(on_eight[number], expected, rtol=rtol, atol=1e-7)

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    learner = make_learner(MeshConfig(1, 4, 1), master_dtype)
    restored = checkpoints.restore(learner.save_structure())
    assert restored is not None and restored.step == 5 and restored.host == {"cursor": 7}
    np.testing.assert_array_equal(restored.held["0"]["tokens"], np.arange(5))
    learner.restore(restored.state)

    def close(path, a, b):
        if master_dtype == "bfloat16":
            assert a.dtype == b.dtype == master_dtype and np.mean(a != b) < 0.01, path
            a, b = a.astype(np.float32), b.astype(np.float32)
            np.testing.assert_allclose(a, b, rtol=2**-6, atol=1e-3, err_msg=str(path))
            return
        scale = np.abs(b).max()
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-5, err_msg=str(path))

    two = jax.device_get(learner.params)
    jax.tree_util.tree_map_with_path(close, two, last)
    jax.tree_util.tree_map_with_path(close, last_of_eight, last)

    store = OrbaxStore(tmp_path / "weights", "bfloat16")
    assert store.versions() == [1, 2, 3, 4, 5]
    newest = store.latest()
    assert isinstance(newest, WeightsRef)
    served = store.read(newest)  # compares every fingerprint with what was read
    flat = jax.tree.map(lambda x: np.asarray(jax.numpy.bfloat16(x)), two)
    jax.tree.map(np.testing.assert_array_equal, served, flat)
    assert unflatten({"a.b": 1}) == {"a": {"b": 1}}
    checkpoints.close()
    learner.close()


# Whole runs -------------------------------------------------------------------------------------

TINY = ["--config=experiments/math.py:tiny", "--config.engine.own_process=True"]
TINY += ["--config.mesh.data=2", "--config.mesh.fsdp=4", "--config.batch.rows_per_microbatch=8"]
TINY += ["--config.checkpoint.every=1", "--config.eval_every=0", "--config.eval.at_start=False"]


def main(workdir: Path, *flags: str) -> list[str]:
    return ["-m", "telescope_jax.main", *TINY, f"--workdir={workdir}", *flags]


def start_two(
    started: list, workdir: Path, folder: Path, *flags: str, second: tuple[str, ...] = ()
) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    port, attempt = free_port(), len(started)
    logs = [folder / f"{attempt}_{process}.log" for process in range(2)]
    two = []
    for process, log in enumerate(logs):
        own = [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={process}"]
        more = second if process else ()
        two.append(start(main(workdir, *flags, *own, *more), 4, log))
    started += two
    return two, logs


def trained(workdir: Path) -> list[int]:
    path = workdir / "metrics" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [step["step"] for line in lines if "train/loss" in (step := json.loads(line))]


def checkpoints_of(workdir: Path) -> list[int]:
    """Steps of the whole ones."""
    return [int(path.name[5:11]) for path in (workdir / "checkpoints").glob("step_??????")]


@pytest.mark.deadline(400)
def test_a_killed_process_is_named_and_the_run_goes_on_in_two_and_then_in_one(
    tmp_path: Path, started
):
    """The others end within 30 s; CK-06 and CK-09 with processes."""
    workdir = tmp_path / "run"
    flags = ["--config.number_of_steps=500", "--config.warm_start.cache=False"]
    flags += ["--config.warm_start.until_probability=0.02"]  # examined by both processes
    (leader, follower), logs = start_two(started, workdir, tmp_path, *flags)
    while len(trained(workdir)) < 2 or not checkpoints_of(workdir):
        assert leader.poll() is None, logs[0].read_text()[-3000:]
        assert follower.poll() is None, logs[1].read_text()[-3000:]
        time.sleep(0.2)
    follower.kill()
    killed = time.monotonic()
    assert leader.wait(timeout=120) == PEER_EXIT_CODE, logs[0].read_text()[-3000:]
    assert time.monotonic() - killed < 30
    assert f"pid {follower.pid}) died: no sign of life" in logs[0].read_text()
    notes = json.loads((workdir / "run.json").read_text())
    assert "process 1 (" in notes["died"] and notes["exit_code"] == PEER_EXIT_CODE

    done = max(checkpoints_of(workdir))
    two, logs = start_two(started, workdir, tmp_path, f"--config.number_of_steps={done + 1}")
    for process, log in zip(two, logs, strict=True):
        assert process.wait(timeout=170) == 0, log.read_text()[-3000:]
    assert trained(workdir) == list(range(done + 1))
    assert "process 1 of 2 follows" in (workdir / "logs" / "process_00001.log").read_text()

    log = tmp_path / "alone.log"
    alone = start(main(workdir, f"--config.number_of_steps={done + 2}"), 8, log)
    started.append(alone)
    assert alone.wait(timeout=120) == 0, log.read_text()[-3000:]
    assert trained(workdir) == list(range(done + 2))
    assert "died" not in json.loads((workdir / "run.json").read_text())


@pytest.mark.deadline(120)
def test_processes_with_different_flags_are_refused_by_the_field(tmp_path: Path, started):
    two, logs = start_two(
        started, tmp_path / "run", tmp_path, second=("--config.optimizer.learning_rate=0.5",)
    )
    assert [process.wait(timeout=100) for process in two] == [2, 2], logs[0].read_text()[-3000:]
    words = "config.optimizer.learning_rate is 0.0004 on process 0 but 0.5 on process 1"
    assert all(words in log.read_text() for log in logs)
