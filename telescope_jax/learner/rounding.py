"""float32 to bfloat16 such that the mean over draws is the float32 value.

An update of RL moves a weight by far less than half the distance to the next bfloat16, so rounding
to the nearest would undo every one of them. Rounded up with the probability of where the value lies
between its two neighbours, it moves as it should in the mean: Zamirai et al., "Revisiting BFloat16
Training" (2020); Ozkara et al., "Stochastic Rounding for LLM Training: Theory and Practice" (2025).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, UInt32

_DROPPED = 16  # bits of a float32 that a bfloat16 lacks


def draw_key(draw: UInt32[Array, "3"]) -> jax.Array:
    """A key from (seed, step, update within the step), in this order.

    The generator is named, since its numbers must not depend on a setting of JAX or on the mesh.
    """
    key = jax.random.key(0, impl="threefry2x32")
    for number in draw:
        key = jax.random.fold_in(key, number)
    return key


def round_tree(tree: Any, key: jax.Array) -> Any:
    """`round_stochastically` of every leaf, each with draws of its own."""
    leaves, structure = jax.tree.flatten(tree)
    rounded = [round_stochastically(x, jax.random.fold_in(key, i)) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, rounded)


def round_stochastically(x: Float32[Array, "*n"], key: jax.Array) -> BFloat16[Array, "*n"]:
    """One of the two bfloat16 around each value; the value itself where it is one.

    P(away from 0) = (|x| − lower) / (upper − lower), in steps of 2⁻¹⁶. NaN and ±inf stay, and only
    what rounds to ±inf to the nearest becomes it.
    """
    # Integers throughout: sign and magnitude lie apart, a carry moves on into the exponent, and
    # denormals are not flushed on the way.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    with jax.threefry_partitionable(True):  # else the numbers are others, and gathered on a mesh
        noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    high = ((bits + noise) >> _DROPPED).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(high, jnp.bfloat16)
    # Of what is not finite the sum would be another NaN, or a finite number of the other sign.
    drawn = jnp.isfinite(x) & jnp.isfinite(rounded)
    return jnp.where(drawn, rounded, x.astype(jnp.bfloat16))
