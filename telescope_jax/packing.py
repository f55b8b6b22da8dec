"""Rollouts to rows: first-fit decreasing into rows of one length, and back.

What holds of every batch:
  * a rollout lies in one row, in one piece; the segments of a row are 1, 2, … from the left, then
    padding (segment 0, every field 0) up to `seq_len`;
  * the number of rows is a multiple of `rows_per_microbatch`, at least one multiple;
  * advantages and μ's log-probs stand on loss tokens only and are 0 elsewhere;
  * the same input gives the same rows, bit for bit.

Choosing the shape: a microbatch is `rows_per_microbatch · seq_len` tokens, and its last one is
half empty on average. Filling 0.9 of the tokens therefore takes a batch of at least 10 microbatches
for certain, 5 on average (beside rows much shorter than about four rollouts, which waste their
ends). For 256 rollouts of about 18 tokens (4,600 in all): rows of 256 with 1 row a microbatch, or
rows of 128 with 2; bigger microbatches as the batch grows.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from telescope_jax.types import PackedBatch, Rollout


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths`, each row's lengths summing to at most `capacity`.

    First-fit decreasing puts an item into the first row with room, longest items first. A row then
    holds what one gets by taking, again and again, the longest item left that still fits: so rows
    can be filled one after the other, in O(n log n). At most 11/9 · optimum + 6/9 rows (Dósa 2007).
    Equal lengths keep their order.

    Args:
      lengths: each in [1, capacity].
    """
    waiting: dict[int, deque[int]] = {}
    for index, length in enumerate(lengths):
        waiting.setdefault(length, deque()).append(index)
    available = sorted(waiting)
    rows = []
    while available:
        row, room = [], capacity
        while at := bisect_right(available, room):
            length = available[at - 1]
            row.append(waiting[length].popleft())
            room -= length
            if not waiting[length]:
                del available[at - 1]
        rows.append(row)
    return rows


