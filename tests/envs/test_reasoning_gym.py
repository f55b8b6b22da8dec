"""reasoning-gym's datasets: held-out questions, scorers in the pool only, errors that help."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from telescope_jax.envs import reasoning_gym as module
from telescope_jax.envs.reasoning_gym import INSTRUCTION, ReasoningGym
from telescope_jax.scoring.reward_pool import RewardPool
from telescope_jax.types import Uid


class Bytes:
    """A tokenizer that takes every text."""

    name, fingerprint, vocab_size, eos_ids, pad_id = "bytes", "bytes", 258, (257,), 256

    def encode(self, text):
        return list(text.encode())

    def prompt(self, text):
        return self.encode(text)

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def env_of(dataset, pool=None, seed=0, **options):
    return ReasoningGym(Bytes(), seed, pool or RewardPool(), dataset=dataset, **options)


def play_all(dataset, texts, **settings):
    """Rewards of completions of prompt 3; each text may use the gold answer."""

    async def main():
        settings_ = {"workers": 1, "timeout_s": 20.0, **settings}
        async with asyncio.timeout(60), RewardPool(**settings_) as pool:
            env = env_of(dataset, pool)
            prompt = env.prompt(Uid(0, 3))
            rewards = []
            for text in texts:

                async def sample(text=text) -> Any:
                    return SimpleNamespace(text=text.format(gold=prompt.task["answer"]))

                rewards.append(await env.play(prompt, sample))
            return rewards

    return asyncio.run(main())


def test_the_gold_answer_where_the_prompt_asks_for_it_earns_the_reward():
    """GR-22: render the template, put the gold where it asks, expect 1."""
    assert "<answer>" in INSTRUCTION and "</answer>" in INSTRUCTION
    rewards = play_all(
        "chain_sum",
        ["<think>hm</think> <answer>{gold}</answer>", "<answer>{gold}1</answer>", "{gold}"],
    )
    assert rewards[0].total == 1 and rewards[1].total < 1
    assert (rewards[2].total, rewards[2].tags) == (0.0, ("no_answer",))


def test_scorers_that_tell_tuples_from_lists_see_tuples():
    assert play_all("rearc", ["<answer>{gold}</answer>"])[0].total == 1


def test_countdown_counts_its_numbers_and_does_not_round():
    """GR-26, in the worker's half, on items made for it."""
    from telescope_jax.envs.gym_scorer import dataset

    source = dataset("countdown", {}, 1, 10)
    for numbers, target, answer in (([1, 81, 1, 1], 81, "81*1"), ([5, 2], 2, "5/2")):
        entry = {"answer": "", "metadata": {"numbers": numbers, "target": target}}
        assert source.score_answer(answer, entry=entry) < 1


def test_a_scorer_that_raises_on_an_answer_gives_nothing_and_says_so():
    (reward,) = play_all("prime_factorization", ["<answer>2 * two (</answer>"])
    assert (reward.total, reward.tags) == (0.0, ("scorer_raised",))


def test_an_answer_that_its_scorer_evaluates_harms_nothing_of_ours(tmp_path):
    """Nine scorers evaluate text as Python: it runs in a child that is thrown away."""
    code = "__import__('time').sleep(60) or ['x']"
    texts = [f"<answer>{code}</answer>", "<answer>{gold}</answer>"]
    hung, right = play_all("string_insertion", texts, timeout_s=1.5)
    assert hung.total < 1 and right.total == 1


def test_no_question_is_both_trained_and_held_out():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    env = env_of("chain_sum", **options)
    trained = {env.prompt(Uid(0, i)).task["question"] for i in range(400)}
    held_out = [env.prompt(Uid(0, i), "eval").task["question"] for i in range(20)]
    assert len(set(held_out)) == 20 and not trained & set(held_out)


def test_prompts_repeat_exactly_and_seeds_share_none():
    one, same, other = env_of("chain_sum"), env_of("chain_sum"), env_of("chain_sum", seed=1)
    texts = [one.prompt(Uid(0, i)).task["question"] for i in range(30)]
    assert texts == [same.prompt(Uid(2, i)).task["question"] for i in range(30)]
    assert not set(texts) & {other.prompt(Uid(0, i)).task["question"] for i in range(30)}
    evals = [env.prompt(Uid(0, 4), "eval").task["question"] for env in (one, other)]
    assert evals[0] == evals[1]


def test_too_few_questions_for_the_evaluation_are_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="prompt 50 asked of"):
        env_of("chain_sum", size=60).prompt(Uid(0, 50), "eval")


def test_a_held_out_solution_is_refused():
    env = env_of("chain_sum")
    assert env.solution(env.prompt(Uid(0, 1))).startswith("<answer>")
    with pytest.raises(ValueError, match="no solution"):
        env.solution(env.prompt(Uid(0, 1), "eval"))


def test_items_that_depend_on_the_string_hash_are_refused_or_noticed(monkeypatch):
    random_hash = SimpleNamespace(flags=SimpleNamespace(hash_randomization=1))
    monkeypatch.setattr(module, "sys", random_hash)
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0"):
        env_of("ransom_note")
    assert sys.flags is not random_hash.flags

    from telescope_jax.envs.gym_scorer import dataset, score

    with pytest.raises(RuntimeError, match="not the same in two processes"):
        score(dataset("chain_sum", {}, 1, 10), 0, 12345, "7")


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("chain_sun", {}, "did you mean chain_sum"),
        ("chain_sum", {"max_term": 3}, "did you mean max_terms"),
        ("chain_sum", {"min_terms": 0}, "min_terms must be positive"),
        ("word_ladder", {}, "size 65536"),
        ("chain_sum", {"held_out": 1.5}, "between 0 and 1"),
    ],
)
def test_wrong_names_and_options_are_one_error_that_helps(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        env_of(dataset, **options)
