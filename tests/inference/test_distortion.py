"""A sampler that differs on purpose says truly what it sampled from; evals never meet it."""

import asyncio
from typing import Any

import jax
import numpy as np
import pytest

from telescope_jax.config import Config, ConfigError, EngineConfig
from telescope_jax.inference.distortion import eight_bits
from telescope_jax.inference.embedded import EngineShape, build_engines
from telescope_jax.types import SamplingParams
from telescope_jax.weights.store import MemoryStore
from tests.inference.engine_rig import (
    CONTEXT,
    EOS,
    POLICY,
    WIDTH,
    V,
    packed_scores,
    prompt,
    trainer_logprobs,
    weights,
)


def answers(**distortion: Any) -> dict[str, tuple[list[int], np.ndarray]]:
    """Engine -> a whole sequence that it sampled, and the log-probs it reports of its answer."""

    async def ask() -> dict[str, tuple[list[int], np.ndarray]]:
        config = EngineConfig(own_process=False, slots=2, prefill_rows=2, **distortion)
        store = MemoryStore()
        shape = EngineShape(V, (EOS,), CONTEXT, WIDTH)
        engines = build_engines(config, POLICY, shape, store, names=("train", "eval"))
        ref = await store.publish(0, weights(0))
        found = {}
        for name, engine in engines.items():
            await engine.load(ref)
            answer = await engine.sample(prompt(0), SamplingParams(max_tokens=8, seed=3))
            found[name] = ([*prompt(0), *answer.tokens.tolist()], answer.logprobs)
        for engine in engines.values():
            await engine.close()
        return found

    return asyncio.run(ask())


def test_a_colder_sampler_reports_its_own_log_probs_and_evals_are_not_colder():
    found = answers(distort_temperature=0.6)
    for name, temperature in (("train", 0.6), ("eval", 1.0)):
        tokens, reported = found[name]
        expected = trainer_logprobs(0, tokens, temperature)[len(prompt(0)) :]
        np.testing.assert_allclose(reported, expected, atol=1e-4)
    tokens, reported = found["train"]
    assert np.abs(reported - trainer_logprobs(0, tokens, 1.0)[len(prompt(0)) :]).max() > 0.01


def test_rounded_weights_sample_what_they_say_and_evals_have_the_whole_ones():
    found = answers(distort_int8=True)
    rounded = eight_bits(weights(0))
    for name, params in (("train", rounded), ("eval", weights(0))):
        tokens, reported = found[name]
        row = np.zeros((1, CONTEXT), np.int32)
        row[0, : len(tokens)] = tokens
        real = (np.arange(CONTEXT)[None] < len(tokens)).astype(np.int32)
        places = np.arange(CONTEXT, dtype=np.int32)[None]
        scores, _ = packed_scores(params, row, real, places, np.float32(1.0))
        expected = np.asarray(scores)[0, len(prompt(0)) : len(tokens)]
        np.testing.assert_allclose(reported, expected, atol=1e-4)


def test_a_matrix_has_255_levels_a_column_and_a_vector_is_left_alone():
    draw = np.random.default_rng(0)
    matrix = draw.normal(size=(1_000, 3)).astype(np.float32) * np.array([1, 10, 0], np.float32)
    rounded = jax.device_get(eight_bits({"m": matrix, "v": matrix[:, 0]}))
    np.testing.assert_array_equal(rounded["v"], matrix[:, 0])
    for column, before in zip(rounded["m"].T, matrix.T, strict=True):
        assert len(np.unique(column)) <= 255
        assert np.abs(column - before).max() <= 0.5001 * np.abs(before).max() / 127


def test_a_server_is_not_distorted():
    config = Config()
    config.engine.kind, config.engine.distort_temperature = "vllm", 0.6
    with pytest.raises(ConfigError, match="distort the embedded engine alone"):
        config.check()
