"""The loss by plain float64 loops over sequences and tokens, from the formulas of the papers.

Imports neither package. Sequences are ragged lists in which every token is a loss token; settings
is a dict with the names of LossSettings. `frozen` is the policy inside every stop-gradient: central
differences in `logprobs` with `frozen` held give the gradient that training applies.
"""

import math

import numpy as np


def weight(log_ratio, s):
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    if s["tis_mode"] == "icepop":
        return ratio if s["tis_floor"] <= ratio <= s["tis_cap"] else 0.0
    return min(ratio, s["tis_cap"])


def clip(u, s):
    return min(max(u, 1 - s["clip_low"]), 1 + s["clip_high"])


def objective(u, frozen_u, logprob, advantage, s):
    if s["objective"] == "pg":
        return -advantage * logprob
    if s["objective"] == "cispo":
        return -clip(frozen_u, s) * advantage * logprob
    if s["objective"] == "sapo":
        tau = s["sapo_tau_positive"] if advantage > 0 else s["sapo_tau_negative"]
        return -(4 / tau) / (1 + math.exp(-tau * (u - 1))) * advantage
    value = -min(u * advantage, clip(u, s) * advantage)
    if s["objective"] == "ppo" and s["dual_clip"] and advantage < 0:
        value = min(value, -s["dual_clip"] * advantage)
    return value


def loss(s, logprobs, sampler, advantages, old=None, reference=None, entropy=None, frozen=None):
    """The loss of one update whose batch is all these sequences."""
    frozen = logprobs if frozen is None else frozen
    tokens = sum(len(sequence) for sequence in logprobs)
    sequences = sum(len(sequence) > 0 for sequence in logprobs)
    total = 0.0
    for i, sequence in enumerate(logprobs):
        n = len(sequence)
        before = sampler[i] if old is None else old[i]
        mean_ratio = math.exp(sum(frozen[i][t] - sampler[i][t] for t in range(n)) / n)
        if s["sequence_mask"] and not s["sequence_mask"][0] <= mean_ratio <= s["sequence_mask"][1]:
            continue
        if s["objective"] == "gspo" or s["normalizer"] == "sequences":
            scale = 1 / (sequences * n)
        elif s["normalizer"] == "constant":
            scale = 1 / (sequences * s["constant_length"])
        else:
            scale = 1 / tokens
        frozen_mean = math.exp(sum(frozen[i][t] - before[t] for t in range(n)) / n)
        for t, logprob in enumerate(sequence):
            u, frozen_u = math.exp(logprob - before[t]), math.exp(frozen[i][t] - before[t])
            if s["objective"] == "gspo":
                u = frozen_mean * math.exp(logprob - frozen[i][t])
            value = objective(u, frozen_u, logprob, advantages[i], s)
            if s["use_tis"]:
                writer = frozen[i][t] if s["objective"] == "pg" else before[t]
                value *= weight(writer - sampler[i][t], s)
            d = logprob - sampler[i][t]
            if s["kl_estimator"] == "k2":
                value += s["kl_coef"] * d * d / 2
            else:
                value += s["kl_coef"] * (math.exp(d) - 1 - d)
            if reference is not None:
                d = reference[i][t] - logprob
                value += s["reference_kl_coef"] * (math.exp(d) - 1 - d)
            if entropy is not None:
                value -= s["entropy_coef"] * entropy[i][t]
            total += scale * value
    return total


def gradient(s, logprobs, *args, step=1e-6, **kwargs):
    """Central differences of `loss`, one array a sequence, every stop-gradient frozen."""
    logprobs = [np.array(sequence, float) for sequence in logprobs]
    frozen = [sequence.copy() for sequence in logprobs]
    result = [np.zeros(len(sequence)) for sequence in logprobs]
    for i, sequence in enumerate(logprobs):
        for t in range(len(sequence)):
            ends = []
            for sign in (1, -1):
                moved = [other.copy() for other in logprobs]
                moved[i][t] += sign * step
                ends.append(loss(s, moved, *args, frozen=frozen, **kwargs))
            result[i][t] = (ends[0] - ends[1]) / (2 * step)
    return result


def stats(s, logprobs, sampler):
    """Means over tokens that compare π with μ before anything is rejected."""
    d = np.concatenate(logprobs) - np.concatenate(sampler)
    ratio = np.exp(d)
    return {
        "ratio_mean": ratio.mean(),
        "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "truncated_fraction": (ratio > s["tis_cap"]).mean(),
        "kl": (ratio - 1 - d).mean(),
    }
