"""One real vLLM server: parity with the trainer, weights in flight, cancels, caches, and a kill."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telescope_jax.inference.vllm_server import WeightsRefused
from telescope_jax.interfaces import EngineError
from telescope_jax.types import Completion, WeightsRef
from telescope_jax.weights.store import OrbaxStore
from tests.inference.vllm_rig import VOCAB, Rig, asking, catch, drop, metrics, resume
from tests.inference.vllm_site import make_visible

pytestmark = [pytest.mark.vllm, pytest.mark.deadline(900)]

PROMPT = list(range(2, 18))
LONG_PROMPT = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
HITS = "vllm:prefix_cache_hits_total"


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


def count(rig: Rig, name: str) -> float:
    """A counter or gauge of the server."""
    return rig.run(metrics(rig.member.client))[name]


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
    print(f"float32, temperature {temperature}: {difference.max():.1e}, {difference.mean():.1e}")
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
    """What stands before a token is computed anew at a swap (vLLM preempts what was running), so
    every log-prob is that of the version named beside it, over the whole sequence."""
    before = rig.newer(rig.params[0])
    rig.run(rig.pool.load(before))
    after = rig.newer(rig.params[2])

    async def story() -> list[Completion]:
        tasks = await catch(rig.pool, PROMPT, 4, max_tokens=600)
        await rig.pool.load(after)
        assert rig.pool.version == after.version
        return await asyncio.gather(*tasks)

    for completion in rig.run(story()):
        assert len(completion.versions) == 2, completion.versions
        (old, start, middle), (new, also_middle, end) = completion.versions
        assert (old, new) == (before.version, after.version)
        assert start == 0 < middle == also_middle < end == len(completion.tokens)
        for ref, part in ((before, slice(0, middle)), (after, slice(middle, end))):
            expected = rig.expected(ref, PROMPT, completion)[part]
            np.testing.assert_allclose(completion.logprobs[part], expected, atol=1e-3)


def test_a_prefix_of_other_weights_is_never_used(rig: Rig):  # VL-02
    for params in (rig.params[1], rig.params[2], rig.params[1]):
        ref = rig.newer(params)
        rig.run(rig.pool.load(ref))
        for reused in (False, True):  # the second one finds the first one's blocks
            hits = count(rig, HITS)
            completion = rig.run(rig.pool.sample(LONG_PROMPT, asking(max_tokens=8, group="g")))
            assert (count(rig, HITS) > hits) is reused
            expected = rig.expected(ref, LONG_PROMPT, completion)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)


def test_a_prefix_is_not_taken_from_a_request_that_older_weights_began(rig: Rig):  # VL-02
    """Its blocks stay in use over the swap, so clearing the cache is not enough."""
    rig.run(rig.pool.load(rig.newer(rig.params[0])))
    after = rig.newer(rig.params[1])

    async def story() -> tuple[Completion, float, float]:
        tasks = await catch(rig.pool, LONG_PROMPT, 1)
        await rig.pool.load(after)
        client, seen = rig.member.client, []
        # Under the salt of the older version the same prompt finds them.
        for salt in (str(after.version), str(after.version - 1)):
            hits = (await metrics(client))[HITS]
            completion = await client.generate(LONG_PROMPT, asking(max_tokens=8), salt=salt)
            seen.append((completion, (await metrics(client))[HITS] - hits))
        await drop(tasks)
        return seen[0][0], seen[0][1], seen[1][1]

    completion, hits, hits_of_the_older = rig.run(story())
    assert hits == 0 and hits_of_the_older > 0
    expected = rig.expected(after, LONG_PROMPT, completion)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)


def test_prompts_of_more_tokens_than_a_step_takes_do_not_end_the_engine(rig: Rig):
    """vLLM 0.32 on a CPU dies of a seeded request whose prompt is computed in parts: many prompts
    at once, or running requests that are prefilled anew after a swap."""
    rig.run(rig.pool.load(rig.newer(rig.params[1])))
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, VOCAB, 900).tolist() for _ in range(16)]

    async def story() -> tuple[list[Completion], list[Completion]]:
        many = await asyncio.gather(*(rig.pool.sample(p, asking(max_tokens=4)) for p in prompts))
        alone = [await rig.pool.sample(p, asking(max_tokens=4)) for p in prompts[:2]]
        return list(many), alone

    many, alone = rig.run(story())
    for together, apart in zip(many, alone, strict=False):
        assert together.tokens.tolist() == apart.tokens.tolist()
    assert rig.member.restarts == 0


def test_a_cancel_frees_the_request_in_the_engine(rig: Rig):  # OR-25
    async def story() -> None:
        client = rig.member.client
        tasks = await catch(rig.pool, PROMPT, 8)
        before = await metrics(client)
        assert before["vllm:num_requests_running"] == 8
        assert before["vllm:kv_cache_usage_perc"] > 0
        await drop(tasks)
        await resume(client)
        while (now := await metrics(client))["vllm:num_requests_running"]:
            await asyncio.sleep(0.02)
        assert now["vllm:kv_cache_usage_perc"] == 0
        ended = "vllm:request_success_total/length"
        assert now[ended] == before[ended]  # not one of them came to its end instead

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
        completion.logprobs, rig.expected(ref, PROMPT, completion), atol=1e-3
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
        tasks = await catch(rig.pool, PROMPT, 4)
        os.kill(process.pid, signal.SIGKILL)
        lost = await asyncio.gather(*tasks, return_exceptions=True)
        return lost, await rig.pool.sample(PROMPT, asking())  # waits for the new server

    lost, completion = rig.run(story())
    assert all(isinstance(error, EngineError) for error in lost), lost
    assert completion.versions[0].version == ref.version
    np.testing.assert_allclose(
        completion.logprobs, rig.expected(ref, PROMPT, completion), atol=1e-3
    )
    assert rig.member.restarts == 1
    assert process.members() == []
