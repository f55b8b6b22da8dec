"""The prompt queue: every prompt once an epoch, failures first, and a cursor that resumes."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax.ledger import Attempt
from telescope_jax.prompts import PromptQueue
from telescope_jax.types import Uid
from tests.scripted import ScriptedEnv


def queue(size: int = 7, prefetch: int = 0, seed: int = 0) -> PromptQueue:
    return PromptQueue(ScriptedEnv(random.Random(0), size=size), seed=seed, prefetch=prefetch)


def draw(prompts: PromptQueue, count: int) -> list[Attempt]:
    return [prompts.pop()[1] for _ in range(count)]


@given(size=st.integers(1, 30), seed=st.integers(0, 9))
def test_every_epoch_draws_every_prompt_once(size: int, seed: int) -> None:
    drawn = draw(queue(size, seed=seed), 3 * size)
    assert set(Counter(attempt.uid for attempt in drawn).values()) == {1}
    for epoch in range(3):
        part = drawn[epoch * size : (epoch + 1) * size]
        assert {attempt.uid for attempt in part} == {Uid(epoch, i) for i in range(size)}


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    def order(attempts: list[Attempt]) -> list[int]:
        return [attempt.uid.index for attempt in attempts]

    one = order(draw(queue(50), 100))
    assert one[:50] != one[50:]
    assert one[:50] != order(draw(queue(50, seed=1), 50))
    assert one == order(draw(queue(50), 100))


def test_a_requeued_prompt_comes_next_as_its_next_attempt() -> None:
    prompts = queue()
    prompt, first = prompts.pop()
    expected = prompts.uid(1)
    prompts.requeue(prompt, first.number + 1)
    assert prompts.pop()[1] == Attempt(first.uid, 1)
    assert prompts.pop()[1] == Attempt(expected, 0)


@given(before=st.integers(0, 20), requeued=st.integers(0, 3))
def test_a_restored_queue_goes_on_where_it_was(before: int, requeued: int) -> None:
    prompts = queue()
    drawn = [prompts.pop() for _ in range(before)]
    for prompt, attempt in drawn[:requeued]:
        prompts.requeue(prompt, attempt.number + 1)
    state = json.loads(json.dumps(prompts.state()))
    in_flight = [attempt for _, attempt in drawn[requeued : requeued + 2]]
    expected = in_flight + draw(prompts, 15)
    other = queue()
    other.pop()
    other.restore(state, in_flight)
    assert draw(other, len(expected)) == expected


def test_prefetching_changes_no_order_and_says_when_it_is_ready() -> None:
    plain = draw(queue(), 40)
    notified = []

    async def run() -> list[Attempt]:
        prompts = queue(prefetch=4)
        assert not prompts.ready()
        filling = asyncio.create_task(prompts.fill(lambda: notified.append(1)))
        drawn = []
        while len(drawn) < 40:
            while not prompts.ready():
                await asyncio.sleep(0.001)
            drawn.append(prompts.pop()[1])
        filling.cancel()
        return drawn

    assert asyncio.run(run()) == plain
    assert len(notified) >= 10


def test_an_environment_that_cannot_make_a_prompt_ends_with_its_own_error() -> None:
    class Broken(ScriptedEnv):
        def prompt(self, uid: Any, split: str = "train") -> Any:
            raise KeyError("column 'question'")

    async def run() -> None:
        await PromptQueue(Broken(random.Random(0)), seed=0, prefetch=2).fill(lambda: None)

    with pytest.raises(KeyError, match="question"):
        asyncio.run(run())


def test_no_prompts_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 training prompts"):
        queue(size=0)
