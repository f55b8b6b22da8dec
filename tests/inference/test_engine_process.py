"""The engine in a process of its own: the same answers, and no waiting for the dead."""

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import psutil
import pytest

from telescope_jax.config import EngineConfig, PolicyConfig
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.engine_client import EngineProcess, ProcessEngine, start_engines
from telescope_jax.inference.wire import (
    Channel,
    pack_completion,
    pack_request,
    unpack_completion,
    unpack_request,
)
from telescope_jax.interfaces import EngineError, EngineLost, PromptTooLong
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import Completion, SamplingParams, StopReason, VersionSpan
from telescope_jax.weights.store import MemoryStore, OrbaxStore

ROOT = Path(__file__).resolve().parents[2]
POLICY = PolicyConfig(width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=64)
SHAPE = EngineShape(vocab_size=32, eos_ids=(1,), context=64, prefill_width=8)
CONFIG = EngineConfig(slots=4, tokens_per_call=2, prefill_rows=2, max_restarts=2)

T = TypeVar("T")


def prompt(seed: int, length: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(2, 32, length).tolist()


def settings(**sampling) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 1, **sampling})


ENDLESS = settings(max_tokens=59, temperature=0.0)


class Rig:
    """An event loop in a thread, and engines in a process, for all tests of this file."""

    def __init__(self, workdir: Path):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.workdir = workdir
        self.store = OrbaxStore(workdir / "weights")
        params = [jax.jit(Decoder(POLICY, 32).init)(jax.random.key(seed)) for seed in range(2)]
        publishing = [self.store.publish(i, tree) for i, tree in enumerate(params)]
        self.refs = [self.run(each) for each in publishing]
        self.engines = self.start(CONFIG)
        self.train, self.held = self.engines["train"], self.engines["eval"]
        self.process: EngineProcess = self.train.process  # type: ignore[attr-defined]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    def start(self, config: EngineConfig, **changes) -> dict:
        arguments = {"workdir": self.workdir, "store": self.store, "shape": SHAPE, **changes}
        return self.run(start_engines(config, POLICY, **arguments))

    def close(self) -> None:
        self.run(self.train.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("run"))
    yield rig
    pid = rig.process.pid
    rig.close()
    assert not psutil.pid_exists(pid), "the engine process outlived close()"


@pytest.fixture
def loaded(rig: Rig) -> Rig:
    """Alive, with version 0 in both engines, whatever the test before did to the process."""

    async def prepare() -> None:
        rig.process.restarts = 0
        await rig.process.restart()
        for engine in (rig.train, rig.held):
            await engine.load(rig.refs[0])

    rig.run(prepare())
    return rig


