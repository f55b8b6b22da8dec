"""Packed batches from process 0 to all: every process gets the rows, and feeds its own devices.

One collective of one shape a microbatch, whatever the batch's size, so it compiles once. All fields
travel as the 32 bits that they are: no arithmetic can change them.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from telescope_jax.hosts.runtime import HostsError
from telescope_jax.types import PackedBatch

FIELDS = {
    "tokens": np.dtype(np.int32),
    "segments": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
}


def header(batch: Sequence[PackedBatch], rows_per_microbatch: int) -> dict[str, Any]:
    """What the others must know before the arrays arrive: shapes and a checksum."""
    for minibatch in batch:
        if minibatch.tokens.shape[0] % rows_per_microbatch:
            raise ValueError(
                f"a minibatch of {minibatch.tokens.shape[0]} rows is not a multiple of "
                f"rows_per_microbatch={rows_per_microbatch}; pack it with that number"
            )
    return {
        "rows": [int(minibatch.tokens.shape[0]) for minibatch in batch],
        "seq_len": int(batch[0].tokens.shape[1]),
        "rows_per_microbatch": rows_per_microbatch,
        "checksum": checksum(batch),
    }


def broadcast(batch: Sequence[PackedBatch] | None, about: dict[str, Any]) -> list[PackedBatch]:
    """The batch of process 0; the others give None. Collective.

    Raises:
      HostsError: what arrived is not what was sent.
    """
    step, seq_len = about["rows_per_microbatch"], about["seq_len"]
    received = []
    for number, rows in enumerate(about["rows"]):
        sent = np.zeros((len(FIELDS), rows, seq_len), np.int32)
        if batch is not None:
            sent = _as_bits(batch[number])
        parts = [
            multihost_utils.broadcast_one_to_all(sent[:, start : start + step])
            for start in range(0, rows, step)
        ]
        received.append(_from_bits(np.concatenate(parts, axis=1)))
    if (found := checksum(received)) != about["checksum"]:
        raise HostsError(
            f"the batch that arrived has the checksum {found:08x} and process 0 sent "
            f"{about['checksum']:08x}"
        )
    return received


def checksum(batch: Sequence[PackedBatch]) -> int:
    """CRC-32 over the bits of every field."""
    crc = 0
    for minibatch in batch:
        crc = zlib.crc32(_as_bits(minibatch).tobytes(), crc)
    return crc


def _as_bits(batch: PackedBatch) -> np.ndarray:
    bits = []
    for name, dtype in FIELDS.items():
        array = np.ascontiguousarray(getattr(batch, name), dtype)
        bits.append(array.view(np.int32) if dtype.itemsize == 4 else array.astype(np.int32))
    return np.stack(bits)


def _from_bits(bits: np.ndarray) -> PackedBatch:
    fields = {
        name: bits[at].view(dtype) if dtype.itemsize == 4 else bits[at].astype(dtype)
        for at, (name, dtype) in enumerate(FIELDS.items())
    }
    return PackedBatch(**fields)
