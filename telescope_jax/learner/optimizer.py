"""AdamW in parts: a direction, a clip and a schedule, each usable alone.

The learning rate is a function of the *step*, not of a counter inside the optimizer state: so a
skipped update, several minibatches a step, or a resume cannot shift the schedule (CK-13). It enters
the compiled update as an argument.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from telescope_jax.config import OptimizerConfig


def adamw_direction(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW's step before it is scaled by −learning rate.

    m̂/(√v̂ + ε) + λ·θ, decay λ on matrices only. Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization" (2019).
    """
    return optax.chain(
        optax.scale_by_adam(
            b1=config.beta1, b2=config.beta2, eps=config.eps, mu_dtype=config.first_moment_dtype
        ),
        optax.add_decayed_weights(config.weight_decay, mask=_matrices),
    )


def clip_factor(norm: Float[Array, ""], limit: float) -> Float[Array, ""]:
    """min(1, limit/norm): what the gradient is multiplied by; 1 when limit is 0 (off)."""
    if limit == 0:
        return jnp.ones_like(norm)
    return jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))


def learning_rate(config: OptimizerConfig, step: int, number_of_steps: int) -> float:
    """The learning rate of step `step`, counted from 0.

    Warm-up is linear and its first step is not 0: step s < w has peak·(s + 1)/w, so step w − 1 is
    the first at the peak. Then constant, or a decay over the remaining steps whose last one, step
    number_of_steps − 1, has final_fraction · peak. Beyond the last step it stays there.
    """
    warmup, peak, last = config.warmup_steps, config.learning_rate, config.final_fraction
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    start = max(warmup - 1, 0)
    progress = min(1.0, (step - start) / max(number_of_steps - 1 - start, 1))
    if config.schedule == "linear":
        return peak * (1.0 + progress * (last - 1.0))
    return peak * (last + (1.0 - last) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
