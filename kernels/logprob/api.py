"""Per-token log-prob, entropy and log-sum-exp from hidden states and the unembedding.

No implementation but `reference` holds the logits [T, V] in memory, forward or backward.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.choice import choose
from kernels.logprob import reference
from kernels.logprob.chunked import Chunked
from kernels.logprob.differentiable import Passes, differentiable
from kernels.logprob.operands import Layout, vocabulary_axis


class TokenLogprobs(NamedTuple):
    """What a policy says of one token each; nats, float32 (float64 for float64 operands)."""

    logprob: Float[Array, " T"]
    entropy: Float[Array, " T"]
    logsumexp: Float[Array, " T"]


def token_logprobs(
    hidden: Float[Array, "T D"],
    unembed: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " T"],
    *,
    unembed_layout: Layout = "vd",
    temperature: float | Float[Array, " T"] = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    implementation: str | None = None,
) -> TokenLogprobs:
    """Scores `targets` under the softmax of `hidden` times the unembedding.

    z = softcap · tanh(h Wᵀ / softcap) / temperature,  log p = z_target - log Σ e^z,
    H = -Σ p log p,  where without a softcap z = h Wᵀ / temperature.

    Softmax statistics after Milakov and Gimelshein, "Online normalizer calculation for softmax"
    (2018); the fused backward after Wijmans et al., "Cut your losses in large-vocabulary language
    models" (2024).

    Args:
      hidden: the last hidden states, one a token to be scored.
      unembed: the same type as `hidden`; [V, D] as an embedding table is, or [D, V].
      targets: the token scored at each place, in [0, V), or `ignore_index`.
      unembed_layout: "vd" or "dv".
      temperature: > 0, one for all or one a token. Logits are divided by it, after the softcap.
        It is a constant: no gradient flows to it.
      softcap: > 0, in logits (Gemma 2 has 30); None is off.
      ignore_index: a token with this target has value 0 in all three outputs and no gradient,
        whatever its hidden state and temperature are.
      implementation: `reference` (dense), `chunked`, or None to pick by platform.

    Returns:
      Three outputs, each differentiable with respect to `hidden` and `unembed`. A target that is
      neither in [0, V) nor ignored has the log-prob NaN: there is no right finite answer.

    Raises:
      ValueError: shapes or types do not fit.
      NotImplementedError: the implementation asked for cannot take the case.
    """
    _check(hidden, unembed, targets, unembed_layout, temperature, softcap)
    name = choose(
        "token_logprobs",
        implementation,
        ["chunked"],
        {"reference": lambda: [], "chunked": lambda: []},
    )

    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    vocabulary = unembed.shape[vocabulary_axis(unembed_layout)]
    ignored = targets == ignore_index
    known = (targets >= 0) & (targets < vocabulary)
    # An ignored token may carry anything, also NaN or temperature 0, and 0 · NaN would reach the
    # gradient of the unembedding: so its inputs are replaced, not only its outputs.
    hidden = jnp.where(ignored[:, None], jnp.zeros_like(hidden), hidden)
    temperature = lax.stop_gradient(jnp.broadcast_to(jnp.asarray(temperature, wide), targets.shape))
    temperature = jnp.where(ignored, 1.0, temperature)
    column = jnp.where(known, targets, 0).astype(jnp.int32)

    if name == "reference":
        outputs = reference.token_logprobs(
            hidden, unembed, column, temperature, layout=unembed_layout, softcap=softcap
        )
    else:
        outputs = _blocked(
            Chunked(unembed_layout, softcap), hidden, unembed, column, 1.0 / temperature
        )
    logprob, entropy, logsumexp = jax.tree.map(lambda x: jnp.where(ignored, 0.0, x), outputs)
    return TokenLogprobs(jnp.where(ignored | known, logprob, jnp.nan), entropy, logsumexp)


@partial(jax.jit, static_argnums=0)
def _blocked(
    passes: Passes,
    hidden: Float[Array, "T D"],
    unembed: Float[Array, "..."],
    column: Int[Array, " T"],
    inverse_temperature: Float[Array, " T"],
) -> tuple[Float[Array, " T"], ...]:
    outputs = differentiable(passes, hidden, unembed, column[:, None], inverse_temperature[:, None])
    return jax.tree.map(lambda x: x[:, 0], outputs)


def _check(hidden, unembed, targets, layout, temperature, softcap) -> None:
    """Raises ValueError with everything that is wrong with the arguments."""
    wrong = []
    if layout not in ("vd", "dv"):
        raise ValueError(f"unembed_layout is {layout!r}; it must be 'vd' or 'dv'")
    if hidden.ndim != 2 or unembed.ndim != 2 or targets.ndim != 1:
        wrong.append(
            f"hidden, unembed and targets have shapes {hidden.shape}, {unembed.shape} and "
            f"{targets.shape}; they must be [T, D], [V, D] or [D, V], and [T]"
        )
    else:
        width = unembed.shape[1 - vocabulary_axis(layout)]
        if hidden.shape[1] != width:
            wrong.append(
                f"hidden is {hidden.shape[1]} wide and unembed {width} in layout {layout!r}"
            )
        if hidden.shape[0] != targets.shape[0]:
            wrong.append(f"{hidden.shape[0]} hidden states for {targets.shape[0]} targets")
        if jnp.shape(temperature) not in ((), targets.shape):
            wrong.append(
                f"temperature has shape {jnp.shape(temperature)}, neither () nor {targets.shape}"
            )
    if not jnp.issubdtype(hidden.dtype, jnp.floating) or hidden.dtype != unembed.dtype:
        wrong.append(
            f"hidden is {hidden.dtype} and unembed {unembed.dtype}; cast both to one float type"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        wrong.append(f"targets are {targets.dtype}, not integers")
    if isinstance(temperature, int | float) and not temperature > 0:
        wrong.append(f"temperature is {temperature}; it must be above 0")
    if softcap is not None and not softcap > 0:
        wrong.append(f"softcap is {softcap}; it must be above 0, or None for none")
    if wrong:
        raise ValueError("; ".join(wrong))
