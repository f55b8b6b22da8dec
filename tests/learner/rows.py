"""Random packed rows and a tiny policy, shared by the learner's tests (they are compile-bound)."""

import numpy as np

from telescope_jax.config import PolicyConfig
from telescope_jax.packing import pack
from telescope_jax.types import PackedBatch, Reward, Rollout, StopReason

VOCAB, SEQ_LEN = 32, 16
POLICY = PolicyConfig(width=16, layers=1, heads=8, kv_heads=8, head_dim=4, mlp_width=32)


def rollout(rng: np.random.Generator, low: int = 4, high: int = 12) -> Rollout:
    size = int(rng.integers(low, high))
    mask = np.arange(size) >= 2
    logprobs = np.where(mask, -3.0 - rng.random(size), 0.0).astype(np.float32)
    tokens = rng.integers(0, VOCAB, size).astype(np.int32)
    return Rollout(tokens, mask, logprobs, (), Reward(0.0), {}, StopReason.EOS, 1)


def batches(
    rollouts: int, rows_per_microbatch: int, *, seed: int = 0, minibatches: int = 1
) -> list[PackedBatch]:
    rng = np.random.default_rng(seed)
    made = [rollout(rng) for _ in range(rollouts)]
    return pack(
        made,
        rng.normal(size=rollouts),
        seq_len=SEQ_LEN,
        rows_per_microbatch=rows_per_microbatch,
        minibatches=minibatches,
    )
