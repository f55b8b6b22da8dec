"""What is left out of an update, and why: decisions with reasons, nothing is changed here.

Filters act before a batch is packed, hence before N, the number of loss tokens, is counted: a
rollout that is left out adds nothing to the loss, the gradient or the denominator (LM-03, LM-13).
Its reward still counts in the advantages of its group, for it did happen.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from telescope_jax.scoring.advantages import all_equal
from telescope_jax.types import Rollout, StopReason

ABORTED = "aborted"
NO_LOSS_TOKENS = "no_loss_tokens"
TRUNCATED = "truncated"
REASONS = (ABORTED, NO_LOSS_TOKENS, TRUNCATED)


def is_truncated(rollout: Rollout) -> bool:
    """Whether the rollout ended for want of room rather than because the policy ended it."""
    return rollout.stop in (StopReason.LENGTH, StopReason.TOO_LONG)


def reason_to_leave_out(rollout: Rollout, *, mask_truncated: bool = False) -> str | None:
    """Why this rollout is not trained on, one of `REASONS`, or None if it is.

    Args:
      mask_truncated: leave truncated rollouts out: their reward says little about the part that was
        written. Yu et al., "DAPO" (2025), section 3.4, overlong filtering.
    """
    if rollout.stop is StopReason.ABORTED:
        return ABORTED
    if not np.any(rollout.loss_mask):
        return NO_LOSS_TOKENS
    if mask_truncated and is_truncated(rollout):
        return TRUNCATED
    return None


def reasons_to_leave_out(
    rollouts: Sequence[Rollout], *, mask_truncated: bool = False
) -> list[str | None]:
    """`reason_to_leave_out` of each rollout; those with None are packed."""
    return [reason_to_leave_out(rollout, mask_truncated=mask_truncated) for rollout in rollouts]


def count_reasons(reasons: Sequence[str | None]) -> dict[str, int]:
    """How many rollouts each reason left out; every reason is there, for the metrics."""
    counts = Counter(reasons)
    return {reason: counts[reason] for reason in REASONS}


def zero_advantage(rewards_G: Sequence[float] | Float[np.ndarray, " G"]) -> bool:
    """Whether a group carries no signal: all its rewards are equal, or it has one rollout.

    Judged on the rewards of the group alone, never on whitened advantages, whose zero is elsewhere
    (LM-13). Such a group would still pull through KL and entropy terms and count in N.
    """
    return all_equal(np.asarray(rewards_G, np.float64))


def soft_overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """A reward in [−1, 0] that grows more negative as an answer nears `max_length`.

    0 up to max_length − buffer; then (max_length − buffer − length) / buffer down to −1 at
    max_length, and −1 beyond. Yu et al., "DAPO" (2025), equation 13.

    Args:
      length: sampled tokens.
      max_length, buffer: tokens, 0 < buffer ≤ max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer {buffer} must lie in (0, max_length = {max_length}]")
    return min(0.0, max(-1.0, (max_length - buffer - length) / buffer))


def duplicate_fraction(rollouts_G: Sequence[Rollout]) -> float:
    """Share of a group's rollouts that repeat an earlier one, token for token, in [0, 1).

    Near (G − 1)/G the group was sampled with one seed (VL-08), or the policy has collapsed.
    """
    if not rollouts_G:
        return 0.0
    texts = {np.asarray(rollout.tokens, np.int64).tobytes() for rollout in rollouts_G}
    return 1.0 - len(texts) / len(rollouts_G)
