"""Advantages: what a rollout was worth beside the others of its group, one number a rollout.

Computed when a batch is assembled, in float64 on the host. Every token of a rollout carries its
rollout's number. A group without signal (all rewards equal, or a single rollout) gets exact zeros
from grpo, dr_grpo and rloo, never 0/0. Rewards that are not finite are refused: one NaN would
reach every member of its group.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

GRPO_EPSILON = 1e-4
"""Added to a group's standard deviation, so that a group that hardly differs is not blown up."""


def all_equal(rewards_G: Float[np.ndarray, " G"]) -> bool:
    """Whether a group carries no signal. Differences of a few float64 roundings are none."""
    if rewards_G.size < 2:
        return True
    scale = max(1.0, float(np.max(np.abs(rewards_G))))
    return bool(np.ptp(rewards_G) <= 1e-12 * scale)


def dr_grpo(rewards_G: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = r_i − mean(r), without the standard deviation, which favours easy and hard prompts.

    Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective" (2025).
    """
    if all_equal(rewards_G):
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def grpo(rewards_G: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = (r_i − mean(r)) / (std(r) + 1e-4), std with G − 1 in the denominator.

    Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language
    Models" (2024), section 4.1.
    """
    if all_equal(rewards_G):
        return np.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + GRPO_EPSILON)


def rloo(rewards_G: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """A_i = r_i − mean of the other rewards = (r_i − mean(r)) · G / (G − 1): leave one out.

    Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
    Human Feedback in LLMs" (2024).
    """
    if all_equal(rewards_G):
        return np.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) * (rewards_G.size / (rewards_G.size - 1))


def reinforce_pp(
    rewards_per_group: Sequence[Float[np.ndarray, " G"]],
    lengths_per_group: Sequence[Int[np.ndarray, " G"]],
) -> list[np.ndarray]:
    """Centred in each group, then whitened over the loss tokens of the batch.

    x_i = r_i − mean(group);  A_i = (x_i − m) / √v, where m and v (biased) are the mean and variance
    of x over tokens: a rollout of n loss tokens counts n times. A group without signal therefore
    gets −m/√v, which is not 0 in general. A batch without signal gets zeros.

    Hu et al., "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models"
    (2025), the variant with a group baseline.
    """
    centred = [dr_grpo(rewards_G) for rewards_G in rewards_per_group]
    values, tokens = np.concatenate(centred), np.concatenate(lengths_per_group)
    if tokens.sum() == 0:
        return [np.zeros_like(group) for group in centred]
    mean = np.average(values, weights=tokens)
    variance = np.average((values - mean) ** 2, weights=tokens)
    # Equal values leave a variance of roundings; dividing by it would make signal from noise.
    if variance <= 1e-24 * max(1.0, float(np.max(np.abs(values))) ** 2):
        return [np.zeros_like(group) for group in centred]
    return [(group - mean) / np.sqrt(variance) for group in centred]


WITHIN_GROUP: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    # These three change the loss and keep GRPO's advantage, as in their papers.
    "cispo": grpo,
    "gspo": grpo,
    "sapo": grpo,
}
ALGORITHMS = (*WITHIN_GROUP, "reinforce_pp")


def compute_advantages(
    algorithm: str,
    rewards_per_group: Sequence[Sequence[float] | np.ndarray],
    lengths_per_group: Sequence[Sequence[int] | np.ndarray],
) -> list[np.ndarray]:
    """Advantages of a whole batch: one float64 array a group, one number a rollout.

    Args:
      algorithm: one of `ALGORITHMS`.
      lengths_per_group: loss tokens of each rollout, ≥ 0; 0 for one that a filter keeps out of the
        update. Only reinforce_pp reads them.

    Raises:
      ValueError: an unknown algorithm, rewards and lengths that do not match, an empty group, a
        reward that is not finite, or a negative length.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r} is none of {', '.join(ALGORITHMS)}")
    rewards = [np.asarray(rewards_G, np.float64) for rewards_G in rewards_per_group]
    lengths = [np.asarray(lengths_G, np.int64) for lengths_G in lengths_per_group]
    if [r.shape for r in rewards] != [n.shape for n in lengths]:
        raise ValueError(
            f"rewards of groups of {[r.size for r in rewards]} do not match lengths of groups of "
            f"{[n.size for n in lengths]}; give one length a rollout"
        )
    for index, (rewards_G, lengths_G) in enumerate(zip(rewards, lengths, strict=True)):
        if rewards_G.size == 0:
            raise ValueError(f"group {index} has no rollouts; drop it before the batch is scored")
        if not np.all(np.isfinite(rewards_G)):
            raise ValueError(
                f"group {index} has rewards {rewards_G.tolist()}; a missing or non-finite reward "
                "is an outcome of its own: drop the group as reward_error"
            )
        if np.any(lengths_G < 0):
            raise ValueError(f"group {index} has lengths {lengths_G.tolist()}; they must be ≥ 0")
    if not rewards:
        return []
    if algorithm == "reinforce_pp":
        return reinforce_pp(rewards, lengths)
    return [WITHIN_GROUP[algorithm](rewards_G) for rewards_G in rewards]
