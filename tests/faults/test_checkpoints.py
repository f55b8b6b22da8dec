"""Checkpoints under fire: whatever happens to the files, the newest whole one is used."""

import asyncio
import json
import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import CheckpointConfig
from telescope_jax.interfaces import Checkpoint
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.learner.fingerprint import differences, fingerprints
from telescope_jax.learner.learner import describe
from telescope_jax.run_checkpoints import RunCheckpoints


def state(step: int) -> dict[str, Any]:
    key = jax.random.key(step)
    params = {"layers": {"0": {"kernel": jax.random.normal(key, (16, 32))}}}
    return {"params": params, "opt_state": ({"mu": params},), "step": jnp.int32(step)}


def make(folder: Path, *steps: int, **options: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder, **{"keep_last": 2, **options})
    for step in steps:
        checkpoints.save(state(step), host={"cursor": step}, held={"tokens": np.arange(step + 3)})
    checkpoints.wait()
    return checkpoints


def largest(path: Path) -> Path:
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda file: file.stat().st_size)


def truncate(path: Path) -> None:
    file = largest(path / "params")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove(path: Path) -> None:
    largest(path / "opt_state").unlink()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(bytes(data))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    (file,) = (path / "host").rglob("metadata")
    written = json.loads(file.read_text())
    change(written)
    file.write_text(json.dumps(written))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, ""),
        (remove, ""),
        (lambda path: flip(largest(path / "params")), "params"),
        (lambda path: flip(largest(path / "opt_state")), ""),
        (lambda path: flip(largest(path / "held")), ""),
        (lambda path: rewrite(path, lambda w: w["host"].update(cursor=7)), "host part is not what"),
        (lambda path: rewrite(path, lambda w: w.update(format=2)), "format is 2 and this version"),
        (lambda path: next((path / "host").rglob("metadata")).unlink(), ""),
        (lambda path: next((path / "host").rglob("metadata")).write_text("{"), ""),
    ],
    ids=[
        "truncated",
        "missing",
        "bit-params",
        "bit-optimizer",
        "bit-held",
        "host",
        "newer",
        "no-host",
        "no-json",
    ],
)
def test_a_damaged_checkpoint_is_passed_over_by_name(
    tmp_path: Path, damage: Callable[[Path], Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """CK-01: and the step is saved again beside it."""
    make(tmp_path, 2, 4).close()
    damage(tmp_path / "step_000004")
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    with caplog.at_level(logging.WARNING):
        restored = checkpoints.restore(describe(state(0)))
    assert restored is not None and restored.step == 2 and restored.host == {"cursor": 2}
    assert not differences(fingerprints(restored.state), fingerprints(state(2)))
    assert "passed over" in caplog.text and "step_000004" in caplog.text and words in caplog.text
    assert checkpoints.steps() == [2, 4], "nothing is deleted before there is something newer"
    checkpoints.save(state(4))
    checkpoints.close()
    assert [p.name for p in tmp_path.iterdir()] == ["step_000004.1"]
    again = Checkpoints(tmp_path, keep_last=1).restore(describe(state(0)))
    assert again is not None and again.step == 4


def test_one_flipped_bit_of_any_kind_of_array_changes_its_fingerprint() -> None:
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(3, 5)).astype(np.float32),
        rng.integers(0, 99, (7,)),
        np.asarray(jnp.ones((4, 4), jnp.bfloat16) / 3),
        np.array([True, False, True]),
        np.int32(9) * np.ones((), np.int32),
    ]
    for array in arrays:
        before = fingerprints({"x": array})
        raw = bytearray(array.tobytes())
        bits = range(8 * len(raw)) if array.dtype != bool else range(0, 8 * len(raw), 8)
        for bit in bits:
            changed = bytearray(raw)
            changed[bit // 8] ^= 1 << bit % 8
            other = np.frombuffer(bytes(changed), array.dtype).reshape(array.shape)
            assert fingerprints({"x": other}) != before, (array.dtype, bit)
        assert fingerprints({"x": np.array(array)}) == before
        assert fingerprints({"x": jnp.asarray(array)}) == before or array.dtype.itemsize == 8
    a, b = np.array([1.0, 2.0], np.float32), np.array([2.0, 1.0], np.float32)
    assert fingerprints({"x": a}) != fingerprints({"x": b})


def test_retention_keeps_the_newest_and_the_multiples(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, *range(1, 9), keep_last=2, keep_every=3)
    assert checkpoints.steps() == [3, 6, 7, 8]
    checkpoints.close()


def test_what_another_process_reads_is_deleted_when_it_has_been_read(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 1, keep_last=1)
    lock = "import fcntl,os,sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)"
    reader = subprocess.Popen(
        ["python3", "-c", f"{lock}; print(1, flush=True); input()", str(tmp_path / "step_000001")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert reader.stdout is not None and reader.stdout.readline()
    checkpoints.save(state(2))
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    reader.communicate(b"\n")
    checkpoints.save(state(3))
    checkpoints.close()
    assert checkpoints.steps() == [3]


def test_saving_a_step_again_never_leaves_less_than_before(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 4, keep_last=1)
    checkpoints.save(state(4), host={"cursor": 5})
    assert (tmp_path / "step_000004").is_dir(), "the first is there until the second is"
    checkpoints.close()
    restored = Checkpoints(tmp_path, keep_last=1).restore(describe(state(0)))
    assert restored is not None and restored.host == {"cursor": 5}
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_save_left_is_cleared_away_at_the_next_one(tmp_path: Path) -> None:
    make(tmp_path, 2).close()
    (tmp_path / "step_000004.orbax-checkpoint-tmp-17" / "params").mkdir(parents=True)
    checkpoints = make(tmp_path)
    assert checkpoints.steps() == [2]
    checkpoints.save(state(4))
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000004"]


def test_evals_that_were_due_come_back_with_their_parameters(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(state(9), evals={4: state(4)["params"], 8: state(8)["params"]})
    checkpoints.wait()
    restored = checkpoints.restore(describe(state(0)))
    assert restored is not None and sorted(restored.evals) == [4, 8]
    for version, params in restored.evals.items():
        assert fingerprints(params) == fingerprints(state(version)["params"])
    checkpoints.close()


def test_weights_only_can_be_exported_and_not_gone_on_from(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    whole = state(3)
    checkpoints.save({name: whole[name] for name in ("params", "step")})
    checkpoints.wait()
    assert sorted(p.name for p in (tmp_path / "step_000003").iterdir() if p.is_dir()) == [
        "host",
        "params",
    ]
    found = checkpoints.restore_params(describe(state(0)["params"]))
    assert found is not None and fingerprints(found[1]) == fingerprints(whole["params"])
    with pytest.raises(ValueError, match="holds weights only .*save_training_state=False"):
        checkpoints.restore(describe(state(0)))
    checkpoints.close()


def test_a_damaged_checkpoint_takes_no_whole_ones_place(tmp_path: Path) -> None:
    make(tmp_path, 2, 4).close()
    truncate(tmp_path / "step_000004")
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    restored = checkpoints.restore(describe(state(0)))
    assert restored is not None and restored.step == 2
    checkpoints.save(state(3))
    checkpoints.close()
    assert checkpoints.steps() == [2, 3, 4], "two whole ones, and what a person may look into"


@pytest.mark.parametrize("whole", [True, False])
def test_the_config_decides_whether_more_than_weights_is_kept(tmp_path: Path, whole: bool) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    saver = RunCheckpoints(checkpoints, CheckpointConfig(save_training_state=whole))
    due = ((2, state(2)["params"]),)
    asyncio.run(saver.save(Checkpoint(3, state(3), {"cursor": 9}, (), due)))
    asyncio.run(saver.finish())
    found = {path.name for path in (tmp_path / "step_000003").iterdir() if path.is_dir()}
    assert found == {"params", "host"} | ({"opt_state", "evals"} if whole else set())
    (host,) = (tmp_path / "step_000003" / "host").rglob("metadata")
    assert ("cursor" in host.read_text()) == whole
    checkpoints.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB that is really full when it is."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs may not be mounted here; RLIMIT_FSIZE plays it in test_checkpoint.py")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_a_full_disk_costs_the_save_and_not_what_was_saved_before(small_disk: Path) -> None:
    """CK-03."""
    checkpoints = make(small_disk / "checkpoints", 1)
    fill(small_disk)
    with pytest.raises((OSError, ValueError), match="(?i)no space|RESOURCE_EXHAUSTED"):
        checkpoints.save(state(2))
        checkpoints.wait()
    assert checkpoints.steps() == [1]
    restored = checkpoints.restore(describe(state(0)))
    assert restored is not None and restored.step == 1
    (small_disk / "filler").unlink()
    checkpoints.save(state(3))
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]
    assert not list((small_disk / "checkpoints").glob("*tmp*")), "half a save takes room for ever"
