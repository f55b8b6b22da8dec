"""Checkpoints: whole or passed over, on any mesh, bit for bit."""

import logging
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from telescope_jax.config import MeshConfig
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.learner.learner import describe
from telescope_jax.sharding import make_mesh, shardings


def state(step: int, mesh=(1, 1, 1), *, scale: float = 1.0) -> dict:
    """A small state of the learner's form: bfloat16 moments beside float32 parameters."""
    rng = np.random.default_rng(step)
    kernel = (scale * rng.normal(size=(8, 16))).astype(np.float32)
    params = {"layers": {"0": {"mlp": {"up": {"kernel": jnp.asarray(kernel)}}}}}
    moments = jax.tree.map(lambda x: (x / 3).astype(jnp.bfloat16), params)
    opt_state = ({"count": jnp.int32(step), "mu": moments},)
    on_mesh = make_mesh(MeshConfig(*mesh))
    return {
        "params": jax.device_put(params, shardings(params, on_mesh)),
        "opt_state": jax.device_put(opt_state, shardings(opt_state, on_mesh)),
        "step": jax.device_put(np.int32(step), NamedSharding(on_mesh, P())),
    }


def assert_same(found, expected) -> None:
    def same(a, b):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

    jax.tree.map(same, dict(found), dict(expected))


@pytest.fixture
def checkpoints(tmp_path: Path):
    made = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    yield made
    made.close()


def folder(checkpoints: Checkpoints, step: int) -> Path:
    return checkpoints._folder / f"step_{step:06d}"


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 2), (2, 2, 2), (1, 8, 1)], ids=str)
def test_a_state_comes_back_bit_for_bit_on_another_mesh(checkpoints, mesh):
    """CK-06, CK-16."""
    saved = state(3, (1, 4, 1))
    checkpoints.save(saved, host={"cursor": [0, 12], "ledger": {"trained": 7}})
    checkpoints.wait()
    wanted = describe(state(0, mesh))
    restored = checkpoints.restore(wanted)
    assert restored is not None and restored.step == 3
    assert restored.host == {"cursor": [0, 12], "ledger": {"trained": 7}}
    assert restored.held is None
    assert_same(restored.state, saved)
    for found, asked in zip(
        jax.tree.leaves(restored.state["params"]), jax.tree.leaves(wanted["params"]), strict=True
    ):
        assert found.sharding == asked.sharding


def test_held_arrays_of_any_shape_come_back(checkpoints):
    held = {"0": {"tokens": np.arange(5, dtype=np.int32), "mask": np.array([True, False])}}
    checkpoints.save(state(1), held=held)
    checkpoints.wait()
    restored = checkpoints.restore(describe(state(0)))
    assert restored is not None
    assert_same(restored.held, held)


def test_without_a_checkpoint_there_is_nothing_to_restore(checkpoints):
    assert checkpoints.restore(describe(state(0))) is None
    with pytest.raises(ValueError, match="no checkpoint of step 4"):
        checkpoints.restore(describe(state(0)), step=4)


def truncate(path: Path) -> None:
    for file in (path / "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: shutil.rmtree(path / "host"),
        lambda path: shutil.rmtree(path / "opt_state"),
        truncate,
        lambda path: [shutil.rmtree(path), path.mkdir()],
        lambda path: path.rename(path.with_name(f"{path.name}.orbax-checkpoint-tmp-0")),
    ],
    ids=["no host part", "no optimizer part", "cut files", "empty", "temporary name"],
)
def test_the_newest_whole_checkpoint_is_used_and_damaged_ones_are_named(
    checkpoints, damage, caplog
):
    """CK-01."""
    checkpoints.save(state(2))
    checkpoints.save(state(4))
    checkpoints.wait()
    damage(folder(checkpoints, 4))
    with caplog.at_level(logging.WARNING):
        restored = checkpoints.restore(describe(state(0)))
    assert restored is not None and restored.step == 2
    assert_same(restored.state, state(2))
    if folder(checkpoints, 4).exists():
        assert "passed over" in caplog.text and "step_000004" in caplog.text
    with pytest.raises(ValueError, match="step 4"):
        checkpoints.restore(describe(state(0)), step=4)
    checkpoints.save(state(4))
    checkpoints.wait()
    again = checkpoints.restore(describe(state(0)))
    assert again is not None and again.step == 4


def test_a_checkpoint_of_another_model_is_an_error_and_not_passed_over(checkpoints):
    """CK-15: lists what is missing and unexpected."""
    checkpoints.save(state(2))
    checkpoints.wait()
    wanted = describe(state(0))
    wanted["params"]["unembed"] = {"kernel": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    wanted["params"]["layers"]["0"]["mlp"] = {"down": wanted["params"]["layers"]["0"]["mlp"]["up"]}
    with pytest.raises(ValueError) as error:
        checkpoints.restore(wanted)
    assert "missing params/unembed/kernel" in str(error.value)
    assert "unexpected params/layers/0/mlp/up/kernel" in str(error.value)


def test_only_the_newest_stay(checkpoints):
    for step in (1, 2, 3, 4):
        checkpoints.save(state(step))
    checkpoints.wait()
    assert checkpoints.steps() == [3, 4]


def test_a_folder_that_cannot_be_deleted_is_a_warning(checkpoints, monkeypatch, caplog):
    """CK-09."""

    def refuse(path):
        raise PermissionError(f"{path} is held open")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("telescope_jax.learner.checkpoint.shutil.rmtree", refuse)
        for step in (1, 2, 3):
            checkpoints.save(state(step))
        checkpoints.wait()
        assert "step_000001 could not be deleted" in caplog.text
    assert checkpoints.steps() == [2, 3]
    assert len(list(checkpoints._folder.iterdir())) == 3, "the failed deletion left its folder"
    checkpoints.save(state(4))
    checkpoints.wait()
    assert sorted(entry.name for entry in checkpoints._folder.iterdir()) == [
        "step_000003",
        "step_000004",
    ]


def test_a_save_that_fails_in_the_background_is_raised_and_leaves_no_checkpoint(tmp_path):
    """CK-03: a disk without room, played by a limit on the size of a file."""
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises((OSError, ValueError), match="too large"):
            checkpoints.save(state(1))
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.steps() == []
    checkpoints.save(state(2))
    checkpoints.close()
    assert checkpoints.steps() == [2]
