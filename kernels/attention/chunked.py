"""Attention by blocks of queries and keys in plain JAX: memory grows with T, not with T².

After Dao et al., "FlashAttention" (2022), and Dao, "FlashAttention-2" (2023): an online softmax
forward; backward forms the scores of a block again from the saved maximum and normaliser. Blocks
above the diagonal, and blocks that share no segment at either end of the walk, are never visited.

Inside, arrays are blocked: N blocks first, then B, n key heads, g query heads a key head, S tokens.
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128
"""Queries, and keys, of a block."""

LOWEST = -1e30
"""Stands for -inf: a difference of two of them is 0, not NaN."""


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hkv K"],
    v: Float[Array, "B T Hkv K"],
    segments: Int[Array, "B T"],
    scale: float,
    *,
    block: int = BLOCK,
) -> Float[Array, "B T H K"]:
    """Softmax of the allowed scores times v; rows of segment 0 are 0."""
    tokens = q.shape[1]
    block = min(block, tokens)
    if pad := -tokens % block:
        q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
        segments = jnp.pad(segments, ((0, 0), (0, pad)))
    out = cast(Array, _attention(scale, block, q, k, v, segments))
    return out[:, :tokens]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    scale: float, block: int, q: Array, k: Array, v: Array, segments: Array
) -> Float[Array, "B T H K"]:
    return _forward(scale, block, q, k, v, segments)[0]


def _forward(scale, block, q, k, v, segments):
    q_blocks, k_blocks, v_blocks = _blocked(q, k, v, block)
    segment_blocks = _split(segments, block)
    first, _ = key_blocks_visited(segment_blocks)

    def of_queries(_, i):
        q_i = q_blocks[i] * scale

        def over_keys(j, carry):
            peak, mass, acc = carry
            mask = allowed(segment_blocks, i, j)
            scores = jnp.where(mask, _dot("bngqk,bnsk->bngqs", q_i, k_blocks[j]), LOWEST)
            new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
            # The second mask is for a row that has met no key yet: there new_peak is LOWEST too.
            weights = jnp.where(mask, jnp.exp(scores - new_peak), 0.0)
            keep = jnp.exp(peak - new_peak)
            mass = keep * mass + weights.sum(axis=-1, keepdims=True)
            return new_peak, mass, keep * acc + _dot("bngqs,bnsk->bngqk", weights, v_blocks[j])

        zero = jnp.zeros_like(q_i[..., :1])
        peak, mass, acc = lax.fori_loop(
            first[i], i + 1, over_keys, (zero + LOWEST, zero, jnp.zeros_like(q_i))
        )
        mass = jnp.where(mass > 0, mass, 1.0)
        return None, (acc / mass, peak, mass)

    _, (out_blocks, peak, mass) = lax.scan(of_queries, None, jnp.arange(len(q_blocks)))
    out = _join(out_blocks).astype(q.dtype)
    return out, (q, k, v, segments, out, peak, mass)


def _backward(scale, block, residuals, d_out):
    q, k, v, segments, out, peak, mass = residuals
    q_blocks, k_blocks, v_blocks = _blocked(q, k, v, block)
    segment_blocks = _split(segments, block)
    _, last = key_blocks_visited(segment_blocks)
    d_out_blocks = _grouped(d_out, k.shape[2], block)
    # Σ_s p dp of each query, which is what the softmax subtracts from dp, is also out · d_out.
    delta = jnp.sum(_grouped(out, k.shape[2], block) * d_out_blocks, axis=-1, keepdims=True)

    def of_keys(d_q, j):
        k_j, v_j = k_blocks[j], v_blocks[j]

        def over_queries(i, carry):
            d_q, d_k, d_v = carry
            q_i, d_out_i = q_blocks[i] * scale, d_out_blocks[i]
            mask = allowed(segment_blocks, i, j)
            scores = jnp.where(mask, _dot("bngqk,bnsk->bngqs", q_i, k_j), LOWEST)
            weights = jnp.where(mask, jnp.exp(scores - peak[i]), 0.0) / mass[i]
            d_scores = weights * (_dot("bngqk,bnsk->bngqs", d_out_i, v_j) - delta[i])
            d_v = d_v + _dot("bngqs,bngqk->bnsk", weights, d_out_i)
            d_k = d_k + _dot("bngqs,bngqk->bnsk", d_scores, q_i)
            return d_q.at[i].add(_dot("bngqs,bnsk->bngqk", d_scores, k_j) * scale), d_k, d_v

        d_q, d_k, d_v = lax.fori_loop(
            j, last[j] + 1, over_queries, (d_q, jnp.zeros_like(k_j), jnp.zeros_like(v_j))
        )
        return d_q, (d_k, d_v)

    d_q, (d_k, d_v) = lax.scan(of_keys, jnp.zeros_like(q_blocks), jnp.arange(len(k_blocks)))
    d_k, d_v = (_join(jnp.expand_dims(x, 3)).astype(k.dtype) for x in (d_k, d_v))
    return _join(d_q).astype(q.dtype), d_k, d_v, np.zeros(segments.shape, jax.dtypes.float0)


_attention.defvjp(_forward, _backward)


def allowed(
    segment_blocks: Int[Array, "N B S"], i: Int[Array, ""], j: Int[Array, ""]
) -> Bool[Array, "B 1 1 S S"]:
    """Which keys of block j the queries of block i see: no later ones, their own segment's only."""
    size = segment_blocks.shape[2]
    query = i * size + lax.broadcasted_iota(jnp.int32, (1, size, size), 1)
    key = j * size + lax.broadcasted_iota(jnp.int32, (1, size, size), 2)
    queries, keys = segment_blocks[i][:, :, None], segment_blocks[j][:, None, :]
    return ((queries == keys) & (queries != 0) & (query >= key))[:, None, None]


