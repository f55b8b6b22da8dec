"""Evaluation of held-out prompts on one version, while training goes on.

Every prompt is answered greedily (`accuracy`) and, if asked for, once at the training temperature
(`sampled_accuracy`, which is what the reward curve estimates, on prompts that were never trained).
An episode that fails is tried again, then left out and counted: a failure is not a wrong answer.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from telescope_jax.interfaces import Engine, EngineLost, Environment, Sample, WeightStore
from telescope_jax.ledger import Attempt
from telescope_jax.types import Params, Prompt, Reward, Rollout, Uid

log = logging.getLogger(__name__)


Kind = Literal["greedy", "sampled"]


class Recording(Protocol):
    """An episode as an evaluator sees it; see rollouts/episode.py."""

    @property
    def sample(self) -> Sample: ...

    def finish(self, reward: Reward) -> Rollout: ...


class EvalError(RuntimeError):
    """Not one held-out prompt could be evaluated."""


class HeldOutEvaluator:
    """Evaluates `items` held-out prompts of one environment.

    Args:
      episode: a fresh episode on `engine`, at temperature 0 or at that of training.
      engine: one of its own holds a version while training goes on; when it is the training engine
        (`shares_engine`), the orchestrator keeps it at the version.
      sampled: whether each prompt is answered at the training temperature too.
      max_prompt_tokens: longer prompts are left out, with a warning.
      brief_tokens: the budget of training, where evals have a larger one: `brief_accuracy` counts
        greedy answers within it alone, which are those that it would have let end; 0 = off.
      max_attempts: tries at an episode before it is left out.

    Raises:
      ValueError: the environment has fewer held-out prompts than `items`, or all are too long.
    """

    def __init__(
        self,
        env: Environment,
        episode: Callable[[Prompt, Attempt, Kind], Recording],
        engine: Engine,
        store: WeightStore,
        *,
        items: int,
        max_prompt_tokens: int,
        brief_tokens: int = 0,
        sampled: bool = True,
        shares_engine: bool = False,
        max_attempts: int = 3,
    ) -> None:
        self._env, self._episode, self._engine, self._store = env, episode, engine, store
        self.shares_engine = shares_engine
        self._kinds: tuple[Kind, ...] = ("greedy", "sampled") if sampled else ("greedy",)
        self._max_attempts, self._brief_tokens = max_attempts, brief_tokens
        prompts = [env.prompt(Uid(0, index), split="eval") for index in range(items)]
        self._prompts = [p for p in prompts if len(p.tokens) <= max_prompt_tokens]
        if len(self._prompts) < items:
            shortest = min(len(prompt.tokens) for prompt in prompts)
            message = (
                f"{items - len(self._prompts)} of {items} held-out prompts of {env.name} are "
                f"longer than sampling.max_prompt_tokens={max_prompt_tokens} (the shortest has "
                f"{shortest})"
            )
            if not self._prompts:
                raise ValueError(f"{message}; raise it")
            log.warning("%s; they are left out of the evals", message)

    async def evaluate(self, version: int, params: Params) -> Mapping[str, float]:
        """`eval/<env>/…` of `version`.

        Raises:
          EvalError: every episode failed.
        """
        if not self.shares_engine:
            # Published by the deploy already, or now: a store writes the same version once.
            await self._engine.load(await self._store.publish(version, params))
        async with asyncio.TaskGroup() as tasks:
            playing = {
                kind: [tasks.create_task(self._play(prompt, kind)) for prompt in self._prompts]
                for kind in self._kinds
            }
        played = {kind: [task.result() for task in row] for kind, row in playing.items()}
        greedy, everything = played["greedy"], [r for row in played.values() for r in row]
        failed = sum(rollout is None for rollout in everything)
        if failed == len(everything):
            raise EvalError(f"all {failed} episodes of the eval of version {version} failed")
        values = {
            f"eval/{self._env.name}/accuracy": _mean_reward(greedy),
            f"eval/{self._env.name}/length": _mean_length(greedy),
            f"eval/{self._env.name}/items": float(len(self._prompts)),
            f"eval/{self._env.name}/failed": float(failed),
        }
        if "sampled" in played:
            values[f"eval/{self._env.name}/sampled_accuracy"] = _mean_reward(played["sampled"])
        if self._brief_tokens:
            values[f"eval/{self._env.name}/brief_accuracy"] = _mean_reward(
                greedy, within=self._brief_tokens
            )
        return values

    async def _play(self, prompt: Prompt, kind: Kind) -> Rollout | None:
        for number in range(self._max_attempts):
            episode = self._episode(prompt, Attempt(prompt.uid, number), kind)
            try:
                return episode.finish(await self._env.play(prompt, episode.sample))
            except EngineLost:
                raise
            except Exception as error:  # an environment is user code, as in rollouts/group.py
                log.warning(
                    "eval of %s of %s failed: %s: %s",
                    tuple(prompt.uid),
                    self._env.name,
                    type(error).__name__,
                    error,
                )
        return None


def _mean_reward(rollouts: Sequence[Rollout | None], within: float = np.inf) -> float:
    """Mean reward, where an answer of more than `within` sampled tokens earned nothing."""
    answered = [rollout for rollout in rollouts if rollout is not None]
    rewards = [r.reward.total if r.loss_mask.sum() <= within else 0.0 for r in answered]
    return float(np.mean(rewards or [np.nan]))


def _mean_length(rollouts: Sequence[Rollout | None]) -> float:
    return float(np.mean([r.loss_mask.sum() for r in rollouts if r is not None] or [np.nan]))