async def sample_many(engine: ProcessEngine, count: int) -> list[Completion]:
    asked = [engine.sample(prompt(i), settings(seed=i, group=str(i // 4))) for i in range(count)]
    return await asyncio.gather(*asked)


def test_both_hosts_give_the_same_bits(loaded: Rig):
    """One class, two places: tokens, log-probs, spans and reasons to stop are equal."""
    here = loaded.start(dataclasses.replace(CONFIG, own_process=False))
    loaded.run(here["train"].load(loaded.refs[0]))
    expected = loaded.run(sample_many(here["train"], 12))
    for found, wanted in zip(loaded.run(sample_many(loaded.train, 12)), expected, strict=True):
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.logprobs.tobytes() == wanted.logprobs.tobytes()
        assert (found.versions, found.stop) == (wanted.versions, wanted.stop)
    for engine in here.values():
        loaded.run(engine.close())


def test_the_eval_engine_holds_its_version_while_training_moves_on(loaded: Rig):
    """OR-04."""
    before = loaded.run(loaded.held.sample(prompt(0), settings()))
    loaded.run(loaded.train.load(loaded.refs[1]))
    assert (loaded.train.version, loaded.held.version) == (1, 0)
    after = loaded.run(loaded.held.sample(prompt(0), settings()))
    assert after.tokens.tolist() == before.tokens.tolist()
    assert after.versions[0].version == 0
    assert loaded.run(loaded.train.sample(prompt(0), settings())).versions[0].version == 1


def test_errors_cross_the_socket_with_their_kind(loaded: Rig):
    with pytest.raises(PromptTooLong, match="64 tokens leaves no room in a context of 64"):
        loaded.run(loaded.train.sample(prompt(0, 64), settings()))
    with pytest.raises(NotImplementedError, match="top_p=0.5"):
        loaded.run(loaded.train.sample(prompt(0), settings(top_p=0.5)))
    with pytest.raises(ValueError, match="vocabulary of 32"):
        loaded.run(loaded.train.sample([32], settings()))
    gone = dataclasses.replace(loaded.refs[1], path=loaded.refs[1].path + "0", version=9)
    with pytest.raises(EngineError, match=r"version 9 .* is gone"):
        loaded.run(loaded.train.load(gone))
    assert loaded.train.version == 0
    assert len(loaded.run(loaded.train.sample(prompt(0), settings())).tokens)


def test_cancelling_reaches_the_process(loaded: Rig):
    """OR-25: its slots are free at once, and nobody waits for the cancelled any more."""

    async def run() -> float:
        asked = [asyncio.create_task(loaded.train.sample(prompt(i), ENDLESS)) for i in range(40)]
        await asyncio.sleep(0.01)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await loaded.train.sample(prompt(0), settings())
        loaded.train.metrics()
        await loaded.train.sample(prompt(1), settings())
        return loaded.train.metrics()["cancelled"]

    assert loaded.run(run()) > 0
    assert loaded.process.questions.pending == {}


def test_a_killed_process_fails_what_waits_on_it_and_can_be_replaced(loaded: Rig):
    """OR-16, OR-19: the error carries the signal and the log; the new one has the weights."""

    async def run() -> list[Any]:
        asked = [asyncio.create_task(loaded.train.sample(prompt(i), ENDLESS)) for i in range(64)]
        os.kill(dead, signal.SIGSTOP)  # so that none is answered first
        await asyncio.sleep(0.02)
        os.kill(dead, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)

    first = loaded.run(loaded.train.sample(prompt(0), settings()))
    dead = loaded.process.pid
    failed = [answer for answer in loaded.run(run()) if not isinstance(answer, Completion)]
    assert failed
    for answer in failed:
        assert isinstance(answer, EngineError)
        assert "killed by signal 9" in str(answer)
        assert "engine.log" in str(answer)
    assert len({id(answer) for answer in failed}) == len(failed)
    assert not psutil.pid_exists(dead)

    async def replace() -> Completion:
        # Whoever asks first replaces the process; that it is cancelled does not harm the others.
        asked = [asyncio.create_task(loaded.train.sample(prompt(0), settings())) for _ in range(3)]
        await asyncio.sleep(0.01)
        asked[0].cancel()
        _, again, same = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(again, Completion) and isinstance(same, Completion)
        assert again.tokens.tolist() == same.tokens.tolist()
        return again

    assert loaded.run(replace()).tokens.tolist() == first.tokens.tolist()
    assert loaded.process.restarts == 1
    assert loaded.held.version == 0


def test_more_deaths_than_allowed_are_an_error_with_the_reason(loaded: Rig):
    """A component that fails is restarted, or ends the run with its own error."""

    async def run() -> None:
        loaded.process.restarts = CONFIG.max_restarts
        os.kill(loaded.process.pid, signal.SIGKILL)
        while loaded.process.alive:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineLost, match="max_restarts=2 allows; .*signal 9"):
            await loaded.train.sample(prompt(0), settings())

    loaded.run(run())


def test_a_process_that_dies_at_its_start_is_reported_with_code_and_log(rig: Rig):
    """OR-16 (b): not after the timeout, but when it happens."""
    wrong = dataclasses.replace(POLICY, vocab_size=5)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"(?s)exited with code 1; .*engine\.log.*Error"):
        rig.run(start_engines(CONFIG, wrong, SHAPE, rig.store, workdir=rig.workdir / "wrong"))
    assert time.monotonic() - started < 60


def test_a_slow_start_is_an_error_with_the_setting_to_change(rig: Rig):
    """OR-16 (a)."""
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError, match=r"start_timeout_s=0\.05"):
        rig.start(dataclasses.replace(CONFIG, start_timeout_s=0.05))
    assert set(psutil.Process().children(recursive=True)) <= children


def test_a_store_in_memory_cannot_serve_another_process(rig: Rig):
    with pytest.raises(ValueError, match="own_process=False"):
        rig.start(CONFIG, store=MemoryStore())


def test_the_process_dies_with_its_parent(rig: Rig, tmp_path: Path):
    """OR-17: SIGKILL leaves the parent no chance to clean up."""
    script = f"""
        import asyncio
        from telescope_jax.config import EngineConfig, PolicyConfig
        from telescope_jax.inference.embedded import EngineShape
        from telescope_jax.inference.engine_client import start_engines
        from telescope_jax.weights.store import OrbaxStore
        async def main():
            engines = await start_engines(
                EngineConfig(), PolicyConfig(), EngineShape(32, (1,), 64, 8),
                OrbaxStore({str(tmp_path / "weights")!r}), workdir={str(tmp_path)!r})
            print(engines["train"].process.pid, flush=True)
            await asyncio.sleep(120)
        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline()))
    assert engine.is_running()
    parent.kill()
    parent.wait()
    psutil.wait_procs([engine], timeout=15)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


# The wire


def test_requests_and_completions_survive_the_wire_bit_for_bit():
    sampling = SamplingParams(
        max_tokens=3,
        temperature=0.7,
        top_p=0.9,
        top_k=4,
        stop_token_ids=(5, 6),
        seed=2**64 - 1,
        group="g",
        priority=-2,
    )
    tokens, found = unpack_request(pack_request([1, 2, 2**31 - 1], sampling))
    assert (tokens.tolist(), found) == ([1, 2, 2**31 - 1], sampling)
    completion = Completion(
        tokens=np.array([3, 4], np.int32),
        logprobs=np.array([-0.1, -1e-30], np.float32),
        versions=(VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)),
        stop=StopReason.STOP,
    )
    back = unpack_completion(pack_completion(completion))
    assert back.tokens.tolist() == [3, 4]
    assert back.logprobs.tobytes() == completion.logprobs.tobytes()
    assert (back.versions, back.stop) == (completion.versions, completion.stop)


def test_messages_of_one_turn_travel_in_one_frame():
    async def run() -> tuple[list, int]:
        ours, theirs = socket.socketpair()
        near = Channel(*await asyncio.open_connection(sock=ours))
        far = Channel(*await asyncio.open_connection(sock=theirs))
        writes = []
        write = near._writer.write
        near._writer.write = lambda data: (writes.append(data), write(data))  # type: ignore
        for index in range(50):
            near.send("sample", index, b"\x00\xff")
        near.close()
        received = [message async for message in far.receive()]
        assert far.ended
        far.close()
        return received, len(writes)

    received, writes = asyncio.run(run())
    assert received == [["sample", index, b"\x00\xff"] for index in range(50)]
    assert writes == 1


def test_a_request_costs_the_parents_event_loop_little(loaded: Rig):
    """256 short requests a step; ≤ 50 µs each on a quiet machine, and a shared one gets 4 times
    as much. Processor time of this thread, not the wall's; the best of a few steps."""
    asked = [(prompt(i), settings(seed=i, group=str(i // 8), max_tokens=2)) for i in range(256)]

    async def run() -> float:
        started = time.thread_time()
        await asyncio.gather(*(loaded.train.sample(*each) for each in asked))
        return (time.thread_time() - started) / len(asked)

    assert min(loaded.run(run()) for _ in range(5)) < 200e-6
