r"""`gsm8k`: grade-school word problems (Cobbe et al., 2021), answered with `\boxed{72}`.

Problems come from JSON Lines files, {"question": …, "answer": "… #### 72"}, or from the hub's
`openai/gsm8k` when no file is given. Evaluation uses the test split; where only a training file is
given, a hash of the question holds some of it out, so no question is on both sides.
"""

import hashlib
import json
import re
from pathlib import Path

import numpy as np

from telescope_jax import extras
from telescope_jax.chat import Tokenizer
from telescope_jax.envs.grading import grade_number
from telescope_jax.interfaces import Sample
from telescope_jax.scoring.reward_pool import RewardPool
from telescope_jax.types import Prompt, Reward, Uid

INSTRUCTION = "\nReason step by step, and put the final answer within \\boxed{}."

_HUB = "openai/gsm8k"
_ANSWER = re.compile(r"####\s*(-?[0-9][0-9,]*)\s*$")

Problem = tuple[str, int]


class Gsm8k:
    """The problems of one pair of files.

    Args:
      tokenizer: encodes the prompt.
      seed: unused; the run's seed shuffles.
      rewards: unused; whole numbers need no worker.
      train_file, eval_file: JSON Lines; "" takes the hub's, or, for `eval_file` beside a
        `train_file`, holds out some of that one.
      held_out: share that is held out then, in (0, 1).

    Raises:
      ValueError: a file cannot be read, a line is no problem (named by number), or a side is empty.
    """

    name = "gsm8k"

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        rewards: RewardPool | None = None,
        *,
        train_file: str = "",
        eval_file: str = "",
        held_out: float = 0.2,
    ):
        del seed, rewards
        if not 0 < held_out < 1:
            raise ValueError(f"gsm8k: held_out {held_out} must lie between 0 and 1")
        self._tokenizer = tokenizer
        train = _read(train_file) if train_file else _from_hub("train")
        if train_file and not eval_file:
            limit = held_out * 2**64
            evaluation = [problem for problem in train if _digest(problem[0]) < limit]
            train = [problem for problem in train if _digest(problem[0]) >= limit]
        else:
            evaluation = _read(eval_file) if eval_file else _from_hub("test")
        if not train or not evaluation:
            raise ValueError(
                f"gsm8k: {len(train)} problems to train on and {len(evaluation)} to evaluate; give "
                "eval_file, a longer train_file, or another held_out"
            )
        self._problems = {"train": train, "eval": evaluation}

    def __len__(self) -> int:
        return len(self._problems["train"])

    def prompt(self, uid: Uid, split: str = "train") -> Prompt:
        """The prompt of `uid`; epochs repeat the first.

        Raises:
          ValueError: `split` is neither train nor eval, or has fewer problems than that.
        """
        if split not in self._problems:
            raise ValueError(f"split {split!r} is neither 'train' nor 'eval'")
        problems = self._problems[split]
        if split == "eval" and uid.index >= len(problems):
            raise ValueError(
                f"gsm8k: evaluation prompt {uid.index} asked of {len(problems)}; set eval.items to "
                f"{len(problems)} or less"
            )
        question, answer = problems[uid.index % len(problems)]
        text = question + INSTRUCTION
        tokens = np.asarray(self._tokenizer.prompt(text), np.int32)
        return Prompt(uid, self.name, tokens, {"question": text, "answer": answer, "split": split})

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        turn = await sample()
        return Reward(grade_number(prompt.task["answer"], turn.text))


def _read(path: str) -> list[Problem]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"gsm8k: {path} cannot be read: {error}") from None
    problems, amiss = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                problems.append(_problem(row["question"], row["answer"]))
            except (ValueError, KeyError, TypeError) as error:
                amiss.append(f"line {number}: {type(error).__name__}: {error}")
    if amiss:
        raise ValueError(
            f"gsm8k: {path}: {len(amiss)} lines are no problems: {'; '.join(amiss[:3])}"
        )
    return problems


def _from_hub(split: str) -> list[Problem]:
    if absent := extras.missing("gsm8k: a data set from the hub", "huggingface_hub"):
        raise ValueError(f"{absent}; or set env.options to {{'train_file': 'FILE.jsonl'}}")
    try:
        from huggingface_hub import hf_hub_download

        file = f"main/{split}-00000-of-00001.parquet"
        path = hf_hub_download(_HUB, file, repo_type="dataset")
    except Exception as error:  # the hub's client raises its own, httpx's and OSError
        raise ValueError(
            f"gsm8k: the {split} split of {_HUB} is neither on the hub nor in its cache "
            f"({type(error).__name__}); set env.options to {{'train_file': 'FILE.jsonl'}}"
        ) from error
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(path, columns=["question", "answer"]).to_pylist()
    return [_problem(row["question"], row["answer"]) for row in rows]


def _problem(question: str, answer: str | int) -> Problem:
    """Data sets hold whole solutions that end in `#### 1,234`, or the bare number (GR-21)."""
    found = _ANSWER.search(answer) if isinstance(answer, str) else None
    number = found[1] if found else str(answer)
    return question.strip(), int(number.replace(",", ""))


def _digest(question: str) -> int:
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest())
