"""The trainer's side of an engine process: starts it, talks to it, and notices when it dies.

Invariants:
- a death of the process fails everything that waits on it, each with an EngineError that carries
  the exit code and the last lines of its log; nothing waits for ever;
- the process never outlives this one: it reads the end of its socket, whatever way we end;
- cancelling a `sample` reaches the process, whose slot is free before its next call.
"""

import asyncio
import dataclasses
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

import telescope_jax
from telescope_jax.config import EngineConfig, PolicyConfig
from telescope_jax.inference.batcher import NO_VERSION
from telescope_jax.inference.embedded import EngineShape, build_engines
from telescope_jax.inference.jax_engine import Reader
from telescope_jax.inference.questions import Questions
from telescope_jax.inference.wire import Channel, pack_ref, pack_request
from telescope_jax.interfaces import Engine, EngineError, EngineLost
from telescope_jax.types import Completion, SamplingParams, WeightsRef


class Store(Reader, Protocol):
    """What an engine needs of a weight store."""

    def elsewhere(self) -> Mapping[str, Any] | None:
        """How another process opens it (module, class, arguments); None: it cannot."""
        ...


log = logging.getLogger(__name__)

_LOG_LINES = 12
_CLOSE_TIMEOUT_S = 15.0


async def start_engines(
    config: EngineConfig,
    policy: PolicyConfig,
    shape: EngineShape,
    store: Store,
    *,
    workdir: str | os.PathLike[str],
    names: Sequence[str] = ("train", "eval"),
) -> dict[str, Engine]:
    """Embedded engines by name, in this process or in one of their own (`config.own_process`).

    They hold no weights yet: `load` each before it samples. Close them all.

    Args:
      store: where they load from; a process of its own needs one on disk.
      workdir: the process logs to `logs/engine.log` in it.

    Raises:
      EngineError: the process did not come up within `config.start_timeout_s`.
      ValueError: this store or device cannot serve another process.
    """
    if not config.own_process:
        return dict(build_engines(config, policy, shape, store, names=names))
    if (elsewhere := store.elsewhere()) is None:
        raise ValueError(
            "engine.own_process=True reads weights from disk, and this store is in memory; use an "
            "OrbaxStore, or set engine.own_process=False"
        )
    if jax.default_backend() == "tpu":
        raise ValueError(
            "a TPU belongs to one process; set engine.own_process=False, or engine.kind=vllm"
        )
    spec = {
        "engine": dataclasses.asdict(config),
        "policy": dataclasses.asdict(policy),
        "shape": dataclasses.asdict(shape),
        "store": elsewhere,
        "names": list(names),
    }
    process = EngineProcess(spec, config, Path(workdir) / "logs" / "engine.log")
    await process.start()
    return {name: ProcessEngine(process, name) for name in names}


