"""Attention by blocks of queries and keys in plain JAX: memory grows with T, not with T².

After Dao et al., "FlashAttention" (2022), and Dao, "FlashAttention-2" (2023): an online softmax
forward; backward forms the scores of a block again from the saved maximum and normaliser. Blocks
above the diagonal, and blocks that share no segment at either end of the walk, are never visited.
The queries may be a part of the row whose keys are all here: `offset` says where they begin.

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
    k: Float[Array, "B S Hkv K"],
    v: Float[Array, "B S Hkv K"],
    segments: Int[Array, "B T"],
    scale: float,
    *,
    key_segments: Int[Array, "B S"] | None = None,
    offset: int | Int[Array, ""] = 0,
    block: int = BLOCK,
) -> Float[Array, "B T H K"]:
    """Softmax of the allowed scores times v; rows of segment 0 are 0.

    Args:
      key_segments: the keys' segments, where the queries are a part of the row; else the same.
      offset: place of the first query among the keys.
    """
    tokens = q.shape[1]
    block = min(block, tokens)
    key_segments = segments if key_segments is None else key_segments
    q, segments = _padded(q, block), _padded(segments, block)
    k, v, key_segments = (_padded(x, block) for x in (k, v, key_segments))
    first = jnp.asarray(offset, jnp.int32)
    out = cast(Array, _attention(scale, block, q, k, v, segments, key_segments, first))
    return out[:, :tokens]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    scale: float,
    block: int,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    key_segments: Array,
    offset: Array,
) -> Float[Array, "B T H K"]:
    return _forward(scale, block, q, k, v, segments, key_segments, offset)[0]


def _forward(scale, block, q, k, v, segments, key_segments, offset):
    q_blocks, k_blocks, v_blocks = _blocked(q, k, v, block)
    ids, key_ids = _split(segments, block), _split(key_segments, block)
    (first, last), _ = blocks_visited(ids, key_ids, offset)

    def of_queries(_, i):
        q_i = q_blocks[i] * scale

        def over_keys(j, carry):
            peak, mass, acc = carry
            mask = allowed(ids, key_ids, offset, i, j)
            scores = jnp.where(mask, _dot("bngqk,bnsk->bngqs", q_i, k_blocks[j]), LOWEST)
            new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
            # The second mask is for a row that has met no key yet: there new_peak is LOWEST too.
            weights = jnp.where(mask, jnp.exp(scores - new_peak), 0.0)
            keep = jnp.exp(peak - new_peak)
            mass = keep * mass + weights.sum(axis=-1, keepdims=True)
            return new_peak, mass, keep * acc + _dot("bngqs,bnsk->bngqk", weights, v_blocks[j])

        zero = jnp.zeros_like(q_i[..., :1])
        peak, mass, acc = lax.fori_loop(
            first[i], last[i] + 1, over_keys, (zero + LOWEST, zero, jnp.zeros_like(q_i))
        )
        mass = jnp.where(mass > 0, mass, 1.0)
        return None, (acc / mass, peak, mass)

    _, (out_blocks, peak, mass) = lax.scan(of_queries, None, jnp.arange(len(q_blocks)))
    out = _join(out_blocks).astype(q.dtype)
    return out, (q, k, v, segments, key_segments, offset, out, peak, mass)


def _backward(scale, block, residuals, d_out):
    q, k, v, segments, key_segments, offset, out, peak, mass = residuals
    q_blocks, k_blocks, v_blocks = _blocked(q, k, v, block)
    ids, key_ids = _split(segments, block), _split(key_segments, block)
    _, (first, last) = blocks_visited(ids, key_ids, offset)
    d_out_blocks = _grouped(d_out, k.shape[2], block)
    # Σ_s p dp of each query, which is what the softmax subtracts from dp, is also out · d_out.
    delta = jnp.sum(_grouped(out, k.shape[2], block) * d_out_blocks, axis=-1, keepdims=True)

    def of_keys(d_q, j):
        k_j, v_j = k_blocks[j], v_blocks[j]

        def over_queries(i, carry):
            d_q, d_k, d_v = carry
            q_i, d_out_i = q_blocks[i] * scale, d_out_blocks[i]
            mask = allowed(ids, key_ids, offset, i, j)
            scores = jnp.where(mask, _dot("bngqk,bnsk->bngqs", q_i, k_j), LOWEST)
            weights = jnp.where(mask, jnp.exp(scores - peak[i]), 0.0) / mass[i]
            d_scores = weights * (_dot("bngqk,bnsk->bngqs", d_out_i, v_j) - delta[i])
            d_v = d_v + _dot("bngqs,bngqk->bnsk", weights, d_out_i)
            d_k = d_k + _dot("bngqs,bngqk->bnsk", d_scores, q_i)
            return d_q.at[i].add(_dot("bngqs,bnsk->bngqk", d_scores, k_j) * scale), d_k, d_v

        d_q, d_k, d_v = lax.fori_loop(
            first[j], last[j] + 1, over_queries, (d_q, jnp.zeros_like(k_j), jnp.zeros_like(v_j))
        )
        return d_q, (d_k, d_v)

    d_q, (d_k, d_v) = lax.scan(of_keys, jnp.zeros_like(q_blocks), jnp.arange(len(k_blocks)))
    d_k, d_v = (_join(jnp.expand_dims(x, 3)).astype(k.dtype) for x in (d_k, d_v))
    none = (np.zeros(x.shape, jax.dtypes.float0) for x in (segments, key_segments, offset))
    return _join(d_q).astype(q.dtype), d_k, d_v, *none


_attention.defvjp(_forward, _backward)


def allowed(
    ids: Int[Array, "N B S"],
    key_ids: Int[Array, "M B S"],
    offset: Int[Array, ""],
    i: Int[Array, ""],
    j: Int[Array, ""],
) -> Bool[Array, "B 1 1 S S"]:
    """Which keys of block j the queries of block i see: no later ones, their own segment's only."""
    size = ids.shape[2]
    query = offset + i * size + lax.broadcasted_iota(jnp.int32, (1, size, size), 1)
    key = j * size + lax.broadcasted_iota(jnp.int32, (1, size, size), 2)
    queries, keys = ids[i][:, :, None], key_ids[j][:, None, :]
    return ((queries == keys) & (queries != 0) & (query >= key))[:, None, None]


