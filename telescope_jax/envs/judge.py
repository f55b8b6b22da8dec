"""What a grader's failure means: the one policy between environments and the reward pool.

An answer that runs into its own limits (deadline, memory) twice, in fresh processes, is a wrong
answer: reward 0 and the tag `grader_limit`. Everything else that goes wrong is infrastructure and
stays an exception, because a missing reward is never reward 0.
"""

from typing import Any

from telescope_jax.envs.grading import Gold, extract_answer, gold_text, normalize, quick_grade
from telescope_jax.scoring.reward_pool import AnswerLimit, RewardPool
from telescope_jax.types import Reward

LIMIT_TAG = "grader_limit"


async def score_in_pool(
    pool: RewardPool, function: str, *args: Any, given: tuple[Any, ...] | None = None
) -> Reward:
    """The reward that `function(*args)` gives when it is run in the pool.

    Args:
      function: returns a number, or a dict of a Reward's fields.
      given: see `RewardPool.call`.

    Raises:
      RewardTimeout: a worker did not answer.
      RewardError: the function raised, or its worker died of something else than its limits.
    """
    for _ in range(2):
        try:
            value = await pool.call(function, *args, given=given)
        except AnswerLimit:
            continue
        if isinstance(value, dict):
            return Reward(value["total"], value.get("parts", {}), tuple(value.get("tags", ())))
        return Reward(float(value))
    return Reward(0.0, tags=(LIMIT_TAG,))


async def grade_in_pool(pool: RewardPool, gold: Gold, completion: str) -> Reward:
    """Grades as `grading.grade` does; numbers and equal texts never leave this process.

    Raises:
      RewardTimeout, RewardError: no verdict, see `score_in_pool`.
    """
    verdict = quick_grade(gold, completion)
    if verdict is not None:
        return Reward(verdict)
    answer = extract_answer(completion)
    assert answer is not None  # or there was a verdict
    # The worker imports and warms up the algebra before it forks; the call itself is short.
    pair = normalize(gold_text(gold)), normalize(answer)
    return await score_in_pool(pool, "telescope_jax.envs.symbolic:equal", *pair)
