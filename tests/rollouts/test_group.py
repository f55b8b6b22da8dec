"""A group attempt: all its rollouts or one reason."""

import asyncio
import random
from typing import Any

import pytest

from telescope_jax.interfaces import (
    EngineError,
    EngineLost,
    EnvError,
    PromptTooLong,
    RewardError,
    RewardTimeout,
)
from telescope_jax.ledger import Attempt, DropReason
from telescope_jax.rollouts.group import GroupFailed, play_group
from telescope_jax.types import Reward, Uid
from tests.rollouts.test_episode import PROMPT, Script, completion, episode
from tests.scripted import ScriptedEnv

ATTEMPT = Attempt(Uid(2, 5), 0)


class Env(ScriptedEnv):
    """Fails the third episode with `error`, after the others have sampled."""

    error: Exception | None = None
    played = 0

    async def play(self, prompt: Any, sample: Any) -> Reward:
        self.played += 1
        mine = self.played
        await sample()
        if mine == 3 and self.error:
            raise self.error
        if self.error:
            await asyncio.Event().wait()
        return Reward(float(mine))


def play(env: Env, size: int = 4) -> Any:
    def fresh(prompt: Any, attempt: Attempt, index: int) -> Any:
        return episode(Script(completion([9])), index)

    async def bounded() -> Any:
        return await asyncio.wait_for(play_group(env, fresh, PROMPT, ATTEMPT, size), 5)

    return asyncio.run(bounded())


def test_a_group_has_all_its_rollouts_in_order() -> None:
    group = play(Env(random.Random(0)))
    assert [rollout.reward.total for rollout in group.rollouts] == [1, 2, 3, 4]
    assert group.prompt is PROMPT and group.attempt == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineError("gone"), DropReason.ENGINE_ERROR),
        (EnvError("gone"), DropReason.ENV_ERROR),
        (RewardError("gone"), DropReason.REWARD_ERROR),
        (RewardTimeout("gone"), DropReason.REWARD_TIMEOUT),
        (PromptTooLong("gone"), DropReason.PROMPT_TOO_LONG),
        (ZeroDivisionError("gone"), DropReason.ENV_ERROR),
        (TimeoutError("gone"), DropReason.ENV_ERROR),
    ],
)
def test_one_failure_is_the_groups_and_cancels_its_siblings(
    error: Exception, reason: DropReason
) -> None:
    env = Env(random.Random(0))
    env.error = error
    with pytest.raises(GroupFailed, match="gone") as failure:
        play(env)
    assert failure.value.reason is reason


def test_a_lost_engine_is_not_the_groups_failure() -> None:
    env = Env(random.Random(0))
    env.error = EngineLost("all servers are gone")
    with pytest.raises(EngineLost, match="all servers are gone"):
        play(env)


def test_an_environment_may_score_its_rollouts_together() -> None:
    class Comparing(Env):
        def score_group(self, rollouts: Any) -> list[float]:
            best = max(rollout.reward.total for rollout in rollouts)
            return [float(rollout.reward.total == best) for rollout in rollouts]

    group = play(Comparing(random.Random(0)))
    assert [rollout.reward.total for rollout in group.rollouts] == [0, 0, 0, 1]


def test_scores_of_another_number_are_an_env_error() -> None:
    class Short(Env):
        def score_group(self, rollouts: Any) -> list[float]:
            return [1.0]

    with pytest.raises(GroupFailed, match="1 rewards for 4 rollouts"):
        play(Short(random.Random(0)))


def test_an_environment_that_cancels_itself_is_an_env_error() -> None:
    """Left alone, its task would end in silence and the group be in flight for ever."""

    class Cancels(Env):
        async def play(self, prompt: Any, sample: Any) -> Reward:
            await sample()
            raise asyncio.CancelledError

    with pytest.raises(GroupFailed, match="cancelled its own episode") as failure:
        play(Cancels(random.Random(0)))
    assert failure.value.reason is DropReason.ENV_ERROR


@pytest.mark.parametrize("answer", [None, 0.5, Reward("good")])  # type: ignore[arg-type]
def test_what_is_no_reward_is_an_env_error(answer: Any) -> None:
    class Wrong(Env):
        async def play(self, prompt: Any, sample: Any) -> Any:
            await sample()
            return answer

    with pytest.raises(GroupFailed, match="not a Reward with a number"):
        play(Wrong(random.Random(0)))
