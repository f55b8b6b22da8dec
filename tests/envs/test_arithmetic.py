"""`sums`: what is held out, and what earns a reward."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from telescope_jax.chat import CharTokenizer
from telescope_jax.envs.arithmetic import Sums
from telescope_jax.types import StopReason, Uid

TOKENIZER = CharTokenizer()


def operands(prompt):
    return tuple(map(int, prompt.task["question"][len("What is ") : -1].split(" + ")))


def test_no_permutation_of_a_held_out_sum_is_ever_trained():
    env = Sums(TOKENIZER, seed=3)
    held_out = {tuple(sorted(operands(env.prompt(Uid(0, i), "eval")))) for i in range(1500)}
    trained = {tuple(sorted(operands(env.prompt(Uid(0, i))))) for i in range(4000)}
    assert not held_out & trained
    # Both sides are large: nearly every multiset of 715 is on one of them.
    assert len(held_out) + len(trained) > 600 and len(held_out) > 80


def test_at_least_1024_distinct_sums_are_held_out():
    env = Sums(TOKENIZER)
    assert len({operands(env.prompt(Uid(0, i), "eval")) for i in range(1024)}) == 1024


def test_held_out_sums_of_a_large_task_are_distinct_too():
    env = Sums(TOKENIZER, terms=3, digits=4)
    drawn = [operands(env.prompt(Uid(0, i), "eval")) for i in range(300)]
    assert len(set(drawn)) == 300 and all(map(env.is_held_out, drawn))
    assert all(1000 <= number <= 9999 for numbers in drawn for number in numbers)


def test_prompts_depend_on_seed_and_uid_alone_and_evaluation_not_on_the_seed():
    one, same, other = Sums(TOKENIZER, 1), Sums(TOKENIZER, 1), Sums(TOKENIZER, 2)
    indices = [7, 0, 1000, 7]
    texts = [one.prompt(Uid(0, i)).task["question"] for i in indices]
    assert texts == [same.prompt(Uid(3, i)).task["question"] for i in indices]
    assert texts != [other.prompt(Uid(0, i)).task["question"] for i in indices]
    assert operands(one.prompt(Uid(0, 9), "eval")) == operands(other.prompt(Uid(0, 9), "eval"))


def test_the_tokens_are_the_question():
    prompt = Sums(TOKENIZER).prompt(Uid(0, 5))
    assert TOKENIZER.decode(prompt.tokens.tolist()) == prompt.task["question"]
    assert prompt.task["answer"] == sum(operands(prompt))


def play(env, prompt, text, stop=StopReason.EOS):
    async def sample() -> Any:
        return SimpleNamespace(text=text, completion=SimpleNamespace(stop=stop))

    return asyncio.run(env.play(prompt, sample)).total


def test_the_solution_earns_the_reward_and_what_is_not_a_number_does_not():
    env = Sums(TOKENIZER)
    prompt = env.prompt(Uid(0, 0))
    answer = prompt.task["answer"]
    assert play(env, prompt, env.solution(prompt)) == 1
    assert play(env, prompt, env.solution(prompt), StopReason.LENGTH) == 0
    sum_itself = prompt.task["question"][len("What is ") : -1]
    for text in (
        f"\\boxed{{{answer + 1}}}",
        f"{answer}",
        f"\\boxed{{{sum_itself}}}",
        "",
        "\\boxed{",
    ):
        assert play(env, prompt, text) == 0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("{}", 1.0),
        ("46 + 29 = {}", 1.0),
        ("The sum of 46 and 29 is {}.", 1.0),
        ("{} is 46 + 29", 0.0),
        ("{}.5", 0.0),
        ("1{}", 0.0),
        ("", 0.0),
        ("\\boxed{{}} or {}", 1.0),
    ],
)
def test_the_last_integer_counts_if_the_answer_ended(text: str, reward: float):
    env = Sums(TOKENIZER, terms=2, digits=2, answer="last_integer")
    prompt = env.prompt(Uid(0, 1))
    answer = text.replace("{}", str(prompt.task["answer"]))

    def earned(stop: StopReason) -> float:
        async def sample() -> Any:
            return SimpleNamespace(text=answer, completion=SimpleNamespace(stop=stop))

        return asyncio.run(env.play(prompt, sample)).total

    assert earned(StopReason.EOS) == reward
    assert earned(StopReason.LENGTH) == 0.0
    assert env.solution(prompt) == str(prompt.task["answer"])
    with pytest.raises(ValueError, match="answer 'box' is neither"):
        Sums(TOKENIZER, answer="box")  # type: ignore[arg-type]


def test_a_held_out_solution_is_refused():
    env = Sums(TOKENIZER)
    with pytest.raises(ValueError, match="held out"):
        env.solution(env.prompt(Uid(0, 0), "eval"))


def test_arguments_that_leave_one_side_empty_are_refused():
    for terms, held_out in ((0, 0.2), (4, 1.0), (1, 1e-9)):
        with pytest.raises(ValueError):
            Sums(TOKENIZER, terms=terms, held_out=held_out)
    with pytest.raises(ValueError, match="held-out sums"):
        Sums(TOKENIZER, terms=2).prompt(Uid(0, 5000), "eval")
    with pytest.raises(ValueError, match="neither"):
        Sums(TOKENIZER).prompt(Uid(0, 0), "test")
