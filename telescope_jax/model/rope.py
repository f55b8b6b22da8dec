"""Rotary positions (Su et al., "RoFormer", 2021), in the half-split pairing of Hugging Face.

Feature i of a head turns together with feature i + K/2, not with i + 1. The two pairings agree at
position 0, where the rotation is the identity, and nowhere else.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 stretches the rotary frequencies beyond the length it was first trained on.

    Attributes:
      factor: by which low frequencies are divided, > 1.
      low_frequency_factor, high_frequency_factor: a wavelength longer than original_length / low is
        divided in full, one shorter than original_length / high is kept, and those between are
        interpolated.
      original_length: context of the first training, tokens.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Llama3Scaling | None = None
) -> Float[np.ndarray, " half"]:
    """ω_i = θ^(−2i/K) for i < K/2, in radians a position.

    Args:
      head_dim: K, even.
      theta: base; 1e4 in RoFormer, 5e5 in Llama 3, 1e6 in Qwen 2 and 3.
      scaling: Llama 3.1's stretch; None for none.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelengths_in_context = scaling.original_length * frequencies / (2 * math.pi)
    keep = np.clip((wavelengths_in_context - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rotate(
    x: Float[Array, "*rows heads head_dim"],
    positions: Int[Array, "*rows"],
    frequencies: Float[np.ndarray, " half"],
) -> Float[Array, "*rows heads head_dim"]:
    """Turns each pair of features (i, i + K/2) by position · ω_i, computed in float32."""
    # float32 even under bfloat16: a position above 256 has no exact bfloat16.
    frequencies_f32 = jnp.asarray(frequencies, jnp.float32)
    angles = jnp.expand_dims(positions.astype(jnp.float32), (-2, -1)) * jnp.expand_dims(
        frequencies_f32, tuple(range(positions.ndim + 1))
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
