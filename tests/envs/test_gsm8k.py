"""`gsm8k`: where problems come from, what is held out, what earns a reward."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telescope_jax.chat import CharTokenizer
from telescope_jax.envs.gsm8k import INSTRUCTION, Gsm8k
from telescope_jax.types import Uid

TOKENIZER = CharTokenizer()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return str(path)


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"question": f"Ann has {n} pens and buys {n} more. Pens?", "answer": f"Sum.\n#### {2 * n}"}
        for n in range(start, start + count)
    ]


def reward(env: Gsm8k, index: int, text: str) -> float:
    async def sample() -> Any:
        return SimpleNamespace(text=text)

    return asyncio.run(env.play(env.prompt(Uid(0, index)), sample)).total


def test_two_files_are_the_two_sides(tmp_path: Path):
    train, test = write(tmp_path / "a", rows(10)), write(tmp_path / "b", rows(3, start=50))
    env = Gsm8k(TOKENIZER, train_file=train, eval_file=test)
    assert len(env) == 10
    prompt = env.prompt(Uid(0, 2), "eval")
    assert prompt.task["question"].startswith("Ann has 52 pens")
    assert TOKENIZER.decode(prompt.tokens.tolist()) == prompt.task["question"]
    assert prompt.task["question"].endswith(INSTRUCTION) and prompt.task["answer"] == 104
    with pytest.raises(ValueError, match="prompt 3 asked of 3; set eval.items to 3"):
        env.prompt(Uid(0, 3), "eval")


def test_one_file_is_split_and_no_question_is_on_both_sides(tmp_path: Path):
    env = Gsm8k(TOKENIZER, train_file=write(tmp_path / "a", rows(60)), held_out=0.3)
    train = {env.prompt(Uid(0, i)).task["question"] for i in range(len(env))}
    held_out = {env.prompt(Uid(0, i), "eval").task["question"] for i in range(60 - len(env))}
    assert not train & held_out and len(train | held_out) == 60 and 5 < len(held_out) < 35


def test_golds_may_have_separators_be_negative_or_be_numbers(tmp_path: Path):
    """GR-21."""
    answers = ["x #### 1,234", "#### -5", 7, "42"]
    file = write(tmp_path / "a", [{"question": str(i), "answer": a} for i, a in enumerate(answers)])
    env = Gsm8k(TOKENIZER, train_file=file, eval_file=file)
    assert [env.prompt(Uid(0, i)).task["answer"] for i in range(4)] == [1234, -5, 7, 42]
    assert reward(env, 0, "so \\boxed{1,234}") == 1.0
    assert reward(env, 1, "\\boxed{5}") == 0.0
    assert reward(env, 2, "7") == 0.0


def test_lines_that_are_no_problems_are_named(tmp_path: Path):
    (tmp_path / "a").write_text('{"question": "q", "answer": "#### 1"}\n{"question": "q"}\nx\n')
    with pytest.raises(
        ValueError, match="2 lines are no problems: line 2: KeyError: 'answer'; line 3"
    ):
        Gsm8k(TOKENIZER, train_file=str(tmp_path / "a"))
    with pytest.raises(ValueError, match="cannot be read"):
        Gsm8k(TOKENIZER, train_file=str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="0 problems|to evaluate; give eval_file"):
        Gsm8k(TOKENIZER, train_file=write(tmp_path / "b", rows(1)))


def test_without_a_network_the_remedy_is_named():
    with pytest.raises(ValueError, match="neither on the hub nor in its cache .*train_file"):
        Gsm8k(TOKENIZER)
