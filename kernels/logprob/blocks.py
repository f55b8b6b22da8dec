"""Block sizes of the TPU kernels by chip, width and type, with the reason beside each row.

Two things decide. A block of `tokens` rows reads the whole unembedding once more, so a pass is
bound by arithmetic only if it does more operations for each byte read than the chip can: from 240
tokens on for v5e, 560 for v6e, 166 for v5p (bfloat16 forward, from data sheets; backward has two or
three times the arithmetic). And all blocks, twice over for the pipeline, must fit VMEM beside a few
float32 tiles; past 16 MiB (v6e 32) the compiler must be told to allow it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MIB = 2**20


class Blocks(NamedTuple):
    """(tokens, vocabulary columns) of a block in each kernel, and the VMEM that they may take."""

    forward: tuple[int, int]
    d_hidden: tuple[int, int]
    d_unembed: tuple[int, int]
    vmem_bytes: int


class Row(NamedTuple):
    """Blocks for one chip, for widths up to `widest` and operands up to `itemsize` bytes."""

    chip: str
    widest: int
    itemsize: int
    blocks: Blocks


def _same(tokens: int, columns: int, vmem_mib: int) -> Blocks:
    size = (tokens, columns)
    return Blocks(size, size, size, vmem_mib * MIB)


TABLE = (
    # Twice the ridge; more columns gain nothing but longer compilation.
    Row("v5e", 1024, 2, _same(512, 512, 64)),
    # At the ridge; 20 MiB with 512 columns.
    Row("v5e", 4096, 2, _same(256, 512, 64)),
    # What fits.
    Row("v5e", 8192, 2, _same(256, 256, 96)),
    # float32 takes six passes of the matrix unit, so its ridge is a third of bfloat16's; 512 x 512
    # took 90 s to compile where this took a fifth.
    Row("v5e", 4096, 4, _same(256, 256, 96)),
    Row("v5e", 8192, 4, _same(128, 128, 64)),
    # Near twice the ridge forward; backward reaches it with half the tokens.
    Row("v6e", 1024, 2, Blocks((1024, 512), (512, 512), (512, 512), 64 * MIB)),
    # Just under the ridge forward; 40.6 MiB backward.
    Row("v6e", 4096, 2, _same(512, 512, 96)),
    Row("v6e", 8192, 2, _same(256, 256, 96)),
    Row("v6e", 4096, 4, _same(256, 256, 96)),
    Row("v6e", 8192, 4, _same(128, 128, 64)),
    # Three times the ridge.
    Row("v5p", 1024, 2, _same(512, 512, 64)),
    # Above the ridge; more than the 16 MiB that are the default.
    Row("v5p", 4096, 2, _same(256, 512, 64)),
    Row("v5p", 8192, 2, _same(256, 256, 64)),
    Row("v5p", 4096, 4, _same(256, 256, 64)),
    Row("v5p", 8192, 4, _same(128, 128, 64)),
    # v4's 16 MiB are all there is. float32 4096 wide takes 16.55 MiB with blocks of 64 x 128, and
    # smaller ones would read the unembedding more often than they can use it.
    Row("v4", 1024, 2, _same(256, 512, 16)),
    Row("v4", 1024, 4, _same(256, 256, 16)),
    Row("v4", 2048, 4, _same(128, 128, 16)),
    Row("v4", 4096, 2, _same(128, 128, 16)),
)
"""The first row that fits is taken. All were compiled ahead of time; none was timed on a TPU."""

SMALLEST = "v4"
"""An unknown chip takes these rows: what fits 16 MiB fits everywhere."""

CHIPS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
}
"""`device_kind` to the names above."""


def blocks_for(device_kind: str, width: int, dtype: jax.typing.DTypeLike) -> Blocks | None:
    """The blocks for this case, None if no row takes it."""
    rows = _rows(device_kind, dtype)
    return next((row.blocks for row in rows if width <= row.widest), None)


def widest(device_kind: str, dtype: jax.typing.DTypeLike) -> int:
    """The largest width that `blocks_for` has blocks for; 0 if there is none."""
    return max((row.widest for row in _rows(device_kind, dtype)), default=0)


def _rows(device_kind: str, dtype: jax.typing.DTypeLike) -> list[Row]:
    chip, size = CHIPS.get(device_kind, SMALLEST), jnp.dtype(dtype).itemsize
    return [row for row in TABLE if row.chip == chip and size <= row.itemsize]
