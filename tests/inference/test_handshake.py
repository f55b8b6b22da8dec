"""The judgement of the handshake on arrays, and the trainer's half of it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import PolicyConfig
from telescope_jax.inference.handshake import Handshake, HandshakeError, compare, diagnose
from telescope_jax.inference.reference import PublishedReference
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import Completion, SamplingParams, StopReason, VersionSpan, WeightsRef
from telescope_jax.weights.store import OrbaxStore

RNG = np.random.default_rng(0)
EXPECTED = [-RNG.exponential(2.0, 8) for _ in range(3)]


def shifted(by: int) -> list[np.ndarray]:
    return [np.roll(row, by) for row in EXPECTED]


@pytest.mark.parametrize(
    ("engine", "others", "words"),
    [
        (shifted(-1), {}, "entry t describes the token after t"),
        (shifted(1), {}, "entry t describes the token before t"),
        ([row * 2 for row in EXPECTED], {"raw": [row * 2 for row in EXPECTED]}, "processed"),
        (shifted(3), {"version 4": shifted(3)}, "the weights of version 4: stale"),
        ([row + 0.1 for row in EXPECTED], {}, "another dtype or precision"),
        ([row - 5 for row in EXPECTED], {"raw": EXPECTED}, "another model"),
        ([row * np.nan for row in EXPECTED], {}, "another model"),
    ],
)
def test_every_difference_gets_its_own_explanation(engine, others, words: str):
    assert compare(engine, EXPECTED).greatest > 0.01
    assert words in diagnose(engine, EXPECTED, others, tolerance=0.01)


@pytest.mark.parametrize(
    ("wrong", "by", "passes"),
    [(1, 0.09, True), (1, 0.2, False), (2, 0.09, False), (24, 0.009, True)],
)
def test_one_token_in_twenty_may_be_ten_times_as_far_off(wrong: int, by: float, passes: bool):
    """Of 24 tokens 1 is less than one in twenty, 2 are more."""
    engine = np.concatenate(EXPECTED)
    engine[:wrong] += by
    assert compare([engine], [np.concatenate(EXPECTED)]).within(0.01) == passes


def test_rows_of_one_token_do_not_pass_for_a_shift():
    short = [row[:1] for row in EXPECTED]
    words = diagnose([row - 5 for row in short], short, {}, tolerance=0.01)
    assert "another model" in words


class Constant:
    """A reference for which every token is equally likely."""

    def logprobs(self, ref: WeightsRef, rows, temperature: float) -> list[np.ndarray]:
        return [np.full(len(tokens), -np.log(16)) for _, tokens in rows]


def test_an_engine_that_names_another_version_is_stuck():
    async def sample(tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        count = sampling.max_tokens
        logprobs = np.full(count, -np.log(16), np.float32)
        spans = (VersionSpan(3, 0, count),)
        return Completion(np.zeros(count, np.int32), logprobs, spans, StopReason.LENGTH)

    handshake = Handshake(Constant(), vocab_size=16, context=12, tolerance=0.01)
    agreement = asyncio.run(handshake.check(sample, WeightsRef(3, "", "")))
    assert agreement.greatest < 1e-6
    with pytest.raises(HandshakeError, match=r"serve version 4 and answers with \{3\}: stale"):
        asyncio.run(handshake.check(sample, WeightsRef(4, "", "")))


def test_the_reference_scores_completions_as_one_row_each(tmp_path: Path):
    """Rows of any length, in one call or alone, get the log-probs of a plain softmax."""
    policy = PolicyConfig(width=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp_width=64)
    decoder = Decoder(policy, 16)
    store = OrbaxStore(tmp_path)
    params = jax.jit(decoder.init)(jax.random.key(0))
    ref = asyncio.run(store.publish(0, params))
    reference = PublishedReference(decoder, store)
    rows = [([3, 4, 5], [6, 7]), ([2], [9, 10, 11, 12, 13]), ([8, 8], [1])]
    together = reference.logprobs(ref, rows, 0.6)
    for row, found in zip(rows, together, strict=True):
        (alone,) = reference.logprobs(ref, [row], 0.6)
        np.testing.assert_allclose(found, alone, atol=1e-6)
        assert found.shape == (len(row[1]),)
        sequence = jnp.array([[*row[0], *row[1]]])
        ones = jnp.ones_like(sequence)
        hidden = decoder.hidden(params, sequence, ones, jnp.arange(sequence.shape[1])[None])
        logits = np.asarray(decoder.logits(params, hidden))[0] / 0.6
        softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        places = range(len(row[0]) - 1, sequence.shape[1] - 1)
        expected = [softmax[place, sequence[0, place + 1]] for place in places]
        np.testing.assert_allclose(found, expected, atol=1e-5)
