"""The two matrices: how their product is formed, in which layout, at which precision."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Layout = Literal["vd", "dv"]
"""Whether the unembedding is [V, D] (an embedding table) or [D, V] (a linear kernel)."""


def vocabulary_axis(layout: Layout) -> int:
    """The axis of the unembedding that the vocabulary is on."""
    return 0 if layout == "vd" else 1


def accumulator(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """What sums are kept in: float32, or float64 for float64 operands."""
    return jnp.promote_types(dtype, jnp.float32)


def dot(
    a: Float[Array, "..."], b: Float[Array, "..."], axes: tuple[int, int]
) -> Float[Array, "..."]:
    """Contracts axis `axes[0]` of `a` with `axes[1]` of `b`, both matrices, into the accumulator.

    float32 operands are multiplied as float32: by default a GPU rounds them to TF32 and a TPU to
    bfloat16. Products of bfloat16 are exact in float32, so they need no more than the default.
    """
    wide = jnp.promote_types(a.dtype, b.dtype).itemsize >= 4
    return lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT,
        preferred_element_type=accumulator(a.dtype),
    )


def contract(
    hidden: Float[Array, "T D"], unembed: Float[Array, "..."], layout: Layout
) -> Float[Array, "T V"]:
    """The logits: `hidden` times the unembedding, accumulated in float32 or wider."""
    return dot(hidden, unembed, (1, 1 if layout == "vd" else 0))
