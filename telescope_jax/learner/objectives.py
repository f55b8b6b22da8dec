"""The terms of the loss, one function a concept, each per token.

Pure and elementwise but for the two that look at a whole rollout. Inputs are float32 or wider and
finite: `loss.py` replaces what stands on tokens that do not train before it calls these. Log-ratios
enter unbounded; each function bounds them where its own exp could overflow.

π is the policy being trained, sg[·] stop-gradient, u = π/π_old, A advantages, d a log-ratio.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: beyond any ratio that means something, and its square is finite in float32."""


def segment_totals(
    values: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B bound"]:
    """Sums over each segment of each row; column k is segment k (rollouts never straddle rows)."""
    bound = values.shape[1] + 1  # static: a row of T tokens holds at most T segments, and padding
    return jax.vmap(lambda v, s: jax.ops.segment_sum(v, s, num_segments=bound))(values, segments)


def segment_sum(values: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """For each token, the sum over the segment that it belongs to."""
    return jnp.take_along_axis(segment_totals(values, segments), segments, axis=1)


def bounded_ratio(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(clip(log_ratio, ±20)): never inf, and no gradient where the clip acts."""
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def truncated_weight(log_ratio: Float[Array, "B T"], *, cap: float) -> Float[Array, "B T"]:
    """w = sg[min(ρ, cap)], truncated importance sampling.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
    the truncation is Ionides, "Truncated Importance Sampling" (2008).
    """
    return lax.stop_gradient(jnp.minimum(bounded_ratio(log_ratio), cap))


def icepop_weight(
    log_ratio: Float[Array, "B T"], *, floor: float, cap: float
) -> Float[Array, "B T"]:
    """w = sg[ρ · 1[floor ≤ ρ ≤ cap]]: tokens on which sampler and trainer disagree are left out.

    Ling team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking
    Model" (2025), IcePop.
    """
    ratio = bounded_ratio(log_ratio)
    inside = (ratio >= floor) & (ratio <= cap)
    return lax.stop_gradient(jnp.where(inside, ratio, 0.0))


def policy_gradient(
    logprobs: Float[Array, "B T"], advantages: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """ℓ = −A · log π. Williams, "Simple statistical gradient-following algorithms" (1992)."""
    return -advantages * logprobs


def ppo(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    low: float,
    high: float,
    dual_clip: float = 0.0,
) -> Float[Array, "B T"]:
    """ℓ = −min(u·A, clip(u, 1 − low, 1 + high)·A), and for A < 0 at most −c·A with the dual clip c.

    Schulman et al., "Proximal Policy Optimization Algorithms" (2017); low ≠ high as in DAPO (2025);
    dual clip: Ye et al., "Mastering Complex Control in MOBA Games with Deep RL" (2020).
    """
    clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    if dual_clip:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)
    return loss


def cispo(
    ratio: Float[Array, "B T"],
    logprobs: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    low: float,
    high: float,
) -> Float[Array, "B T"]:
    """ℓ = −sg[clip(u, 1 − low, 1 + high)] · A · log π: the clip bounds the weight, loses no token.

    MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention" (2025).
    """
    weight = lax.stop_gradient(jnp.clip(ratio, 1.0 - low, 1.0 + high))
    return -weight * advantages * logprobs


def gspo_ratio(
    log_ratio: Float[Array, "B T"],
    logprobs: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    length: Float[Array, "B T"],
) -> Float[Array, "B T"]:
    """u_t = sg[s] · π/sg[π] with s = exp(mean over the rollout of log π/π_old).

    Every token has the value of its rollout's ratio s; its gradient is s · ∇log π of that token, so
    that the mean over the rollout's tokens has the gradient of s, and weights per token apply to
    each token's own term. Zheng et al., "Group Sequence Policy Optimization" (2025), section 4.3.

    Args:
      log_ratio, logprobs: 0 on tokens that do not train.
      length: loss tokens of the rollout that each token belongs to, ≥ 1.
    """
    mean = segment_sum(log_ratio, segments) / length
    return lax.stop_gradient(bounded_ratio(mean)) * jnp.exp(logprobs - lax.stop_gradient(logprobs))


def sapo(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    tau_positive: float,
    tau_negative: float,
) -> Float[Array, "B T"]:
    """ℓ = −(4/τ) · σ(τ(u − 1)) · A: a soft gate instead of the clip, τ by the sign of A.

    Gao et al., "Soft Adaptive Policy Optimization" (2025).
    """
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    return -(4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages


def k2(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """½d². Schulman, "Approximating KL Divergence" (2020)."""
    return 0.5 * log_ratio**2


def k3(log_ratio: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(d) − 1 − d ≥ 0, unbiased when d = log p/q and the tokens come from q. Schulman (2020)."""
    # Bounded above only: below, exp(d) vanishes and the gradient −1 is right as it stands.
    bounded = jnp.minimum(log_ratio, LOG_RATIO_LIMIT)
    return jnp.expm1(bounded) - bounded
