"""Evaluation of held-out prompts on one version, while training goes on.

Every prompt is answered twice: greedily (`accuracy`) and once at the training temperature
(`sampled_accuracy`, which is what the reward curve estimates, on prompts that were never trained).
An episode that fails is tried again, then left out and counted: a failure is not a wrong answer.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from telescope_jax.chat import Tokenizer
from telescope_jax.interfaces import (
    Engine,
    EngineError,
    Environment,
    EnvError,
    RewardError,
    WeightStore,
)
from telescope_jax.ledger import Attempt
from telescope_jax.rollouts.episode import Episode, EpisodeSettings
from telescope_jax.types import Params, Prompt, Rollout, Uid

log = logging.getLogger(__name__)


class EvalError(RuntimeError):
    """Not one held-out prompt could be evaluated."""


class HeldOutEvaluator:
    """Evaluates `items` held-out prompts of one environment.

    Args:
      engine: plays the episodes. One of its own holds a version while training goes on; when it is
        the training engine (`shares_engine`), the orchestrator keeps it at the version.
      settings: as in training; greedy episodes only change the temperature.
      max_attempts: tries at an episode before it is left out.

    Raises:
      ValueError: the environment has fewer held-out prompts than `items`.
    """

    def __init__(
        self,
        env: Environment,
        tokenizer: Tokenizer,
        engine: Engine,
        store: WeightStore,
        settings: EpisodeSettings,
        *,
        items: int,
        shares_engine: bool = False,
        max_attempts: int = 3,
    ) -> None:
        self._env, self._tokenizer, self._engine, self._store = env, tokenizer, engine, store
        self.shares_engine = shares_engine
        self._max_attempts = max_attempts
        greedy = replace(settings, sampling=replace(settings.sampling, temperature=0.0))
        self._settings = {"greedy": greedy, "sampled": settings}
        self._prompts = [env.prompt(Uid(0, index), split="eval") for index in range(items)]

    async def evaluate(self, version: int, params: Params) -> Mapping[str, float]:
        """`eval/<env>/…` of `version`.

        Raises:
          EvalError: every episode failed.
        """
        if not self.shares_engine:
            # Published by the deploy already, or now: a store writes the same version once.
            await self._engine.load(await self._store.publish(version, params))
        async with asyncio.TaskGroup() as tasks:
            plays = {
                kind: [tasks.create_task(self._play(prompt, kind)) for prompt in self._prompts]
                for kind in self._settings
            }
        greedy, sampled = ([task.result() for task in plays[kind]] for kind in self._settings)
        failed = sum(rollout is None for rollout in [*greedy, *sampled])
        if failed == len(greedy) + len(sampled):
            raise EvalError(f"all {failed} episodes of the eval of version {version} failed")
        return {
            f"eval/{self._env.name}/accuracy": _mean_reward(greedy),
            f"eval/{self._env.name}/sampled_accuracy": _mean_reward(sampled),
            f"eval/{self._env.name}/length": _mean_length(greedy),
            f"eval/{self._env.name}/items": float(len(self._prompts)),
            f"eval/{self._env.name}/failed": float(failed),
        }

    async def _play(self, prompt: Prompt, kind: str) -> Rollout | None:
        for number in range(self._max_attempts):
            episode = Episode(
                self._engine,
                self._tokenizer,
                prompt,
                Attempt(prompt.uid, number),
                0,
                self._settings[kind],
                purpose=f"eval-{kind}",
            )
            try:
                return episode.finish(await self._env.play(prompt, episode.sample))
            except (EngineError, EnvError, RewardError) as error:
                log.warning("eval of %s failed: %s: %s", prompt.uid, type(error).__name__, error)
        return None


def _mean_reward(rollouts: Sequence[Rollout | None]) -> float:
    return float(np.mean([r.reward.total for r in rollouts if r is not None] or [np.nan]))


def _mean_length(rollouts: Sequence[Rollout | None]) -> float:
    return float(np.mean([r.loss_mask.sum() for r in rollouts if r is not None] or [np.nan]))
