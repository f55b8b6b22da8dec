"""An environment that any policy can learn: the reward is the share of one token in the answer."""

import numpy as np

from telescope_jax.chat import Tokenizer
from telescope_jax.interfaces import Sample
from telescope_jax.scoring.reward_pool import RewardPool
from telescope_jax.types import Prompt, Reward, Uid


class ShareOfToken:
    name = "share"

    def __init__(
        self, tokenizer: Tokenizer, seed: int = 0, rewards: RewardPool | None = None
    ) -> None:
        del seed, rewards
        self._tokenizer = tokenizer
        (self._wanted,) = tokenizer.encode("7")

    def __len__(self) -> int:
        return 1_000

    def prompt(self, uid: Uid, split: str = "train") -> Prompt:
        tokens = np.asarray(self._tokenizer.prompt(f"{split} {uid.index % 100}"), np.int32)
        return Prompt(uid, self.name, tokens, None)

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        turn = await sample()
        return Reward(float(np.mean(turn.completion.tokens == self._wanted)))
