"""What a trainer asked of its engine process: every question gets an answer, an error, or an end.

A question outlives no channel: who owns the process calls `fail` when it is gone.
"""

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from telescope_jax.inference.wire import Channel, unpack_completion
from telescope_jax.interfaces import EngineError, PromptTooLong

_ERRORS = {
    error.__name__: error for error in (EngineError, PromptTooLong, NotImplementedError, ValueError)
}


class Questions:
    """Those that wait for their answer, by number."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self.pending: dict[int, asyncio.Future] = {}
        self.metrics: dict[str, Mapping[str, float]] = {}

    async def ask(
        self, channel: Channel, kind: str, name: str, packed: Any, timeout_s: float
    ) -> Any:
        """Sends a request to the engine `name` and waits; cancelling cancels it there too.

        Raises:
          EngineError: no answer within `timeout_s`, or what `fail` said.
          PromptTooLong, NotImplementedError, ValueError: the engine's own answer.
        """
        id, loop = next(self._ids), asyncio.get_running_loop()
        answer = self.pending[id] = loop.create_future()
        channel.send(kind, name, id, packed)
        # A timer of the loop costs a fifth of asyncio.timeout, once for every rollout.
        expiry = loop.call_later(timeout_s, _expire, answer, kind, timeout_s)
        try:
            return await answer
        finally:
            expiry.cancel()
            if self.pending.pop(id, None) is not None:
                channel.send("cancel", id)

    def hear(self, message: list[Any]) -> None:
        """Takes one message of the process; a late answer finds nobody waiting."""
        kind, *rest = message
        if kind == "metrics":
            name, values = rest
            self.metrics[name] = values
        elif kind in ("answer", "loaded", "refused"):
            answer = self.pending.pop(rest[0], None)
            if answer is None or answer.done():
                return
            if kind == "refused":
                _, error, text = rest
                answer.set_exception(_ERRORS[error](text))
            else:
                answer.set_result(unpack_completion(rest[1]) if kind == "answer" else None)

    def fail(self, why: str) -> None:
        """Nobody will answer any more."""
        waiting = list(self.pending.values())
        self.pending.clear()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(EngineError(why))


def _expire(answer: asyncio.Future, kind: str, timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(EngineError(f"the engine did not answer a {kind} in {timeout_s:g} s"))
