"""One place in a pool: a server that is started, loaded, watched and, when it dies, replaced.

A server is `ready` once it answers, and `serving` once its workers and the handshake have confirmed
a version that the pool asked for. During a swap new requests wait, so that none is answered from a
prefix that other weights computed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from telescope_jax.inference.server_process import ServerProcess, free_port, new_key
from telescope_jax.inference.vllm_server import (
    ServerShape,
    VllmClient,
    command_line,
    environment,
)
from telescope_jax.interfaces import EngineError
from telescope_jax.types import Completion, SamplingParams, WeightsRef

log = logging.getLogger(__name__)

NO_VERSION = -1
_HEALTH_POLL_S = 0.2
_WATCH_POLL_S = 1.0
_STRIKES = 3  # failed probes in a row that count as death
_PORT_TRIES = 3
_PORT_TAKEN = "ddress already in use"


class Source(Protocol):
    """Where the server of a place comes from."""

    name: str

    async def open(self) -> tuple[ServerProcess | None, VllmClient]:
        """A server that was just started, or that somebody else runs; it may not answer yet."""
        ...


class LocalSource:
    """Servers that this process starts, on a free port of this machine."""

    def __init__(
        self,
        name: str,
        shape: ServerShape,
        *,
        workdir: Path,
        timeout_s: float,
        log_name: str = "",
        command: Callable[..., Sequence[str]] = command_line,
    ) -> None:
        """
        Args:
          name: what the server is called; unique among runs.
          workdir: the server's log is in its folder `logs`.
          timeout_s: longest wait for one answer.
          log_name: of the log file, without its ending; "" is `name`.
          command: the command line, by shape, name and port.
        """
        self.name, self._shape, self._timeout_s = name, shape, timeout_s
        self._log_path = workdir / "logs" / f"{log_name or name}.log"
        self._command = command

    async def open(self) -> tuple[ServerProcess, VllmClient]:
        key, port = new_key(), free_port()
        process = ServerProcess(
            self._command(self._shape, name=self.name, port=port),
            environment(self._shape, name=self.name, key=key),
            self._log_path,
            cwd=self._log_path.parent,
        )
        await process.start()
        client = VllmClient(
            f"http://127.0.0.1:{port}",
            key,
            self.name,
            eos_ids=self._shape.eos_ids,
            context=self._shape.context,
            vocab_size=self._shape.vocab_size,
            timeout_s=self._timeout_s,
            gone=lambda: not process.alive,
        )
        return process, client


class AttachedSource:
    """A server that somebody else started with our plugin; it is never stopped from here."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        eos_ids: Sequence[int],
        context: int,
        vocab_size: int,
        timeout_s: float,
    ) -> None:
        """See VllmClient for the arguments."""
        self.name, self._key = url, key
        self._eos_ids, self._context, self._vocab_size = eos_ids, context, vocab_size
        self._timeout_s = timeout_s

    async def open(self) -> tuple[None, VllmClient]:
        client = VllmClient(
            self.name,
            self._key,
            "",
            eos_ids=self._eos_ids,
            context=self._context,
            vocab_size=self._vocab_size,
            timeout_s=self._timeout_s,
        )
        return None, client


T = TypeVar("T")


