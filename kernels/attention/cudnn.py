"""Attention on NVIDIA GPUs: cuDNN's fused kernel, through `jax.nn.dot_product_attention`.

jax's public function takes segments only as a mask, which is one [T, T] bfloat16 array a row, for
all heads. So memory grows with T² after all, 2 bytes at a time; `refusals` sets the limit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LARGEST_MASK = 2**30
"""Bytes of the mask of one call; past it `chunked` is the better bargain."""


def refusals(q: jax.ShapeDtypeStruct, keys: int, device: Any) -> list[str]:
    """Why cuDNN cannot take the case on this `jax.Device`; empty if it can."""
    rows, tokens, _, width = q.shape
    reasons = []
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        reasons.append(f"cuDNN needs an NVIDIA GPU; this is {device.device_kind}")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"it multiplies bfloat16 and float16, not {q.dtype}")
    if width % 8 or width > 128:
        reasons.append(f"heads must be a multiple of 8 and at most 128 wide, not {width}")
    if tokens % 2:
        reasons.append(f"rows must have an even number of tokens, not {tokens}")
    if 2 * rows * tokens * keys > LARGEST_MASK:
        reasons.append(f"the mask of {rows} rows of {tokens} tokens passes {LARGEST_MASK} bytes")
    return reasons


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
    """Softmax of the allowed scores times v; rows of segment 0 attend to each other.

    Args:
      key_segments: the keys' segments, where the queries are a part of the row; else the same.
      offset: place of the first query among the keys.
    """
    keys = segments if key_segments is None else key_segments
    mask = segments[:, None, :, None] == keys[:, None, None, :]
    if key_segments is not None:  # cuDNN's own causal mask begins at the first key
        index = jnp.arange(k.shape[1])
        mask &= (offset + jnp.arange(q.shape[1])[:, None] >= index[None, :])[None, None]
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=key_segments is None,
        implementation="cudnn",
    )
