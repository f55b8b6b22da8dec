"""What the benchmarks of the scheduler model instead of running: lengths, answers and the trainer.

The orchestrator, its books, episodes and packing are the real ones; `tests/scripted.py` joins them.
"""

import asyncio
import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from telescope_jax.interfaces import Sample
from telescope_jax.types import Completion, LossStats, Prompt, Reward, StopReason, VersionSpan
from tests.scripted import NO_STATS, ScriptedEnv, ScriptedStore, ScriptedTrainer


def heavy_tailed(rng: random.Random, *, mean: float, sigma: float, most: float) -> float:
    """A lognormal draw of mean `mean` (before the cut), at most `most` times the mean."""
    return mean * min(math.exp(rng.gauss(-(sigma**2) / 2, sigma)), most)


def answer(tokens: int, versions: tuple[VersionSpan, ...]) -> Completion:
    """A whole answer of `tokens` equal tokens."""
    return Completion(*_equal_tokens(tokens), versions, StopReason.EOS)


@functools.cache
def _equal_tokens(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(count, 3, np.int32), np.full(count, -1.0, np.float32)


def store_without_delay() -> ScriptedStore:
    return ScriptedStore(publish_s=0.0)


class DrawnRewards(ScriptedEnv):
    """One turn and a reward drawn at once: every group has a signal."""

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        await sample()
        return Reward(self.rng.random())


class InstantTrainer(ScriptedTrainer):
    """Takes no time."""

    async def update(self, batch: Sequence[Any]) -> LossStats:
        await asyncio.sleep(0)
        self.step += 1
        return NO_STATS
