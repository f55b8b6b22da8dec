"""The embedded engine: an Engine whose slots are decoded in a thread of this process.

One class serves twice: in the trainer's process (tests, notebooks), and in a process of its own,
where `engine_process.py` puts it behind a socket.

One EngineThread steps all engines of a process in turn, so that an eval engine can hold another
version of the weights while training samples; they share their compiled functions. The event loop
hands work over in commands, which run between two steps, and gets results back in batches. A
request's tokens depend on its seed and prompt alone, so the hand-over's timing decides nothing
but, when weights are swapped in flight, which version writes which token.
"""

import asyncio
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import jax
import numpy as np

from telescope_jax.inference.batcher import (
    Batcher,
    Counters,
    Finished,
    Request,
    check_request,
)
from telescope_jax.inference.decoding import Decoding
from telescope_jax.interfaces import EngineError
from telescope_jax.types import Completion, Params, SamplingParams, WeightsRef

log = logging.getLogger(__name__)


class Reader(Protocol):
    """The reading half of a weight store."""

    def read(self, ref: WeightsRef) -> Params: ...


class EngineThread:
    """Steps batchers in a thread of its own until it is closed.

    It must be closed: a thread inside XLA while the interpreter shuts down aborts the process.
    """

    def __init__(self, name: str = "engine"):
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._stepping: dict[Batcher, Callable[[list[Finished]], None]] = {}
        self._users = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, batcher: Batcher, deliver: Callable[[list[Finished]], None]) -> None:
        """Steps `batcher` from now on; `deliver` gets, in the thread, what each step finished."""
        self._users += 1
        self.call(partial(self._stepping.__setitem__, batcher, deliver))

    def remove(self, batcher: Batcher) -> None:
        """Stops stepping `batcher`; the thread ends with its last one."""
        self._users -= 1
        self.call(partial(self._stepping.pop, batcher, None))
        if not self._users:
            self.close()

    def call(self, command: Callable[[], object]) -> None:
        """Runs `command` in the thread between two steps; it must not raise.

        Raises:
          EngineError: the thread has ended.
        """
        with self._wake:
            if self._stopping:
                raise EngineError("the engine is closed")
            self._commands.append(command)
            self._wake.notify()

    def close(self) -> None:
        """Runs the commands that are left, and joins the thread."""
        atexit.unregister(self.close)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while self._take_commands():
            for batcher, deliver in self._stepping.items():
                if batcher.busy and (done := batcher.step()):
                    deliver(done)

    def _take_commands(self) -> bool:
        """Runs what is queued; waits when there is nothing to step. False: time to end."""
        with self._wake:
            while not (self._commands or self._stopping or any(b.busy for b in self._stepping)):
                self._wake.wait()
            commands, stopping = list(self._commands), self._stopping
            self._commands.clear()
        for command in commands:
            command()
        return not stopping


