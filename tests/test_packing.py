"""Packing: everything arrives once and whole, rows are full, and wrong input is named."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax.packing import fill_fraction, first_fit_decreasing, pack, unpack
from telescope_jax.types import Reward, Rollout, StopReason, VersionSpan
from tests.oracles.packing import first_fit_decreasing as textbook

SEQ_LEN = 24


def rollout(tokens, loss_mask=None, logprobs=None):
    size = len(tokens)
    mask = np.arange(size) >= min(2, size - 1) if loss_mask is None else np.array(loss_mask, bool)
    values = -np.arange(1, size + 1) / 7 if logprobs is None else np.array(logprobs, float)
    return Rollout(
        tokens=np.array(tokens, int),
        loss_mask=mask,
        logprobs=np.where(mask, values, 0.0).astype(np.float32),
        versions=(VersionSpan(0, 0, size),),
        reward=Reward(0.0),
        metrics={},
        stop=StopReason.EOS,
        turns=1,
    )


def numbered(lengths):
    """Rollouts whose tokens all differ, from 1 on, so each token tells where it came from."""
    ends = np.cumsum(lengths)
    return [rollout(np.arange(end - n, end) + 1) for n, end in zip(lengths, ends, strict=True)]


lengths_strategy = st.lists(st.integers(1, SEQ_LEN), min_size=0, max_size=40)


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 50))
def test_rows_are_those_of_the_textbook(lengths, capacity):
    assert first_fit_decreasing(lengths, capacity) == textbook(lengths, capacity)


@given(lengths_strategy, st.integers(1, 4), st.integers(1, 3))
def test_unpacking_gives_back_every_rollout_whole_and_once(lengths, rows, minibatches):
    rollouts = numbered(lengths)
    advantages = np.linspace(-1, 1, len(rollouts)).astype(np.float32)
    batches = pack(
        rollouts, advantages, seq_len=SEQ_LEN, rows_per_microbatch=rows, minibatches=minibatches
    )
    seen = {}
    for batch in batches:
        fields = [unpack(batch, values) for values in batch if values is not None]
        for tokens, _, positions, mask, logprobs, advantage in zip(*fields, strict=True):
            assert tokens[0] not in seen
            seen[tokens[0]] = (tokens, positions, mask, logprobs, advantage)
    assert len(seen) == len(rollouts)
    for original, value in zip(rollouts, advantages, strict=True):
        tokens, positions, mask, logprobs, advantage = seen[original.tokens[0]]
        assert np.array_equal(tokens, original.tokens)
        assert np.array_equal(positions, np.arange(len(tokens)))
        assert np.array_equal(mask, original.loss_mask)
        assert np.array_equal(logprobs, original.logprobs)
        assert np.array_equal(advantage, np.where(mask, value, 0))


@given(lengths_strategy, st.integers(1, 4))
def test_rows_hold_numbered_segments_then_padding_that_is_zero(lengths, rows):
    (batch,) = pack(
        numbered(lengths), [1.0] * len(lengths), seq_len=SEQ_LEN, rows_per_microbatch=rows
    )
    assert batch.tokens.shape[0] % rows == 0 and batch.tokens.shape[0] >= rows
    for row in batch.segments:
        used = int(np.count_nonzero(row))
        assert np.all(np.diff(row[:used]) >= 0) and np.all(row[used:] == 0)
        assert sorted(set(row[:used])) == list(range(1, row.max() + 1))
    for values in batch:
        if values is not None:
            assert not np.any(values[batch.segments == 0])


@given(st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=30), st.integers(1, 6))
def test_minibatches_split_the_rollouts_evenly_and_in_order(lengths, minibatches):
    batches = pack(
        numbered(lengths),
        [0.0] * len(lengths),
        seq_len=SEQ_LEN,
        rows_per_microbatch=2,
        minibatches=minibatches,
    )
    sizes = [len(unpack(batch)) for batch in batches]
    assert len(batches) == min(minibatches, len(lengths))
    assert max(sizes) - min(sizes) <= 1
    firsts = [sorted(tokens[0] for tokens in unpack(batch)) for batch in batches]
    assert sum(firsts, []) == sorted(sum(firsts, []))


def test_the_same_rollouts_give_the_same_rows():
    rollouts = numbered([5, 5, 7, 7, 3, 3, 20, 1])
    first, second = (
        pack(rollouts, range(8), seq_len=SEQ_LEN, rows_per_microbatch=2)[0] for _ in range(2)
    )
    for a, b in zip(first[:6], second[:6], strict=True):
        assert np.array_equal(a, b) and a.dtype == b.dtype


def test_ids_masks_and_missing_logprobs_stay_as_they_were_sampled():
    """LM-19: no end token is invented. LM-07: an absent log-prob is not turned into 0."""
    cut = rollout([9, 5, 6, 7], [False, True, True, True], [0, -0.1, np.nan, -0.2])
    (batch,) = pack([cut], [0.5], seq_len=6, rows_per_microbatch=1)
    assert batch.tokens.tolist() == [[9, 5, 6, 7, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True, True, False, False]]
    expected = np.array([[0, -0.1, np.nan, -0.2, 0, 0]], np.float32)
    assert np.array_equal(batch.logprobs, expected, equal_nan=True)


def test_nothing_to_train_is_one_microbatch_of_padding():
    """LM-04: every rollout was left out; the step still has a batch, which trains nothing."""
    (batch,) = pack([], [], seq_len=8, rows_per_microbatch=3, minibatches=2)
    assert batch.tokens.shape == (3, 8)
    assert not batch.loss_mask.any() and not batch.segments.any()
    assert unpack(batch) == [] and fill_fraction([batch]) == 0.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("seq_len", "rows"), [(256, 1), (128, 2)])
def test_nine_tenths_of_the_tokens_are_real_on_the_math_run(seed, seq_len, rows):
    """256 rollouts of about 18 tokens, in the shapes that the module recommends."""
    lengths = np.random.default_rng(seed).integers(14, 24, size=256)
    batches = pack(numbered(lengths), np.zeros(256), seq_len=seq_len, rows_per_microbatch=rows)
    assert fill_fraction(batches) >= 0.9


def test_packing_takes_milliseconds():
    """256 rollouts in 3 ms, 10,000 in 200 ms on an idle core; thrice that on a shared one."""
    random = np.random.default_rng(0)
    for count, limit_s in ((256, 0.009), (10_000, 0.6)):
        rollouts = numbered(random.integers(5, 200, size=count))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            pack(rollouts, np.zeros(count), seq_len=256, rows_per_microbatch=8)
            times.append(time.perf_counter() - start)
        assert min(times) < limit_s


def test_a_rollout_longer_than_a_row_is_named_with_both_numbers_and_the_remedy():
    with pytest.raises(ValueError, match=r"rollout 1 has 9 tokens .* seq_len = 8; raise seq_len"):
        pack(numbered([3, 9]), [0, 0], seq_len=8, rows_per_microbatch=1)


@pytest.mark.parametrize("broken", [rollout([1, 2], [False, False]), rollout([])])
def test_a_rollout_without_loss_tokens_never_reaches_a_row(broken):
    """LM-26 and VL-12: filters count and refuse these; packing will not train on nothing."""
    with pytest.raises(ValueError, match="no loss tokens"):
        pack([rollout([1, 2, 3]), broken], [0, 0], seq_len=8, rows_per_microbatch=1)


def test_other_wrong_input_is_refused():
    with pytest.raises(ValueError, match="3 advantages for 2 rollouts"):
        pack(numbered([3, 3]), [0, 0, 0], seq_len=8, rows_per_microbatch=1)
    with pytest.raises(ValueError, match="at least 1"):
        pack(numbered([3]), [0], seq_len=8, rows_per_microbatch=0)
    many = [rollout([1, 2], [False, False])] * 12
    with pytest.raises(ValueError, match="and 7 more rollouts"):
        pack(many, [0] * 12, seq_len=8, rows_per_microbatch=1)
    (batch,) = pack(numbered([3]), [0], seq_len=8, rows_per_microbatch=1)
    with pytest.raises(ValueError, match=r"\(1, 7\).*\(1, 8\)"):
        unpack(batch, np.zeros((1, 7)))
