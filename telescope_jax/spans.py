"""Where a run's time goes: seconds by name, since the metrics line before."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TRAINERS = ("wait_for_batch", "update", "checkpoint")
"""Spans of the trainer, which follow one another; all others go on meanwhile."""


class Spans:
    """A stopwatch.

    Args:
      now: the clock, in seconds.
      began: when the run did, by that clock.
    """

    def __init__(self, now: Callable[[], float], began: float) -> None:
        self._now, self._began, self._line = now, began, began
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `name`, however it ends."""
        started = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - started

    def step(self) -> dict[str, float]:
        """`time/*` of a step's line: `step` is all the time since the line before."""
        return self._taken("step", self._now() - self._line)

    def rest(self, name: str) -> dict[str, float]:
        """`time/*` of a line that is no step's: `name` is what the trainer's spans leave."""
        spent = sum(self._seconds[span] for span in TRAINERS)
        return self._taken(name, self._now() - self._line - spent)

    def _taken(self, name: str, seconds: float) -> dict[str, float]:
        now = self._now()
        values = {**self._seconds, name: seconds, "elapsed": now - self._began}
        self._line, self._seconds = now, defaultdict(float, publish=0.0, deploy=0.0)
        return {f"time/{name}": value for name, value in values.items()}