def blocks_visited(
    ids: Int[Array, "N B S"], key_ids: Int[Array, "M B S"], offset: int | Int[Array, ""] = 0
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """(first, last) key block of each query block, and query block of each key block.

    Two blocks need each other if in some row their ranges of segments overlap. Ranges hold at
    least the segments themselves, so nothing is missed whatever the order of the segments is.
    Where nothing is needed, `last` is before `first`.
    """

    def ranges(ids: Array) -> tuple[Array, Array]:
        real = ids != 0
        low = jnp.where(real, ids, jnp.iinfo(jnp.int32).max).min(axis=-1)
        return low, jnp.where(real, ids, 0).max(axis=-1)

    (low, high), (key_low, key_high) = ranges(ids), ranges(key_ids)
    overlap = (low[:, None] <= key_high[None]) & (key_low[None] <= high[:, None])
    size = ids.shape[2]
    last_query = offset + size * jnp.arange(1, len(ids) + 1) - 1
    needed = overlap.any(axis=-1) & (size * jnp.arange(len(key_ids))[None] <= last_query[:, None])
    return _span(needed), _span(needed.T)


def _span(needed: Bool[Array, "N M"]) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """First and last column of each row that is true; 0 and −1 if none is."""
    some = needed.any(axis=1)
    last = needed.shape[1] - 1 - jnp.argmax(needed[:, ::-1], axis=1)
    return jnp.where(some, jnp.argmax(needed, axis=1), 0), jnp.where(some, last, -1)


def _padded(x: Array, block: int) -> Array:
    """B T ... with T filled up to whole blocks; segment 0 is padding."""
    pad = -x.shape[1] % block
    return jnp.pad(x, ((0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2))) if pad else x


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
