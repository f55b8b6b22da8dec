"""The embedded engine on its thread: answers, versions, cancels, errors and its end."""

import asyncio
import threading
import time

import numpy as np
import pytest

from telescope_jax.inference.jax_engine import EngineThread, JaxEngine
from telescope_jax.interfaces import EngineError
from telescope_jax.types import Completion, SamplingParams
from telescope_jax.weights.store import MemoryStore
from tests.inference.engine_rig import (
    DECODING,
    SLOTS,
    batcher,
    bits,
    complete,
    prompt,
    request,
    trainer_logprobs,
    weights,
)


async def _engine(store: MemoryStore, **settings) -> JaxEngine:
    engine = JaxEngine(DECODING, store, EngineThread(), **settings)
    await engine.load(await store.publish(0, weights(0)))
    return engine


def _params(**sampling) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 1, **sampling})


def test_the_engine_answers_as_the_batcher_does():
    async def run() -> list[Completion]:
        engine = await _engine(MemoryStore())
        asked = [engine.sample(prompt(i), _params(seed=i)) for i in range(20)]
        answers = await asyncio.gather(*asked)
        metrics = engine.metrics()
        assert metrics["tokens"] == sum(len(a.tokens) for a in answers)
        assert metrics["time_decoding"] > 0
        assert engine.metrics()["tokens"] == 0
        await engine.close()
        return answers

    expected = complete(batcher(), *(request(prompt(i), seed=i) for i in range(20)))
    assert [bits(a) for a in asyncio.run(run())] == [bits(b) for b in expected]


def test_two_engines_hold_two_versions_and_one_thread():
    """An eval goes on with its version while training samples from the next."""

    async def run() -> None:
        store, thread = MemoryStore(), EngineThread("shared")
        train, held = (JaxEngine(DECODING, store, thread) for _ in range(2))
        await held.load(await store.publish(0, weights(0)))
        await train.load(await store.publish(1, weights(1)))
        assert (held.version, train.version) == (0, 1)
        old, new = await asyncio.gather(
            held.sample(prompt(0), _params()), train.sample(prompt(0), _params())
        )
        assert (old.versions[0].version, new.versions[0].version) == (0, 1)
        for seed, answer in ((0, old), (1, new)):
            expected = trainer_logprobs(seed, [*prompt(0), *answer.tokens], 1.0)[5:]
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        await train.close()
        assert len((await held.sample(prompt(0), _params())).tokens) > 0
        await held.close()

    asyncio.run(run())
    assert "shared" not in [thread.name for thread in threading.enumerate()]


def test_cancelled_samples_leave_no_slot_behind():
    """OR-25, at every moment: before the hand-over, while waiting, while running."""

    async def run() -> None:
        engine = await _engine(MemoryStore())
        asked = [
            asyncio.create_task(engine.sample(prompt(i), _params(seed=i, max_tokens=18)))
            for i in range(100)
        ]
        for i, task in enumerate(asked):
            if i % 20 == 0:
                await asyncio.sleep(0.002)
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        answers = await asyncio.gather(*(engine.sample(prompt(i), _params()) for i in range(8)))
        assert len(answers) == 8
        deadline = time.monotonic() + 20
        while engine._batcher.busy:
            assert time.monotonic() < deadline, "a cancelled request still holds a slot"
            await asyncio.sleep(0.01)
        assert engine._answers == {}
        await engine.close()

    asyncio.run(run())


def test_closing_fails_what_is_pending_instead_of_returning_nothing():
    """VL-12, OR-10: a lost answer is an error, never an empty completion."""

    async def run() -> list[object]:
        engine = await _engine(MemoryStore())
        asked = [
            asyncio.create_task(engine.sample(prompt(i), _params(max_tokens=18, temperature=0.0)))
            for i in range(4 * SLOTS)
        ]
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.sample(prompt(0), _params())
        return await asyncio.gather(*asked, return_exceptions=True)

    before = threading.active_count()
    for answer in asyncio.run(run()):
        lost = isinstance(answer, EngineError) and "closed" in str(answer)
        assert lost or (isinstance(answer, Completion) and len(answer.tokens))
    assert threading.active_count() <= before


def test_an_engine_without_weights_says_so():
    async def run() -> None:
        engine = JaxEngine(DECODING, MemoryStore(), EngineThread())
        assert engine.version == -1
        with pytest.raises(EngineError, match="no weights yet"):
            await engine.sample(prompt(0), _params())
        await engine.close()

    asyncio.run(run())


def test_weights_that_are_gone_fail_the_load_and_not_the_engine():
    """CK-08: the old version goes on, and the error says what to load instead."""

    async def run() -> None:
        store = MemoryStore()
        engine = await _engine(store)
        gone = await store.publish(1, weights(1))
        await store.prune([0])
        with pytest.raises(EngineError, match="cannot load version 1.*latest"):
            await engine.load(gone)
        assert engine.version == 0
        assert (await engine.sample(prompt(0), _params())).versions[0].version == 0
        await engine.close()

    asyncio.run(run())


def test_a_sample_that_takes_too_long_is_an_error():
    """Every wait has a timeout: a run may end with an error, never stand still."""

    async def run() -> None:
        engine = await _engine(MemoryStore(), request_timeout_s=0.05)
        blocked = threading.Event()
        engine._thread.call(lambda: blocked.wait(20))
        with pytest.raises(EngineError, match="request_timeout_s=0.05"):
            await engine.sample(prompt(0), _params())
        blocked.set()
        await engine.close()

    asyncio.run(run())
