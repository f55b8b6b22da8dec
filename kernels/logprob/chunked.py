"""Log-probs by chunks of the vocabulary in plain JAX: memory grows with T times one chunk.

Whole chunks run in a loop and the rest of the vocabulary is one shorter chunk after it, so that no
column is ever padded or masked.

The backward pass needs the logits again. Those of the first tokens are kept where the gradient of
the unembedding will be written: that memory is needed anyway, it holds D tokens (D/2 in 16 bits),
and each chunk of it is read just before it is overwritten. The logits of the other tokens are
formed again. A vocabulary of one chunk keeps all its logits and costs what the dense computation
costs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from kernels.logprob import tile
from kernels.logprob.operands import Layout, accumulator, contract, dot, vocabulary_axis

TILE_BYTES = 3 * 2**20
"""Aim for the logits of a chunk: two of them should stay in a core's share of the last-level cache.
"""

SHORTEST, LONGEST = 256, 16384
"""Bounds of a chunk, in columns: below, the loop costs more than the tile; above, nothing is won.
"""

Stored = Float[Array, "..."] | UInt[Array, "..."]
"""The unembedding, or its gradient, as `as_bits` leaves it."""


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
        *,
        keep: bool,
    ) -> tuple[tile.Statistics, Stored | None]:
        """The statistics, and what `gradients_by_chunk` takes as `kept`."""
        hidden = self._widened(hidden)
        stored = as_bits(unembed)
        chunk = self._chunk(hidden, unembed)
        whole, rest = divmod(unembed.shape[vocabulary_axis(self.layout)], chunk)
        alone = whole == 1 and not rest

        def step(start, columns: int, carry):
            statistics, kept = carry
            block = take(stored, start, columns, self.layout, unembed.dtype)
            raw = contract(hidden, block.astype(hidden.dtype), self.layout)
            z, _ = tile.scaled(raw, inverse_temperature, self.softcap)
            statistics = tile.update(statistics, z, target_logit(z, targets - start))
            if keep:
                kept = raw if alone else write_logits(kept, raw, start, self.layout)
            return statistics, kept

        carry = tile.empty(hidden.shape[0], accumulator(hidden.dtype)), None
        if alone:
            return step(0, chunk, carry)
        carry = carry[0], jnp.zeros_like(stored) if keep else None
        carry = lax.fori_loop(0, whole, lambda i, carry: step(i * chunk, chunk, carry), carry)
        return step(whole * chunk, rest, carry) if rest else carry

    def backward(
        self,
        hidden: Float[Array, "T D"],
        unembed: Float[Array, "..."],
        targets: Int[Array, "T 1"],
        inverse_temperature: Float[Array, "T 1"],
        saved: Stored,
        rows: tile.RowGradients,
    ) -> tuple[Float[Array, "T D"], Float[Array, "..."]]:
        """(d hidden, d unembed): each chunk's logits, kept or formed again, then two products."""
        wide = self._widened(hidden)

        def d_logits(start, block: Float[Array, "..."], kept: Array | None) -> Float[Array, "T C"]:
            assert kept is not None, "the forward pass kept some"
            raw = kept
            if len(kept) < len(wide):
                again = contract(wide[len(kept) :], block, self.layout)
                raw = jnp.concatenate([kept, again])
            z, slope = tile.scaled(raw, inverse_temperature, self.softcap)
            is_target = lax.broadcasted_iota(jnp.int32, z.shape, 1) == targets - start
            return (tile.dz(z, is_target, rows) * slope).astype(wide.dtype)

        chunk = self._chunk(hidden, unembed)
        d_hidden, d_unembed = gradients_by_chunk(
            wide, unembed, self.layout, chunk, d_logits, kept=saved
        )
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
    d_logits: Callable[[int | Array, Array, Array | None], Array],
    *,
    kept: Stored | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "..."]]:
    """(d hidden in the accumulator's type, d unembed), one chunk of the vocabulary at a time.

    Args:
      d_logits: (first column, that chunk of `unembed` in the type of `hidden`, the raw logits
        [K, C] that were kept of the first K tokens) -> the gradient of the raw logits [T, C], in
        the type of `hidden`.
      kept: the raw logits [T, V] if all is one chunk, else what `write_logits` made; or None.
    """
    axis = vocabulary_axis(layout)
    whole, rest = divmod(unembed.shape[axis], chunk)
    stored, wide = as_bits(unembed), accumulator(unembed.dtype)

    def step(start, columns: int, logits: Array | None) -> tuple[Array, Array]:
        block = take(stored, start, columns, layout, unembed.dtype).astype(hidden.dtype)
        d_raw = d_logits(start, block, logits)
        d_hidden = dot(d_raw, block, (1, axis))
        d_block = dot(d_raw, hidden, (0, 0)) if axis == 0 else dot(hidden, d_raw, (0, 0))
        return d_hidden, d_block.astype(unembed.dtype)

    if whole == 1 and not rest:
        return step(0, chunk, kept)

    def add(start, columns: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_stored = carry
        logits = None
        if kept is not None:
            logits = read_logits(d_stored, start, columns, layout, len(hidden), wide)
        more, d_block = step(start, columns, logits)
        d_stored = lax.dynamic_update_slice_in_dim(d_stored, as_bits(d_block), start, axis)
        return d_hidden + more, d_stored

    d_stored = jnp.zeros_like(stored) if kept is None else kept
    carry = jnp.zeros(hidden.shape, wide), d_stored
    carry = lax.fori_loop(0, whole, lambda i, carry: add(i * chunk, chunk, carry), carry)
    if rest:
        carry = add(whole * chunk, rest, carry)
    d_hidden, d_stored = carry
    return d_hidden, from_bits(d_stored, unembed.dtype)


def write_logits(stored: Stored, raw: Float[Array, "T C"], start, layout: Layout) -> Stored:
    """`stored` with the logits of the first tokens, as many as fit, in the place of their columns.

    They lie there in their own order, not as the gradient will: only `read_logits` looks at them.
    """
    columns, per_logit = raw.shape[1], raw.dtype.itemsize // stored.dtype.itemsize
    fitting = min(raw.shape[0], stored.shape[1 - vocabulary_axis(layout)] // per_logit)
    block = raw[:fitting]
    if per_logit > 1:
        block = lax.bitcast_convert_type(block, stored.dtype)
    if layout == "vd":
        return lax.dynamic_update_slice(stored, block.reshape(columns, -1), (start, 0))
    return lax.dynamic_update_slice(stored, block.reshape(-1, columns), (0, start))


def read_logits(
    stored: Stored, start, columns: int, layout: Layout, tokens: int, dtype: jnp.dtype
) -> Float[Array, "K C"]:
    """What `write_logits` wrote of these columns, of the first K of `tokens`."""
    axis, per_logit = vocabulary_axis(layout), dtype.itemsize // stored.dtype.itemsize
    fitting = min(tokens, stored.shape[1 - axis] // per_logit)
    block = lax.dynamic_slice_in_dim(stored, start, columns, axis)
    block = lax.slice_in_dim(block, 0, fitting * per_logit, axis=1 - axis)
    if per_logit == 1:
        return block.reshape(fitting, columns)
    return lax.bitcast_convert_type(block.reshape(fitting, columns, per_logit), dtype)


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
