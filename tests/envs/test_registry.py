"""Environments by name, and how little one has to be."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from telescope_jax.chat import CharTokenizer
from telescope_jax.envs.grading import grade_number
from telescope_jax.envs.registry import make_env
from telescope_jax.scoring.reward_pool import RewardPool
from telescope_jax.types import Prompt, Reward, Uid


class Doubles:
    """A whole environment: what the README shows must be about this long."""

    name = "doubles"

    def __init__(self, tokenizer, seed, rewards, *, largest=99):
        self.tokenizer, self.largest = tokenizer, largest

    def __len__(self):
        return self.largest

    def prompt(self, uid, split="train"):
        text = f"What is {uid.index} + {uid.index}?"
        return Prompt(uid, self.name, np.array(self.tokenizer.encode(text)), 2 * uid.index)

    async def play(self, prompt, sample):
        turn = await sample()
        return Reward(grade_number(prompt.task, turn.text))


def make(name, **options):
    return make_env(name, tokenizer=CharTokenizer(), seed=0, rewards=RewardPool(), options=options)


def test_environments_come_by_name():
    assert make("sums", terms=3).name == "sums"
    assert make("reasoning_gym:chain_sum", max_terms=3).name == "reasoning_gym:chain_sum"


def test_an_environment_of_fifteen_lines_is_one():
    env = make("tests.envs.test_registry:Doubles", largest=5)

    async def sample() -> Any:
        return SimpleNamespace(text="\\boxed{8}")

    assert len(env) == 5
    assert asyncio.run(env.play(env.prompt(Uid(0, 4)), sample)).total == 1
    assert asyncio.run(env.play(env.prompt(Uid(0, 3)), sample)).total == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sumz", {}, "no environment 'sumz'; did you mean 'sums'"),
        ("zzz", {}, "known: sums, gsm8k, reasoning_gym:<dataset>"),
        ("reasoning_gym", {}, "reasoning_gym:<dataset>"),
        ("reasoning_gym:", {}, "has no dataset ''"),
        ("reasoning_gym:chain_sun", {}, "did you mean chain_sum"),
        ("sums", {"term": 2}, "did you mean 'terms'"),
        ("no_such_package.x:Env", {}, "there is no module 'no_such_package'"),
        ("telescope_jax.envs.arithmetic:Sum", {}, "has no 'Sum'"),
        ("tests.envs.test_registry:Doubles", {"larges": 2}, "did you mean 'largest'"),
    ],
)
def test_wrong_names_and_options_name_the_nearest(name, options, message):
    with pytest.raises(ValueError, match=message):
        make(name, **options)
