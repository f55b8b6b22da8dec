"""The store of versions: what is committed is whole, and what is not is not there."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath

from telescope_jax.types import WeightsRef
from telescope_jax.weights.store import MemoryStore, OrbaxStore, WeightsError, flatten, unflatten

ROOT = Path(__file__).resolve().parents[2]


def params(seed: int = 0) -> dict:
    """Nested as the decoder's are, with a scalar and a matrix that float32 alone can hold."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "embed": {"embedding": jax.random.normal(keys[0], (7, 4))},
        "layers": {
            "0": {"attention": {"q": {"kernel": jax.random.normal(keys[1], (4, 4))}}},
            "1": {"attention": {"q": {"kernel": jax.random.normal(keys[2], (4, 4))}}},
        },
        "final_norm": {"scale": jnp.float32(1 + seed)},
    }


def publish(store: OrbaxStore | MemoryStore, version: int, seed: int | None = None) -> WeightsRef:
    return asyncio.run(store.publish(version, params(version if seed is None else seed)))


def prune(store: OrbaxStore | MemoryStore, *keep: int) -> None:
    asyncio.run(store.prune(keep))


def assert_same(read: dict, published: dict, dtype: np.dtype) -> None:
    flat, expected = flatten(read), flatten(published)
    assert flat.keys() == expected.keys()
    for name, array in flat.items():
        assert array.dtype == dtype
        assert array.shape == expected[name].shape
        np.testing.assert_array_equal(array, np.asarray(expected[name]).astype(dtype))


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_what_is_read_is_what_was_published_in_the_serving_dtype(tmp_path: Path, name, dtype):
    store = OrbaxStore(tmp_path / "weights", name)
    ref = publish(store, 3)
    assert (ref.version, store.versions(), store.latest()) == (3, [3], ref)
    elsewhere = OrbaxStore(**store.elsewhere()["arguments"])
    assert_same(elsewhere.read(ref), params(3), np.dtype(dtype))
    store.close()


def test_an_empty_store_has_no_latest_version(tmp_path: Path):
    """OR-22: a fresh run finds nothing, and does not fail for it."""
    store = OrbaxStore(tmp_path / "nowhere")
    assert store.latest() is None
    prune(store)
    assert not (tmp_path / "nowhere").exists()


def test_flattening_is_undone_by_unflattening_and_refuses_ambiguous_names():
    tree = params()
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, unflatten(flatten(tree)), tree))
    with pytest.raises(ValueError, match=r"'a\.b' holds a dot"):
        flatten({"a.b": jnp.zeros(2)})


