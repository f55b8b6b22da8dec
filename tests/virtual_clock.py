"""An asyncio loop whose time jumps to the next timer when nothing else can run.

Hours pass in milliseconds and every schedule is exact: equal programs give equal interleavings. A
program that waits for something no timer will bring is a deadlock, and raises.
"""

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any


class Deadlock(AssertionError):
    """Every task waits and no timer is set."""


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0

    def time(self) -> float:
        return self._virtual_now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = self._scheduled  # type: ignore[attr-defined]
            while timers and timers[0].cancelled():
                # As asyncio does before it looks at the first one; its heap stays its own.
                self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
                heapq.heappop(timers)._scheduled = False
            if not timers:
                waiting = "; ".join(sorted(task.get_name() for task in asyncio.all_tasks(self)))
                raise Deadlock(f"no timer is set and all tasks wait: {waiting}")
            self._virtual_now = max(self._virtual_now, timers[0].when())
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    """Runs `main` and returns its result and the virtual seconds it took."""
    loop = VirtualClockLoop()
    try:
        return loop.run_until_complete(main), loop.time()
    finally:
        loop.close()
