"""`--role=inference`: vLLM servers on this machine, for a trainer that runs elsewhere.

    TELESCOPE_ENGINE_KEY=… python -m telescope_jax.main --role=inference --config=… \\
        --workdir=SHARED --host=0.0.0.0 --port=8000

The trainer is given their addresses as `engine.urls` and the same key. Both see one workdir: the
weights are read from it. A server that dies is started again, `engine.max_restarts` times in all;
the trainer then loads the newest version into it. SIGTERM and Ctrl-C end them all.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from telescope_jax.config import Config
from telescope_jax.inference import vllm_pools
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.server_process import ServerProcess
from telescope_jax.inference.vllm_server import ServerShape, command_line, environment
from telescope_jax.interfaces import EngineError
from telescope_jax.pretrained import StartError, open_start
from telescope_jax.weights.hf_config import hf_config_of

log = logging.getLogger(__name__)


def serve(
    config: Config,
    workdir: str,
    *,
    host: str,
    port: int,
    command: Callable[..., Sequence[str]] = command_line,
) -> int:
    """Runs `engine.servers` servers on ports from `port` on; returns the exit code."""
    logging.getLogger("telescope_jax").setLevel(logging.INFO)
    try:
        check_ports(host, port, config.engine.servers)
        shape = server_shape(config, Path(workdir), host)
        return asyncio.run(_serve(config, shape, Path(workdir).resolve(), port, command))
    except (EngineError, StartError) as error:
        print(f"telescope_jax: {error}", file=sys.stderr)
        return 2


def check_ports(host: str, port: int, servers: int) -> None:
    """Whether all servers can listen on `host`.

    Raises:
      EngineError: the first port that one cannot, and why.
    """
    if not 0 < port <= (1 << 16) - servers:
        raise EngineError(
            f"--port={port} with engine.servers={servers}: ports are 1 to {(1 << 16) - 1}"
        )
    for one in range(port, port + servers):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, one, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise EngineError(
                f"no server can listen on {host}:{one}: {error.strerror}; choose another --port, "
                "or --host"
            ) from error


def server_shape(config: Config, workdir: Path, host: str) -> ServerShape:
    """What every server of this machine is started with.

    Raises:
      EngineError, StartError: it cannot be, and what to change.
    """
    if config.engine.kind != "vllm":
        raise EngineError(
            f"--role=inference starts vLLM servers and engine.kind={config.engine.kind}; set "
            "engine.kind=vllm (the embedded engine is started by the trainer)"
        )
    if not workdir.name or not os.environ.get(vllm_pools.KEY_VARIABLE):
        raise EngineError(
            "--role=inference needs --workdir, shared with the trainer, and "
            f"{vllm_pools.KEY_VARIABLE}, the key that the trainer has too"
        )
    config, tokenizer, _ = open_start(config)
    vllm_pools.check_can_start(replace(config.engine, urls=()), config.policy)
    wanted = EngineShape(
        config.policy.vocab_size or tokenizer.vocab_size,
        tokenizer.eos_ids,
        context=config.engine_context(),
        prefill_width=config.sampling.max_prompt_tokens,
    )
    described = hf_config_of(config.policy, wanted.vocab_size, wanted.context)
    folder = workdir.resolve() / "engines" / f"{socket.gethostname()}-{os.getpid()}"
    shape = vllm_pools.server_shape(
        config.engine,
        config.placement,
        config.policy,
        wanted,
        model=vllm_pools.write_model_folder(folder, described),
    )
    # The last --host on a command line counts.
    return replace(shape, arguments=("--host", host, *shape.arguments))


async def _serve(
    config: Config,
    shape: ServerShape,
    workdir: Path,
    port: int,
    command: Callable[..., Sequence[str]],
) -> int:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    places = config.placement.engine_devices
    watching = [
        asyncio.create_task(
            _keep_up(
                replace(shape, devices=places[index] if places else ""),
                workdir,
                port + index,
                config.engine.max_restarts,
                command,
            )
        )
        for index in range(config.engine.servers)
    ]
    asked = asyncio.create_task(ended.wait())
    done, _ = await asyncio.wait([asked, *watching], return_when=asyncio.FIRST_COMPLETED)
    for task in (asked, *watching):
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    failed = [task.exception() for task in done if task is not asked]
    for error in failed:
        print(f"telescope_jax: {error}", file=sys.stderr)
    return 1 if failed else 0


async def _keep_up(
    shape: ServerShape,
    workdir: Path,
    port: int,
    max_restarts: int,
    command: Callable[..., Sequence[str]],
) -> None:
    """Runs one server, again and again; cancelling ends it.

    Raises:
      EngineError: it died once too often; with its last words.
    """
    name = f"{socket.gethostname()}-{port}"
    key = os.environ[vllm_pools.KEY_VARIABLE]
    for restarts in range(max_restarts + 1):
        process = ServerProcess(
            command(shape, name=name, port=port),
            environment(shape, name=name, key=key),
            workdir / "logs" / f"vllm-{name}.log",
            cwd=Path(shape.model),
        )
        try:
            await process.start()
            print(f"telescope_jax: {name} starts, pid {process.pid}", file=sys.stderr, flush=True)
            await process.wait()
        finally:
            await asyncio.shield(process.stop())
        print(f"telescope_jax: {name}: {process.death()}", file=sys.stderr, flush=True)
        log.warning("%s died, %d of %d restarts left", name, max_restarts - restarts, max_restarts)
    raise EngineError(f"{name} died {max_restarts + 1} times (engine.max_restarts={max_restarts})")
