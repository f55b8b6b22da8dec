"""The policy loss: arrays in, a sum out.

`policy_loss` of one microbatch is that microbatch's share of the loss of the whole update: every
token is divided by denominators of the update, counted beforehand over all its rows (`denominators`
adds over rows). So the loss and the gradient of an update are the plain sums over its microbatches
and devices, and the same for every split, every packing, every mesh and any padding. The statistics
are sums as well (`LossSums`); `finish` turns their total into means.

Tokens that do not train (prompt, padding) contribute exactly 0 to the value and to the gradient,
whatever stands there, inf and nan included: they are replaced *before* anything is computed, since
0 · inf is nan in a derivative even where `where` hides it in the value (LM-06).

A token whose sampler log-prob is not finite (the engine could not score it) is trained with weight
1 and ratio 1, adds no KL to μ, and is counted (LM-07).

Words: π the policy being trained, μ the sampler as the engine reported it, π_old the policy as the
trainer computed it when the batch arrived, sg[·] stop-gradient, A advantages, all per token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from telescope_jax.learner.objectives import (
    bounded_ratio,
    cispo,
    gspo_ratio,
    icepop_weight,
    k2,
    k3,
    policy_gradient,
    ppo,
    sapo,
    segment_sum,
    segment_totals,
    truncated_weight,
)
from telescope_jax.types import PackedBatch

OBJECTIVES = ("pg", "ppo", "cispo", "gspo", "sapo")
NORMALIZERS = ("tokens", "sequences", "constant")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Plain values, hashable: a static argument of the jitted step.

    Attributes:
      objective: pg (policy gradient), or one of four built on u = π/π_old: ppo, cispo, gspo, sapo.
      use_tis: weigh each token by a bounded ratio to μ: π/μ for pg, π_old/μ for the other four.
      tis_cap: upper bound of that weight, > 0; inf is plain importance sampling. It also decides
        what `truncated` counts, with use_tis or without.
      tis_mode: truncate (min(ρ, cap)) or icepop (0 outside [tis_floor, tis_cap]).
      tis_floor: lower bound of icepop, in [0, tis_cap].
      clip_low, clip_high: ppo, cispo and gspo clip u to [1 − clip_low, 1 + clip_high]; both ≥ 0.
      dual_clip: c > 1 of the dual clip of ppo, 0 for none.
      sapo_tau_positive, sapo_tau_negative: temperature of sapo for A > 0 and A ≤ 0; both > 0.
      sequence_mask: (low, high): a rollout whose exp(mean log π/μ) lies outside adds nothing to
        the loss; None for off. The mean keeps a small bias per token from growing with length.
      kl_coef: ≥ 0, weight of the KL to μ; kl_estimator: k2 or k3.
      reference_kl_coef: ≥ 0, weight of the KL to the reference policy (GRPO's β); 0 needs none.
      entropy_coef: weight of the entropy bonus, nats; 0 for off.
      normalizer: what the sum over tokens is divided by: tokens (N), sequences (each rollout's mean
        over its tokens, then the mean over rollouts) or constant (rollouts · constant_length). gspo
        is a mean over sequences by definition and takes tokens to mean that.
      constant_length: tokens, > 0 with normalizer constant; Dr. GRPO takes the token budget.
    """

    objective: str = "pg"
    use_tis: bool = True
    tis_cap: float = 2.0
    tis_mode: str = "truncate"
    tis_floor: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    sequence_mask: tuple[float, float] | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    reference_kl_coef: float = 0.0
    entropy_coef: float = 0.0
    normalizer: str = "tokens"
    constant_length: float = 0.0

    def __post_init__(self):
        wrong = [
            f"{name} {value!r} is none of {', '.join(choices)}"
            for name, value, choices in (
                ("objective", self.objective, OBJECTIVES),
                ("tis_mode", self.tis_mode, ("truncate", "icepop")),
                ("kl_estimator", self.kl_estimator, ("k2", "k3")),
                ("normalizer", self.normalizer, NORMALIZERS),
            )
            if value not in choices
        ]
        if not 0 <= self.tis_floor <= self.tis_cap or self.tis_cap <= 0:
            wrong.append(f"tis_cap {self.tis_cap} must be > 0 and ≥ tis_floor {self.tis_floor} ≥ 0")
        if min(self.clip_low, self.clip_high) < 0:
            wrong.append(f"clip_low {self.clip_low} and clip_high {self.clip_high} must be ≥ 0")
        if self.dual_clip != 0 and self.dual_clip <= 1:
            wrong.append(f"dual_clip {self.dual_clip} must be > 1, or 0 for none")
        if min(self.sapo_tau_positive, self.sapo_tau_negative) <= 0:
            wrong.append("sapo_tau_positive and sapo_tau_negative must be > 0")
        if self.sequence_mask is not None and self.sequence_mask[0] > self.sequence_mask[1]:
            wrong.append(f"sequence_mask {self.sequence_mask} must be (low, high)")
        if min(self.kl_coef, self.reference_kl_coef) < 0:
            wrong.append("kl_coef and reference_kl_coef must be ≥ 0")
        if self.normalizer == "constant" and self.constant_length <= 0:
            wrong.append(
                f"normalizer constant needs constant_length > 0, not {self.constant_length}"
            )
        if self.normalizer == "constant" and self.objective == "gspo":
            wrong.append("gspo is a mean over sequences; normalizer constant contradicts it")
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def needs_old_logprobs(self) -> bool:
        """π_old must be in the batch: u and the weight may not both be ratios to μ."""
        return self.use_tis and self.objective != "pg"

    @property
    def needs_reference_logprobs(self) -> bool:
        """The reference policy's log-probs must be in the batch."""
        return self.reference_kl_coef > 0


