"""The recording sampler: what was sampled is what is trained, and nothing else."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from telescope_jax.interfaces import EngineError, EnvError, PromptTooLong
from telescope_jax.ledger import Attempt
from telescope_jax.rollouts.episode import Episode, EpisodeSettings, sample_seed
from telescope_jax.types import (
    Completion,
    Prompt,
    Reward,
    SamplingParams,
    StopReason,
    Uid,
    VersionSpan,
)
from tests.scripted import ScriptedTokenizer

PROMPT = Prompt(Uid(2, 5), "scripted", np.array([4, 5, 6], np.int32), None)


def completion(
    tokens: Sequence[int],
    stop: StopReason = StopReason.EOS,
    spans: Sequence[tuple[int, int, int]] | None = None,
) -> Completion:
    spans = spans if spans is not None else [(0, 0, len(tokens))]
    return Completion(
        np.array(tokens, np.int32),
        -np.arange(1.0, len(tokens) + 1, dtype=np.float32),
        tuple(VersionSpan(*span) for span in spans),
        stop,
    )


class Script:
    """Answers in order, and keeps what it was asked."""

    version = 0

    def __init__(self, *answers: Completion) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        self.asked.append((list(tokens), sampling))
        if not self.answers:
            await asyncio.Event().wait()
        return self.answers.pop(0)


def episode(script: Any, index: int = 0, number: int = 0, **changes: Any) -> Episode:
    settings: dict[str, Any] = {"context": 20, "timeout_s": 5.0, "run_seed": 7} | changes
    return Episode(
        script,
        ScriptedTokenizer(),
        PROMPT,
        Attempt(PROMPT.uid, number),
        index,
        EpisodeSettings(SamplingParams(max_tokens=8, temperature=0.7), **settings),
    )


def test_one_turn_trains_exactly_the_sampled_tokens() -> None:
    """LM-16, LM-19, TK-05: the ids as sampled, an end token only where one was sampled."""

    async def play() -> Any:
        recording = episode(Script(completion([9, 8, 7], StopReason.LENGTH)))
        await recording.sample()
        return recording.finish(Reward(1.0))

    rollout = asyncio.run(play())
    assert rollout.tokens.tolist() == [4, 5, 6, 9, 8, 7]
    assert rollout.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert rollout.logprobs.tolist() == [0, 0, 0, -1, -2, -3]
    assert rollout.stop is StopReason.LENGTH
    assert rollout.versions == (VersionSpan(0, 3, 6),)


def test_later_turns_extend_the_same_history_and_mask_observations() -> None:
    """TK-07: turn 2 is asked with turn 1's ids, verbatim."""
    script = Script(completion([9, 1]), completion([8, 1], spans=[(3, 0, 1), (4, 1, 2)]))

    async def play() -> Any:
        recording = episode(script)
        turn = await recording.sample()
        assert turn.text == "j"  # token 9; the end token has no text
        await recording.sample([11, 12])
        return recording.finish(Reward(0.5))

    rollout = asyncio.run(play())
    assert script.asked[1][0] == [4, 5, 6, 9, 1, 11, 12]
    assert rollout.tokens.tolist() == [4, 5, 6, 9, 1, 11, 12, 8, 1]
    assert rollout.loss_mask.tolist() == [False] * 3 + [True, True, False, False, True, True]
    assert rollout.versions == (VersionSpan(0, 3, 5), VersionSpan(3, 7, 8), VersionSpan(4, 8, 9))
    assert rollout.oldest_version == 0 and rollout.turns == 2
    first, second = (sampling for _, sampling in script.asked)
    assert first.group == second.group and second.priority < first.priority


def test_rollouts_attempts_and_turns_have_seeds_of_their_own() -> None:
    """VL-08: equal seeds would make a group of equal completions."""
    seeds = set()
    for index in range(4):
        for number in range(2):
            script = Script(completion([9]), completion([9]))

            async def play(script: Script = script, index: int = index, n: int = number) -> None:
                recording = episode(script, index, n)
                await recording.sample()
                await recording.sample()

            asyncio.run(play())
            seeds |= {sampling.seed for _, sampling in script.asked}
    assert len(seeds) == 4 * 2 * 2
    assert sample_seed(1, "a") == sample_seed(1, "a") != sample_seed(1, "b")
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_full_context_ends_the_episode_with_a_value_and_samples_nothing() -> None:
    """VL-03, LM-26: overflow is a stop reason; max_tokens never exceeds the room."""
    script = Script(completion([9] * 4))

    async def play() -> Any:
        recording = episode(script, context=8)
        await recording.sample()
        turn = await recording.sample([1] * 3)
        assert turn.completion.stop is StopReason.TOO_LONG and turn.text == ""
        return recording.finish(Reward(0.0))

    rollout = asyncio.run(play())
    assert script.asked[0][1].max_tokens == 5 and len(script.asked) == 1
    assert len(rollout.tokens) == 7 and rollout.stop is StopReason.TOO_LONG


def test_a_prompt_that_leaves_no_room_at_all_is_refused_and_not_an_empty_answer() -> None:
    """VL-03: filtered with a count; asking again cannot help."""
    script = Script()
    with pytest.raises(PromptTooLong, match="3 tokens leaves no room in a context of 3"):
        asyncio.run(episode(script, context=3).sample())
    assert not script.asked


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (completion([], StopReason.ABORTED), "aborted"),
        (completion([]), "0 tokens"),
        (completion([9, 9], spans=[(0, 0, 1)]), "version spans"),
        (completion([9, 9], spans=[(0, 0, 1), (1, 0, 2)]), "version spans"),
        (
            Completion(
                np.array([9]), np.zeros(2, np.float32), (VersionSpan(0, 0, 1),), StopReason.EOS
            ),
            "1 tokens, 2 log-probs",
        ),
    ],
)
def test_a_half_answer_is_an_engine_error_and_never_a_row(answer: Completion, message: str) -> None:
    """VL-12: no zero-length row, no padding with zeros."""
    with pytest.raises(EngineError, match=message):
        asyncio.run(episode(Script(answer)).sample())


def test_an_engine_that_does_not_answer_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="no completion in 0.01 s"):
        asyncio.run(episode(Script(), timeout_s=0.01).sample())


def test_an_episode_without_a_sampled_token_is_an_env_error() -> None:
    """OR-12."""
    with pytest.raises(EnvError, match="without a sampled token"):
        episode(Script()).finish(Reward(1.0))


@pytest.mark.parametrize("total", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_env_error(total: float) -> None:
    async def play() -> Any:
        recording = episode(Script(completion([9])))
        await recording.sample()
        return recording.finish(Reward(total))

    with pytest.raises(EnvError, match="reward"):
        asyncio.run(play())
