"""Attention written down plainly, with the scores [B, H, T, T] in memory.

Its gradient is JAX's own, so it shares no backward pass with the other implementations.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hkv K"],
    v: Float[Array, "B T Hkv K"],
    segments: Int[Array, "B T"],
    scale: float,
) -> Float[Array, "B T H K"]:
    """Softmax of the allowed scores times v; rows of segment 0 are what they happen to be."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    heads, kv_heads, head_width = q.shape[2], k.shape[2], q.shape[3]
    grouped = q.reshape(*q.shape[:2], kv_heads, heads // kv_heads, head_width)
    scores = jnp.einsum(
        "bqngk,bsnk->bngqs",
        grouped.astype(wide),
        k.astype(wide),
        precision=lax.Precision.HIGHEST,
    )

    index = jnp.arange(q.shape[1])
    causal = index[:, None] >= index[None, :]
    allowed = (segments[:, :, None] == segments[:, None, :]) & causal[None]
    scores = jnp.where(allowed[:, None, None], scores * scale, -jnp.inf)
    # Every token may attend to itself, so no maximum is -inf.
    weights = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bngqs,bsnk->bqngk", weights, v.astype(wide), precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype)
