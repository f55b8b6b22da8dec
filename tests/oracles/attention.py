"""Segment-masked causal attention and its gradients in float64 numpy, one query at a time."""

from typing import NamedTuple

import numpy as np


class Attended(NamedTuple):
    """The output, then the gradients of Σ cotangent · output."""

    out: np.ndarray
    d_q: np.ndarray
    d_k: np.ndarray
    d_v: np.ndarray


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segments: np.ndarray,
    cotangent: np.ndarray,
    scale: float | None = None,
) -> Attended:
    """q [B, T, H, K], k and v [B, T, Hkv, K], segments [B, T]; rows of segment 0 are 0."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, cotangent))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    result = Attended(*(np.zeros_like(x) for x in (q, q, k, v)))
    for b, t, h in np.ndindex(q.shape[:3]):
        if segments[b, t] == 0:
            continue
        n = h // (q.shape[2] // k.shape[2])
        keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        scores = scale * k[b, keys, n] @ q[b, t, h]
        p = np.exp(scores - scores.max())
        p /= p.sum()
        d_p = v[b, keys, n] @ g[b, t, h]
        d_scores = scale * p * (d_p - p @ d_p)
        result.out[b, t, h] = p @ v[b, keys, n]
        result.d_q[b, t, h] = d_scores @ k[b, keys, n]
        result.d_k[b, keys, n] += np.outer(d_scores, q[b, t, h])
        result.d_v[b, keys, n] += np.outer(p, g[b, t, h])
    return result
