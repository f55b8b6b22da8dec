"""Filters: what is left out, why, and that it happens before anything is counted."""

import numpy as np
import pytest

from telescope_jax.packing import pack
from telescope_jax.scoring.filters import (
    count_reasons,
    duplicate_fraction,
    reasons_to_leave_out,
    soft_overlong_penalty,
    zero_advantage,
)
from telescope_jax.types import Reward, Rollout, StopReason, VersionSpan


def rollout(prompt, completion, stop=StopReason.EOS, first_token=1):
    size = prompt + completion
    return Rollout(
        tokens=np.arange(first_token, first_token + size),
        loss_mask=np.arange(size) >= prompt,
        logprobs=np.zeros(size),
        versions=(VersionSpan(0, prompt, size),),
        reward=Reward(0.0),
        metrics={},
        stop=stop,
        turns=1,
    )


def test_truncated_rollouts_leave_the_denominator_too():
    """LM-03: 30 completion tokens, 5 of them in a truncated rollout: N is 25."""
    rollouts = [rollout(2, 10), rollout(2, 5, StopReason.LENGTH), rollout(2, 15)]
    reasons = reasons_to_leave_out(rollouts, mask_truncated=True)
    assert reasons == [None, "truncated", None]
    kept = [r for r, reason in zip(rollouts, reasons, strict=True) if reason is None]
    (batch,) = pack(kept, [1.0] * len(kept), seq_len=32, rows_per_microbatch=1)
    assert np.count_nonzero(batch.loss_mask) == 25


def test_truncated_rollouts_stay_unless_masking_is_asked_for():
    cut = [rollout(2, 5, StopReason.LENGTH), rollout(2, 5, StopReason.TOO_LONG)]
    assert reasons_to_leave_out(cut) == [None, None]
    assert reasons_to_leave_out(cut, mask_truncated=True) == ["truncated", "truncated"]


def test_a_rollout_without_loss_tokens_is_refused_with_a_counted_reason():
    """LM-26: the prompt fills the context and no completion token survives."""
    reasons = reasons_to_leave_out([rollout(16, 0, StopReason.TOO_LONG), rollout(3, 4)])
    assert reasons == ["no_loss_tokens", None]
    assert count_reasons(reasons) == {"aborted": 0, "no_loss_tokens": 1, "truncated": 0}


def test_an_aborted_rollout_is_never_trained():
    """VL-12: an abort may carry tokens or none; either way it is no outcome of the policy."""
    aborted = [rollout(3, 0, StopReason.ABORTED), rollout(3, 4, StopReason.ABORTED)]
    assert reasons_to_leave_out(aborted) == ["aborted", "aborted"]


def test_a_single_end_token_is_trained():
    """VL-12: a completion that is only the end token is a real answer."""
    assert reasons_to_leave_out([rollout(3, 1)], mask_truncated=True) == [None]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 1, 1], True),
        ([0.7], True),
        ([0.1 + 0.2, 0.3], True),
        ([1, 0], False),
        ([1, 1 + 1e-9], False),
    ],
)
def test_groups_without_signal_are_told_from_small_differences(rewards, expected):
    assert zero_advantage(rewards) is expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_soft_overlong_penalty_meets_dapo(length, expected):
    """golden/README.md: maximum 20480, buffer 4096."""
    assert soft_overlong_penalty(length, max_length=20480, buffer=4096) == expected


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_that_makes_no_sense_is_refused(buffer):
    with pytest.raises(ValueError, match="max_length = 10"):
        soft_overlong_penalty(3, max_length=10, buffer=buffer)


def test_duplicates_are_counted_beyond_the_first():
    """VL-08: one seed for a whole group gives identical completions."""
    same, other = rollout(2, 3), rollout(2, 3, first_token=50)
    assert duplicate_fraction([same, same, same, same]) == 0.75
    assert duplicate_fraction([same, other, same, rollout(2, 4)]) == 0.25
    assert duplicate_fraction([same]) == 0.0
    assert duplicate_fraction([]) == 0.0
