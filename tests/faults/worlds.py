"""Environments that do to a run what users' environments do."""

from typing import Any

from telescope_jax.envs.arithmetic import Sums
from telescope_jax.types import Prompt, Reward


class Digits(Sums):
    """Rewards the share of digits in an answer, so that random weights have something to learn."""

    async def play(self, prompt: Prompt, sample: Any) -> Reward:
        text = (await sample()).text
        return Reward(sum(c.isdigit() for c in text) / 10)
