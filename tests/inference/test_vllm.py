"""One real vLLM server: parity with the trainer, weights in flight, cancels, caches, and a kill.

The server has no eos, so that a rollout is as long as its test needs it to be.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import pytest

from telescope_jax.config import EngineConfig, PlacementConfig, PolicyConfig
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.pool import Pool
from telescope_jax.inference.reference import PublishedReference
from telescope_jax.inference.vllm_pools import start_pools
from telescope_jax.inference.vllm_server import WeightsRefused
from telescope_jax.interfaces import EngineError
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import Completion, SamplingParams, WeightsRef
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.hf_layout import from_hf, to_hf
from telescope_jax.weights.store import OrbaxStore
from tests.inference.vllm_site import make_visible

pytestmark = [pytest.mark.vllm, pytest.mark.deadline(900)]

VOCAB, CONTEXT = 64, 4_096
POLICY = PolicyConfig(
    vocab_size=VOCAB, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp_width=512
)
CONFIG = EngineConfig(
    kind="vllm",
    slots=16,
    start_timeout_s=600.0,
    request_timeout_s=120.0,
    server_arguments=("--enforce-eager",),  # compiling costs minutes, and decodes no other tokens
)

T = TypeVar("T")


class Rig:
    """An event loop in a thread, a store with three versions, and a pool of one server."""

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
            timeout_s=700,
        )
        assert engines["train"] is engines["eval"]
        assert isinstance(engines["train"], Pool)
        self.pool = engines["train"]
        self.version = 0
        self.run(self.pool.load(self.refs[0]))

    @property
    def member(self):
        return self.pool.members[0]

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 300) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def publish(self, version: int, params: Any) -> WeightsRef:
        return self.run(self.store.publish(version, params))

    def newer(self, params: Any) -> WeightsRef:
        """`params` as the next version."""
        self.version += 1
        return self.publish(self.version, params)

    def expected(self, ref: WeightsRef, prompt: list[int], completion: Completion, t: float):
        (row,) = self.reference.logprobs(ref, [(prompt, completion.tokens.tolist())], t)
        return row

    def close(self) -> None:
        self.run(self.pool.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        workdir = tmp_path_factory.mktemp("vllm")
        make_visible(workdir / "site", monkeypatch)
        rig = Rig(workdir)
        try:
            yield rig
        finally:
            rig.close()
            assert rig.member.process is not None and rig.member.process.members() == []


def asking(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 3, **changes})


PROMPT = list(range(2, 18))
ENDLESS = 4_000  # tokens: no request of this length ends before its test has done with it


async def until_running(rig: Rig, tasks: Sequence[asyncio.Task]) -> None:
    """Until the engine decodes all of `tasks`."""
    while await rig.member.client.requests_running() < len(tasks):
        assert not any(task.done() for task in tasks), tasks
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_engine_and_trainer_agree_on_every_log_prob(rig: Rig, temperature: float):
    """Measured in float32: up to 1e-6, mean 3e-7. The limit leaves room for other matmuls."""
    ref = rig.newer(rig.params[1])
    rig.run(rig.pool.load(ref))
    prompts = [PROMPT[i:] for i in range(4)]
    completions = [
        rig.run(rig.pool.sample(p, asking(temperature=temperature, seed=i)))
        for i, p in enumerate(prompts)
    ]
    theirs = np.concatenate([completion.logprobs for completion in completions])
    rows = list(zip(prompts, completions, strict=True))
    ours, other = (
        np.concatenate([rig.expected(of, p, c, temperature or 1.0) for p, c in rows])
        for of in (ref, rig.refs[0])
    )
    difference = np.abs(ours - theirs)
    assert len(difference) == 160
    assert difference.max() < 1e-3 and difference.mean() < 1e-4, difference.max()
    # Other weights are far away, so agreement says which ones these were.
    assert np.abs(other - theirs).max() > 0.1
    assert rig.pool.metrics()["handshake_error"] < 1e-3


def test_a_seed_decides_the_sample_whatever_else_is_asked(rig: Rig):
    async def several() -> list[Completion]:
        return await asyncio.gather(
            *(rig.pool.sample(PROMPT, asking(seed=seed)) for seed in (5, 6, 7, 8))
        )

    alone = rig.run(rig.pool.sample(PROMPT, asking(seed=5)))
    together = rig.run(several())
    assert together[0].tokens.tolist() == alone.tokens.tolist()
    assert len({tuple(completion.tokens.tolist()) for completion in together}) == 4


def test_new_weights_arrive_in_flight_and_every_token_names_its_own(rig: Rig):
    before = rig.newer(rig.params[0])
    rig.run(rig.pool.load(before))
    after = rig.newer(rig.params[2])

    async def story() -> list[Completion]:
        tasks = [
            asyncio.create_task(rig.pool.sample(PROMPT, asking(max_tokens=1000, seed=seed)))
            for seed in range(4)
        ]
        await until_running(rig, tasks)
        await rig.pool.load(after)
        assert rig.pool.version == after.version
        return await asyncio.gather(*tasks)

    completions = rig.run(story())
    for completion in completions:
        assert len(completion.versions) == 2, completion.versions
        (old, start, middle), (new, also_middle, end) = completion.versions
        assert (old, new) == (before.version, after.version)
        assert start == 0 and middle == also_middle and end == len(completion.tokens) == 1000
        # Tokens before the swap are the old weights' to the last bit of a log-prob.
        expected = rig.expected(before, PROMPT, completion, 1.0)[:middle]
        np.testing.assert_allclose(completion.logprobs[:middle], expected, atol=1e-3)


def test_a_prefix_of_other_weights_is_never_used(rig: Rig):  # VL-02
    prompt = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
    for params in (rig.params[1], rig.params[2], rig.params[1]):
        ref = rig.newer(params)
        rig.run(rig.pool.load(ref))
        for _ in range(2):  # the second one finds the first one's blocks
            completion = rig.run(rig.pool.sample(prompt, asking(max_tokens=8, group="g")))
            expected = rig.expected(ref, prompt, completion, 1.0)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)


def test_a_cancel_frees_the_request_in_the_engine(rig: Rig):  # OR-25
    async def story() -> None:
        tasks = [
            asyncio.create_task(rig.pool.sample(PROMPT, asking(max_tokens=ENDLESS, seed=seed)))
            for seed in range(8)
        ]
        await until_running(rig, tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60):
            while await rig.member.client.requests_running():
                await asyncio.sleep(0.02)

    rig.run(story())
    assert rig.member.in_flight == 0
    assert len(rig.run(rig.pool.sample(PROMPT, asking())).tokens) == 40


def test_a_damaged_version_is_refused_and_the_old_one_is_served_on(rig: Rig, tmp_path: Path):
    ref = rig.newer(rig.params[0])
    rig.run(rig.pool.load(ref))
    # Right bits under the wrong names, as another layout would publish them.
    strange = OrbaxStore(tmp_path / "strange")
    foreign = rig.run(strange.publish(rig.version + 1, rig.params[1]))
    damaged = WeightsRef(ref.version, ref.path, "0" * 64)
    for bad, words in ((foreign, "tensors are missing"), (damaged, "fingerprint")):
        with pytest.raises(WeightsRefused, match=words):
            rig.run(rig.member.load(bad))
    completion = rig.run(rig.pool.sample(PROMPT, asking()))
    np.testing.assert_allclose(
        completion.logprobs, rig.expected(ref, PROMPT, completion, 1.0), atol=1e-3
    )


def test_nothing_is_answered_without_the_key(rig: Rig):
    import aiohttp

    async def story() -> dict[str, int]:
        paths = ("/v1/models", "/pause", "/update_weights", "/collective_rpc", "/metrics")
        async with aiohttp.ClientSession() as session:
            found = {}
            for path in paths:
                async with session.post(rig.member.client.url + path, json={}) as answer:
                    found[path] = answer.status
            return found

    assert set(rig.run(story()).values()) == {401}


def test_a_killed_server_comes_back_with_the_newest_weights(rig: Rig):  # OR-19; last: it restarts
    ref = rig.newer(rig.params[2])
    rig.run(rig.pool.load(ref))
    process = rig.member.process
    assert process is not None
    family = process.members()
    assert len(family) > 1  # the engine core is a process of its own

    async def story() -> tuple[list[Any], Completion]:
        tasks = [
            asyncio.create_task(rig.pool.sample(PROMPT, asking(max_tokens=ENDLESS, seed=seed)))
            for seed in range(4)
        ]
        await until_running(rig, tasks)
        os.kill(process.pid, signal.SIGKILL)
        lost = await asyncio.gather(*tasks, return_exceptions=True)
        return lost, await rig.pool.sample(PROMPT, asking())  # waits for the new server

    lost, completion = rig.run(story(), timeout_s=700)
    assert all(isinstance(error, EngineError) for error in lost), lost
    assert completion.versions[0].version == ref.version
    np.testing.assert_allclose(
        completion.logprobs, rig.expected(ref, PROMPT, completion, 1.0), atol=1e-3
    )
    assert rig.member.restarts == 1
    assert process.members() == []
