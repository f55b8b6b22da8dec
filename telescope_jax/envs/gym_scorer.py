"""The worker's half of `reasoning_gym`: items by number, and their scorers.

Nine of the scorers evaluate an answer as Python or as sympy's superset of it, so `score` runs in a
reward worker's child and nowhere else. `dataset` takes no text of a model and may run anywhere.
An item is sent as its number and made again, because some scorers tell tuples from lists, which
JSON does not.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset


def dataset(name: str, options: Mapping[str, Any], seed: int, size: int) -> ProceduralDataset:
    """The dataset in which an item is known by its index.

    Raises:
      ValueError, TypeError: the dataset refuses the options.
    """
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)


def digest(question: str) -> int:
    """64 bits of the question."""
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest())


def score(source: ProceduralDataset, index: int, question_digest: int, answer: str) -> dict:
    """The dataset's own score of an answer, in [0, 1] by its convention.

    A scorer that raises on an answer has not accepted it: 0, with the tag `scorer_raised`.

    Raises:
      RuntimeError: this process makes another item of that index than the one that was asked.
    """
    entry = source[index]
    if digest(entry["question"]) != question_digest:
        raise RuntimeError(
            f"item {index} of {type(source).__name__} is not the same in two processes; "
            "set PYTHONHASHSEED=0"
        )
    try:
        return {"total": float(source.score_answer(answer, entry=entry)), "tags": []}
    except MemoryError:
        raise  # a limit of the worker, not a verdict
    except Exception:
        return {"total": 0.0, "tags": ["scorer_raised"]}
