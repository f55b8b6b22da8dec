"""The README's environment runs as printed, and what it links to is there."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

from telescope_jax.types import Uid

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Characters:
    def prompt(self, text: str) -> list[int]:
        return [ord(c) for c in text]


def test_the_environment_of_the_readme_runs():
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(source, names)
    env = names["Reverse"](Characters(), seed=3)
    assert len(env) > 0

    async def reward(answer: str, split: str) -> float:
        async def sample() -> SimpleNamespace:
            return SimpleNamespace(text=answer)

        return (await env.play(env.prompt(Uid(0, 5), split), sample)).total

    train, held_out = (env.prompt(Uid(0, 5), split) for split in ("train", "eval"))
    assert env.prompt(Uid(0, 5)).task == train.task != env.prompt(Uid(0, 6)).task
    assert "".join(map(chr, train.tokens)) == f"{train.task} = "
    assert int(train.task) % 7 and int(held_out.task) % 7 == 0
    assert env.solution(train) == train.task[::-1]
    assert asyncio.run(reward(train.task[::-1], "train")) == 1.0
    assert asyncio.run(reward(train.task, "train")) == 0.0


def test_the_class_has_about_fifteen_lines():
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in source.splitlines() if line.strip()]) <= 18


def test_every_flag_of_the_readme_is_a_field():
    from telescope_jax import config_tree
    from telescope_jax.config import Config

    flags = set(re.findall(r"--config\.([a-z_.]+)", README))
    assert flags and flags <= set(config_tree.leaves(Config))
