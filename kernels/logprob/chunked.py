"""Log-probs by chunks of the vocabulary in plain JAX: memory grows with T times one chunk.

Whole chunks run in a loop and the rest of the vocabulary is one shorter chunk after it, so that no
column is ever padded or masked. A vocabulary of one chunk keeps its logits for the backward pass:
it then costs what the dense computation costs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from kernels.logprob import tile
from kernels.logprob.operands import Layout, accumulator, contract, dot, vocabulary_axis

TILE_BYTES = 4 * 2**20
"""Aim for the logits of a chunk: they should stay in a core's share of the last-level cache."""

SHORTEST, LONGEST = 512, 16384
"""Bounds of a chunk, in columns: below, the loop costs more than the tile; above, nothing is won.
"""


def chunk_columns(tokens: int, vocabulary: int) -> int:
    """Columns of a chunk: about `TILE_BYTES` of float32 logits, a multiple of 128 or all."""
    columns = TILE_BYTES // (4 * max(tokens, 1)) // 128 * 128
    return min(vocabulary, max(SHORTEST, min(LONGEST, columns)))


@dataclass(frozen=True, slots=True)
class Chunked:
    """The two passes.

    Attributes:
      chunk: columns of a chunk; None for `chunk_columns`.
      widen: multiply in the accumulator's type. A CPU has no bfloat16 products: XLA converts
        around each of them, which costs more than converting first (measured: 1.3 to 2 times).
    """

    layout: Layout
    softcap: float | None
    chunk: int | None = None
    widen: bool = False

    def forward(
        self,
        hidden: Float[Array, "T D"],
        unembed: Float[Array, "..."],
        targets: Int[Array, "T 1"],
        inverse_temperature: Float[Array, "T 1"],
    ) -> tuple[tile.Statistics, Float[Array, "T V"] | None]:
        """The statistics, and the raw logits if there is only one chunk."""
        hidden = self._widened(hidden)
        stored = as_bits(unembed)

        def step(start, columns: int, carry: tile.Statistics) -> tuple[tile.Statistics, Array]:
            block = take(stored, start, columns, self.layout, unembed.dtype)
            raw = contract(hidden, block.astype(hidden.dtype), self.layout)
            z, _ = tile.scaled(raw, inverse_temperature, self.softcap)
            return tile.update(carry, z, target_logit(z, targets - start)), raw

        carry = tile.empty(hidden.shape[0], accumulator(hidden.dtype))
        chunk = self._chunk(hidden, unembed)
        whole, rest = divmod(unembed.shape[vocabulary_axis(self.layout)], chunk)
        if whole == 1 and not rest:
            return step(0, chunk, carry)
        carry = lax.fori_loop(0, whole, lambda i, carry: step(i * chunk, chunk, carry)[0], carry)
        if rest:
            carry, _ = step(whole * chunk, rest, carry)
        return carry, None

    def backward(
        self,
        hidden: Float[Array, "T D"],
        unembed: Float[Array, "..."],
        targets: Int[Array, "T 1"],
        inverse_temperature: Float[Array, "T 1"],
        saved: Float[Array, "T V"] | None,
        rows: tile.RowGradients,
    ) -> tuple[Float[Array, "T D"], Float[Array, "..."]]:
        """(d hidden, d unembed): each chunk's logits once more, then two products with dz."""
        wide = self._widened(hidden)

        def d_logits(start, block: Float[Array, "..."]) -> Float[Array, "T C"]:
            raw = contract(wide, block, self.layout) if saved is None else saved
            z, slope = tile.scaled(raw, inverse_temperature, self.softcap)
            is_target = lax.broadcasted_iota(jnp.int32, z.shape, 1) == targets - start
            return (tile.dz(z, is_target, rows) * slope).astype(wide.dtype)

        chunk = self._chunk(hidden, unembed)
        d_hidden, d_unembed = gradients_by_chunk(wide, unembed, self.layout, chunk, d_logits)
        return d_hidden.astype(hidden.dtype), d_unembed

    def _widened(self, x: Array) -> Array:
        return x.astype(accumulator(x.dtype)) if self.widen else x

    def _chunk(self, hidden: Array, unembed: Array) -> int:
        vocabulary = unembed.shape[vocabulary_axis(self.layout)]
        return min(vocabulary, self.chunk or chunk_columns(hidden.shape[0], vocabulary))


def gradients_by_chunk(
    hidden: Float[Array, "T D"],
    unembed: Float[Array, "..."],
    layout: Layout,
    chunk: int,
    d_logits: Callable[[int | Array, Array], Array],
) -> tuple[Float[Array, "T D"], Float[Array, "..."]]:
    """(d hidden in the accumulator's type, d unembed), one chunk of the vocabulary at a time.

    Args:
      d_logits: (first column, that chunk of `unembed` in the type of `hidden`) -> the gradient of
        its raw logits [T, C], in the type of `hidden`.
    """
    axis = vocabulary_axis(layout)
    whole, rest = divmod(unembed.shape[axis], chunk)
    stored = as_bits(unembed)

    def step(start, columns: int) -> tuple[Array, Array]:
        block = take(stored, start, columns, layout, unembed.dtype).astype(hidden.dtype)
        d_raw = d_logits(start, block)
        d_hidden = dot(d_raw, block, (1, axis))
        d_block = dot(d_raw, hidden, (0, 0)) if axis == 0 else dot(hidden, d_raw, (0, 0))
        return d_hidden, d_block.astype(unembed.dtype)

    if whole == 1 and not rest:
        return step(0, chunk)

    def add(start, columns: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_stored = carry
        more, d_block = step(start, columns)
        d_stored = lax.dynamic_update_slice_in_dim(d_stored, as_bits(d_block), start, axis)
        return d_hidden + more, d_stored

    carry = jnp.zeros(hidden.shape, accumulator(hidden.dtype)), jnp.zeros_like(stored)
    carry = lax.fori_loop(0, whole, lambda i, carry: add(i * chunk, chunk, carry), carry)
    if rest:
        carry = add(whole * chunk, rest, carry)
    d_hidden, d_stored = carry
    return d_hidden, from_bits(d_stored, unembed.dtype)


def target_logit(z: Float[Array, "T C"], column: Int[Array, "T 1"]) -> Float[Array, "T 1"]:
    """z at each token's column, 0 for a column outside the tile."""
    inside = (column >= 0) & (column < z.shape[1])
    return jnp.where(inside, jnp.take_along_axis(z, column, axis=1, mode="clip"), 0.0)


def as_bits(x: Float[Array, "..."]) -> Float[Array, "..."] | UInt[Array, "..."]:
    """16-bit floats as integers: XLA for CPUs converts a float loop carry to float32 as a whole,
    every iteration (measured: 1.5 times the time and 17 to 30 times the memory)."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: Array, dtype: jax.typing.DTypeLike) -> Float[Array, "..."]:
    """Undoes `as_bits`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def take(
    stored: Array, start, columns: int, layout: Layout, dtype: jax.typing.DTypeLike
) -> Float[Array, "..."]:
    """Columns [start, start + columns) of the vocabulary."""
    axis = vocabulary_axis(layout)
    return from_bits(lax.dynamic_slice_in_dim(stored, start, columns, axis), dtype)
