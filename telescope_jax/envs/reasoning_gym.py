"""`reasoning_gym:<dataset>`: the procedural tasks of the reasoning-gym package, by name.

The package makes the questions here; its scorers see a model's answer only in a reward worker.
Answers are found by this project's extractor, for training and evaluation alike, between the tags
that every prompt asks for (tags, because many answers hold braces).
"""

import difflib
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from reasoning_gym.factory import DATASETS

from telescope_jax.chat import Tokenizer
from telescope_jax.envs import gym_scorer
from telescope_jax.envs.grading import extract_answer
from telescope_jax.envs.judge import score_in_pool
from telescope_jax.interfaces import Sample
from telescope_jax.scoring.reward_pool import RewardPool
from telescope_jax.types import Prompt, Reward, Uid

INSTRUCTION = "\nGive the final answer between <answer> and </answer>.\n"

_EVAL_SEED = 0x5EED
_MOST_REDRAWS = 64
_NEEDS_HASH_SEED = frozenset({"polynomial_multiplication", "isomorphic_strings", "ransom_note"})


class ReasoningGym:
    """One dataset of reasoning-gym.

    A hash of the question decides whether it is held out, so no question is on both sides, however
    few the dataset has. Evaluation prompts are distinct and do not depend on the seed.

    Args:
      tokenizer: encodes the prompt.
      seed: of the training prompts.
      rewards: where the scorers run.
      dataset: its name, such as `chain_sum`.
      size: prompts in one epoch.
      held_out: share of the questions kept for evaluation, in (0, 1).
      options: fields of the dataset's own configuration, such as `max_terms`.

    Raises:
      ValueError: the dataset or an option is unknown (the nearest names are given) or refused, or
        its items depend on Python's string hash, which is random unless PYTHONHASHSEED is 0.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        rewards: RewardPool,
        *,
        dataset: str,
        size: int = 2**16,
        held_out: float = 0.2,
        **options: Any,
    ):
        _check(dataset, options)
        if size < 1 or not 0 < held_out < 1:
            raise ValueError(f"size {size} must be ≥ 1 and held_out {held_out} between 0 and 1")
        self.name = f"reasoning_gym:{dataset}"
        self._tokenizer, self._rewards = tokenizer, rewards
        self._dataset, self._options, self._size = dataset, options, size
        self._seed, self._held_out_share = seed, held_out
        self._sources: dict[int, Any] = {}
        self._eval_indices: list[int] = []
        self._eval_seen: set[int] = set()
        self._eval_next = 0
        try:
            self._item(_EVAL_SEED, 0)
        except Exception as error:
            raise ValueError(f"{self.name} refuses size {size}, {options}: {error}") from None

    def __len__(self) -> int:
        return self._size

    def prompt(self, uid: Uid, split: str = "train") -> Prompt:
        """The prompt of `uid`; epochs repeat the first.

        Raises:
          ValueError: `split` is neither train nor eval, or too few questions are on its side.
        """
        if split == "train":
            seed, index = self._training_item(uid.index)
        elif split == "eval":
            seed, index = _EVAL_SEED, self._eval_index(uid.index)
        else:
            raise ValueError(f"split {split!r} is neither 'train' nor 'eval'")
        item = self._item(seed, index)
        text = item["question"] + INSTRUCTION
        task = {"question": text, "answer": item["answer"], "split": split, "item": [seed, index]}
        return Prompt(uid, self.name, np.asarray(self._tokenizer.prompt(text), np.int32), task)

    def solution(self, prompt: Prompt) -> str:
        """The text that a warm start is trained on, without its end.

        Raises:
          ValueError: the prompt is held out, or the dataset gives no answer (only a scorer).
        """
        if prompt.task["split"] != "train" or prompt.task["answer"] is None:
            raise ValueError(f"{prompt.uid} of {self.name} has no solution for training")
        return f"<answer>{prompt.task['answer']}</answer>"

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        turn = await sample()
        answer = extract_answer(turn.text)
        if not answer:
            return Reward(0.0, tags=("no_answer",))
        seed, index = prompt.task["item"]
        digest = gym_scorer.digest(self._item(seed, index)["question"])
        source = ("telescope_jax.envs.gym_scorer:dataset", *self._source_arguments(seed))
        return await score_in_pool(
            self._rewards,
            "telescope_jax.envs.gym_scorer:score",
            index,
            digest,
            answer,
            given=source,
        )

    def _source_arguments(self, seed: int) -> tuple[str, Mapping[str, Any], int, int]:
        return self._dataset, self._options, seed, self._size

    def _item(self, seed: int, index: int) -> dict[str, Any]:
        if seed not in self._sources:
            self._sources[seed] = gym_scorer.dataset(*self._source_arguments(seed))
        return self._sources[seed][index]

    def _is_held_out(self, question: str) -> bool:
        return gym_scorer.digest(question) < self._held_out_share * 2**64

    def _training_item(self, index: int) -> tuple[int, int]:
        # The package seeds item i of a dataset with seed + i, so nearby seeds share their items:
        # hashed seeds keep runs apart, and a redraw comes from another dataset.
        for draw in range(_MOST_REDRAWS):
            seed = gym_scorer.digest(f"{self._seed}/{draw}") % 2**31
            if not self._is_held_out(self._item(seed, index % self._size)["question"]):
                return seed, index % self._size
        raise ValueError(f"{self.name}: {_MOST_REDRAWS} draws of prompt {index} were all held out")

    def _eval_index(self, index: int) -> int:
        while len(self._eval_indices) <= index:
            if self._eval_next == self._size:
                raise ValueError(
                    f"{self.name}: evaluation prompt {index} asked of {len(self._eval_indices)} "
                    f"distinct held-out questions in {self._size}; evaluate on fewer"
                )
            question = self._item(_EVAL_SEED, self._eval_next)["question"]
            digest = gym_scorer.digest(question)
            if self._is_held_out(question) and digest not in self._eval_seen:
                self._eval_seen.add(digest)
                self._eval_indices.append(self._eval_next)
            self._eval_next += 1
        return self._eval_indices[index]


def _check(dataset: str, options: Mapping[str, Any]) -> None:
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=3, cutoff=0.5)
        raise ValueError(f"reasoning_gym has no dataset {dataset!r}; {_nearest(near)}")
    names = [field.name for field in fields(DATASETS[dataset][1]) if field.name != "seed"]
    for option in options:
        if option not in names:
            near = difflib.get_close_matches(option, names, n=3, cutoff=0.4)
            raise ValueError(f"{dataset} has no option {option!r}; {_nearest(near or names)}")
    if dataset in _NEEDS_HASH_SEED and sys.flags.hash_randomization:
        raise ValueError(
            f"the items of {dataset} change with Python's string hash: a resumed run would train "
            "on others; set PYTHONHASHSEED=0 in the environment"
        )


def _nearest(names: list[str]) -> str:
    return f"did you mean {', '.join(names)}?" if names else "no name is near"
