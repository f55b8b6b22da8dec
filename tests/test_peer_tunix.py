"""Our half of the benchmark against google-tunix does what it times."""

import asyncio

import jax
import numpy as np

from experiments.benchmarks.peer_tunix import NEW_TOKENS, TINY, Ours, Shape
from experiments.benchmarks.policies import random_params


def test_a_synchronous_step_trains_and_brings_the_weights_to_the_engine():
    async def steps():
        ours = Ours(TINY, Shape(2, 2, 64, 2), random_params(TINY))
        try:
            await ours.load(0)
            before = ours.learner.params
            parts = [await ours.step() for _ in range(2)]
            return before, ours.learner.params, ours.version, parts
        finally:
            await ours.close()

    before, after, served, (_, second) = asyncio.run(steps())
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, after)
    assert max(jax.tree.leaves(moved)) > 0
    assert served == 2
    assert second["compilations"] == 0
    assert second["tokens"] == 2 * 2 * NEW_TOKENS
