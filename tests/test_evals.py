"""Evaluation of held-out prompts, on scripted engines and environments."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from telescope_jax.evals import EvalError, HeldOutEvaluator, Kind
from telescope_jax.interfaces import EngineError
from telescope_jax.ledger import Attempt
from telescope_jax.rollouts.episode import Episode, EpisodeSettings
from telescope_jax.types import Prompt, Reward, SamplingParams
from tests.scripted import ScriptedEngine, ScriptedEnv, ScriptedStore, ScriptedTokenizer
from tests.virtual_clock import run_virtual


class GreedyIsRight(ScriptedEnv):
    async def play(self, prompt: Prompt, sample: Any) -> Reward:
        turn = await sample()
        return Reward(float(turn.completion.logprobs[0] == 0.0))


class GreedyEngine(ScriptedEngine):
    """Marks greedy answers by their log-prob; fails the first `failures` requests."""

    failures = 0

    async def sample(self, tokens: Any, sampling: SamplingParams) -> Any:
        completion = await super().sample(tokens, sampling)
        if self.failures:
            self.failures -= 1
            raise EngineError("scripted")
        if sampling.temperature == 0.0:
            completion.logprobs[:] = 0.0
        return completion


def build(
    engine: GreedyEngine,
    rng: random.Random,
    items: int,
    limit: int = 8,
    brief: int = 0,
    twice: bool = True,
) -> HeldOutEvaluator:
    sampled = EpisodeSettings(SamplingParams(max_tokens=4), 16, 60.0, 0)
    greedy = replace(sampled, sampling=replace(sampled.sampling, temperature=0.0))

    def episode(prompt: Prompt, attempt: Attempt, kind: Kind) -> Episode:
        settings = {"greedy": greedy, "sampled": sampled}[kind]
        return Episode(engine, ScriptedTokenizer(), prompt, attempt, 0, settings, purpose=kind)

    return HeldOutEvaluator(
        GreedyIsRight(rng),
        episode,
        engine,
        ScriptedStore(),
        items=items,
        max_prompt_tokens=limit,
        brief_tokens=brief,
        sampled=twice,
    )


def evaluate(failures: int, items: int = 5) -> dict[str, float]:
    rng = random.Random(0)
    engine = GreedyEngine(rng, lambda r: 1.0)
    engine.failures = failures
    evaluator = build(engine, rng, items)
    values, _ = run_virtual(evaluator.evaluate(7, 7))
    assert engine.loads == [7]
    return dict(values)


def test_greedy_and_sampled_answers_are_scored_apart() -> None:
    values = evaluate(failures=0)
    assert values["eval/scripted/accuracy"] == 1.0
    assert values["eval/scripted/sampled_accuracy"] == 0.0
    assert values["eval/scripted/failed"] == 0.0


def test_a_failed_episode_is_tried_again_and_never_counts_as_wrong() -> None:
    assert evaluate(failures=10)["eval/scripted/accuracy"] == 1.0
    values = evaluate(failures=29)
    # 30 tries are 3 for each of 10 episodes: one episode is left, of either kind.
    assert values["eval/scripted/failed"] == 9.0


def test_an_eval_without_any_answer_is_an_error_and_not_an_accuracy_of_zero() -> None:
    with pytest.raises(EvalError, match="all 10 episodes of the eval of version 7 failed"):
        evaluate(failures=30)


def test_an_eval_without_sampled_answers_costs_half() -> None:
    rng = random.Random(0)
    engine = GreedyEngine(rng, lambda r: 1.0)
    values, _ = run_virtual(build(engine, rng, items=40, twice=False).evaluate(0, 0))
    assert "eval/scripted/sampled_accuracy" not in values and engine.most_running == 40
    assert values["eval/scripted/accuracy"] == 1.0


def test_a_brief_budget_counts_longer_answers_as_wrong() -> None:
    def brief_accuracy(budget: int) -> float:
        rng = random.Random(0)
        evaluator = build(GreedyEngine(rng, lambda r: 1.0, tokens=4), rng, items=5, brief=budget)
        values, _ = run_virtual(evaluator.evaluate(0, 0))
        assert values["eval/scripted/accuracy"] == 1.0
        return values["eval/scripted/brief_accuracy"]

    assert (brief_accuracy(4), brief_accuracy(3)) == (1.0, 0.0)
    assert "eval/scripted/brief_accuracy" not in evaluate(failures=0)


def test_evals_run_side_by_side() -> None:
    rng = random.Random(0)
    engine = GreedyEngine(rng, lambda r: 1.0)
    evaluator = build(engine, rng, items=40)
    _, took = run_virtual(asyncio.wait_for(evaluator.evaluate(0, 0), 10))
    assert took < 2 and engine.most_running == 80


def test_held_out_prompts_that_are_all_too_long_are_refused_with_both_numbers() -> None:
    rng = random.Random(0)
    with pytest.raises(ValueError, match=r"3 of 3 .*max_prompt_tokens=1 \(the shortest has 2\)"):
        build(GreedyEngine(rng, lambda r: 1.0), rng, items=3, limit=1)


def test_whatever_an_environment_raises_costs_its_episode_and_not_the_run() -> None:
    class Boom(GreedyIsRight):
        async def play(self, prompt: Prompt, sample: Any) -> Reward:
            if prompt.uid.index == 0:
                raise RuntimeError("eval boom")
            return await super().play(prompt, sample)

    rng = random.Random(0)
    engine = GreedyEngine(rng, lambda r: 1.0)
    evaluator = build(engine, rng, items=5)
    evaluator._env = Boom(rng)
    values, _ = run_virtual(evaluator.evaluate(0, 0))
    assert values["eval/scripted/failed"] == 2 and values["eval/scripted/accuracy"] == 1.0
