"""Parts of a real run that take as long as a test needs; called in its process before it starts.

Each one makes a phase last `SECONDS_*` and leaves a file `phase` in the workdir when it begins.
"""

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

SHORT_S, LONG_S = 1.0, 3_600.0


def _begin() -> None:
    (workdir,) = [a.partition("=")[2] for a in sys.argv if a.startswith("--workdir=")]
    (Path(workdir) / "phase").touch()


def _slow_update(seconds: float, *, at: int) -> None:
    from telescope_jax.learner.learner import Learner

    update = Learner.update_now

    def slow(self: Any, batch: Any) -> Any:
        if self.step == at:
            _begin()
            time.sleep(seconds)
        return update(self, batch)

    Learner.update_now = slow  # type: ignore[method-assign]


def first_update() -> None:
    """As long as a compilation."""
    _slow_update(SHORT_S, at=0)


def third_update() -> None:
    _slow_update(SHORT_S, at=2)


def hung_update() -> None:
    _slow_update(LONG_S, at=2)


def compilation() -> None:
    """Of the engine, before there is anything to save."""
    from telescope_jax.inference.batcher import Batcher

    def slow(self: Any) -> None:
        _begin()
        time.sleep(LONG_S)

    Batcher._warm_up = slow  # type: ignore[method-assign]


def publish() -> None:
    """To a file system that hangs, of version 2."""
    from telescope_jax.weights.store import MemoryStore

    original = MemoryStore.publish

    async def slow(self: Any, version: int, params: Any) -> Any:
        if version == 2:
            _begin()
            await asyncio.to_thread(time.sleep, LONG_S)
        return await original(self, version, params)

    MemoryStore.publish = slow  # type: ignore[method-assign]


def evaluation() -> None:
    """Of version 0; the training goes on."""
    from telescope_jax.evals import HeldOutEvaluator

    async def slow(self: Any, version: int, params: Any) -> Any:
        _begin()
        await asyncio.sleep(LONG_S)

    HeldOutEvaluator.evaluate = slow  # type: ignore[method-assign]


def jumping_clock() -> None:
    """Wall time that jumps by up to a day, both ways, at every look.

    Not for orbax (0.12.8), which measures its own timeouts by wall time: a jump in the middle of a
    save fails that save, see `checkpoint.max_failures`.
    """
    real, rng = time.time, random.Random(0)

    def jumping() -> float:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("orbax"):
            return real()
        return real() + rng.uniform(-86_400, 86_400)

    time.time = jumping
