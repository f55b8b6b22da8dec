"""Attention on TPUs: jax's splash attention, which skips the blocks above the diagonal.

The kernel wants rows of whole blocks, so rows are filled up with segment 0.
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jaxtyping import Array, Float, Int

LANES = 128
BLOCKS = (512, 256, 128)
"""Tokens of a block, largest first; those that divide the row are taken."""


def refusals(q: jax.Array) -> list[str]:
    """Why splash attention cannot take the case; empty if it can."""
    reasons = []
    if q.dtype != jnp.bfloat16:
        reasons.append(f"it multiplies in bfloat16 whatever it is given; this is {q.dtype}")
    if q.shape[3] % 64:
        reasons.append(f"heads must be a multiple of 64 wide, not {q.shape[3]}")
    return reasons


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hkv K"],
    v: Float[Array, "B T Hkv K"],
    segments: Int[Array, "B T"],
    scale: float,
    *,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """Softmax of the allowed scores times v; rows of segment 0 attend to each other."""
    tokens, heads = q.shape[1:3]
    # The kernel knows no scale. In float32 first: not every K^-½ is a bfloat16.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    pad = -tokens % LANES
    q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
    segments = jnp.pad(segments, ((0, 0), (0, pad)))
    block = next(size for size in BLOCKS if (tokens + pad) % size == 0)

    causal = splash_attention_mask.CausalMask((tokens + pad, tokens + pad))
    kernel = splash_attention_kernel.make_splash_mha(
        mask=splash_attention_mask.MultiHeadMask([causal] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    heads_first = partial(jnp.swapaxes, axis1=1, axis2=2)
    ids = splash_attention_kernel.SegmentIds(q=segments, kv=segments)
    # A tuple only when residuals are asked for.
    out = cast(Array, jax.vmap(kernel)(heads_first(q), heads_first(k), heads_first(v), ids))
    return heads_first(out)[:, :tokens]
