"""The mathematics of one [tokens, columns] tile of logits, shared by every implementation.

A pass over the vocabulary carries, per token, m = max z, l = Σ e^(z-m), s = Σ e^(z-m)(z-m) and the
target's logit. Then, with p the softmax of z,

    log p = (z - m) - log l,   log Σ e^z = m + log l,   H = log l - s / l.

H computed as (log Σ e^z) - Σ p z cancels: 1.6 nats wrong at logits of ±1e4. For the same reason m
and log l stay two numbers until the backward pass has formed z - m.

Everything per token has a trailing axis of 1, so that it broadcasts against a tile and has the
shape that a TPU kernel wants.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LOWEST = -1e30
"""Stands for -inf in maxima and masks: a difference of two of them is 0, not NaN."""


class Statistics(NamedTuple):
    """What a pass over some columns leaves; `merge` joins those of disjoint columns."""

    peak: Float[Array, "T 1"]
    mass: Float[Array, "T 1"]
    moment: Float[Array, "T 1"]
    target: Float[Array, "T 1"]


class Normaliser(NamedTuple):
    """What the backward pass keeps of the forward pass: p = e^((z - peak) - log_mass), and H."""

    peak: Float[Array, "T 1"]
    log_mass: Float[Array, "T 1"]
    entropy: Float[Array, "T 1"]


class RowGradients(NamedTuple):
    """What the backward pass needs of a token: its normaliser and the three cotangents."""

    peak: Float[Array, "T 1"]
    log_mass: Float[Array, "T 1"]
    entropy: Float[Array, "T 1"]
    g_logprob: Float[Array, "T 1"]
    g_entropy: Float[Array, "T 1"]
    g_logsumexp: Float[Array, "T 1"]


def scaled(
    raw: Float[Array, "T C"], inverse_temperature: Float[Array, "T 1"], softcap: float | None
) -> tuple[Float[Array, "T C"], Float[Array, "T C"]]:
    """(z, dz/draw): z = softcap · tanh(raw / softcap) / temperature, or raw / temperature."""
    if softcap is None:
        return raw * inverse_temperature, inverse_temperature
    tanh = jnp.tanh(raw * (1.0 / softcap))
    return softcap * tanh * inverse_temperature, inverse_temperature * (1.0 - tanh * tanh)


def empty(tokens: int, dtype: jax.typing.DTypeLike) -> Statistics:
    """The statistics of no columns at all."""
    zero = jnp.zeros((tokens, 1), dtype)
    return Statistics(jnp.full((tokens, 1), LOWEST, dtype), zero, zero, zero)


def update(carry: Statistics, z: Float[Array, "T C"], target: Float[Array, "T 1"]) -> Statistics:
    """`carry` and one more tile. Columns that do not exist must be `LOWEST`.

    `target` is the target's logit where the tile holds the target, else 0.
    """
    peak = jnp.maximum(carry.peak, jnp.max(z, axis=1, keepdims=True))
    # A logit of -inf (a masked column) adds e^(z-m)(z-m) = 0, not 0 · inf.
    shifted = jnp.maximum(z - peak, LOWEST)
    weight = jnp.exp(shifted)
    mass = jnp.sum(weight, axis=1, keepdims=True)
    moment = jnp.sum(weight * shifted, axis=1, keepdims=True)
    old_mass, old_moment = rescaled(carry, peak)
    return Statistics(peak, old_mass + mass, old_moment + moment, carry.target + target)


def rescaled(
    carry: Statistics, peak: Float[Array, "T 1"]
) -> tuple[Float[Array, "T 1"], Float[Array, "T 1"]]:
    """(mass, moment) of `carry` as they are under the larger maximum `peak`."""
    # The difference may be -1e30 when the carry is empty; its mass and moment are 0 then.
    change = carry.peak - peak
    scale = jnp.exp(change)
    return scale * carry.mass, scale * (carry.moment + carry.mass * change)


def merge(a: Statistics, b: Statistics) -> Statistics:
    """The statistics of the union of two disjoint sets of columns."""
    peak = jnp.maximum(a.peak, b.peak)
    a_mass, a_moment = rescaled(a, peak)
    b_mass, b_moment = rescaled(b, peak)
    return Statistics(peak, a_mass + b_mass, a_moment + b_moment, a.target + b.target)


def outputs(
    statistics: Statistics,
) -> tuple[Normaliser, tuple[Float[Array, "T 1"], Float[Array, "T 1"], Float[Array, "T 1"]]]:
    """(what to keep, (log-prob, entropy, log-sum-exp)) from the statistics of all columns."""
    log_mass = jnp.log(statistics.mass)
    logprob = (statistics.target - statistics.peak) - log_mass
    entropy = log_mass - statistics.moment / statistics.mass
    normaliser = Normaliser(statistics.peak, log_mass, entropy)
    return normaliser, (logprob, entropy, statistics.peak + log_mass)


def dz(
    z: Float[Array, "T C"], is_target: Bool[Array, "T C"], rows: RowGradients
) -> Float[Array, "T C"]:
    """The gradient with respect to the logits.

    dz = p · (g_logsumexp - g_logprob - g_entropy · (log p + H)) + 1[target] · g_logprob.
    """
    # As in `update`: p log p is 0 where p is.
    log_p = jnp.maximum((z - rows.peak) - rows.log_mass, LOWEST)
    constant = rows.g_logsumexp - rows.g_logprob - rows.g_entropy * rows.entropy
    gradient = jnp.exp(log_p) * (constant - rows.g_entropy * log_p)
    return gradient + jnp.where(is_target, rows.g_logprob, 0.0)
