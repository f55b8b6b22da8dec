"""A run that goes on for days, or again and again in one process, holds what it held."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from telescope_jax.allocator import few_arenas
from telescope_jax.config import CheckpointConfig
from telescope_jax.interfaces import Checkpoint
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.learner.learner import describe
from telescope_jax.run_checkpoints import RunCheckpoints
from telescope_jax.tensorstore_json import free_what_tensorstore_keeps

ROOT = Path(__file__).resolve().parents[2]
LIVES = 3


@pytest.mark.deadline(600)
def test_a_life_of_a_run_leaves_no_array_thread_or_file_to_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.lives", str(tmp_path / "run"), str(LIVES)]
    environment = {**os.environ, "XLA_FLAGS": ""}
    process = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=580
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("left ")]
    left = [json.loads(line.removeprefix("left ")) for line in lines]
    assert len(left) == LIVES, process.stdout + process.stderr
    assert all(life["code"] == 0 for life in left)
    assert all(life["device_arrays"] == 0 and life["threads"] == 1 for life in left), left
    assert left[-1]["files"] <= left[0]["files"], left
    assert left[-1]["tensorstore"] <= left[0]["tensorstore"], left


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("what", ["save", "restore"])
def test_what_orbax_does_again_and_again_leaves_nothing_behind(tmp_path: Path, what: str) -> None:
    """Tensorstore keeps every key and value of JSON that it gives to Python, for ever: a restore of
    these 20 arrays left 300 objects, and each save another 50."""
    tree = {f"layer_{i}": jnp.full((8, 8), float(i)) for i in range(20)}
    state = {"params": tree, "step": np.int32(0)}
    held = {f"tokens_{i}": np.arange(9) for i in range(10)}
    checkpoints = Checkpoints(tmp_path, keep_last=1)

    def save() -> None:
        checkpoints.save(state, held=held)
        checkpoints.wait()

    save()
    structure = {"params": describe(tree), "step": None}
    actions = {"save": save, "restore": lambda: checkpoints.restore(structure)}
    for _ in range(2):  # what is made once
        actions[what]()
    grown = []
    for _ in range(5):
        before = objects()
        actions[what]()
        grown.append(objects() - before)
    # What leaks does so every time; what else this process holds, of tests before, comes and goes.
    assert min(grown) < 10, grown
    checkpoints.close()


SPECS: list[Any] = [
    {"driver": "zarr", "kvstore": {"driver": "memory", "path": "a, True/None 'x'/"}},
    {"driver": "zarr3", "kvstore": {"driver": "file", "path": "/tmp/ünï/"}, "dtype": "bfloat16"},
    {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": "/x/"},
        "metadata": {"shape": [3, 4], "chunks": [3, 4], "dtype": "<f4", "fill_value": None},
        "transform": {"input_exclusive_max": [[3], 4], "input_inclusive_min": [0, 0]},
    },
]


@pytest.mark.parametrize("spec", SPECS)
def test_the_json_that_is_read_from_text_is_tensorstores_own(spec: Any) -> None:
    free_what_tensorstore_keeps()
    for made in (tensorstore.Spec(spec), tensorstore.KvStore.Spec(spec["kvstore"])):
        again = type(made)(made.to_json())
        assert repr(again) == repr(made)


def test_a_cancelled_save_is_waited_for(tmp_path: Path) -> None:
    """Its thread went on alone, and whoever closed the checkpoints met a save half-way through."""
    goes_on, begun = threading.Event(), threading.Event()
    order = []

    class Slow(Checkpoints):
        def save(self, *args: Any, **named: Any) -> None:
            begun.set()
            goes_on.wait(60)
            super().save(*args, **named)
            order.append("saved")

    checkpoints = Slow(tmp_path, keep_last=1)
    saver = RunCheckpoints(checkpoints, CheckpointConfig(save_training_state=False))
    state = {"params": {"w": jnp.ones(4)}, "step": np.int32(3)}

    async def main() -> None:
        saving = asyncio.create_task(saver.save(Checkpoint(3, state, {}, (), ())))
        await asyncio.to_thread(begun.wait, 60)
        saving.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await saving
        order.append("ended")

    asyncio.run(main())
    assert order == ["saved", "ended"]
    checkpoints.close()
    assert checkpoints.steps() == [3]


@pytest.mark.skipif(sys.platform != "linux", reason="the arenas are glibc's")
def test_threads_share_few_arenas_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "64")
    assert not few_arenas()
    source = (
        "import ctypes, threading; from telescope_jax.allocator import few_arenas\n"
        "assert few_arenas()\n"
        "wait = threading.Barrier(33)\n"
        "def work(): kept = [bytes(600) for _ in range(99)]; wait.wait()\n"
        "threads = [threading.Thread(target=work) for _ in range(32)]\n"
        "[t.start() for t in threads]; wait.wait(); [t.join() for t in threads]\n"
        "ctypes.CDLL('libc.so.6').malloc_stats()\n"
    )
    environment = {n: v for n, v in os.environ.items() if n != "MALLOC_ARENA_MAX"}
    told = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert told.returncode == 0 and 1 <= told.stderr.count("Arena ") <= 2, told.stderr