def pack(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float] | np.ndarray,
    *,
    seq_len: int,
    rows_per_microbatch: int,
    minibatches: int = 1,
) -> list[PackedBatch]:
    """Packs rollouts into one PackedBatch a minibatch.

    The rollouts are split in the order given, into minibatches whose numbers of rollouts differ by
    at most one, so groups stay together when they are given together. Fewer rollouts than
    minibatches give fewer batches; no rollouts at all give one batch of padding, which trains
    nothing and lets the step complete (LM-04).

    Args:
      advantages: one number a rollout.
      seq_len: tokens a row, T.
      rows_per_microbatch: rows of the trainer's fixed microbatch shape.
      minibatches: optimizer updates of this step, ≥ 1.

    Raises:
      ValueError: a rollout longer than a row, without tokens or without loss tokens (`filters.py`
        refuses those with a reason), with arrays of unequal length, or sizes that make no sense.
    """
    if min(seq_len, rows_per_microbatch, minibatches) < 1:
        raise ValueError(
            f"seq_len {seq_len}, rows_per_microbatch {rows_per_microbatch} and minibatches "
            f"{minibatches} must all be at least 1"
        )
    if len(advantages) != len(rollouts):
        raise ValueError(
            f"{len(advantages)} advantages for {len(rollouts)} rollouts; give one a rollout"
        )
    _check(rollouts, seq_len)
    count = max(1, min(minibatches, len(rollouts)))
    bounds = [len(rollouts) * k // count for k in range(count + 1)]
    return [
        _pack_one(rollouts[lo:hi], np.asarray(advantages[lo:hi]), seq_len, rows_per_microbatch)
        for lo, hi in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def _check(rollouts: Sequence[Rollout], seq_len: int) -> None:
    """Gathers everything that is wrong with the rollouts into one error."""
    problems = []
    for index, rollout in enumerate(rollouts):
        size = len(rollout.tokens)
        if size > seq_len:
            problems.append(
                f"rollout {index} has {size} tokens and a row holds seq_len = {seq_len}; "
                "raise seq_len, or lower sampling.max_tokens or the longest prompt"
            )
        elif len(rollout.loss_mask) != size or len(rollout.logprobs) != size:
            problems.append(
                f"rollout {index} has {size} tokens, {len(rollout.loss_mask)} mask values and "
                f"{len(rollout.logprobs)} log-probs; they must be as many"
            )
        elif not rollout.loss_mask.any():
            problems.append(
                f"rollout {index} of {size} tokens has no loss tokens; leave out what "
                "scoring.filters refuses"
            )
    if problems:
        more = f"; and {len(problems) - 5} more rollouts" if len(problems) > 5 else ""
        raise ValueError("; ".join(problems[:5]) + more)


def _pack_one(
    rollouts: Sequence[Rollout], advantages: np.ndarray, seq_len: int, rows_per_microbatch: int
) -> PackedBatch:
    rows = first_fit_decreasing([len(rollout.tokens) for rollout in rollouts], seq_len)
    microbatches = max(1, -(-len(rows) // rows_per_microbatch))
    shape = (microbatches * rows_per_microbatch, seq_len)
    batch = PackedBatch(
        tokens=np.zeros(shape, np.int32),
        segments=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, np.bool_),
        logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
    )
    if not rollouts:
        return batch

    # One scatter a field instead of one slice a rollout: 10,000 rollouts in tens of milliseconds.
    placed = [rollouts[index] for row in rows for index in row]
    lengths = np.array([len(rollout.tokens) for rollout in placed])
    row_sizes = [len(row) for row in rows]
    row_of = np.repeat(np.arange(len(rows)), row_sizes)
    segment_of = np.concatenate([np.arange(1, size + 1) for size in row_sizes])
    ends = np.cumsum(lengths)
    position = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    before_row = np.concatenate([[0], np.cumsum(np.bincount(row_of, weights=lengths))[:-1]])
    start = row_of * seq_len + (ends - lengths) - before_row[row_of].astype(np.int64)
    at = np.repeat(start, lengths) + position

    mask = np.concatenate([rollout.loss_mask for rollout in placed])
    order = np.array([index for row in rows for index in row])
    batch.tokens.reshape(-1)[at] = np.concatenate([rollout.tokens for rollout in placed])
    batch.segments.reshape(-1)[at] = np.repeat(segment_of, lengths)
    batch.positions.reshape(-1)[at] = position
    batch.loss_mask.reshape(-1)[at] = mask
    logprobs = np.concatenate([rollout.logprobs for rollout in placed])
    batch.logprobs.reshape(-1)[at] = np.where(mask, logprobs, 0.0)
    batch.advantages.reshape(-1)[at] = np.where(mask, np.repeat(advantages[order], lengths), 0.0)
    return batch


def unpack(batch: PackedBatch, values: ArrayLike | None = None) -> list[np.ndarray]:
    """Cuts a [B T] array into one array a rollout, rows from the top, each row from the left.

    Args:
      values: of the batch's shape, [B T], such as one of its fields or the trainer's log-probs;
        the batch's tokens if None.
    """
    segments = np.asarray(batch.segments)
    per_token = np.asarray(batch.tokens if values is None else values)
    if per_token.shape != segments.shape:
        raise ValueError(f"values of shape {per_token.shape} for a batch of shape {segments.shape}")
    rows, columns = np.nonzero(segments)  # row-major: every segment is one run
    if rows.size == 0:
        return []
    keys = rows * (segments.shape[1] + 1) + segments[rows, columns]
    return np.split(per_token[rows, columns], np.flatnonzero(np.diff(keys)) + 1)


def fill_fraction(batches: Sequence[PackedBatch]) -> float:
    """Share of the tokens of these batches that are not padding, in [0, 1]."""
    real = sum(int(np.count_nonzero(batch.segments)) for batch in batches)
    return real / sum(np.asarray(batch.segments).size for batch in batches)
