"""Scored groups to a training batch: what is kept, what it is worth, what it looks like."""

import numpy as np
import pytest

from telescope_jax.assembly import AssemblySettings, assemble
from telescope_jax.packing import unpack
from telescope_jax.types import Group, Prompt, Reward, Rollout, StopReason, Uid, VersionSpan

SETTINGS = AssemblySettings("dr_grpo", False, seq_len=16, rows_per_microbatch=1, minibatches=1)


def rollout(
    reward: float, length: int, spans: list[tuple[int, int, int]], stop: StopReason = StopReason.EOS
) -> Rollout:
    return Rollout(
        tokens=np.arange(2 + length, dtype=np.int32),
        loss_mask=np.arange(2 + length) >= 2,
        logprobs=np.where(np.arange(2 + length) >= 2, -0.5, 0.0).astype(np.float32),
        versions=tuple(VersionSpan(v, 2 + a, 2 + b) for v, a, b in spans),
        reward=Reward(reward),
        metrics={},
        stop=stop,
        turns=1,
    )


def group(index: int, *rollouts: Rollout) -> Group:
    prompt = Prompt(Uid(0, index), "scripted", np.arange(2, dtype=np.int32), None)
    return Group(prompt, 0, rollouts)


GROUPS = [
    group(0, rollout(1.0, 3, [(5, 0, 3)]), rollout(0.0, 2, [(4, 0, 1), (5, 1, 2)])),
    group(1, rollout(0.0, 4, [(6, 0, 4)], StopReason.LENGTH), rollout(1.0, 1, [(6, 0, 1)])),
]


def test_advantages_stand_on_the_sampled_tokens_of_their_rollout() -> None:
    batch = assemble(6, GROUPS, SETTINGS)
    (packed,) = batch.minibatches
    values = {
        len(tokens): advantages[2:].tolist()
        for tokens, advantages in zip(
            unpack(packed), unpack(packed, packed.advantages), strict=True
        )
    }
    assert values == {5: [0.5] * 3, 4: [-0.5] * 2, 6: [-0.5] * 4, 3: [0.5]}


def test_ages_are_measured_against_the_batch() -> None:
    metrics = assemble(6, GROUPS, SETTINGS).metrics
    # Tokens by age: version 5 three and one (age 1), version 4 one (age 2), version 6 five (age 0).
    assert metrics["staleness/mean"] == pytest.approx((4 * 1 + 1 * 2) / 10)
    assert metrics["staleness/max"] == 2
    assert metrics["rollout/length"] == 2.5
    assert metrics["rollout/length_stop_fraction"] == 0.25


def test_a_sampled_id_of_a_padded_vocabulary_trains_and_is_counted() -> None:
    """MX-21: rows that pad the vocabulary are sampled too; a prompt's ids do not count."""
    settings = AssemblySettings("dr_grpo", False, 16, 1, 1, tokenizer_size=4)
    batch = assemble(6, GROUPS, settings)
    # Sampled ids run from 2, so rollouts of 3, 2, 4 and 1 tokens hold 1, 0, 2 and 0 ids over 3.
    assert batch.metrics["rollout/unknown_tokens"] == 3
    assert sum(packed.loss_mask.sum() for packed in batch.minibatches) == 10
    assert assemble(6, GROUPS, SETTINGS).metrics["rollout/unknown_tokens"] == 0


def test_a_masked_rollout_trains_nothing_but_its_reward_counts_in_its_group() -> None:
    settings = AssemblySettings("dr_grpo", True, 16, 1, 1)
    batch = assemble(6, GROUPS, settings)
    (packed,) = batch.minibatches
    assert sorted(len(tokens) for tokens in unpack(packed)) == [3, 4, 5]
    assert batch.metrics["rollout/left_out/truncated"] == 1
    kept = next(
        a
        for t, a in zip(unpack(packed), unpack(packed, packed.advantages), strict=True)
        if len(t) == 3
    )
    assert kept[-1] == 0.5


def test_a_batch_with_nothing_to_train_is_a_batch_of_padding() -> None:
    """LM-04: every completion cut and masked; the step still has something to complete on."""
    cut = group(0, *(rollout(r, 3, [(0, 0, 3)], StopReason.LENGTH) for r in (0.0, 1.0)))
    batch = assemble(0, [cut], AssemblySettings("grpo", True, 16, 1, 1))
    assert not batch.minibatches[0].loss_mask.any()
    assert np.isfinite(list(batch.metrics.values())).all()