def key_blocks_visited(
    segment_blocks: Int[Array, "N B S"],
) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """(first key block of each query block, last query block of each key block).

    Two blocks need each other if in some row their ranges of segments overlap. Ranges hold at
    least the segments themselves, so nothing is missed whatever the order of the segments is.
    """
    real = segment_blocks != 0
    low = jnp.where(real, segment_blocks, jnp.iinfo(jnp.int32).max).min(axis=-1)
    high = jnp.where(real, segment_blocks, 0).max(axis=-1)
    overlap = ((low[:, None] <= high[None]) & (low[None] <= high[:, None])).any(axis=-1)
    count = len(segment_blocks)
    needed = overlap & jnp.tri(count, dtype=bool)
    # An empty range when nothing is needed: from i + 1 to i, or from j to j - 1.
    index = jnp.arange(count)
    first = jnp.where(needed.any(axis=1), jnp.argmax(needed, axis=1), index + 1)
    backwards = jnp.argmax(needed[::-1], axis=0)
    last = jnp.where(needed.any(axis=0), count - 1 - backwards, index - 1)
    return first, last


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def _split(x: Array, block: int) -> Array:
    """B T ... -> N B S ..."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def _blocked(q: Array, k: Array, v: Array, block: int) -> tuple[Array, Array, Array]:
    """q as N B n g S K, k and v as N B n S K, in the accumulator's type."""
    k, v = (_grouped(x, x.shape[2], block)[:, :, :, 0] for x in (k, v))
    return _grouped(q, k.shape[2], block), k, v


def _grouped(x: Array, kv_heads: int, block: int) -> Float[Array, "N B n g S K"]:
    """B T H K -> N B n g S K, query head n · g + i being the i-th of key head n."""
    blocks = _split(x.astype(jnp.promote_types(x.dtype, jnp.float32)), block)
    count, rows, size, heads, width = blocks.shape
    blocks = blocks.reshape(count, rows, size, kv_heads, heads // kv_heads, width)
    return jnp.moveaxis(blocks, 2, 4)


def _join(blocks: Float[Array, "N B n g S K"]) -> Float[Array, "B T H K"]:
    """Undoes `_grouped`, but for the type."""
    count, rows, n, g, size, width = blocks.shape
    return jnp.transpose(blocks, (1, 0, 4, 2, 3, 5)).reshape(rows, count * size, n * g, width)
