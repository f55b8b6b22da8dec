"""A small policy and its batcher, one compiled shape for all tests of the embedded engine."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from telescope_jax.config import PolicyConfig
from telescope_jax.inference.batcher import Batcher, Finished, Request, check_request
from telescope_jax.inference.decoding import Decoding
from telescope_jax.model.decoder import Decoder
from telescope_jax.model.logprobs import logprobs as packed_logprobs
from telescope_jax.types import Completion, SamplingParams

V, CONTEXT, WIDTH, SLOTS, TOKENS_PER_CALL, EOS = 32, 24, 8, 6, 3, 1

POLICY = PolicyConfig(width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=64)
DECODER = Decoder(POLICY, V)
ON_DEVICE_0 = jax.sharding.SingleDeviceSharding(jax.devices()[0])

DECODING = Decoding(
    DECODER,
    slots=SLOTS,
    context=CONTEXT,
    prefill_width=WIDTH,
    prefill_rows=2,
    tokens_per_call=TOKENS_PER_CALL,
    eos_ids=(EOS,),
)


@functools.cache
def weights(seed: int) -> dict:
    """Random parameters, scaled so that the policy is far from uniform."""
    params = jax.jit(DECODER.init)(jax.random.key(seed))
    return jax.device_put(jax.tree.map(lambda x: x * 6, params), ON_DEVICE_0)


def batcher(seed: int = 0, decoding: Decoding = DECODING) -> Batcher:
    loaded = Batcher(decoding, ON_DEVICE_0)
    loaded.swap(weights(seed), version=seed)
    return loaded


def prompt(seed: int, length: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(2, V, length).tolist()


def request(tokens: Sequence[int], **sampling) -> Request:
    settings = {"max_tokens": 8, "seed": 1, **sampling}
    return check_request(tokens, SamplingParams(**settings), context=CONTEXT, vocab_size=V)


def drain(engine: Batcher) -> list[Finished]:
    done: list[Finished] = []
    while engine.busy:
        done += engine.step()
    return done


def complete(engine: Batcher, *requests: Request) -> list[Completion]:
    for each in requests:
        engine.submit(each)
    found = dict(drain(engine))
    completions = [found[each] for each in requests]
    assert all(isinstance(each, Completion) for each in completions), completions
    return completions  # type: ignore[return-value]


def bits(completion: Completion) -> tuple:
    """What must not depend on anything around a request."""
    return completion.tokens.tobytes(), completion.logprobs.tobytes(), completion.stop


def trainer_logprobs(seed: int, tokens: Sequence[int], temperature: float) -> np.ndarray:
    """What the trainer's packed forward says of a whole sequence."""
    row = np.zeros((1, CONTEXT), np.int32)
    row[0, : len(tokens)] = tokens
    segments = (np.arange(CONTEXT)[None] < len(tokens)).astype(np.int32)
    positions = np.arange(CONTEXT, dtype=np.int32)[None]
    scored, _ = packed_scores(weights(seed), row, segments, positions, jnp.float32(temperature))
    return np.asarray(scored)[0, : len(tokens)]


@jax.jit
def packed_scores(params, tokens, segments, positions, temperature):
    return packed_logprobs(DECODER, params, tokens, segments, positions, temperature=temperature)
