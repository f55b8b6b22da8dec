"""A group attempt: G episodes of one prompt, all or nothing.

The attempt is atomic: when one episode fails its siblings are cancelled and the whole attempt ends
with one reason, so no group ever has fewer rollouts than its size and no failure poses as a reward
of 0. That discards good siblings; in return a straggler is never cut off for being long.
"""

import asyncio
import traceback
from dataclasses import replace

from telescope_jax.interfaces import (
    EngineError,
    EngineLost,
    EnvError,
    Environment,
    PromptTooLong,
    RewardError,
    RewardTimeout,
)
from telescope_jax.ledger import Attempt, DropReason
from telescope_jax.rollouts.episode import EpisodeFactory
from telescope_jax.types import Group, Prompt, Rollout


class GroupFailed(RuntimeError):
    """The attempt ended without a group; `reason` is for the ledger, `detail` for the events."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


_REASONS: tuple[tuple[type[Exception], DropReason], ...] = (
    # A subclass comes before its base.
    (RewardTimeout, DropReason.REWARD_TIMEOUT),
    (RewardError, DropReason.REWARD_ERROR),
    (EngineError, DropReason.ENGINE_ERROR),
    (PromptTooLong, DropReason.PROMPT_TOO_LONG),
    (EnvError, DropReason.ENV_ERROR),
)


async def play_group(
    env: Environment, episode: EpisodeFactory, prompt: Prompt, attempt: Attempt, size: int
) -> Group:
    """Plays `size` episodes of `prompt` at once and scores them.

    Raises:
      GroupFailed: one of them failed; the others were cancelled.
      EngineLost: the engine is gone for good, which is the run's end and not the group's.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            plays = [
                tasks.create_task(_play(env, episode, prompt, attempt, i)) for i in range(size)
            ]
    except BaseExceptionGroup as errors:
        raise _failure(errors.exceptions[0]) from None
    try:
        rollouts = score_together(env, tuple(task.result() for task in plays))
    except Exception as error:
        raise _failure(error) from None
    return Group(prompt, attempt.number, rollouts)


async def _play(
    env: Environment, episode: EpisodeFactory, prompt: Prompt, attempt: Attempt, index: int
) -> Rollout:
    recording = episode(prompt, attempt, index)
    try:
        return recording.finish(await env.play(prompt, recording.sample))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # by us
        # Left alone it would end this task in silence, and its group would never be heard of.
        raise EnvError("the environment cancelled its own episode") from error


def score_together(env: Environment, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    """Lets an environment that has `score_group` replace the rewards by comparing rollouts."""
    score = getattr(env, "score_group", None)
    if score is None:
        return rollouts
    rewards_G = score(rollouts)
    if len(rewards_G) != len(rollouts):
        raise EnvError(f"score_group gave {len(rewards_G)} rewards for {len(rollouts)} rollouts")
    return tuple(
        replace(rollout, reward=replace(rollout.reward, total=float(reward)))
        for rollout, reward in zip(rollouts, rewards_G, strict=True)
    )


def _failure(error: BaseException) -> BaseException:
    if isinstance(error, BaseExceptionGroup):
        return _failure(error.exceptions[0])
    if isinstance(error, EngineLost) or not isinstance(error, Exception):
        return error
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return GroupFailed(reason, f"{type(error).__name__}: {error}")
    # An environment is user code: whatever it raises is its failure, with the place where it rose.
    return GroupFailed(DropReason.ENV_ERROR, "".join(traceback.format_exception(error)))
