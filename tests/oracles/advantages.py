"""Advantages by plain loops, straight from the papers' formulas. Imports neither package."""

import math


def grpo(rewards):
    n = len(rewards)
    if n < 2 or all(r == rewards[0] for r in rewards):
        return [0.0] * n
    mean = math.fsum(rewards) / n
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1))
    return [(r - mean) / (std + 1e-4) for r in rewards]


def dr_grpo(rewards):
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def rloo(rewards):
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    return [
        r - math.fsum(o for j, o in enumerate(rewards) if j != i) / (len(rewards) - 1)
        for i, r in enumerate(rewards)
    ]


def reinforce_pp(reward_groups, length_groups):
    """Every token of the batch written out, then whitened."""
    tokens, owner = [], []
    for g, (rewards, lengths) in enumerate(zip(reward_groups, length_groups, strict=True)):
        centre = math.fsum(rewards) / len(rewards)
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
            tokens += [reward - centre] * length
            owner += [(g, i)] * length
    mean = math.fsum(tokens) / len(tokens)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in tokens) / len(tokens))
    result = [[math.nan] * len(rewards) for rewards in reward_groups]
    for x, (g, i) in zip(tokens, owner, strict=True):
        result[g][i] = (x - mean) / std
    return result