class Denominators(NamedTuple):
    """What one optimizer update is divided by, over all its rows on all devices; sums over rows."""

    tokens: Float[Array, ""]
    sequences: Float[Array, ""]


class LossSums(NamedTuple):
    """Sums over loss tokens that add over microbatches and devices; `finish` reads the total.

    All compare π with μ before anything is rejected; `rejected` counts tokens that icepop or the
    sequence mask removed, `clipped` those with u outside the clip, `unscored` those without μ.
    """

    loss: Float[Array, ""]
    tokens: Float[Array, ""]
    ratio: Float[Array, ""]
    ratio_squared: Float[Array, ""]
    truncated: Float[Array, ""]
    kl: Float[Array, ""]
    entropy: Float[Array, ""]
    clipped: Float[Array, ""]
    rejected: Float[Array, ""]
    unscored: Float[Array, ""]


def denominators(segments: Int[Array, "B T"], loss_mask: Bool[Array, "B T"]) -> Denominators:
    """Counts loss tokens, and rollouts with at least one: of all rows of an update, not some."""
    mask = (loss_mask & (segments > 0)).astype(jnp.float32)
    sequences = segment_totals(mask, segments)[:, 1:] > 0
    return Denominators(tokens=mask.sum(), sequences=sequences.sum().astype(jnp.float32))


def policy_loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    batch: PackedBatch,
    totals: Denominators,
    settings: LossSettings,
) -> tuple[Float[Array, ""], LossSums]:
    """One microbatch's share of the loss of its update, and of its statistics.

    L = Σ_t c_t · (w_t·ℓ_t + kl_coef·KL_t(μ) + reference_kl_coef·KL_t(ref) − entropy_coef·H_t),

    with ℓ the objective, w the importance weight (1 without TIS) and c_t = 1/N, or 1/(S·n) for n
    loss tokens in the rollout and S rollouts, or 1/(S·constant_length). The KL terms come after the
    weight. Rejection changes neither N nor S. KL(μ): d = log π − log μ. KL(ref): exp(−d) − 1 + d
    with d = log π − log π_ref, as in GRPO (Shao et al. 2024, equation 4).

    Args:
      logprobs, entropy: of π, nats; differentiable.
      batch: the same rows. `old_logprobs` is what u compares with; without it u is π/μ.
      totals: of the whole update, over all rows on all devices.

    Returns:
      The share, in at least float32, and sums without gradient.

    Raises:
      ValueError: settings need old or reference log-probs that the batch lacks.
    """
    if settings.needs_old_logprobs and batch.old_logprobs is None:
        raise ValueError(
            f"{settings.objective} with use_tis compares π with π_old and π_old with μ, and the "
            "batch has no old_logprobs; compute them when the batch arrives, or set use_tis=False"
        )
    if settings.needs_reference_logprobs and batch.reference_logprobs is None:
        raise ValueError(
            f"reference_kl_coef is {settings.reference_kl_coef} and the batch has no "
            "reference_logprobs; compute them, or set reference_kl_coef=0"
        )

    segments = jnp.asarray(batch.segments)
    mask = jnp.asarray(batch.loss_mask) & (segments > 0)
    dtype = jnp.promote_types(logprobs.dtype, jnp.float32)

    def trained(values: object) -> Float[Array, "B T"]:
        return jnp.where(mask, jnp.asarray(values).astype(dtype), 0.0)

    logprobs, entropy, advantages = trained(logprobs), trained(entropy), trained(batch.advantages)
    fixed = lax.stop_gradient(logprobs)
    reported = trained(batch.logprobs)
    scored = jnp.isfinite(reported)
    sampler = jnp.where(scored, reported, fixed)
    old = sampler if batch.old_logprobs is None else trained(batch.old_logprobs)
    length = jnp.maximum(segment_sum(mask.astype(dtype), segments), 1.0)

    loss, ratio = _objective(logprobs, old, advantages, segments, length, settings)
    kept = mask
    if settings.use_tis:
        written_by = logprobs if settings.objective == "pg" else old
        log_weight = jnp.where(scored, written_by - sampler, 0.0)
        if settings.tis_mode == "icepop":
            weight = icepop_weight(log_weight, floor=settings.tis_floor, cap=settings.tis_cap)
            kept = kept & (weight > 0)
        else:
            weight = truncated_weight(log_weight, cap=settings.tis_cap)
        loss = weight * loss

    log_ratio = logprobs - sampler
    if settings.kl_coef:
        estimator = k2 if settings.kl_estimator == "k2" else k3
        loss = loss + settings.kl_coef * estimator(log_ratio)
    if settings.reference_kl_coef:
        loss = loss + settings.reference_kl_coef * k3(trained(batch.reference_logprobs) - logprobs)
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * entropy
    if settings.sequence_mask is not None:
        low, high = settings.sequence_mask
        mean_ratio = bounded_ratio(segment_sum(lax.stop_gradient(log_ratio), segments) / length)
        inside = (mean_ratio >= low) & (mean_ratio <= high)
        loss = jnp.where(inside, loss, 0.0)
        kept = kept & inside

    contribution = jnp.where(mask, loss, 0.0) * _token_scale(length, totals, settings)
    value = contribution.sum()
    counted = _sums(value, log_ratio, ratio, entropy, mask, kept, scored, settings)
    return value, lax.stop_gradient(counted)


