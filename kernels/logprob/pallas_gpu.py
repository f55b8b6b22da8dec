"""Log-probs on GPUs: two Pallas kernels in Triton, and XLA's matrix products for the rest.

`forward` keeps the logits in registers; its programs each walk a share of the vocabulary for a
block of tokens, and the shares are merged after it (2TDV FLOPs). `backward` writes dz of one chunk
of the vocabulary at a time, [T, chunk] in the type of the operands, and leaves both products with
it to the vendor's matrix multiply (2TDV + 4TDV). No atomics, so results repeat bit for bit.

Triton through Pallas is deprecated from jax 0.11 on; all that knows it is in this file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from kernels.logprob import tile
from kernels.logprob.chunked import gradients_by_chunk
from kernels.logprob.operands import Layout, contract, vocabulary_axis

CHUNK_BYTES = 32 * 2**20
"""Of dz and of the unembedding's gradient before it is rounded: enough columns that the products
run at the speed of large ones, few enough that all else fits 64 MiB."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """One kernel's tile: powers of two, as Triton wants them.

    128 x 128 over widths of 64 with 8 warps: ptxas for sm_90a reports 96 KiB of shared memory and
    no spills; 128 x 256 spills and, backward, does not fit (compiled, not run).
    """

    tokens: int = 128
    columns: int = 128
    width: int = 64
    warps: int = 8
    stages: int = 3


def tiling_for(tokens: int, dtype: jax.typing.DTypeLike) -> Tiling:
    """The tile for so many tokens: no taller than they are, and narrower if float32 is multiplied
    exactly, which Triton does without the matrix units."""
    tall = max(16, min(128, pl.next_power_of_2(tokens)))
    if jnp.dtype(dtype).itemsize >= 4:
        return Tiling(min(64, tall), 64, 32, warps=4, stages=2)
    return Tiling(tall, warps=8 if tall == 128 else 4)


def refusals(tokens: int, width: int, vocabulary: int, dtype: jax.typing.DTypeLike) -> list[str]:
    """Why this implementation cannot take the case; empty if it can."""
    reasons = []
    if jnp.dtype(dtype).itemsize not in (2, 4):
        reasons.append(f"{jnp.dtype(dtype)} is neither 16 nor 32 bits wide")
    if max(tokens, vocabulary) * width >= 2**31:
        reasons.append(f"an operand of {max(tokens, vocabulary)} x {width} passes 32-bit indices")
    return reasons


@dataclass(frozen=True, slots=True)
class PallasGpu:
    """The two passes.

    Attributes:
      shares: programs that split the vocabulary of one block of tokens.
      chunk: columns of dz in memory at a time; None for `CHUNK_BYTES`.
      interpret: run the kernels in Python, on any platform: for tests.
    """

    layout: Layout
    softcap: float | None
    tiling: Tiling = Tiling()
    shares: int = 16
    chunk: int | None = None
    interpret: bool = False

    def forward(
        self,
        hidden: Float[Array, "T D"],
        unembed: Float[Array, "..."],
        targets: Int[Array, "T 1"],
        inverse_temperature: Float[Array, "T 1"],
        *,
        keep: bool,
    ) -> tuple[tile.Statistics, None]:
        """The statistics of every token: one kernel, then the shares are merged."""
        del keep
        tokens = hidden.shape[0]
        vocabulary = unembed.shape[vocabulary_axis(self.layout)]
        blocks = pl.cdiv(vocabulary, self.tiling.columns)
        # Whole blocks to each share, and none left without: every program meets a real column.
        per_share = pl.cdiv(blocks, min(self.shares, blocks))
        shares = pl.cdiv(blocks, per_share)
        padded = self._padded(hidden, targets, inverse_temperature)
        count = padded[0].shape[0]
        parts = self._call(
            "logprob_forward",
            partial(_forward_kernel, self, per_share),
            grid=(count // self.tiling.tokens, shares),
            out=[jax.ShapeDtypeStruct((shares, count, 1), jnp.float32)] * 4,
        )(padded[0], unembed, *padded[1:])
        merged = jax.tree.map(lambda x: x[0, :tokens], tile.Statistics(*parts))
        for share in range(1, shares):
            part = jax.tree.map(lambda x, share=share: x[share, :tokens], tile.Statistics(*parts))
            merged = tile.merge(merged, part)
        return merged, None

    def backward(
        self,
        hidden: Float[Array, "T D"],
        unembed: Float[Array, "..."],
        targets: Int[Array, "T 1"],
        inverse_temperature: Float[Array, "T 1"],
        saved: None,
        rows: tile.RowGradients,
    ) -> tuple[Float[Array, "T D"], Float[Array, "..."]]:
        """(d hidden, d unembed), a chunk of dz at a time."""
        del saved
        tokens, columns = hidden.shape[0], self.tiling.columns
        vocabulary = unembed.shape[vocabulary_axis(self.layout)]
        column_bytes = tokens * hidden.dtype.itemsize + 4 * hidden.shape[1]
        wanted = self.chunk or CHUNK_BYTES // column_bytes
        chunk = min(vocabulary, max(columns, wanted // columns * columns))
        padded_hidden, padded_temperature, *padded_rows = self._padded(
            hidden, inverse_temperature, *rows
        )

        def d_logits(start, block: Float[Array, "..."], kept: object) -> Float[Array, "T C"]:
            del kept
            # Padding has the target -1 or less, so that no column is its target.
            (local,) = self._padded(targets - start, fill=-1)
            width = block.shape[vocabulary_axis(self.layout)]
            blocks = pl.cdiv(width, columns)
            d_raw = self._call(
                "logprob_dz",
                partial(_dz_kernel, self),
                grid=(padded_hidden.shape[0] // self.tiling.tokens, blocks),
                out=jax.ShapeDtypeStruct((padded_hidden.shape[0], blocks * columns), hidden.dtype),
            )(padded_hidden, block, local, padded_temperature, *padded_rows)
            return d_raw[:tokens, :width]

        d_hidden, d_unembed = gradients_by_chunk(hidden, unembed, self.layout, chunk, d_logits)
        return d_hidden.astype(hidden.dtype), d_unembed

    def _padded(self, *columns: Array, fill: int = 0) -> list[Array]:
        """Each array [T, ...] with T filled up to whole blocks, so that no row needs a mask."""
        pad = -columns[0].shape[0] % self.tiling.tokens
        return [jnp.pad(x, ((0, pad), (0, 0)), constant_values=fill) for x in columns]

    def _call(self, name: str, kernel: Callable, *, grid: tuple[int, ...], out):
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=out,
            compiler_params=pltriton.CompilerParams(
                num_warps=self.tiling.warps, num_stages=self.tiling.stages
            ),
            interpret=self.interpret,
            name=name,
        )


def _forward_kernel(passes, per_share, hidden, unembed, targets, inverse_temperature, *out):
    rows = pl.ds(pl.program_id(0) * passes.tiling.tokens, passes.tiling.tokens)
    share = pl.program_id(1)
    vocabulary = unembed.shape[vocabulary_axis(passes.layout)]

    def step(j, carry):
        z, _, column = _logits(passes, hidden, unembed, inverse_temperature, rows, j)
        z = jnp.where(column < vocabulary, z, tile.LOWEST)
        target = jnp.where(column == targets[rows, :], z, 0.0)
        return tile.update(carry, z, jnp.sum(target, axis=1, keepdims=True))

    first = share * per_share
    last = jnp.minimum(first + per_share, pl.cdiv(vocabulary, passes.tiling.columns))
    carry = lax.fori_loop(first, last, step, tile.empty(passes.tiling.tokens, jnp.float32))
    for ref, value in zip(out, carry, strict=True):
        ref[share, rows, :] = value


def _dz_kernel(passes, hidden, unembed, targets, inverse_temperature, *rest):
    *row_refs, d_raw = rest
    rows = pl.ds(pl.program_id(0) * passes.tiling.tokens, passes.tiling.tokens)
    j = pl.program_id(1)
    z, slope, column = _logits(passes, hidden, unembed, inverse_temperature, rows, j)
    row_gradients = tile.RowGradients(*(ref[rows, :] for ref in row_refs))
    # Columns past the edge come from zeros, not from what memory holds, and are cut off after.
    dz = tile.dz(z, column == targets[rows, :], row_gradients) * slope
    columns = pl.ds(j * passes.tiling.columns, passes.tiling.columns)
    d_raw[rows, columns] = dz.astype(d_raw.dtype)


def _logits(passes, hidden, unembed, inverse_temperature, rows, j):
    """(z, dz/draw, column index [1, C]) of tile j of the vocabulary; raw logits past it are 0."""
    tiling = passes.tiling
    width, axis = hidden.shape[1], vocabulary_axis(passes.layout)
    vocabulary = unembed.shape[axis]
    columns = pl.ds(j * tiling.columns, tiling.columns)
    column = j * tiling.columns + lax.broadcasted_iota(jnp.int32, (1, tiling.columns), 1)

    def step(k, raw):
        inner = pl.ds(k * tiling.width, tiling.width)
        index = k * tiling.width + lax.broadcasted_iota(jnp.int32, (1, tiling.width), 1)
        x = pltriton.load(hidden.at[rows, inner], mask=index < width, other=0.0)
        if axis == 0:
            at, mask = (columns, inner), (column.reshape(-1, 1) < vocabulary) & (index < width)
        else:
            at, mask = (inner, columns), (index.reshape(-1, 1) < width) & (column < vocabulary)
        block = pltriton.load(unembed.at[at], mask=mask, other=0.0)
        return raw + contract(x, block, passes.layout)

    raw = jnp.zeros((tiling.tokens, tiling.columns), jnp.float32)
    raw = lax.fori_loop(0, pl.cdiv(width, tiling.width), step, raw)
    return *tile.scaled(raw, inverse_temperature[rows, :], passes.softcap), column
