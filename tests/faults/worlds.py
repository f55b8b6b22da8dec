"""Environments that do to a run what users' environments do."""

import time
from typing import Any

from telescope_jax.envs.arithmetic import Sums
from telescope_jax.types import Prompt, Reward, Uid


class Digits(Sums):
    """Rewards the share of digits in an answer, so that random weights have something to learn."""

    async def play(self, prompt: Prompt, sample: Any) -> Reward:
        text = (await sample()).text
        return Reward(sum(c.isdigit() for c in text) / 10)


class Naps(Digits):
    """Sleeps in the event loop once, instead of awaiting."""

    naps = 1

    async def play(self, prompt: Prompt, sample: Any) -> Reward:
        if prompt.uid.index % 2 and Naps.naps:
            Naps.naps -= 1
            time.sleep(3)  # the fault
        return await super().play(prompt, sample)


class Blocks(Digits):
    """Never gives the event loop back."""

    async def play(self, prompt: Prompt, sample: Any) -> Reward:
        while prompt.uid.epoch == 0:
            time.sleep(0.1)  # the fault
        return await super().play(prompt, sample)


class Broken(Digits):
    def prompt(self, uid: Uid, split: str = "train") -> Prompt:
        raise KeyError("column `question`")


class Empty(Digits):
    def __len__(self) -> int:
        return 0


class Plain:
    """The least that is an environment."""

    name = "plain"

    def __init__(self, tokenizer: Any, seed: int = 0, rewards: Any = None) -> None:
        self._sums = Sums(tokenizer)

    def __len__(self) -> int:
        return 9

    def prompt(self, uid: Uid, split: str = "train") -> Prompt:
        return self._sums.prompt(uid, split)

    async def play(self, prompt: Prompt, sample: Any) -> Reward:
        return Reward(float(len((await sample()).text)))