class EngineProcess:
    """One engine process, which may be replaced when it dies."""

    def __init__(self, spec: Mapping[str, Any], config: EngineConfig, log_path: Path):
        """
        Args:
          spec: what `engine_process.Server` builds.
          config: timeouts and the limit of restarts.
          log_path: the process's output, appended to.
        """
        self._spec, self._config, self._log_path = dict(spec), config, log_path
        self.questions = Questions()
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._watch: asyncio.Task | None = None
        self._ready: asyncio.Future | None = None
        self._starting = asyncio.Lock()  # held while the process or its weights are replaced
        self._death = "the engine process was never started"
        self._revival: asyncio.Task[None] | None = None
        self.closing = False
        self.restarts = 0
        self.loaded: dict[str, WeightsRef] = {}

    @property
    def alive(self) -> bool:
        """Whether requests have somebody to answer them."""
        return self._channel is not None and not self._channel.ended

    @property
    def pid(self) -> int:
        """The newest process's, dead or alive. Raises EngineError before the first."""
        if self._process is None:
            raise EngineError(self._death)
        return self._process.pid

    async def start(self) -> None:
        """Starts the process, and waits until its engines have what they had loaded last.

        Raises:
          EngineError: it died, or took longer than `start_timeout_s`; it is gone then.
        """
        process, channel = await self._spawn()
        ready = self._ready = asyncio.get_running_loop().create_future()
        self._process, timeout_s = process, self._config.start_timeout_s
        self._watch = asyncio.create_task(self._listen(process, channel))
        channel.send("start", self._spec)
        try:
            async with asyncio.timeout(timeout_s):
                await ready
            for name, ref in self.loaded.items():
                await self._ask(channel, "load", name, pack_ref(ref), timeout_s)
        except TimeoutError as error:
            await self._kill()
            raise EngineError(
                f"the engine process was not ready within engine.start_timeout_s={timeout_s:g}; "
                f"{self._log_tail()}"
            ) from error
        except BaseException:
            await self._kill()
            raise
        self._channel = channel  # from here on requests come in

    async def restart(self) -> None:
        """Replaces a dead process; its engines load again what they had loaded last.

        Callers that arrive together share one restart, and a process that lives is left alone.

        Raises:
          EngineError: `max_restarts` are used up, or the new process fails too.
        """
        async with self._starting:
            if self.alive:
                return
            if self.closing:
                raise EngineError("the engine is closed")
            if self._watch is not None:
                await asyncio.wait([self._watch])  # so that the cause of death is known
            if self.restarts >= self._config.max_restarts:
                raise EngineError(
                    f"the engine process died {self.restarts + 1} times, more often than "
                    f"engine.max_restarts={self._config.max_restarts} allows; {self._death}"
                )
            while True:
                self.restarts += 1
                log.warning("restarting the engine (%d): %s", self.restarts, self._death)
                try:
                    return await self.start()
                except EngineError as error:
                    if self.closing or self.restarts >= self._config.max_restarts:
                        raise
                    log.warning("the new engine process failed too: %s", error)

    async def revive(self) -> None:
        """Replaces the process if it is dead, in a task of its own: whoever waits for it may be
        cancelled, the others still get their engine.

        Raises:
          EngineLost: `max_restarts` are used up, or the new process fails too.
        """
        if self.alive or self.closing:
            return
        if self._revival is None or self._revival.done():
            self._revival = asyncio.create_task(self.restart(), name="engine restart")
        try:
            await asyncio.shield(self._revival)
        except EngineError as error:
            raise EngineLost(str(error)) from error

    async def sample(
        self, name: str, tokens: Sequence[int], sampling: SamplingParams
    ) -> Completion:
        """See ProcessEngine. One that meets a restart under way waits for its end."""
        if not self.alive and self._starting.locked():
            async with self._starting:
                pass
        packed, timeout_s = pack_request(tokens, sampling), self._config.request_timeout_s
        return await self._ask(self._channel, "sample", name, packed, timeout_s)

    async def load(self, name: str, ref: WeightsRef) -> None:
        """See ProcessEngine."""
        async with self._starting:  # a restart must not load an older version after this one
            timeout_s = self._config.start_timeout_s  # the first load compiles
            await self._ask(self._channel, "load", name, pack_ref(ref), timeout_s)
            self.loaded[name] = ref

    async def _ask(
        self, channel: Channel | None, kind: str, name: str, packed: Any, timeout_s: float
    ) -> Any:
        if channel is None or channel.ended:
            raise EngineError(self._death)
        return await self.questions.ask(channel, kind, name, packed, timeout_s)

    async def _spawn(self) -> tuple[asyncio.subprocess.Process, Channel]:
        ours, theirs = socket.socketpair()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "telescope_jax.inference.engine_process",
                f"--fd={theirs.fileno()}",
                f"--parent={os.getpid()}",
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=_environment(),
            )
        return process, Channel(*await asyncio.open_connection(sock=ours))

    def ask_metrics(self) -> None:
        """Asks for new metrics; they arrive in `questions.metrics` when the process gets to it."""
        if self._channel is not None and not self._channel.ended:
            self._channel.send("metrics")

    async def close(self) -> None:
        """Ends the process, politely at first, and fails what still waits."""
        self.closing = True
        if self._process is None or self._watch is None:
            return
        if self._channel is not None:
            self._channel.close()
        try:
            await asyncio.wait_for(asyncio.shield(self._watch), _CLOSE_TIMEOUT_S)
        except TimeoutError:
            await self._kill()

    async def _listen(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        """Hands answers to those who wait, until the process is gone."""
        try:
            async for message in channel.receive():
                if message[0] != "ready":
                    self.questions.hear(message)
                elif self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
        finally:
            # The socket is closed; should the process linger, it has nothing left to do for us.
            try:
                code = await asyncio.wait_for(process.wait(), _CLOSE_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                code = await process.wait()
            channel.close()
            self._fail_pending(code)

    def _fail_pending(self, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self._death = (
            "the engine is closed"
            if self.closing
            else f"the engine process {how}; {self._log_tail()}"
        )
        self.questions.fail(self._death)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineError(self._death))

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._watch is not None:
            await asyncio.wait([self._watch])

    def _log_tail(self) -> str:
        with self._log_path.open(errors="replace") as lines:
            tail = "".join(f"\n    {line.rstrip()}" for line in deque(lines, _LOG_LINES))
        return f"the last lines of {self._log_path}:{tail or ' (empty)'}"


class ProcessEngine:
    """One of the engines of an engine process."""

    def __init__(self, process: EngineProcess, name: str):
        self.process, self.name = process, name

    @property
    def version(self) -> int:
        """The version that was loaded last; −1 before the first."""
        ref = self.process.loaded.get(self.name)
        return ref.version if ref else NO_VERSION

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        """One completion of `tokens`; cancelling frees the slot before the next call.

        Raises:
          PromptTooLong: no token fits behind the prompt.
          NotImplementedError: top_p or top_k cut the distribution.
          ValueError: the request is malformed.
          EngineError: the process died meanwhile, is closed, failed, or took too long.
          EngineLost: it died more often than it may.
        """
        await self.process.revive()
        return await self.process.sample(self.name, tokens, sampling)

    async def load(self, ref: WeightsRef) -> None:
        """Swaps to `ref` between two calls; running requests go on with the new weights.

        A process that dies of it, or meanwhile, is replaced and asked again.

        Raises:
          EngineError: the weights cannot be read, or the engine is closed.
          EngineLost: it died more often than it may.
        """
        while True:
            await self.process.revive()
            try:
                return await self.process.load(self.name, ref)
            except EngineError:
                if self.process.alive or self.process.closing:
                    raise

    async def restart(self) -> None:
        """Replaces the process if it is dead, for all its engines. Raises EngineError."""
        await self.process.restart()

    def metrics(self) -> Mapping[str, float]:
        """What the engine did between the last two calls, see JaxEngine.metrics; one call late,
        since nothing here waits for the process."""
        self.process.ask_metrics()
        return self.process.questions.metrics.pop(self.name, {})

    async def close(self) -> None:
        """Ends the process, and with it its other engines."""
        await self.process.close()


def _environment() -> dict[str, str]:
    """What the process inherits: our import path, our platform, our compilation cache."""
    environment = dict(os.environ)
    package_root = str(Path(telescope_jax.__file__).parent.parent)
    inherited = [path for path in [environment.get("PYTHONPATH")] if path]
    environment["PYTHONPATH"] = os.pathsep.join([package_root, *inherited])
    if jax.default_backend() == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    # The trainer shares the accelerator: take memory as it is needed, unless the user says more.
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for setting in (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ):
        if (value := jax.config.values[setting]) is not None:
            environment[setting.upper()] = str(value)
    return environment
