"""Scored groups to one training batch: advantages, filters, packing, and what the batch is made of.

Pure: the orchestrator decides *which* groups form batch k, here it is decided what they are worth.
Filters act before anything is packed, so what is left out is in neither loss nor denominator.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from telescope_jax.packing import fill_fraction, pack
from telescope_jax.scoring.advantages import compute_advantages
from telescope_jax.scoring.filters import (
    count_reasons,
    duplicate_fraction,
    is_truncated,
    reasons_to_leave_out,
)
from telescope_jax.staleness import ages
from telescope_jax.types import Group, PackedBatch, Rollout


@dataclass(frozen=True, slots=True)
class AssemblySettings:
    """Attributes:
    advantages: name of the estimator, one of scoring.advantages.ALGORITHMS.
    mask_truncated: rollouts cut for want of room train no token.
    seq_len, rows_per_microbatch, minibatches: the shape of the packed batch.
    tokenizer_size: ids from here on have no text; a model's vocabulary may be padded with them.
    """

    advantages: str
    mask_truncated: bool
    seq_len: int
    rows_per_microbatch: int
    minibatches: int
    tokenizer_size: float = float("inf")


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Batch `step`, ready to train; `metrics` describe its rollouts."""

    step: int
    minibatches: tuple[PackedBatch, ...]
    metrics: dict[str, float]


def assemble(step: int, groups: Sequence[Group], settings: AssemblySettings) -> TrainingBatch:
    """Packs `groups` into batch `step`."""
    rollouts_P_G = [group.rollouts for group in groups]
    left_out_P_G = [
        reasons_to_leave_out(rollouts, mask_truncated=settings.mask_truncated)
        for rollouts in rollouts_P_G
    ]
    advantages_P_G = compute_advantages(
        settings.advantages,
        [[rollout.reward.total for rollout in rollouts] for rollouts in rollouts_P_G],
        [
            [
                0 if reason else int(rollout.loss_mask.sum())
                for rollout, reason in zip(rollouts, reasons, strict=True)
            ]
            for rollouts, reasons in zip(rollouts_P_G, left_out_P_G, strict=True)
        ],
    )
    kept = [
        (rollout, advantage)
        for rollouts, reasons, advantages in zip(
            rollouts_P_G, left_out_P_G, advantages_P_G, strict=True
        )
        for rollout, reason, advantage in zip(rollouts, reasons, advantages, strict=True)
        if reason is None
    ]
    minibatches = pack(
        [rollout for rollout, _ in kept],
        [advantage for _, advantage in kept],
        seq_len=settings.seq_len,
        rows_per_microbatch=settings.rows_per_microbatch,
        minibatches=settings.minibatches,
    )
    metrics = describe(step, rollouts_P_G)
    metrics["rollout/unknown_tokens"] = float(
        sum(
            np.sum(rollout.tokens[rollout.loss_mask] >= settings.tokenizer_size)
            for rollouts_G in rollouts_P_G
            for rollout in rollouts_G
        )
    )
    reasons = [reason for row in left_out_P_G for reason in row]
    metrics |= {f"rollout/left_out/{name}": float(n) for name, n in count_reasons(reasons).items()}
    metrics["train/packing_fill"] = fill_fraction(minibatches)
    metrics["train/rows"] = float(sum(len(batch.tokens) for batch in minibatches))
    metrics["rollout/advantage_std"] = float(np.std([advantage for _, advantage in kept] or [0.0]))
    return TrainingBatch(step, tuple(minibatches), metrics)


def describe(step: int, rollouts_P_G: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """What the rollouts of batch `step` look like: rewards, lengths and ages in weight updates."""
    rollouts = [rollout for rollouts_G in rollouts_P_G for rollout in rollouts_G]
    rewards = np.array([rollout.reward.total for rollout in rollouts])
    lengths = np.array([rollout.loss_mask.sum() for rollout in rollouts])
    age, tokens = np.array(
        [pair for rollout in rollouts for pair in ages(rollout.versions, step)]
    ).T
    metrics = {
        "rollout/reward_trained": rewards.mean(),
        "rollout/reward_std": rewards.std(),
        "rollout/length": lengths.mean(),
        "rollout/length_max": lengths.max(),
        "rollout/turns": np.mean([rollout.turns for rollout in rollouts]),
        "rollout/length_stop_fraction": np.mean([is_truncated(rollout) for rollout in rollouts]),
        "rollout/duplicate_fraction": np.mean([duplicate_fraction(row) for row in rollouts_P_G]),
        "staleness/mean": (age * tokens).sum() / tokens.sum(),
        "staleness/max": age.max(),
    }
    return {name: float(value) for name, value in metrics.items()}
