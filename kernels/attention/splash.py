"""Attention on TPUs: jax's splash attention, which skips the blocks above the diagonal.

The kernel wants rows of whole blocks, so rows are filled up with segment 0. Of a row that is split
over devices it wants to know where each part begins: its block lists are split the same way.
"""

from functools import partial
from typing import Any, cast

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


def refusals(q: jax.ShapeDtypeStruct, *, parts: int = 1) -> list[str]:
    """Why splash attention cannot take the case; empty if it can.

    Args:
      q: what one device has of it.
      parts: devices that a row is split over.
    """
    reasons = []
    if parts > 1 and q.shape[1] % LANES:
        reasons.append(
            f"a part of a row must be a multiple of {LANES} tokens, not {q.shape[1]}: filling up "
            "each part would move the keys"
        )
    if q.dtype != jnp.bfloat16:
        reasons.append(f"it multiplies in bfloat16 whatever it is given; this is {q.dtype}")
    if q.shape[3] % 64:
        reasons.append(f"heads must be a multiple of 64 wide, not {q.shape[3]}")
    return reasons


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S Hkv K"],
    v: Float[Array, "B S Hkv K"],
    segments: Int[Array, "B T"],
    scale: float,
    *,
    key_segments: Int[Array, "B S"] | None = None,
    kernel: Any = None,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """Softmax of the allowed scores times v; rows of segment 0 attend to each other.

    Args:
      key_segments, kernel: where the queries are a part of the row: the keys' segments, and this
        device's part of `kernel_of`.
    """
    tokens, heads = q.shape[1:3]
    # The kernel knows no scale. In float32 first: not every K^-½ is a bfloat16.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    pad = -tokens % LANES
    q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
    segments = jnp.pad(segments, ((0, 0), (0, pad)))
    if kernel is None:
        kernel = kernel_of(heads, tokens + pad, parts=1, interpret=interpret)
    heads_first = partial(jnp.swapaxes, axis1=1, axis2=2)
    keys = segments if key_segments is None else key_segments
    ids = splash_attention_kernel.SegmentIds(q=segments, kv=keys)
    # A tuple only when residuals are asked for.
    out = cast(Array, jax.vmap(kernel)(heads_first(q), heads_first(k), heads_first(v), ids))
    return heads_first(out)[:, :tokens]


def kernel_of(heads: int, tokens: int, *, parts: int, interpret: bool) -> Any:
    """The kernel for whole rows of `tokens`; its arrays say which blocks a query visits.

    Args:
      heads: of one device.
      parts: devices that a row is split over; `manual_sharding_spec` then splits the arrays.
    """
    block = next(size for size in BLOCKS if tokens // parts % size == 0)
    causal = splash_attention_mask.CausalMask((tokens, tokens), shard_count=parts)
    return splash_attention_kernel.make_splash_mha(
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
        q_seq_shards=parts,
        interpret=interpret,
    )