def test_a_writer_killed_before_its_commit_leaves_no_version(tmp_path: Path):
    """The process dies at the rename that commits; then another writer takes over."""
    script = """
import asyncio, os, pathlib, sys
import jax.numpy as jnp
from telescope_jax.weights.store import OrbaxStore
rename = os.rename
def die_at_commit(source, target, *args, **kwargs):
    if pathlib.Path(target).name == "00000002":
        os._exit(9)
    return rename(source, target, *args, **kwargs)
store = OrbaxStore(sys.argv[1])
publish = lambda version: asyncio.run(store.publish(version, {"x": jnp.full(4, float(version))}))
publish(1)
os.rename = os.replace = die_at_commit
publish(2)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=120,
        capture_output=True,
    )
    assert done.returncode == 9, done.stderr.decode()
    store = OrbaxStore(tmp_path)
    latest = store.latest()
    assert latest is not None
    assert (latest.version, store.versions()) == (1, [1])
    assert len(list(tmp_path.iterdir())) == 2  # the leftover is there, and is no version
    publish(store, 2)
    prune(store, 1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000002"]
    store.close()


def _tensor_files(ref: WeightsRef, name: str) -> list[Path]:
    files = (Path(ref.path) / "weights" / name).iterdir()
    return [path for path in files if not path.name.startswith(".")]


def test_two_tensors_that_changed_places_are_damage(tmp_path: Path):
    """Same shapes, same bytes in all: only a fingerprint a tensor can tell."""
    store = OrbaxStore(tmp_path)
    ref = publish(store, 1)
    first, second = (
        _tensor_files(ref, f"layers.{layer}.attention.q.kernel")[0] for layer in (0, 1)
    )
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    second.write_bytes(content[0])
    with pytest.raises(WeightsError, match=r"version 1 .* is damaged: 2 of 4 tensors"):
        store.read(ref)


# tensorstore's other reads of the tree end after orbax has closed its event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_tensor_is_refused_with_one_clear_error(tmp_path: Path, damage: str):
    """CK-01: cut files, rotten bits and missing files never come back as weights."""
    store = OrbaxStore(tmp_path)
    ref = publish(store, 1)
    (file,) = _tensor_files(ref, "embed.embedding")
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 0x40]) + content[-2:])
    else:
        file.unlink()
    with pytest.raises(WeightsError, match="version 1"):
        store.read(ref)


def test_a_reference_to_bits_that_were_replaced_is_refused(tmp_path: Path):
    store = OrbaxStore(tmp_path)
    old = publish(store, 1, seed=1)
    new = publish(store, 1, seed=2)
    assert_same(store.read(new), params(2), np.dtype(np.float32))
    with pytest.raises(WeightsError, match="was replaced"):
        store.read(old)


def test_publishing_the_same_bits_again_writes_nothing(tmp_path: Path):
    """A resumed run publishes the step that it resumed from (OR-20)."""
    store = OrbaxStore(tmp_path)
    ref = publish(store, 4)
    before = Path(ref.path).stat().st_mtime_ns, Path(ref.path).stat().st_ino
    assert publish(store, 4) == ref
    assert (Path(ref.path).stat().st_mtime_ns, Path(ref.path).stat().st_ino) == before


def test_a_version_whose_metadata_is_broken_is_passed_over_and_named(tmp_path: Path, caplog):
    """CK-01: the newest whole version is used, with a warning that names the other."""
    store = OrbaxStore(tmp_path)
    whole = publish(store, 1)
    broken = publish(store, 2)
    (Path(broken.path) / "metadata" / "metadata").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert store.latest() == whole
    assert "version 2" in caplog.text
    assert publish(store, 2) == broken
    assert store.latest() == broken


def test_pruning_keeps_what_it_is_told_to(tmp_path: Path):
    store = OrbaxStore(tmp_path)
    refs = [publish(store, version) for version in range(4)]
    prune(store, 1, 3)
    assert store.versions() == [1, 3]
    with pytest.raises(WeightsError, match=r"version 0 .* is gone; load latest"):
        store.read(refs[0])


def test_a_deletion_that_fails_is_a_warning_and_tried_again(tmp_path: Path, monkeypatch, caplog):
    """CK-09: housekeeping never ends a run."""
    store = OrbaxStore(tmp_path)
    for version in range(3):
        publish(store, version)
    path_type = type(epath.Path(tmp_path))

    def refuse(self, *args, **kwargs):
        raise PermissionError(f"held open: {self.name}")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(path_type, "rmtree", refuse)
        prune(store, 2)
    assert "held open" in caplog.text
    assert store.versions() == [2]
    assert len(list(tmp_path.iterdir())) == 3
    prune(store, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["00000002"]


def test_two_pruners_may_race(tmp_path: Path, caplog):
    """CK-09: what somebody else deleted is deleted."""
    first, second = OrbaxStore(tmp_path), OrbaxStore(tmp_path)
    for version in range(6):
        publish(first, version)

    async def race() -> None:
        await asyncio.gather(*(store.prune([5]) for store in (first, second) * 3))

    asyncio.run(race())
    assert first.versions() == [5]
    assert [path.name for path in tmp_path.iterdir()] == ["00000005"]
    assert second.latest() is not None


def test_the_event_loop_lives_while_weights_are_written(tmp_path: Path):
    store = OrbaxStore(tmp_path)
    gaps = []

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)

    async def run() -> None:
        await store.publish(0, params())
        ticking = asyncio.create_task(tick())
        await store.publish(1, params(1))
        ticking.cancel()

    asyncio.run(run())
    assert len(gaps) >= 3


def test_a_failed_write_is_the_publishers_error(tmp_path: Path):
    """CK-03: nothing fails silently in the background."""
    (tmp_path / "file").write_text("not a folder")
    store = OrbaxStore(tmp_path / "file")
    with pytest.raises(OSError):
        publish(store, 0)


def test_memory_holds_the_very_arrays_until_they_are_pruned():
    store, mine = MemoryStore(), params()
    ref = asyncio.run(store.publish(7, mine))
    assert store.read(ref) is mine
    assert store.latest() == ref
    publish(store, 8)
    prune(store, 8)
    with pytest.raises(WeightsError, match="version 7 is gone"):
        store.read(ref)
    assert store.elsewhere() is None
