"""Finished groups as arrays and JSON, and back: what a checkpoint keeps of held groups.

Tokens, masks and log-probs are concatenated into four arrays, so that a thousand held rollouts are
four files and not four thousand; the rest is JSON. Prompts are not kept: an environment gives the
same prompt for a uid at every call.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from telescope_jax.interfaces import Environment
from telescope_jax.types import Group, Reward, Rollout, StopReason, Uid, VersionSpan

Arrays = dict[str, np.ndarray]


def pack_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], Arrays]:
    """JSON of each group, and the arrays of all; empty arrays are left out."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    records = [
        {
            "uid": list(group.prompt.uid),
            "attempt": group.attempt,
            "rollouts": [_describe(rollout) for rollout in group.rollouts],
        }
        for group in groups
    ]
    if not rollouts:
        return records, {}
    arrays = {
        "tokens": np.concatenate([rollout.tokens for rollout in rollouts]),
        "loss_mask": np.concatenate([rollout.loss_mask for rollout in rollouts]),
        "logprobs": np.concatenate([rollout.logprobs for rollout in rollouts]),
    }
    return records, arrays


def unpack_groups(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray], env: Environment
) -> list[Group]:
    """The inverse of `pack_groups`.

    Raises:
      ValueError: the arrays are not as long as the records say.
    """
    lengths = [rollout["length"] for record in records for rollout in record["rollouts"]]
    columns = [np.asarray(arrays[name]) if lengths else np.zeros(0) for name in _COLUMNS]
    if any(len(column) != sum(lengths) for column in columns):
        raise ValueError(
            f"held groups have {sum(lengths)} tokens and arrays of {[len(c) for c in columns]}"
        )
    bounds = np.cumsum([0, *lengths])
    at = iter(zip(bounds[:-1], bounds[1:], strict=True))
    groups = []
    for record in records:
        rollouts = tuple(_rollout(one, columns, *next(at)) for one in record["rollouts"])
        groups.append(Group(env.prompt(Uid(*record["uid"])), record["attempt"], rollouts))
    return groups


_COLUMNS = ("tokens", "loss_mask", "logprobs")


def _describe(rollout: Rollout) -> dict[str, Any]:
    reward = rollout.reward
    return {
        "length": len(rollout.tokens),
        "versions": [list(span) for span in rollout.versions],
        "reward": [reward.total, dict(reward.parts), list(reward.tags)],
        "metrics": dict(rollout.metrics),
        "stop": rollout.stop.value,
        "turns": rollout.turns,
    }


def _rollout(
    record: Mapping[str, Any], columns: Sequence[np.ndarray], start: int, end: int
) -> Rollout:
    tokens, loss_mask, logprobs = (column[start:end] for column in columns)
    total, parts, tags = record["reward"]
    return Rollout(
        tokens=tokens,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=tuple(VersionSpan(*span) for span in record["versions"]),
        reward=Reward(total, parts, tuple(tags)),
        metrics=record["metrics"],
        stop=StopReason(record["stop"]),
        turns=record["turns"],
    )
