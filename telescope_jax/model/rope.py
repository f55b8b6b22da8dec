"""Rotary positions (Su et al., "RoFormer", 2021), in the half-split pairing of Hugging Face.

Feature i of a head turns together with feature i + K/2, not with i + 1. The two pairings agree at
position 0, where the rotation is the identity, and nowhere else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): slow features are interpolated, fast ones kept, queries and keys
    grow with the stretch.

    Attributes:
      factor: new context over `original_length`, ≥ 1.
      original_length: context of the first training, tokens.
      beta_fast, beta_slow: a feature that turns more often than beta_fast within the original
        context is kept, one that turns less often than beta_slow is divided by `factor` in full.
      magnitude: factor of the rotated queries and keys.
      truncate: round the two ends of the ramp outwards to whole features.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True


Scaling = Llama3Scaling | YarnScaling | None

_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_YARN = {"factor", "original_max_position_embeddings"}
_YARN_MAY = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}


def scaling_of(settings: Mapping[str, Any]) -> Scaling:
    """The stretch that Hugging Face's rope settings describe (PolicyConfig.rope_scaling).

    Raises:
      ValueError: an unknown type, or keys that are missing or unknown: a stretch that is left out
        goes unnoticed, since short contexts look right without it.
    """
    settings = {key: value for key, value in settings.items() if value is not None}
    kind = settings.pop("rope_type", "default")
    known = {"default": (set(), set()), "llama3": (_LLAMA3, set()), "yarn": (_YARN, _YARN_MAY)}
    if kind not in known:
        raise ValueError(
            f"rope_type {kind!r} is none of {', '.join(known)}; this decoder would place tokens "
            "elsewhere than the model was trained with"
        )
    needed, optional = known[kind]
    if amiss := (needed - settings.keys()) | (settings.keys() - needed - optional):
        raise ValueError(
            f"rope settings of type {kind}: {', '.join(sorted(amiss))} missing or unknown; "
            f"needed are {', '.join(sorted(needed)) or 'none'}"
        )
    if kind == "llama3":
        return Llama3Scaling(
            settings["factor"],
            settings["low_freq_factor"],
            settings["high_freq_factor"],
            settings["original_max_position_embeddings"],
        )
    if kind == "yarn":
        return YarnScaling(
            settings["factor"],
            settings["original_max_position_embeddings"],
            settings.get("beta_fast") or 32.0,
            settings.get("beta_slow") or 1.0,
            _yarn_magnitude(settings),
            settings.get("truncate", True),
        )
    return None


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Scaling = None
) -> Float[np.ndarray, " half"]:
    """ω_i = θ^(−2i/K) for i < K/2, in radians a position.

    Args:
      head_dim: K, even.
      theta: base; 1e4 in RoFormer, 5e5 in Llama 3, 1e6 in Qwen 2 and 3.
      scaling: None for none.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    if isinstance(scaling, YarnScaling):
        keep = 1.0 - _yarn_ramp(head_dim, theta, scaling)
        return frequencies * (keep + (1.0 - keep) / scaling.factor)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelengths_in_context = scaling.original_length * frequencies / (2 * math.pi)
    keep = np.clip((wavelengths_in_context - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def _yarn_ramp(head_dim: int, theta: float, scaling: YarnScaling) -> Float[np.ndarray, " half"]:
    """0 for features that are kept, 1 for those divided in full."""

    def feature(turns: float) -> float:
        length = scaling.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    first, last = feature(scaling.beta_fast), feature(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # head_dim − 1 and not half of it: the reference clamps so, and short contexts meet it.
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001
    return np.clip((np.arange(head_dim // 2) - first) / width, 0.0, 1.0)


def _yarn_magnitude(settings: Mapping[str, Any]) -> float:
    """0.1 · mscale · ln(factor) + 1, over the same of mscale_all_dim where both are given."""
    if "attention_factor" in settings:
        return settings["attention_factor"]

    def growth(mscale: float) -> float:
        factor = settings["factor"]
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return growth(settings["mscale"]) / growth(settings["mscale_all_dim"])
    return growth(1.0)


def rotate(
    x: Float[Array, "*rows heads head_dim"],
    positions: Int[Array, "*rows"],
    frequencies: Float[np.ndarray, " half"],
    magnitude: float = 1.0,
) -> Float[Array, "*rows heads head_dim"]:
    """Turns each pair of features (i, i + K/2) by position · ω_i, computed in float32.

    Args:
      magnitude: factor of the result; YaRN's, else 1.
    """
    # float32 even under bfloat16: a position above 256 has no exact bfloat16.
    frequencies_f32 = jnp.asarray(frequencies, jnp.float32)
    angles = jnp.expand_dims(positions.astype(jnp.float32), (-2, -1)) * jnp.expand_dims(
        frequencies_f32, tuple(range(positions.ndim + 1))
    )
    cos, sin = jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
