"""The embedded engine's process: JaxEngines by name behind a socket.

    python -m telescope_jax.inference.engine_process --fd N      (started by engine_client.py)

The first message says what to build; from then on (parent -> process):
    sample name id request      -> answer id completion | refused id kind text
    cancel id
    load name id ref            -> loaded id | refused id kind text
    metrics                     -> metrics name values, for every engine, since the last time

The process lives as long as its parent: it ends when the socket closes, and on Linux also when the
parent is killed while this one hangs. Signals of the terminal and the cluster are the parent's to
answer: one that reached only the engine would fail rollouts in the middle of a checkpoint.
"""

import argparse
import asyncio
import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import Any

from telescope_jax.allocator import few_arenas
from telescope_jax.config import EngineConfig, PolicyConfig
from telescope_jax.inference.embedded import EngineShape, build_engines
from telescope_jax.inference.jax_engine import JaxEngine
from telescope_jax.inference.wire import (
    Channel,
    pack_completion,
    unpack_ref,
    unpack_request,
)
from telescope_jax.interfaces import PromptTooLong
from telescope_jax.types import Completion

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_CLOSE_TIMEOUT_S = 10.0


def main(argv: list[str]) -> None:
    """Serves the engines until the parent closes the socket."""
    few_arenas()
    parser = argparse.ArgumentParser(description="an engine process; started by the trainer")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--parent", type=int, required=True, help="the trainer's process id")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)  # orbax tells of every file it opens
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != args.parent:
        return  # it died before the line above
    asyncio.run(_serve(socket.socket(fileno=args.fd)))


async def _serve(connection: socket.socket) -> None:
    channel = Channel(*await asyncio.open_connection(sock=connection))
    server: Server | None = None
    async for message in channel.receive():
        if server is None:
            server = Server(channel, message[1])
            channel.send("ready")
            log.info("ready: %s", ", ".join(server.engines))
        else:
            server.handle(message)
    if server is not None:
        # A device that hangs must not keep the process alive: nobody is left to notice.
        try:
            await asyncio.wait_for(server.close(), _CLOSE_TIMEOUT_S)
        except TimeoutError:
            log.error("the engine did not stop within %g s", _CLOSE_TIMEOUT_S)
            os._exit(1)


class Server:
    """Answers messages from the engines that a specification describes."""

    def __init__(self, channel: Channel, spec: dict[str, Any]):
        # By name: the engine knows no store, it reads from the one that the trainer writes to.
        store_class = getattr(
            importlib.import_module(spec["store"]["module"]), spec["store"]["class"]
        )
        store = store_class(**spec["store"]["arguments"])
        self._channel = channel
        self.engines: dict[str, JaxEngine] = build_engines(
            EngineConfig(**spec["engine"]),
            PolicyConfig(**spec["policy"]),
            EngineShape(**{**spec["shape"], "eos_ids": tuple(spec["shape"]["eos_ids"])}),
            store,
            names=spec["names"],
        )
        self._cancels: dict[int, Any] = {}
        self._loads: set[asyncio.Task] = set()

    def handle(self, message: list[Any]) -> None:
        """Does what one message asks; what it cannot do, it answers."""
        kind, *rest = message
        if kind == "sample":
            self._sample(*rest)
        elif kind == "cancel":
            if (cancel := self._cancels.pop(rest[0], None)) is not None:
                cancel()
        elif kind == "load":
            task = asyncio.create_task(self._load(*rest))
            self._loads.add(task)  # the event loop keeps weak references only
            task.add_done_callback(self._loads.discard)
        elif kind == "metrics":
            for name, engine in self.engines.items():
                self._channel.send("metrics", name, dict(engine.metrics()))
        else:
            raise ValueError(f"unknown message {kind!r}")

    async def close(self) -> None:
        """Stops the engines and joins their thread."""
        for task in self._loads:
            task.cancel()
        for engine in self.engines.values():
            await engine.close()

    def _sample(self, name: str, id: int, packed: list[Any]) -> None:
        engine = self.engines[name]
        try:
            request = engine.submit(*unpack_request(packed), partial(self._answer, id))
        except Exception as error:
            self._refuse(id, error)
        else:
            self._cancels[id] = partial(engine.cancel, request)

    def _answer(self, id: int, result: Completion | Exception) -> None:
        self._cancels.pop(id, None)
        if isinstance(result, Completion):
            self._channel.send("answer", id, pack_completion(result))
        else:
            self._refuse(id, result)

    async def _load(self, name: str, id: int, packed: list[Any]) -> None:
        try:
            await self.engines[name].load(unpack_ref(packed))
        except Exception as error:
            self._refuse(id, error)
        else:
            self._channel.send("loaded", id)

    def _refuse(self, id: int, error: Exception) -> None:
        """The kinds of error that a caller of the interface can tell apart."""
        known = (PromptTooLong, NotImplementedError, ValueError)
        kind = next((k.__name__ for k in known if isinstance(error, k)), "EngineError")
        self._channel.send("refused", id, kind, str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
