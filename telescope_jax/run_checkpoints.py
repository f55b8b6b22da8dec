"""When a run saves, what of it, and how many failures of that it stands."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from telescope_jax.allocator import give_back
from telescope_jax.config import CheckpointConfig
from telescope_jax.hosts.leader import SharedCheckpoints
from telescope_jax.interfaces import Checkpoint
from telescope_jax.learner.checkpoint import Checkpoints, SaveFailed
from telescope_jax.rollouts.archive import pack_groups

log = logging.getLogger(__name__)


class RunCheckpoints:
    """The orchestrator's Checkpointer: the trainer's arrays, the books and the held groups.

    A save that failed is told of when the next one begins, and at the end. It ends the run, unless
    `checkpoint.max_failures` says that so many in a row are only warnings and a metric.
    """

    def __init__(
        self, checkpoints: Checkpoints | SharedCheckpoints, config: CheckpointConfig
    ) -> None:
        self._checkpoints, self._config = checkpoints, config
        self._failures = self._in_a_row = 0

    async def save(self, checkpoint: Checkpoint) -> None:
        """Returns once the arrays are copied; what follows goes on in the background."""
        await self._finish_previous()
        trainer, host, held, evals = checkpoint.trainer, {}, None, {}
        if self._config.save_training_state:
            groups, held = pack_groups(checkpoint.held)
            host = {"run": checkpoint.run, "groups": groups}
            evals = dict(checkpoint.evals)
        else:
            trainer = {name: trainer[name] for name in ("params", "step")}
        try:
            await _in_thread(self._checkpoints.save, trainer, host=host, held=held, evals=evals)
        except Exception as error:
            self._failed(error)

    async def finish(self) -> None:
        """Returns once the last save is committed.

        Raises:
          SaveFailed: it is not, whatever `max_failures` says of those on the way.
        """
        self._config = replace(self._config, max_failures=0)
        await self._finish_previous()

    def metrics(self) -> Mapping[str, float]:
        """For `checkpoint/*`."""
        return {"checkpoint/failures": float(self._failures)}

    async def _finish_previous(self) -> None:
        try:
            await _in_thread(self._checkpoints.wait)
            await _in_thread(give_back)  # the copies that were written
            self._in_a_row = 0
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._failures, self._in_a_row = self._failures + 1, self._in_a_row + 1
        steps = self._checkpoints.steps()
        message = (
            f"a checkpoint could not be written ({type(error).__name__}: {error}); "
            f"the newest whole one is of step {steps[-1] if steps else 'none'}"
        )
        if self._in_a_row > self._config.max_failures:
            raise SaveFailed(f"{message}; make room, then run the same command again") from error
        log.warning("%s", message)


async def _in_thread(call: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Like `asyncio.to_thread`, but a cancelled run waits for the thread: whoever closes the
    checkpoints next must not meet a save half-way through."""
    working = asyncio.ensure_future(asyncio.to_thread(call, *args, **named))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
