"""Rows of the embedding in the compute dtype, from a table that is kept wider and in parts.

The table is cast before it is gathered over fsdp, or twice the bytes would travel. The gradient of
these operations would add up a token's uses in the compute dtype; this one adds them up in the
table's own, as a cast after the lookup would.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def look_up(
    table: Float[Array, "V D"], tokens: Int[Array, "*rows"], dtype: jnp.dtype, pin: Callable
) -> Float[Array, "*rows D"]:
    """Rows of the table as `dtype`; NaN for an id outside the vocabulary.

    Args:
      pin: (array, kind of activation) -> the array, laid out as sharding.py says.
    """
    if table.dtype == dtype:
        return _rows(table, tokens, pin)
    return _narrow_rows(table, tokens, dtype, pin, jax.ShapeDtypeStruct(table.shape, table.dtype))


def _rows(table: Array, tokens: Array, pin: Callable) -> Array:
    return jnp.take(pin(table, "table"), tokens, axis=0)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _narrow_rows(
    table: Array, tokens: Array, dtype: jnp.dtype, pin: Callable, like: jax.ShapeDtypeStruct
) -> Array:
    del like
    # Pinned where it lies too: else the cast is merged into the gather, and comes after it.
    return _rows(pin(table.astype(dtype), "split_table"), tokens, pin)


def _forward(
    table: Array, tokens: Array, dtype: jnp.dtype, pin: Callable, like: jax.ShapeDtypeStruct
) -> tuple:
    return _narrow_rows(table, tokens, dtype, pin, like), tokens


def _backward(
    dtype: jnp.dtype, pin: Callable, like: jax.ShapeDtypeStruct, tokens: Array, gradient: Array
) -> tuple:
    del dtype
    add_up = jax.linear_transpose(lambda table: _rows(table, tokens, pin), like)
    return *add_up(gradient.astype(like.dtype)), None


_narrow_rows.defvjp(_forward, _backward)
