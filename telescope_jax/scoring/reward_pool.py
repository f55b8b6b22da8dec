"""Runs graders in processes that can be killed: the only place where text of a model meets code.

Each worker (`reward_worker`) loads the graders once and forks a child for each call, with limits on
time, memory and files. The pool adds what a worker cannot do for itself: it replaces one that died
or does not answer. Invariants:
- a call returns, raises, or is cancelled within its deadline plus `grace_s` of its start on a
  worker, whatever the grader does; waiting for a free worker is not counted;
- cancelling a call kills its child; the worker goes back to the pool;
- workers are started by exec, never by fork, so threads of JAX in this process do not matter, and
  they inherit neither its environment nor its descriptors;
- nothing is pickled: arguments and results are JSON.

Not concurrent.futures.ProcessPoolExecutor, which never takes back a worker that hangs. A pool
belongs to the event loop of its first call.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from telescope_jax.interfaces import RewardError, RewardTimeout
from telescope_jax.scoring.confinement import landlock_version
from telescope_jax.scoring.reward_worker import MAX_REPLY

log = logging.getLogger(__name__)

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from telescope_jax.scoring.reward_worker import main; main()"
)
_START_TIMEOUT_S = 120.0


class AnswerLimit(RewardTimeout):
    """The call ran into its own deadline, memory or CPU limit, or crashed its process.

    It may be the answer's fault or that of a busy machine; a second try in a fresh process tells
    (`envs.judge`). A plain RewardTimeout is a worker that did not answer.
    """


class RewardPool:
    """A pool of `workers` killable processes.

    Args:
      workers: most calls at a time, ≥ 1. Each is a process of 50-150 MB.
      timeout_s: seconds that one call may take.
      memory_bytes: address space that one call may add to its worker's.
      preload: modules that a worker imports when it starts. The function's own module is imported
        at its first call otherwise, outside that call's deadline but inside `grace_s`.
      grace_s: seconds beyond the deadline after which a silent worker is replaced.
      confined: keep calls from files outside their folder, the network and other processes, where
        the kernel can (`confinement`); False is for tools of an environment that need one of them.

    Raises:
      ValueError: an argument is not positive.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_bytes: int = 512 << 20,
        preload: Sequence[str] = (),
        grace_s: float = 30.0,
        confined: bool = True,
    ):
        if workers < 1 or timeout_s <= 0 or memory_bytes <= 0 or grace_s <= 0:
            raise ValueError(
                f"workers {workers}, timeout_s {timeout_s}, memory_bytes {memory_bytes} "
                f"and grace_s {grace_s} must all be positive"
            )
        self.timeout_s = timeout_s
        self._grace_s = grace_s
        self._setup = {
            "preload": list(preload),
            "memory_bytes": memory_bytes,
            "confined": confined,
        }
        self._workers = workers
        self._places = asyncio.Semaphore(workers)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._counts = dict.fromkeys(("calls", "limits", "errors", "started"), 0)

    async def __aenter__(self) -> "RewardPool":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def prewarm(self) -> None:
        """Starts all workers, so that the first calls do not pay for the imports.

        Raises:
          RewardError: a worker could not start.
        """
        missing = self._workers - len(self._idle) - len(self._busy)
        await asyncio.gather(*(self._start_idle() for _ in range(missing)))

    async def call(
        self,
        function: str,
        *args: Any,
        given: Sequence[Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """The value of `function(*args)`, run in a fresh process.

        Args:
          function: `package.module:name`, importable here; never text of a model.
          args: what JSON can carry; tuples arrive as lists.
          given: (`package.module:name`, *arguments) of something costly that the worker itself
            makes, once, and passes as the first argument of every call that names it. No text of a
            model may be in it.
          timeout_s: instead of the pool's.

        Raises:
          AnswerLimit: the call ran into one of its limits.
          RewardTimeout: the worker did not answer; it is replaced.
          RewardError: the function raised (message and traceback), or its worker died.
        """
        self._counts["calls"] += 1
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        request = {"function": function, "args": args, "given": given, "timeout_s": timeout_s}
        await self._places.acquire()
        try:
            worker = self._idle.pop() if self._idle else await self._start()
        except BaseException:
            self._places.release()
            raise
        self._busy.add(worker)
        try:
            async with asyncio.timeout(timeout_s + self._grace_s):
                reply = await worker.ask(request)
        except asyncio.CancelledError:
            self._keep(self._reclaim(worker))  # which frees the place, once the child is gone
            raise
        except (TimeoutError, _WorkerDied) as error:
            self._counts["errors"] += 1
            self._release(worker, alive=False)
            if isinstance(error, TimeoutError):
                raise RewardTimeout(
                    f"the worker running {function} did not answer within its deadline of "
                    f"{timeout_s} s and {self._grace_s} s of grace; it is replaced"
                ) from None
            raise RewardError(f"the worker running {function} ended: {error}") from None
        except BaseException:  # arguments that are not JSON: nothing was sent
            self._release(worker, alive=True)
            raise
        self._release(worker, alive=True)
        return self._value(function, timeout_s, reply)

    def _value(self, function: str, timeout_s: float, reply: Mapping[str, Any]) -> Any:
        if "value" in reply:
            return reply["value"]
        if limit := reply.get("limit"):
            self._counts["limits"] += 1
            raise AnswerLimit(f"{function} ran into a limit ({limit}); its deadline: {timeout_s} s")
        self._counts["errors"] += 1
        raise RewardError(f"{function} raised {reply.get('error')}\n{reply.get('traceback', '')}")

    def metrics(self) -> dict[str, float]:
        """Counters since the last call: calls, limits hit, errors, workers started."""
        counts = {f"reward/{name}": float(count) for name, count in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return counts

    async def close(self) -> None:
        """Ends every worker; calls in flight raise RewardError. Closing twice is allowed."""
        self._closed = True
        for worker in [*self._idle, *self._busy]:
            self._keep(worker.end())
        self._idle.clear()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self) -> "_Worker":
        if self._closed:
            raise RewardError("the reward pool is closed")
        if self._setup["confined"] and not self._counts["started"] and not landlock_version():
            log.warning(
                "graders can reach files and the network: this kernel has no Landlock (Linux 5.13 "
                "or later, built with it). They still run in killable processes with limits; with "
                "an environment that evaluates answers, run as a user who owns nothing, or in a "
                "container"
            )
        self._counts["started"] += 1
        worker = await _Worker.start(self._setup)
        if self._closed:
            await worker.end()
            raise RewardError("the reward pool is closed")
        return worker

    async def _start_idle(self) -> None:
        async with self._places:
            self._idle.append(await self._start())

    async def _reclaim(self, worker: "_Worker") -> None:
        alive = False
        try:
            async with asyncio.timeout(self._grace_s):
                await worker.cancel()
            alive = True
        except (TimeoutError, _WorkerDied):
            self._counts["errors"] += 1
        finally:
            self._release(worker, alive=alive)

    def _release(self, worker: "_Worker", *, alive: bool) -> None:
        self._busy.discard(worker)
        if alive and not self._closed:
            self._idle.append(worker)
        else:
            self._keep(worker.end())
        self._places.release()

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop alone holds tasks weakly
        task.add_done_callback(self._tasks.discard)


class _WorkerDied(Exception):
    """The worker's output ended."""


class _Worker:
    """One process and the conversation with it: one call at a time."""

    def __init__(self, process: asyncio.subprocess.Process, scratch: str):
        assert process.stdin is not None and process.stdout is not None
        self._process, self._scratch = process, scratch
        self._input, self._output = process.stdin, process.stdout
        self._last_id = 0

    @classmethod
    async def start(cls, setup: Mapping[str, Any]) -> "_Worker":
        """A worker that is ready.

        Raises:
          RewardError: it did not get ready; the message holds the end of its log.
        """
        scratch = tempfile.mkdtemp(prefix="telescope_reward_")
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        log = os.path.join(scratch, "log")
        try:
            with open(log, "wb") as log_file:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-s", "-X", "utf8", "-c", _BOOT, path),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log_file,
                    cwd=scratch,
                    env={"PYTHONHASHSEED": "0"},  # graders give one verdict in every worker
                    start_new_session=True,  # an interrupt from the terminal is the parent's
                    limit=2 * MAX_REPLY,
                )
        except BaseException:  # cancelled: asyncio has killed what it started
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        worker = cls(process, scratch)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker._send(setup)
                await worker._receive()
        except (TimeoutError, _WorkerDied) as error:
            await worker.end(keep_scratch=True)
            with contextlib.suppress(OSError), open(log, errors="replace") as log_file:
                said = log_file.read()[-4000:]
                error = _WorkerDied(f"{error}\n{said}")
            shutil.rmtree(scratch, ignore_errors=True)
            raise RewardError(f"a reward worker could not start: {error}") from None
        except BaseException:
            await worker.end()
            raise
        return worker

    async def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The reply to one call.

        Raises:
          _WorkerDied: there will be none.
          TypeError, ValueError: the request is not JSON.
        """
        self._last_id += 1
        await self._send({"id": self._last_id, **request})
        return await self._reply()

    async def cancel(self) -> None:
        """Ends the call whose `ask` was cancelled; then the worker can take another."""
        await self._send({"cancel": self._last_id})
        await self._reply()

    async def end(self, *, keep_scratch: bool = False) -> None:
        """Kills the process and waits for it; its child, if any, dies with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if not keep_scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    async def _reply(self) -> Mapping[str, Any]:
        while True:
            reply = await self._receive()
            if reply.get("id") == self._last_id:
                return reply

    async def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        try:
            self._input.write(line)
            await self._input.drain()
        except ConnectionError as error:
            raise _WorkerDied(str(error)) from None

    async def _receive(self) -> Mapping[str, Any]:
        try:
            line = await self._output.readline()
            if line.endswith(b"\n"):
                return json.loads(line)
        except (ConnectionError, ValueError) as error:
            raise _WorkerDied(f"unreadable reply ({error})") from None
        raise _WorkerDied("its output closed")