def _objective(
    logprobs: Float[Array, "B T"],
    old: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    length: Float[Array, "B T"],
    settings: LossSettings,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """ℓ per token, and the ratio u that the objective looks at."""
    ratio = bounded_ratio(logprobs - old)
    clip = {"low": settings.clip_low, "high": settings.clip_high}
    match settings.objective:
        case "ppo":
            return ppo(ratio, advantages, **clip, dual_clip=settings.dual_clip), ratio
        case "cispo":
            return cispo(ratio, logprobs, advantages, **clip), ratio
        case "gspo":
            ratio = gspo_ratio(logprobs - old, logprobs, segments, length)
            return ppo(ratio, advantages, **clip), ratio
        case "sapo":
            tau_positive, tau_negative = settings.sapo_tau_positive, settings.sapo_tau_negative
            loss = sapo(ratio, advantages, tau_positive=tau_positive, tau_negative=tau_negative)
            return loss, ratio
        case _:
            return policy_gradient(logprobs, advantages), ratio


def _token_scale(
    length: Float[Array, "B T"], totals: Denominators, settings: LossSettings
) -> Float[Array, "B T"]:
    """c_t of `policy_loss`. An update without loss tokens divides by 1: its loss is 0 (LM-04)."""
    tokens = jnp.maximum(totals.tokens, 1).astype(length.dtype)
    sequences = jnp.maximum(totals.sequences, 1).astype(length.dtype)
    if settings.normalizer == "sequences" or settings.objective == "gspo":
        return 1.0 / (sequences * length)
    if settings.normalizer == "constant":
        return jnp.full_like(length, 1.0) / (sequences * settings.constant_length)
    return jnp.full_like(length, 1.0) / tokens


def _sums(
    value: Float[Array, ""],
    log_ratio: Float[Array, "B T"],
    ratio: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    kept: Bool[Array, "B T"],
    scored: Bool[Array, "B T"],
    settings: LossSettings,
) -> LossSums:
    def total(values: Array) -> Float[Array, ""]:
        return jnp.where(mask, values, 0).astype(log_ratio.dtype).sum()

    rho = bounded_ratio(log_ratio)
    outside = (ratio < 1.0 - settings.clip_low) | (ratio > 1.0 + settings.clip_high)
    clips = settings.objective in ("ppo", "cispo", "gspo")
    return LossSums(
        loss=value,
        tokens=total(mask),
        ratio=total(rho),
        ratio_squared=total(rho**2),
        truncated=total(rho > settings.tis_cap),
        kl=total(k3(log_ratio)),
        entropy=total(entropy),
        clipped=total(outside) if clips else jnp.zeros_like(value),
        rejected=total(~kept),
        unscored=total(~scored),
    )


def finish(sums: LossSums) -> dict[str, float]:
    """Means of an update from the total of its sums, named as in `types.LossStats`.

    `unscored_tokens` comes on top. Without any loss token the loss is 0 and the means are nan: what
    was not measured is not 0.
    """
    total = {name: float(value) for name, value in sums._asdict().items()}
    n = total["tokens"] or float("nan")
    return {
        "loss": total["loss"],
        "ratio_mean": total["ratio"] / n,
        "ess": total["ratio"] ** 2 / (n * total["ratio_squared"]),
        "truncated_fraction": total["truncated"] / n,
        "kl": total["kl"] / n,
        "entropy": total["entropy"] / n,
        "token_count": total["tokens"],
        "rejected_fraction": total["rejected"] / n,
        "clipped_fraction": total["clipped"] / n,
        "unscored_tokens": total["unscored"],
    }
