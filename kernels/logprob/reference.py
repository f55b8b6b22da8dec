"""The log-probs written down plainly, with the logits in memory: what the others must equal.

Its gradient is JAX's own, so it shares no backward pass with the other implementations.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.logprob.operands import Layout, contract


def token_logprobs(
    hidden: Float[Array, "T D"],
    unembed: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, "T 1"],
    inverse_temperature: Float[Array, "T 1"],
    *,
    layout: Layout,
    softcap: float | None,
) -> tuple[Float[Array, "T 1"], Float[Array, "T 1"], Float[Array, "T 1"]]:
    """(log-prob, entropy, log-sum-exp) of each token, `targets` in [0, V)."""
    logits = contract(hidden, unembed, layout)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = logits * inverse_temperature

    logprobs = jax.nn.log_softmax(logits)
    probs = jnp.exp(logprobs)
    # A column of probability 0 adds nothing; its log-prob may be -inf, and 0 · -inf is NaN.
    weighted = probs * jnp.where(probs > 0, logprobs, 0.0)
    return (
        jnp.take_along_axis(logprobs, targets, axis=1),
        -jnp.sum(weighted, axis=1, keepdims=True),
        jax.nn.logsumexp(logits, axis=1, keepdims=True),
    )
