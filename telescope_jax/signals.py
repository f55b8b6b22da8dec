"""How a run ends when it is told to, or when it can no longer end by itself.

Ctrl-C and SIGTERM: the first one asks for a checkpoint and an end, the second one ends. From the
first one on the process has `checkpoint.grace_s` seconds: past them it exits, whatever it waits for
(an update that cannot be interrupted, a publish to a file system that hangs), and the last
checkpoint has to do. The same holds for a run that failed and cannot close its parts.

The handlers are Python's own and the clock is a thread, not the event loop's: an environment that
blocks the loop must not keep a run from ending.
"""

import logging
import os
import signal
import sys
import threading
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, Protocol

from telescope_jax.log_lines import row

log = logging.getLogger(__name__)

_CLOSE_S = 5.0


class Stoppable(Protocol):
    """What a signal asks to end; see orchestrator.py."""

    def stop(self, reason: str) -> None: ...


class Signals:
    """The signals of one run, while the block runs.

    Until `orchestrator` is set there is nothing to save, and the first signal ends. What runs in
    threads then (warm start, compilation) cannot be stopped otherwise; processes end with this one.
    """

    def __init__(
        self, *, grace_s: float, resume_exit_code: int, note: Callable[..., None], again: str = ""
    ) -> None:
        """
        Args:
          grace_s: seconds from the first signal, or from a failure, to the end.
          resume_exit_code: after a SIGTERM; 0 = 143.
          note: writes state and exit code into run.json.
          again: the command that takes the run up again.
        """
        self.exit_code = 0
        self.orchestrator: Stoppable | None = None
        self._grace_s, self._note, self._again = grace_s, note, again
        self.codes = {signal.SIGINT: 130, signal.SIGTERM: resume_exit_code or 143}
        self._previous: dict[int, Any] = {}
        self._loop: AbstractEventLoop | None = None
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> "Signals":
        self._loop = get_running_loop()
        for number in self.codes:
            self._previous[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def arrive(self, number: int) -> None:
        """A signal that another process of this trainer got; in the main thread."""
        self._arrived(number, None)

    def saved(self) -> None:
        """Everything is on the disk. After a signal nothing else is worth the rest of the grace."""
        if self.exit_code:
            self._leave_later(self.exit_code, "saved, but its parts did not close", _CLOSE_S)

    def closed(self) -> None:
        """All parts are closed, and the process is whose it was before."""
        for timer in self._timers:
            timer.cancel()

    def failed(self, error: BaseException) -> None:
        """The run failed with `error`, and closes its parts within the grace time, or leaves."""
        self._leave_later(1, f"{type(error).__name__}: {error}; its parts did not close")

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two instructions of the main thread: no logging, which may hold a lock.
        del frame
        code = self.codes[signal.Signals(number)]
        if self.exit_code or self.orchestrator is None or self._loop is None:
            self._leave(code, "exit at once")
        self.exit_code = code
        self._leave_later(code, f"no end within checkpoint.grace_s={self._grace_s:g} s of a signal")
        self._loop.call_soon_threadsafe(self._stop, self.orchestrator, number)

    def _stop(self, orchestrator: Stoppable, number: int) -> None:
        name = signal.Signals(number).name
        log.warning(
            "%s: finishing the running update, then a checkpoint, within %g s; again to exit at "
            "once",
            name,
            self._grace_s,
        )
        orchestrator.stop(name)

    def _leave_later(self, code: int, why: str, seconds: float | None = None) -> None:
        timer = threading.Timer(seconds or self._grace_s, self._leave, (code, why))
        timer.daemon = True  # nothing has to wait for it
        timer.start()
        self._timers.append(timer)

    def _leave(self, code: int, why: str) -> NoReturn:
        with suppress(Exception):
            resume = "\n" + row("resume", self._again) if self._again else ""
            print(f"telescope_jax: {why}, exit code {code}{resume}", file=sys.stderr, flush=True)
        with suppress(Exception):
            self._note(state="stopped", exit_code=code)
        os._exit(code)


def exit_with(code: int) -> NoReturn:
    """Ends this process, also when a thread of a part still hangs (a file system, a device)."""
    timer = threading.Timer(_CLOSE_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)
