"""Attention of packed rows: causal by index, within a segment, grouped key heads."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.attention import chunked, reference
from kernels.choice import choose

SHORT = 512
"""Rows up to this many tokens run dense on a CPU: the scores fit the cache."""


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hkv K"],
    v: Float[Array, "B T Hkv K"],
    *,
    segments: Int[Array, "B T"],
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """softmax(scale · q kᵀ) v over the keys s ≤ t of the query's own segment.

    Args:
      q, k, v: of one float type; H is a multiple of Hkv, and query head h reads key head
        h // (H / Hkv). The softmax is in float32 whatever the type.
      segments: the rollouts of a row, numbered from 1; 0 is padding, whose rows are 0 and give and
        receive no gradient.
      scale: of the scores; None is K^-½.
      implementation: `reference` (dense), `chunked`, or None to pick by platform and T.

    Raises:
      ValueError: shapes or types do not fit.
      NotImplementedError: the implementation asked for cannot take the case.
    """
    _check(q, k, v, segments)
    tokens, width = q.shape[1], q.shape[3]
    name = choose(
        "attention",
        implementation,
        ["reference", "chunked"] if tokens <= SHORT else ["chunked"],
        {"reference": lambda: [], "chunked": lambda: []},
    )
    scale = width**-0.5 if scale is None else float(scale)
    run = {"reference": reference.attention, "chunked": chunked.attention}[name]
    out = run(q, k, v, segments, scale)
    # Also cuts the gradient of padding: nothing of it may reach the parameters.
    return jnp.where((segments != 0)[:, :, None, None], out, jnp.zeros_like(out))


def _check(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> None:
    """Raises ValueError with everything that is wrong with the arguments."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or segments.ndim != 2:
        raise ValueError(
            f"q, k, v and segments have shapes {q.shape}, {k.shape}, {v.shape} and "
            f"{segments.shape}; they must be [B, T, H, K], twice [B, T, Hkv, K], and [B, T]"
        )
    wrong = []
    if not q.shape[:2] == k.shape[:2] == segments.shape or q.shape[3] != k.shape[3]:
        wrong.append(
            f"q {q.shape}, k {k.shape} and segments {segments.shape} disagree on B, T or K"
        )
    if q.shape[2] % k.shape[2]:
        wrong.append(f"{q.shape[2]} query heads do not divide over {k.shape[2]} key heads")
    if not jnp.issubdtype(q.dtype, jnp.floating) or not q.dtype == k.dtype == v.dtype:
        wrong.append(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; cast to one float type")
    if not jnp.issubdtype(segments.dtype, jnp.integer):
        wrong.append(f"segments are {segments.dtype}, not integers")
    if wrong:
        raise ValueError("; ".join(wrong))
