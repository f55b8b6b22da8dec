"""Attention written down plainly, with the scores [B, H, T, T] in memory.

Its gradient is JAX's own, so it shares no backward pass with the other implementations.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S Hkv K"],
    v: Float[Array, "B S Hkv K"],
    segments: Int[Array, "B T"],
    scale: float,
    *,
    key_segments: Int[Array, "B S"] | None = None,
    offset: int | Int[Array, ""] = 0,
) -> Float[Array, "B T H K"]:
    """Softmax of the allowed scores times v; rows of segment 0 are what they happen to be.

    Args:
      key_segments: the keys' segments, where the queries are a part of the row; else the same.
      offset: place of the first query among the keys.
    """
    key_segments = segments if key_segments is None else key_segments
    wide = jnp.promote_types(q.dtype, jnp.float32)
    heads, kv_heads, head_width = q.shape[2], k.shape[2], q.shape[3]
    grouped = q.reshape(*q.shape[:2], kv_heads, heads // kv_heads, head_width)
    scores = jnp.einsum(
        "bqngk,bsnk->bngqs",
        grouped.astype(wide),
        k.astype(wide),
        precision=lax.Precision.HIGHEST,
    )

    causal = offset + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])[None, :]
    allowed = (segments[:, :, None] == key_segments[:, None, :]) & causal[None]
    scores = jnp.where(allowed[:, None, None], scores * scale, -jnp.inf)
    # Every token may attend to itself, so no maximum is -inf.
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bngqs,bsnk->bqngk", weights, v.astype(wide), precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype)
