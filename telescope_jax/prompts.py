"""Which prompt comes next: shuffled epochs, prefetched ahead, with re-queued attempts in front.

Every prompt is drawn once an epoch, in an order that (seed, epoch) decides. What failed or went
stale goes back to the *front*, as the next attempt of the same uid. The queue's state is a cursor
and a list, so a resumed run goes on with the very next prompt.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from telescope_jax.interfaces import Environment
from telescope_jax.ledger import Attempt
from telescope_jax.types import Prompt, Uid


class PromptQueue:
    """An endless queue of (prompt, attempt).

    Args:
      env: source of the prompts.
      seed: decides the order of every epoch.
      prefetch: prompts that a thread prepares ahead; 0 prepares each one when it is asked for, in
        the caller's thread.

    Raises:
      ValueError: the environment has no prompts.
    """

    def __init__(self, env: Environment, *, seed: int, prefetch: int = 0) -> None:
        if len(env) < 1:
            raise ValueError(f"environment {env.name} has {len(env)} training prompts; it needs 1")
        self._env = env
        self._seed = seed
        self._prefetch = prefetch
        self._cursor = 0  # draws handed out so far, re-queued ones not counted
        self._order: tuple[int, np.ndarray] | None = None
        self._front: deque[tuple[Prompt | Uid, int]] = deque()
        self._ahead: deque[Prompt] = deque()
        self._changed = asyncio.Event()

    def uid(self, draw: int) -> Uid:
        """The uid of the `draw`-th draw of the run."""
        epoch, position = divmod(draw, len(self._env))
        if self._order is None or self._order[0] != epoch:
            self._order = (
                epoch,
                np.random.default_rng((self._seed, epoch)).permutation(len(self._env)),
            )
        return Uid(epoch, int(self._order[1][position]))

    def ready(self) -> bool:
        """Whether pop() may be called; False while the prefetcher has not caught up."""
        return bool(self._front or self._ahead or not self._prefetch)

    def pop(self) -> tuple[Prompt, Attempt]:
        """The next prompt and its attempt, which counts from 0."""
        if self._front:
            prompt, number = self._front.popleft()
            if not isinstance(prompt, Prompt):
                prompt = self._env.prompt(prompt)
            return prompt, Attempt(prompt.uid, number)
        if self._ahead:
            prompt = self._ahead.popleft()
            self._changed.set()
        else:
            prompt = self._env.prompt(self.uid(self._cursor))
        self._cursor += 1
        return prompt, Attempt(prompt.uid, 0)

    def requeue(self, prompt: Prompt, number: int) -> None:
        """Puts `prompt` in front, to be tried as attempt `number`."""
        self._front.appendleft((prompt, number))

    async def fill(self, notify: Callable[[], None]) -> None:
        """Keeps `prefetch` prompts ready, and says so; runs until cancelled.

        An environment that cannot make a prompt ends the run with its own error.
        """
        while self._prefetch:
            self._changed.clear()
            if len(self._ahead) >= self._prefetch:
                await self._changed.wait()
                continue
            draw = self._cursor + len(self._ahead)
            prompts = await asyncio.to_thread(self._prepare, draw, self._prefetch)
            # Nothing else appends, and a pop moves cursor and buffer together, so the draws that
            # were prepared meanwhile still follow on the buffer's end.
            self._ahead.extend(prompts)
            notify()

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON values; front first."""
        front = [[*(p.uid if isinstance(p, Prompt) else p), number] for p, number in self._front]
        return {"cursor": self._cursor, "front": front}

    def restore(self, state: Mapping[str, Any], in_flight: Iterable[Attempt] = ()) -> None:
        """Goes on where `state` was taken; attempts in flight come first, as the same attempt."""
        self._cursor = state["cursor"]
        self._ahead.clear()
        self._front = deque((attempt.uid, attempt.number) for attempt in in_flight)
        self._front.extend((Uid(epoch, index), number) for epoch, index, number in state["front"])

    def _prepare(self, draw: int, count: int) -> list[Prompt]:
        return [self._env.prompt(self.uid(draw + i)) for i in range(count)]
