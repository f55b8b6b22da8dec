"""Checkpoints and published versions are written side by side."""

import asyncio
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.weights.store import OrbaxStore


@pytest.mark.deadline(120)
def test_a_store_publishes_while_checkpoints_are_saved(tmp_path: Path) -> None:
    """Unlocked, a save waited for the other one's folders, then failed or hung (seen on a run)."""
    store = OrbaxStore(tmp_path / "weights")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    tree = {f"layer_{i}": {"kernel": jnp.full((64, 64), float(i))} for i in range(12)}

    async def publish() -> None:
        for version in range(20):
            ref = await store.publish(version, tree)
            assert store.read(ref)["layer_3"]["kernel"][0, 0] == 3.0

    async def save() -> None:
        for step in range(10):
            state = {"params": tree, "step": np.asarray(step, np.int32)}
            await asyncio.to_thread(checkpoints.save, state, host={"step": step})
        await asyncio.to_thread(checkpoints.wait)

    async def both() -> None:
        await asyncio.gather(publish(), save())

    asyncio.run(both())
    assert checkpoints.steps() == [8, 9]
    assert len(store.versions()) == 20
    checkpoints.close()
    store.close()
