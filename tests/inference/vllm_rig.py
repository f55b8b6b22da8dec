"""A real vLLM server for tests, and a way to catch it in the middle of its work at any speed.

Two facts of vLLM 0.32 that a test must know. Its gauges (/metrics) are set once an engine step, by
the task that hands out what the engine wrote; and that task does not yield while more of it waits,
so a server whose engine is fast answers no other request, /metrics and /pause among them, for
seconds: until its requests are done. `catch` therefore stops the engine's process while it looks.
"""

import asyncio
import os
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import psutil

from telescope_jax.config import EngineConfig, PlacementConfig, PolicyConfig
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.member import Member
from telescope_jax.inference.pool import Pool
from telescope_jax.inference.reference import PublishedReference
from telescope_jax.inference.server_process import ServerProcess
from telescope_jax.inference.vllm_pools import start_pools
from telescope_jax.inference.vllm_server import VllmClient
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import Completion, SamplingParams, WeightsRef
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.hf_layout import from_hf, to_hf
from telescope_jax.weights.store import OrbaxStore

VOCAB, CONTEXT = 64, 4_096
ENDLESS = CONTEXT - 300  # tokens: with any prompt of these tests, as many as there is room for
POLICY = PolicyConfig(
    vocab_size=VOCAB, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp_width=512
)
CONFIG = EngineConfig(
    kind="vllm",
    slots=16,
    start_timeout_s=600.0,
    request_timeout_s=600.0,
    server_arguments=("--enforce-eager",),  # compiling costs minutes, and decodes no other tokens
)
ROUNDS = 20

T = TypeVar("T")


class Rig:
    """An event loop in a thread, a store with three versions, and a pool of one server.

    The server has no eos, so that a rollout is as long as its test needs it to be.
    """

    def __init__(self, workdir: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.store = OrbaxStore(workdir / "weights", to_served=to_hf, from_served=from_hf)
        decoder = Decoder(POLICY, VOCAB)
        self.reference = PublishedReference(decoder, self.store)
        self.params = [jax.jit(decoder.init)(jax.random.key(seed)) for seed in range(3)]
        self.refs = [self.publish(i, tree) for i, tree in enumerate(self.params)]
        engines = self.run(
            start_pools(
                CONFIG,
                PlacementConfig(),
                POLICY,
                EngineShape(VOCAB, (), context=CONTEXT, prefill_width=16),
                self.store,
                workdir=workdir,
                eval_servers=0,
                hf_config=hf_config_of(POLICY, VOCAB, CONTEXT),
            ),
        )
        assert engines["train"] is engines["eval"]
        assert isinstance(engines["train"], Pool)
        self.pool = engines["train"]
        self.version = 0
        self.run(self.pool.load(self.refs[0]))

    @property
    def member(self) -> Member:
        return self.pool.members[0]

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 800) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def publish(self, version: int, params: Any) -> WeightsRef:
        return self.run(self.store.publish(version, params))

    def newer(self, params: Any) -> WeightsRef:
        """`params` as the next version."""
        self.version += 1
        return self.publish(self.version, params)

    def expected(
        self, ref: WeightsRef, prompt: list[int], completion: Completion, t: float = 1.0
    ) -> np.ndarray:
        """What the trainer says of the log-probs of `completion`."""
        (row,) = self.reference.logprobs(ref, [(prompt, completion.tokens.tolist())], t)
        return row

    def close(self) -> None:
        self.run(self.pool.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


def asking(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 3, **changes})


async def catch(
    pool: Pool, prompt: Sequence[int], count: int, *, max_tokens: int = ENDLESS
) -> list[asyncio.Task[Completion]]:
    """`count` requests, each in the middle of its answer, and an engine that is paused.

    Whatever the speed of the machine: a round whose requests ended first is followed by another.
    `resume` lets the engine go on; so does a load.
    """
    member = pool.members[0]
    for round_ in range(ROUNDS):
        tasks = [
            asyncio.create_task(
                pool.sample(prompt, asking(max_tokens=max_tokens, seed=100 * round_ + seed))
            )
            for seed in range(count)
        ]
        while not any(task.done() for task in tasks):
            await asyncio.sleep(0.02)
            with stopped(engine_core(member.process)):
                if await running(member.client) == count:
                    pausing = asyncio.create_task(pause(member.client))
                    # With no output to hand out, the server passes the pause on at once.
                    await asyncio.sleep(0.3)
                    break
        else:
            await drop(tasks)
            continue
        await pausing
        if await running(member.client) == count and not any(task.done() for task in tasks):
            return tasks
        await resume(member.client)
        await drop(tasks)
    raise AssertionError(f"{count} requests of {max_tokens} tokens ended first {ROUNDS} times")


async def drop(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    """Cancels `tasks`; how each of them ended."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def pause(client: VllmClient) -> None:
    await client._post("/pause?mode=keep", None)


async def resume(client: VllmClient) -> None:
    await client._post("/resume", None)


async def running(client: VllmClient) -> int:
    """Sequences that the engine decodes, as of its last step."""
    return int((await metrics(client))["vllm:num_requests_running"])


async def metrics(client: VllmClient) -> dict[str, float]:
    """What /metrics says, summed over labels; of requests that ended, also by their reason."""
    async with client._http().get(f"{client.url}/metrics", headers=client._headers) as answer:
        text = await answer.text()
    values: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in re.findall(r"^(vllm:\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        values[name] += float(value)
        if reason := re.search(r'finished_reason="(\w+)"', labels):
            values[f"{name}/{reason[1]}"] += float(value)
    return dict(values)


def engine_core(process: ServerProcess | None) -> int:
    """The process that schedules, a child of the one that answers HTTP."""
    return _named(process, "VLLM::EngineCore")


def worker(process: ServerProcess | None) -> int:
    """The process that holds the weights, a child of the engine core."""
    return _named(process, "VLLM::Worker")


def _named(process: ServerProcess | None, title: str) -> int:
    assert process is not None
    found = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in process.members()}
    (pid,) = (pid for pid, line in found.items() if line.startswith(title))
    return pid


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
