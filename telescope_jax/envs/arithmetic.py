r"""`sums`: additions without end, `What is 8 + 6 + 5 + 2?`, to be answered with `\boxed{21}`.

Held out are *multisets* of operands: a hash of the sorted operands decides, so no permutation of an
evaluated sum is ever trained (split by ordered tuple, 99.95 % of the held-out sums of four digits
had a permutation in training). Neither the hash nor the evaluation prompts depend on the seed: all
runs of one task are measured on the same sums.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from typing import Literal

import numpy as np

from telescope_jax.chat import Tokenizer
from telescope_jax.envs.grading import grade_number
from telescope_jax.interfaces import Sample
from telescope_jax.scoring.reward_pool import RewardPool
from telescope_jax.types import Prompt, Reward, StopReason, Uid

_INTEGER = re.compile(r"(?<![0-9.])[0-9]+(?![0-9]|\.[0-9])")
_ENUMERABLE = 200_000  # orderings; a larger task is sampled instead of listed


class Sums:
    r"""Sums of `terms` numbers of `digits` digits each (0 to 9 for one digit).

    A prompt is decided by (seed, uid.index); every epoch repeats the prompts of the first, which is
    2^20 long. Four single digits have only 715 multisets, but 10,000 orderings: evaluation prompts
    are distinct *orderings* of held-out multisets, about `held_out` of all orderings (some 2,000).

    The reward is 1 for the sum written as a plain number in an answer that ended by itself, else 0:
    the sum repeated in the box (`\boxed{8 + 6}`) is equal and earns nothing.

    Args:
      tokenizer: encodes the prompt.
      seed: of the training prompts.
      rewards: unused; a plain number needs no worker.
      terms: operands, ≥ 1.
      digits: decimal digits of an operand, ≥ 1.
      held_out: share of the multisets kept for evaluation, in (0, 1).
      answer: `boxed`, or `last_integer`: the last integer of the answer, for a model that was never
        shown a box.

    Raises:
      ValueError: an argument is out of range, or the task is so small that one side is empty.
    """

    name = "sums"

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int = 0,
        rewards: RewardPool | None = None,
        *,
        terms: int = 4,
        digits: int = 1,
        held_out: float = 0.2,
        answer: Literal["boxed", "last_integer"] = "boxed",
    ):
        del rewards
        if terms < 1 or digits < 1 or not 0 < held_out < 1:
            raise ValueError(
                f"sums: terms {terms} and digits {digits} must be ≥ 1, "
                f"held_out {held_out} between 0 and 1"
            )
        if answer not in ("boxed", "last_integer"):
            raise ValueError(f"sums: answer {answer!r} is neither 'boxed' nor 'last_integer'")
        self._boxed = answer == "boxed"
        self._tokenizer = tokenizer
        self._seed = seed
        self._terms = terms
        self._low, self._high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
        self._held_out_share = held_out
        self._eval: list[tuple[int, ...]] = []
        self._eval_source = self._held_out_orderings()
        space = (self._high - self._low) ** terms
        if space <= _ENUMERABLE:
            self._eval = list(self._eval_source)
            if not 0 < len(self._eval) < space:
                raise ValueError(
                    f"sums: of {space} orderings {len(self._eval)} are held out; "
                    "raise terms or digits, or change held_out"
                )

    def __len__(self) -> int:
        return 2**20

    def prompt(self, uid: Uid, split: str = "train") -> Prompt:
        """The prompt of `uid`.

        Raises:
          ValueError: `split` is neither train nor eval, or there are fewer held-out sums than that.
        """
        if split == "train":
            operands = self._training_operands(uid.index)
        elif split == "eval":
            operands = self._eval_operands(uid.index)
        else:
            raise ValueError(f"split {split!r} is neither 'train' nor 'eval'")
        text = f"What is {' + '.join(map(str, operands))}?"
        task = {"question": text, "answer": sum(operands), "split": split}
        tokens = np.asarray(self._tokenizer.prompt(text), np.int32)
        return Prompt(uid, self.name, tokens, task)

    def solution(self, prompt: Prompt) -> str:
        """The text that the warm start is trained on, without its end.

        Raises:
          ValueError: the prompt is held out.
        """
        if prompt.task["split"] != "train":
            raise ValueError(f"{prompt.uid} of sums is held out: its solution is not for training")
        answer = prompt.task["answer"]
        return f"\\boxed{{{answer}}}" if self._boxed else str(answer)

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        turn = await sample()
        # A cut answer may end in the middle of a number; and if it earned the reward, nothing
        # would teach the policy to end (seen: every answer grew to the whole token budget).
        if turn.completion.stop is StopReason.LENGTH:
            return Reward(0.0)
        if self._boxed:
            return Reward(grade_number(prompt.task["answer"], turn.text))
        numbers = _INTEGER.findall(turn.text.replace(",", ""))
        return Reward(float(numbers[-1:] == [str(prompt.task["answer"])]))

    def is_held_out(self, operands: tuple[int, ...]) -> bool:
        """Decided by the multiset of the operands alone."""
        digest = hashlib.blake2b(repr(sorted(operands)).encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self._held_out_share * 2**64

    def _training_operands(self, index: int) -> tuple[int, ...]:
        draw = random.Random(f"sums/{self._seed}/{index}")
        while True:
            operands = self._draw(draw)
            if not self.is_held_out(operands):
                return operands

    def _eval_operands(self, index: int) -> tuple[int, ...]:
        while len(self._eval) <= index:
            operands = next(self._eval_source, None)
            if operands is None:
                raise ValueError(
                    f"sums: evaluation prompt {index} asked of {len(self._eval)} held-out sums; "
                    "evaluate on fewer, or raise terms, digits or held_out"
                )
            self._eval.append(operands)
        return self._eval[index]

    def _held_out_orderings(self) -> Iterator[tuple[int, ...]]:
        """Distinct held-out orderings, in a fixed random order."""
        draw = random.Random("sums/eval")
        numbers = range(self._low, self._high)
        if len(numbers) ** self._terms <= _ENUMERABLE:
            orderings = filter(self.is_held_out, itertools.product(numbers, repeat=self._terms))
            yield from draw.sample(chosen := list(orderings), len(chosen))
            return
        seen = set()
        failures = 0
        while failures < _ENUMERABLE:  # so many in a row: there is hardly another one to find
            operands = self._draw(draw)
            failures += 1
            if operands not in seen and self.is_held_out(operands):
                seen.add(operands)
                failures = 0
                yield operands

    def _draw(self, draw: random.Random) -> tuple[int, ...]:
        return tuple(draw.randrange(self._low, self._high) for _ in range(self._terms))
