"""Notices that a run stands still, and says what waits on what.

Progress is a group that became trainable; once no further group is needed, a step that was trained
or an eval that ended. The first of each includes compilation and cannot be told from a stall by its
length, so until this process has seen one group and trained one step a period lasts at least as
long as an engine may take to start.

It runs on the event loop, so it sees whatever the loop waits for; a loop that is itself blocked is
seen by `loop_guard`, from a thread.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)

STRIKES = 3
"""Periods in a row without progress that end the run."""


class WatchdogError(RuntimeError):
    """Nothing moved for too long; the message names what waits on what."""


class Doing:
    """Who is busy with what, and since when (a time of the loop's clock)."""

    def __init__(self) -> None:
        self._busy: dict[str, tuple[str, float]] = {}

    @contextmanager
    def __call__(self, who: str, what: str) -> Iterator[None]:
        """`who` does `what` while the block runs."""
        self._busy[who] = (what, asyncio.get_running_loop().time())
        try:
            yield
        finally:
            del self._busy[who]

    def __contains__(self, who: str) -> bool:
        return who in self._busy

    def lines(self, now: float) -> list[str]:
        """`trainer: update of step 3 for 12 s`, for each one that is busy."""
        return [
            f"{who}: {what} for {now - since:.0f} s" for who, (what, since) in self._busy.items()
        ]


@dataclass(frozen=True, slots=True)
class Watched:
    """What a watchdog looks at, at the end of every period.

    Attributes:
      trainable: groups that ever became trainable.
      trained: steps that this process has trained.
      evals: evals that ended.
      all_in: no further group has to become trainable for the run to end.
      evaluating: an eval is being played, which has a deadline of its own.
    """

    trainable: int
    trained: int
    evals: int
    all_in: bool
    evaluating: bool

    def moved(self, before: "Watched") -> bool:
        """Whether the run came closer to its end since `before`."""
        if self.trainable > before.trainable:
            return True
        ending = (self.trained, self.evals) != (before.trained, before.evals)
        return self.all_in and (ending or self.evaluating or not before.all_in)


async def watch(
    look: Callable[[], Watched],
    blocker: Callable[[], str],
    report: Callable[[str], None],
    *,
    period_s: float,
    first_period_s: float,
) -> None:
    """Looks once a period, until cancelled.

    Args:
      blocker: what waits on what, in one line.
      report: takes the message of every period without progress.
      period_s: longest time without progress.
      first_period_s: the same, while something is done for the first time.

    Raises:
      WatchdogError: STRIKES periods in a row without progress.
    """
    start = seen = look()
    strikes, silent_s = 0, 0.0
    while True:
        warm = seen.trained > start.trained and seen.trainable > start.trainable
        wait_s = period_s if warm else max(period_s, first_period_s)
        await asyncio.sleep(wait_s)
        before, seen = seen, look()
        if seen.moved(before):
            strikes, silent_s = 0, 0.0
            continue
        strikes, silent_s = strikes + 1, silent_s + wait_s
        message = f"no progress for {silent_s:g} s: {blocker()}"
        log.warning("watchdog: %s", message)
        report(message)
        if strikes == STRIKES:
            raise WatchdogError(message)