class _Told(Generic[T]):
    """A field of a member whose every change is told to whoever routes requests."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, member: "Member", owner: type) -> T:
        return getattr(member, self._slot)

    def __set__(self, member: "Member", value: T) -> None:
        setattr(member, self._slot, value)
        member.tell(member)


def _nobody(member: "Member") -> None: ...


class Member:
    """One place of a pool.

    `tell` is called with the member after each change of version, serving, swapping or in_flight.
    """

    version = _Told[int]()
    serving = _Told[bool]()
    swapping = _Told[bool]()
    in_flight = _Told[int]()

    def __init__(self, source: Source, *, start_timeout_s: float) -> None:
        self._source, self._start_timeout_s = source, start_timeout_s
        self._process: ServerProcess | None = None
        self._client: VllmClient | None = None
        self.tell: Callable[[Member], None] = _nobody
        self.version = NO_VERSION
        self.ready = False
        self.serving = False
        self.swapping = False
        self.loading = asyncio.Lock()  # one load at a time, whoever asks
        self.in_flight = 0
        self.restarts = 0
        self.load_s = 0.0
        self.swap_s = 0.0

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def client(self) -> VllmClient:
        """The client of the newest server of this place."""
        assert self._client is not None, "start the member first"
        return self._client

    @property
    def process(self) -> ServerProcess | None:
        """The newest process; None for a server that somebody else runs."""
        return self._process

    @property
    def takes_requests(self) -> bool:
        return self.serving and not self.swapping

    async def start(self) -> None:
        """Starts a server and waits until it answers; it has no weights yet.

        Raises:
          EngineError: it died, or took longer than `start_timeout_s`; with its last log lines.
        """
        for attempt in range(_PORT_TRIES):
            try:
                return await self._start()
            except EngineError as error:
                # Somebody took the port between our choice and the server's bind.
                if _PORT_TAKEN not in str(error) or attempt == _PORT_TRIES - 1:
                    raise
                log.warning("%s: its port was taken meanwhile, trying another one", self.name)

    async def _start(self) -> None:
        self.version, self.swapping = NO_VERSION, False
        self._process, self._client = await self._source.open()
        deadline = time.monotonic() + self._start_timeout_s
        try:
            while not await self._client.healthy():
                if self._process is not None and not self._process.alive:
                    raise EngineError(f"{self.name}: {self._process.death()}")
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{self.name} at {self._client.url} did not answer within "
                        f"engine.start_timeout_s={self._start_timeout_s:g}; "
                        + (self._process.log_tail() if self._process else "")
                    )
                await asyncio.sleep(_HEALTH_POLL_S)
            await self._client.check_version()
        except BaseException:
            await self.stop(kill=True)
            raise
        self.ready = True

    def give_up(self) -> None:
        """Takes the server out: whatever state it is in, it is to be replaced."""
        self.ready = self.serving = False

    async def check(self, process: ServerProcess | None) -> None:
        """Gives the server up if it, or its engine, is dead; `process` is the one that failed."""
        if process is not self._process or not self.ready:
            return  # it was replaced meanwhile, or is being replaced
        dead = process is not None and not process.alive
        if (dead or not await self._healthy()) and process is self._process:
            self.give_up()

    async def load(self, ref: WeightsRef) -> None:
        """Stages and swaps to `ref`. Raises what VllmClient.stage and swap raise."""
        started = time.monotonic()
        await self.client.stage(ref)
        self.swapping, begun = True, time.monotonic()
        try:
            await self.client.swap(ref)
            self.version = ref.version
        finally:
            self.swapping = False
        self.swap_s = time.monotonic() - begun
        self.load_s = time.monotonic() - started

    async def sample(
        self, tokens: Sequence[int], sampling: SamplingParams, *, salt: str = ""
    ) -> Completion:
        """One completion from this server. `salt` sets it apart from other requests' prefixes."""
        return await self.client.generate(tokens, sampling, salt=f"{salt}{self.version}")

    async def died(self) -> str:
        """Waits until the server is dead, or its engine is; says how, with the last log lines."""
        strikes = 0
        while strikes < _STRIKES and self.ready:
            if self._process is not None:
                try:
                    await asyncio.wait_for(self._process.wait(), _WATCH_POLL_S)
                    break
                except TimeoutError:
                    pass
            else:
                await asyncio.sleep(_WATCH_POLL_S)
            strikes = 0 if await self._healthy() else strikes + 1
        self.give_up()
        return self.last_words()

    def last_words(self) -> str:
        """How the server ended, if it did, with the last lines of its log."""
        if self._process is None:
            return f"{self.name} does not answer"
        return f"{self.name}: {self._process.death()}"

    async def _healthy(self) -> bool:
        try:
            return await self.client.healthy()
        except EngineError as error:
            log.warning("%s", error)
            return False

    async def stop(self, *, kill: bool = False) -> None:
        """Ends the server with all its processes, and the connections to it."""
        self.give_up()
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            await self._process.stop(kill=kill)
