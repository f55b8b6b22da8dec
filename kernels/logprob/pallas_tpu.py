"""Log-probs on TPUs: three Pallas kernels that keep the logits in VMEM.

The grid's last axis is the one summed over; a block of results stays in VMEM while it runs and is
written once. `forward` walks the vocabulary for each block of tokens (2TDV FLOPs); `d_hidden` walks
it again and `d_unembed` walks the tokens for each block of the vocabulary, each forming the logits
anew (4TDV + 4TDV). Sums are kept in order, so results repeat bit for bit.

Tokens are padded to whole blocks here. The vocabulary is not, since that would copy the
unembedding: its last block reads past the edge, where memory may hold anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels.logprob import tile
from kernels.logprob.blocks import Blocks, blocks_for, widest
from kernels.logprob.operands import Layout, contract, dot, vocabulary_axis

SUBLANES = 16
"""Of a bfloat16 register; twice those of float32."""


def refusals(device_kind: str, width: int, dtype: jax.typing.DTypeLike) -> list[str]:
    """Why this implementation cannot take the case; empty if it can."""
    reasons = []
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append(f"TPUs multiply bfloat16 and float32, not {dtype}")
    if blocks_for(device_kind, width, dtype) is None:
        limit = widest(device_kind, dtype)
        reasons.append(
            f"{dtype} blocks fit the VMEM of a {device_kind} up to D={limit}, not {width}"
        )
    return reasons


@dataclass(frozen=True, slots=True)
class PallasTpu:
    """The two passes. `interpret` runs the kernels in Python, on any platform: for tests."""

    layout: Layout
    softcap: float | None
    blocks: Blocks
    interpret: bool | pltpu.InterpretParams = False

    def forward(
        self,
        hidden: Float[Array, "T D"],
        unembed: Float[Array, "..."],
        targets: Int[Array, "T 1"],
        inverse_temperature: Float[Array, "T 1"],
        *,
        keep: bool,
    ) -> tuple[tile.Statistics, None]:
        """The statistics of every token, from one kernel."""
        del keep
        tokens = hidden.shape[0]
        grid = _Grid.of(self, hidden, unembed, self.blocks.forward, tokens_first=True)
        statistics = grid.call(
            "logprob_forward",
            partial(_forward_kernel, grid),
            (hidden, unembed, targets, inverse_temperature),
            out=[jax.ShapeDtypeStruct((grid.padded_tokens, 1), jnp.float32)] * 4,
            out_specs=[grid.token_column] * 4,
            flops=2,
        )
        return tile.Statistics(*(x[:tokens] for x in statistics)), None

    def backward(
        self,
        hidden: Float[Array, "T D"],
        unembed: Float[Array, "..."],
        targets: Int[Array, "T 1"],
        inverse_temperature: Float[Array, "T 1"],
        saved: None,
        rows: tile.RowGradients,
    ) -> tuple[Float[Array, "T D"], Float[Array, "..."]]:
        """(d hidden, d unembed), from a kernel each."""
        del saved
        tokens, width = hidden.shape
        operands = (hidden, unembed, targets, inverse_temperature, *rows)

        grid = _Grid.of(self, hidden, unembed, self.blocks.d_hidden, tokens_first=True)
        d_hidden = grid.call(
            "logprob_d_hidden",
            partial(_d_hidden_kernel, grid),
            operands,
            out=jax.ShapeDtypeStruct((grid.padded_tokens, width), hidden.dtype),
            out_specs=grid.hidden_block,
            scratch=[pltpu.VMEM((grid.tokens, width), jnp.float32)],
            flops=4,
        )
        grid = _Grid.of(self, hidden, unembed, self.blocks.d_unembed, tokens_first=False)
        d_unembed = grid.call(
            "logprob_d_unembed",
            partial(_d_unembed_kernel, grid),
            operands,
            out=jax.ShapeDtypeStruct(unembed.shape, unembed.dtype),
            out_specs=grid.unembed_block,
            scratch=[pltpu.VMEM(grid.unembed_shape, jnp.float32)],
            flops=4,
        )
        return d_hidden[:tokens], d_unembed


def _forward_kernel(grid, hidden, unembed, targets, inverse_temperature, *out):
    @pl.when(pl.program_id(1) == 0)
    def _():
        for ref, start in zip(out, tile.empty(grid.tokens, jnp.float32), strict=True):
            ref[...] = start

    z, _, is_target = grid.logits(hidden[...], unembed[...], targets, inverse_temperature)
    target = jnp.sum(jnp.where(is_target, z, 0.0), axis=1, keepdims=True)
    carry = tile.Statistics(*(ref[...] for ref in out))
    for ref, value in zip(out, tile.update(carry, z, target), strict=True):
        ref[...] = value


def _d_hidden_kernel(grid, hidden, unembed, targets, inverse_temperature, *rest):
    *rows, d_hidden, total = rest

    @pl.when(pl.program_id(1) == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    block = grid.within_vocabulary(unembed[...])
    d_raw = grid.d_raw(hidden[...], block, targets, inverse_temperature, rows)
    total[...] += dot(d_raw, block, (1, vocabulary_axis(grid.layout)))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        d_hidden[...] = total[...].astype(d_hidden.dtype)


def _d_unembed_kernel(grid, hidden, unembed, targets, inverse_temperature, *rest):
    *rows, d_unembed, total = rest

    @pl.when(pl.program_id(1) == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    d_raw = grid.d_raw(hidden[...], unembed[...], targets, inverse_temperature, rows)
    if grid.layout == "vd":
        total[...] += dot(d_raw, hidden[...], (0, 0))
    else:
        total[...] += dot(hidden[...], d_raw, (0, 0))

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        d_unembed[...] = total[...].astype(d_unembed.dtype)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Blocks over (tokens, vocabulary) with one of the two innermost, and what a program computes.

    Attributes:
      tokens, columns: of a block.
      token_axis: the grid axis over blocks of tokens; the vocabulary has the other.
    """

    passes: PallasTpu
    width: int
    all_tokens: int
    vocabulary: int
    tokens: int
    columns: int
    token_axis: int

    @classmethod
    def of(cls, passes, hidden, unembed, blocks: tuple[int, int], *, tokens_first: bool):
        """The grid for these operands: blocks no larger than the arrays."""
        all_tokens, width = hidden.shape
        vocabulary = unembed.shape[vocabulary_axis(passes.layout)]
        tokens = min(blocks[0], pl.cdiv(all_tokens, SUBLANES) * SUBLANES)
        columns = min(blocks[1], vocabulary)
        axis = 0 if tokens_first else 1
        return cls(passes, width, all_tokens, vocabulary, tokens, columns, axis)

    @property
    def layout(self) -> Layout:
        return self.passes.layout

    @property
    def padded_tokens(self) -> int:
        return pl.cdiv(self.all_tokens, self.tokens) * self.tokens

    @property
    def hidden_block(self) -> pl.BlockSpec:
        return pl.BlockSpec((self.tokens, self.width), lambda *ij: (ij[self.token_axis], 0))

    @property
    def token_column(self) -> pl.BlockSpec:
        return pl.BlockSpec((self.tokens, 1), lambda *ij: (ij[self.token_axis], 0))

    @property
    def unembed_block(self) -> pl.BlockSpec:
        axis = 1 - self.token_axis
        if self.layout == "vd":
            return pl.BlockSpec(self.unembed_shape, lambda *ij: (ij[axis], 0))
        return pl.BlockSpec(self.unembed_shape, lambda *ij: (0, ij[axis]))

    @property
    def unembed_shape(self) -> tuple[int, int]:
        if self.layout == "vd":
            return self.columns, self.width
        return self.width, self.columns

    def call(self, name: str, kernel: Callable, operands, *, out, out_specs, flops, scratch=()):
        """Runs `kernel` over the grid; `name` is for profiles, `flops` counts in TDV."""
        hidden, unembed, *columns = operands
        pad = ((0, self.padded_tokens - self.all_tokens), (0, 0))
        counts = [self.padded_tokens // self.tokens, pl.cdiv(self.vocabulary, self.columns)]
        size = self.all_tokens * self.vocabulary
        # What the outer axis walks over is read once, the other operand once a block of it.
        outer, inner = (hidden, unembed) if self.token_axis == 0 else (unembed, hidden)
        written = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(out))
        return pl.pallas_call(
            kernel,
            grid=tuple(counts if self.token_axis == 0 else counts[::-1]),
            in_specs=[
                self.hidden_block,
                self.unembed_block,
                *[self.token_column] * len(columns),
            ],
            out_specs=out_specs,
            out_shape=out,
            scratch_shapes=list(scratch),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"),
                vmem_limit_bytes=self.passes.blocks.vmem_bytes,
            ),
            cost_estimate=pl.CostEstimate(
                flops=flops * size * self.width,
                transcendentals=size,
                bytes_accessed=outer.nbytes + inner.nbytes * counts[self.token_axis] + written,
            ),
            name=name,
            interpret=self.passes.interpret,
        )(jnp.pad(hidden, pad), unembed, *(jnp.pad(x, pad) for x in columns))

    def logits(self, hidden, unembed, targets, inverse_temperature):
        """(z, dz/draw, which is the target) of this program's tile; `LOWEST` past the edge."""
        raw = contract(hidden, unembed, self.layout)
        z, slope = tile.scaled(raw, inverse_temperature[...], self.passes.softcap)
        column = self._column(z.shape, 1)
        if self.ragged:
            z = jnp.where(column < self.vocabulary, z, tile.LOWEST)
        return z, slope, column == targets[...]

    def d_raw(self, hidden, unembed, targets, inverse_temperature, rows):
        """The gradient of this program's tile, in the type of the operands; 0 past the edge."""
        z, slope, is_target = self.logits(hidden, unembed, targets, inverse_temperature)
        rows = tile.RowGradients(*(ref[...] for ref in rows))
        d_raw = tile.dz(z, is_target, rows) * slope
        if self.ragged:
            d_raw = jnp.where(self._column(z.shape, 1) < self.vocabulary, d_raw, 0.0)
        return d_raw.astype(hidden.dtype)

    def within_vocabulary(self, unembed):
        """The block with zeros past the edge: there 0 times what memory holds may be NaN."""
        if not self.ragged:
            return unembed
        column = self._column(unembed.shape, vocabulary_axis(self.layout))
        return jnp.where(column < self.vocabulary, unembed, jnp.zeros_like(unembed))

    @property
    def ragged(self) -> bool:
        """Whether the last block of the vocabulary reaches past its edge."""
        return self.vocabulary % self.columns != 0

    def _column(self, shape: tuple[int, ...], axis: int) -> Int[Array, "..."]:
        """The vocabulary index of each element."""
        start = pl.program_id(1 - self.token_axis) * self.columns
        return start + lax.broadcasted_iota(jnp.int32, shape, axis)
