"""Which versions are to be evaluated, and which of them still wait for it."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from telescope_jax.types import Params

Version = tuple[int, Params]
"""A version, and its parameters, which it keeps in memory while it waits."""


@dataclass(frozen=True, slots=True)
class EvalSchedule:
    """When versions are evaluated; the last one always is.

    Attributes:
      last: the version that the run ends with.
      every: steps; 0 is never on the way.
      at_start: evaluate version 0.
    """

    last: int
    every: int = 0
    at_start: bool = True

    def includes(self, version: int) -> bool:
        if version == 0:
            return self.at_start
        return version == self.last or (self.every > 0 and version % self.every == 0)


class DueEvals:
    """Versions that wait for their eval, the oldest first.

    Args:
      schedule: None evaluates nothing.
      start: where this process goes on from.
      on_record: versions that an earlier one has evaluated; those after `start` are trained again,
        and evaluated again.
      waiting: versions that waited when it was cut.
    """

    def __init__(
        self,
        schedule: EvalSchedule | None,
        start: Version,
        on_record: frozenset[int] = frozenset(),
        waiting: Sequence[Version] = (),
    ) -> None:
        self._schedule = schedule
        self._waiting = deque(one for one in waiting if schedule and one[0] not in on_record)
        self.done_here = 0
        """Evals of this process."""
        if start[0] not in on_record | {version for version, _ in waiting}:
            self.offer(*start)

    def offer(self, version: int, params: Params) -> None:
        """A new version is there; from now on it waits, if it is to be evaluated."""
        if self._schedule and self._schedule.includes(version):
            self._waiting.append((version, params))

    def done(self) -> int:
        """The first one was evaluated, or given up; returns its version."""
        self.done_here += 1
        return self._waiting.popleft()[0]

    @property
    def first(self) -> Version:
        return self._waiting[0]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Version]:
        return iter(self._waiting)