class JaxEngine:
    """An Engine that decodes in this process; used from one event loop."""

    def __init__(
        self,
        decoding: Decoding,
        store: Reader,
        thread: EngineThread,
        *,
        sharding: jax.sharding.Sharding | None = None,
        request_timeout_s: float = 600.0,
        temperature_factor: float = 1.0,
    ):
        """
        Args:
          decoding: the compiled functions; engines may share them.
          store: where `load` reads weights.
          thread: what steps this engine; it ends with the last engine that it steps.
          sharding: where weights and slots live; None is the first local device.
          request_timeout_s: longest wait for one completion, seconds.
          temperature_factor: multiplies every request's temperature; see distortion.py.
        """
        self._decoding, self._store, self._thread = decoding, store, thread
        one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        self._sharding = sharding or one_device
        self._request_timeout_s = request_timeout_s
        self._temperature_factor = temperature_factor
        self._batcher = Batcher(decoding, self._sharding)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: dict[Request, Callable[[Completion | Exception], None]] = {}
        self._outbox: list[Callable[[], object]] = []
        self._loading = asyncio.Lock()
        self._closed = False
        self._last_metrics = (time.perf_counter(), Counters())
        thread.add(self._batcher, self._deliver)

    @property
    def version(self) -> int:
        """The version of the next token; −1 before the first load."""
        return self._batcher.version

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        """One completion of `tokens`; cancelling frees the slot before the next call.

        Raises:
          PromptTooLong: no token fits behind the prompt.
          NotImplementedError: top_p or top_k cut the distribution.
          ValueError: the request is malformed.
          EngineError: the engine is closed, has no weights, failed, or took too long.
        """
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        request = self.submit(tokens, sampling, partial(_settle, answer))
        expired = EngineError(
            f"no completion within engine.request_timeout_s={self._request_timeout_s:g}"
        )
        expiry = loop.call_later(self._request_timeout_s, _settle, answer, expired)
        try:
            return await answer
        finally:
            expiry.cancel()
            self.cancel(request)

    def submit(
        self,
        tokens: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        answer: Callable[[Completion | Exception], None],
    ) -> Request:
        """The callback form of `sample`: `answer` is called on the event loop, once, or never
        after a `cancel`. Raises as `sample` does."""
        if self._closed:
            raise EngineError("the engine is closed")
        request = check_request(
            tokens,
            replace(sampling, temperature=sampling.temperature * self._temperature_factor),
            context=self._decoding.context,
            vocab_size=self._decoding.decoder.vocab_size,
        )
        self._answers[request] = answer
        self._post(partial(self._submit, request))
        return request

    def cancel(self, request: Request) -> None:
        """Forgets a request; nothing happens when it has its answer."""
        if self._answers.pop(request, None) is not None and not self._closed:
            self._post(partial(self._batcher.cancel, request))

    async def load(self, ref: WeightsRef) -> None:
        """Swaps to `ref` between two calls; running requests go on with the new weights.

        The first load compiles the engine's functions.

        Raises:
          EngineError: the weights cannot be read, or the engine is closed.
        """
        async with self._loading:  # a slow read must not overtake a later one
            try:
                params = await asyncio.to_thread(self._read, ref)
            except Exception as error:
                raise EngineError(f"cannot load version {ref.version}: {error}") from error
            loop = asyncio.get_running_loop()
            swapped = loop.create_future()
            self._thread.call(partial(self._swap, params, ref.version, loop, swapped))
            await swapped

    def metrics(self) -> Mapping[str, float]:
        """What happened since the last call, for `engine/*`; times in seconds.

        `slots_busy` is the mean share of slots in use over the decode calls, `host_share` the part
        of the engine's working time that the device did not work.
        """
        totals = self._batcher.counters.copy()
        moment = time.perf_counter()
        (earlier, before), self._last_metrics = self._last_metrics, (moment, totals)
        return describe(
            totals.minus(before),
            seconds=moment - earlier,
            slots=self._decoding.slots,
            waiting=self._batcher.waiting,
        )

    async def close(self) -> None:
        """Fails what is pending and frees the device memory; joins the thread with its last
        engine."""
        if self._closed:
            return
        self._closed = True
        for answer in list(self._answers.values()):
            answer(EngineError("the engine was closed"))
        self._answers.clear()
        self._outbox.clear()
        self._thread.call(self._batcher.close)
        # The join waits for a call on the device; the event loop must not.
        await asyncio.to_thread(self._thread.remove, self._batcher)

    def _read(self, ref: WeightsRef) -> Params:
        return jax.block_until_ready(jax.device_put(self._store.read(ref), self._sharding))

    def _post(self, command: Callable[[], object]) -> None:
        """Hands a command to the thread with all others of this turn of the event loop: a group
        that arrives together is prefilled together."""
        if not self._outbox:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if commands and not self._closed:
            self._thread.call(partial(_run_all, commands))

    # What follows runs in the engine's thread.

    def _submit(self, request: Request) -> None:
        try:
            self._batcher.submit(request)
        except EngineError as error:
            self._deliver([(request, error)])

    def _swap(
        self,
        params: Params,
        version: int,
        loop: asyncio.AbstractEventLoop,
        swapped: asyncio.Future,
    ) -> None:
        try:
            self._batcher.swap(params, version)
            result = None
        except Exception as error:
            result = EngineError(f"cannot run version {version}: {error!r}")
        _call_soon(loop, partial(_settle, swapped, result))

    def _deliver(self, done: list[Finished]) -> None:
        if self._loop is not None:
            _call_soon(self._loop, partial(self._answer, done))

    def _answer(self, done: list[Finished]) -> None:
        """On the event loop."""
        for request, result in done:
            if (answer := self._answers.pop(request, None)) is not None:
                answer(result)


def describe(counters: Counters, *, seconds: float, slots: int, waiting: int) -> dict[str, float]:
    """Counters of a stretch of time as metrics."""
    return {
        "tokens": counters.tokens,
        "tokens_per_s": counters.tokens / max(seconds, 1e-9),
        "slots_busy": counters.busy_slots / max(counters.calls * slots, 1),
        "waiting": waiting,
        "cancelled": counters.cancelled,
        "failed": counters.failed,
        "prefills": counters.prefilled,
        "prefills_saved": max(counters.admitted - counters.prefilled, 0),
        "time_decoding": counters.step_s,
        "time_idle": max(seconds - counters.step_s, 0.0),
        "host_share": 1 - counters.device_s / counters.step_s if counters.step_s else 0.0,
    }


def _settle(future: asyncio.Future, result: object) -> None:
    if future.done():  # cancelled meanwhile
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _run_all(commands: list[Callable[[], object]]) -> None:
    for command in commands:
        command()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Into the event loop from another thread; a loop that has ended wants nothing any more."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        log.debug("the event loop ended before an engine's answer")
