"""How late the event loop runs, who makes it late, and the end of one that never runs again.

Everything of a run shares one loop: an environment that computes or sleeps in it instead of
awaiting stops engines, deploys and the watchdog as well. A beat on the loop measures its delay; a
thread watches the beat. After `alarm_s` without one it names the line that the loop stands in, and
after `end_s` it ends the process, since nobody else can.
"""

import asyncio
import gc
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

BEAT_S = 0.05
_LOOK_S = 0.25
_EXIT_CODE = 1
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class LoopGuard:
    """Watches the running loop while the block runs.

    Args:
      alarm_s: longest time without a beat before the culprit is named.
      end_s: the same before `end` is called.
      end: takes the last words; the default logs them and exits the process with code 1.
    """

    def __init__(
        self,
        *,
        end_s: float,
        alarm_s: float = 1.0,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._alarm_s, self._end_s, self._end = alarm_s, end_s, end or _exit
        self._lags: list[float] = []
        self._beats = 0
        self._alarms = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="loop guard", daemon=True)

    async def __aenter__(self) -> "LoopGuard":
        self._loop_thread = threading.get_ident()
        self._beating = asyncio.create_task(self._beat(), name="loop guard")
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed.set()
        self._beating.cancel()

    def metrics(self) -> Mapping[str, float]:
        """For `loop/*`, since the last call; alarms since the start."""
        lags, self._lags = sorted(self._lags), []
        values = {"loop/alarms": float(self._alarms)}
        if lags:
            values["loop/lag_p99"] = lags[int(0.99 * (len(lags) - 1))]
            values["loop/lag_max"] = lags[-1]
        return values

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self._beats += 1
            self._lags.append(max(0.0, time.monotonic() - due))

    def _look(self) -> None:
        seen, blocked_s, alarmed = -1, 0.0, False
        while not self._closed.wait(_LOOK_S):
            if self._beats != seen:
                seen, blocked_s, alarmed = self._beats, 0.0, False
                continue
            # Counted in looks and not by the clock: a process that was stopped, or a machine that
            # slept, has not blocked its loop.
            blocked_s += _LOOK_S
            if blocked_s >= self._alarm_s and not alarmed:
                alarmed = True
                self._alarms += 1
                log.warning("the event loop is blocked for %g s in %s", blocked_s, self._culprit())
            if blocked_s >= self._end_s:
                self._end(
                    f"the event loop was blocked for {blocked_s:g} s in {self._culprit()}; "
                    "environments must await what takes long, or run it in the reward pool"
                )
                return

    def _culprit(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return "a thread that has ended"
        calls = traceback.extract_stack(frame)
        # Library code alone would name nobody: also the last two lines that are none.
        own = [call for call in calls[:-1] if not call.filename.startswith(_LIBRARIES)][-2:]
        places = [f"{call.filename}:{call.lineno} {call.name}" for call in [*own, calls[-1]]]
        return f"{' > '.join(places)}: {calls[-1].line}"


def calm_collector() -> None:
    """Keeps the garbage collector from stopping the loop; called once, when everything is built.

    With 10,000 rollouts in flight a full collection took 50 to 240 ms, several times a second, and
    one of 200,000 young objects 180 ms. What is there now stays to the end and is looked at no
    more; of the rest, which is freed by reference counts nearly always, at most 12,000 objects
    are looked at in one go (29 ms), and all of them once in ten million.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000)


def _exit(last_words: str) -> None:
    log.error("%s", last_words)
    logging.shutdown()
    os._exit(_EXIT_CODE)
