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


def refusals(q: jax.Array, device: Any) -> list[str]:
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
    if 2 * rows * tokens**2 > LARGEST_MASK:
        reasons.append(f"the mask of {rows} rows of {tokens} tokens passes {LARGEST_MASK} bytes")
    return reasons


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hkv K"],
    v: Float[Array, "B T Hkv K"],
    segments: Int[Array, "B T"],
    scale: float,
) -> Float[Array, "B T H K"]:
    """Softmax of the allowed scores times v; rows of segment 0 attend to each other."""
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(
        q, k, v, mask=same, scale=scale, is_causal=True, implementation="cudnn"
    )
