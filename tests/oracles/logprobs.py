"""Per-token log-probs, entropies and their gradients in float64 numpy, from the definitions."""

from typing import NamedTuple

import numpy as np


class Scores(NamedTuple):
    """Values of each token, then the gradients of Σ g · value."""

    logprob: np.ndarray
    entropy: np.ndarray
    logsumexp: np.ndarray
    d_hidden: np.ndarray
    d_unembed: np.ndarray


def scores(
    hidden: np.ndarray,
    unembed: np.ndarray,
    targets: np.ndarray,
    cotangents: np.ndarray,
    *,
    temperature: float | np.ndarray = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Scores:
    """Scores of hidden [T, D] and unembed [V, D]; `cotangents` [3, T] weight the three values."""
    hidden, unembed, g = (np.asarray(x, np.float64) for x in (hidden, unembed, cotangents))
    temperature = np.broadcast_to(np.asarray(temperature, np.float64), len(targets))
    kept = targets != ignore_index
    logprob, entropies, logsumexp = np.zeros((3, len(targets)))
    d_hidden, d_unembed = np.zeros_like(hidden), np.zeros_like(unembed)
    for t in np.flatnonzero(kept):
        raw = unembed @ hidden[t]
        capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
        slope = 1.0 if softcap is None else 1.0 - np.tanh(raw / softcap) ** 2
        z = capped / temperature[t]
        lse = z.max() + np.log(np.sum(np.exp(z - z.max())))
        logp = z - lse
        p = np.exp(logp)
        entropy = -np.sum(p * np.where(p > 0, logp, 0.0))
        logprob[t], entropies[t], logsumexp[t] = logp[targets[t]], entropy, lse
        onehot = np.arange(len(z)) == targets[t]
        d_z = g[0, t] * (onehot - p) + g[2, t] * p - g[1, t] * p * (logp + entropy)
        d_raw = d_z * slope / temperature[t]
        d_hidden[t] = unembed.T @ d_raw
        d_unembed += np.outer(d_raw, hidden[t])
    return Scores(logprob, entropies, logsumexp, d_hidden, d_unembed)
