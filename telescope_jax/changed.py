"""How coroutines that share state tell one another that it has changed."""

import asyncio
from collections.abc import Callable


class Changed:
    """Wakes every waiter when the state has changed; each one then looks for itself."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
