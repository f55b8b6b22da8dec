"""What a server can answer, and an environment return, that is wrong; see bad_inputs.py."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from telescope_jax.inference.vllm_server import VllmClient
from telescope_jax.rollouts.group import score_together
from telescope_jax.types import Completion, Reward, StopReason, VersionSpan
from tests.bad_inputs import case


def answered(**choice: Any) -> None:
    async def main() -> None:
        client = VllmClient(
            "http://127.0.0.1:1",
            "key",
            "stub",
            eos_ids=(1,),
            context=64,
            vocab_size=16,
            timeout_s=1.0,
        )
        try:
            client._completion(choice)
        finally:
            await client.close()

    asyncio.run(main())


def choice(tokens: list[Any], logprobs: list[Any] | None, reason: str = "stop") -> dict[str, Any]:
    content = None
    if logprobs is not None:
        pairs = zip(tokens, logprobs, strict=False)
        content = [{"token_id": token, "logprob": value} for token, value in pairs]
    return {
        "token_ids": tokens,
        "logprobs": {"content": content},
        "finish_reason": reason,
        "stop_reason": 1,
        "weight_versions": [{"version": 3, "start": 0, "end": len(tokens)}],
    }


@case
def server_answer_without_choices(tmp: Path) -> None:
    answered(error="busy")


@case
def server_answer_with_too_few_log_probs(tmp: Path) -> None:
    answered(choices=[choice([3, 4], [-1.0])])


@case
def server_answer_without_log_probs(tmp: Path) -> None:
    answered(choices=[choice([3, 4], None)])


@case
def server_answer_with_a_log_prob_that_is_not_finite(tmp: Path) -> None:
    answered(choices=[choice([3, 4], [-1.0, float("nan")])])


@case
def server_answer_with_a_log_prob_that_is_null(tmp: Path) -> None:
    answered(choices=[choice([3, 4], [-1.0, None])])


@case
def server_answer_with_a_log_prob_that_is_text(tmp: Path) -> None:
    answered(choices=[choice([3, 4], [-1.0, "-oo"])])


@case
def server_answer_of_no_tokens(tmp: Path) -> None:
    answered(choices=[choice([], [])])


def played(completion: Completion | None, reward: Any = None) -> None:
    from tests.rollouts.test_episode import Script, episode

    async def main() -> None:
        recording = episode(Script(*([completion] if completion else [])))
        if completion is not None:
            await recording.sample()
        recording.finish(Reward(1.0) if reward is None else reward)

    asyncio.run(main())


def completion(
    tokens: int, logprobs: int, spans: list[tuple[int, int, int]], stop: StopReason = StopReason.EOS
) -> Completion:
    versions = tuple(VersionSpan(*span) for span in spans)
    return Completion(np.ones(tokens, np.int32), np.zeros(logprobs, np.float32), versions, stop)


WHOLE = completion(2, 2, [(0, 0, 2)])


@case
def completion_without_tokens(tmp: Path) -> None:
    played(completion(0, 0, []))


@case
def completion_with_too_few_log_probs(tmp: Path) -> None:
    played(completion(3, 2, [(0, 0, 3)]))


@case
def completion_whose_versions_leave_a_gap(tmp: Path) -> None:
    played(completion(3, 3, [(0, 0, 1), (1, 2, 3)]))


@case
def completion_that_was_aborted(tmp: Path) -> None:
    played(completion(2, 2, [(0, 0, 2)], StopReason.ABORTED))


@case
def reward_that_is_not_a_number(tmp: Path) -> None:
    played(WHOLE, Reward(float("nan")))


@case
def reward_that_is_no_reward(tmp: Path) -> None:
    played(WHOLE, 1.0)


@case
def episode_that_never_sampled(tmp: Path) -> None:
    played(None)


@case
def group_scores_of_another_length(tmp: Path) -> None:
    class Scores:
        def score_group(self, rollouts: Any) -> list[float]:
            return [1.0]

    score_together(Scores(), (object(), object()))  # type: ignore[arg-type]
