"""A sampler that differs from the trainer on purpose, to see what corrects for it.

The log-probs that it reports are those of what it samples from: it is another policy, not a wrong
report. `experiments/sweeps/mismatch.py` trains against it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from telescope_jax.inference.jax_engine import Reader
from telescope_jax.types import Params, WeightsRef


class EightBitReader:
    """Reads weights whose matrices are rounded to 8 bits."""

    def __init__(self, store: Reader) -> None:
        self._store = store

    def read(self, ref: WeightsRef) -> Params:
        return eight_bits(self._store.read(ref))


@jax.jit
def eight_bits(params: Params) -> Params:
    """`params` with every matrix rounded; one compilation for all versions."""
    return jax.tree.map(_eight_bits, params)


def _eight_bits(weights: Float[Array, "..."]) -> Float[Array, "..."]:
    """q·s with q = round(w / s) an integer of 8 bits and s = max |w| / 127 of each column.

    Vectors (norms, biases) stay as they are.
    """
    if weights.ndim < 2:
        return weights
    weights = weights.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weights), axis=tuple(range(weights.ndim - 1)), keepdims=True) / 127
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(weights / scale) * scale
