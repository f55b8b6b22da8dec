"""What comes before and after every kernel: checks, ignored tokens and unknown targets."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.logprob.operands import Layout, accumulator, vocabulary_axis


class TokenLogprobs(NamedTuple):
    """What a policy says of one token each; nats, float32 (float64 for float64 operands)."""

    logprob: Float[Array, " T"]
    entropy: Float[Array, " T"]
    logsumexp: Float[Array, " T"]


class Arguments(NamedTuple):
    """Operands that a kernel can take without knowing of ignored tokens."""

    hidden: Float[Array, "T D"]
    column: Int[Array, "T 1"]
    inverse_temperature: Float[Array, "T 1"]
    ignored: Bool[Array, "T 1"]
    known: Bool[Array, "T 1"]


def prepare(
    hidden: Float[Array, "T D"],
    unembed: Float[Array, "..."],
    targets: Int[Array, " T"],
    *,
    layout: Layout,
    temperature: float | Float[Array, " T"],
    softcap: float | None,
    ignore_index: int,
) -> Arguments:
    """Checked operands, with harmless values where a token is ignored.

    Raises:
      ValueError: shapes, types or values do not fit; everything that is wrong at once.
    """
    _check(hidden, unembed, targets, layout, temperature, softcap)
    ignored = targets == ignore_index
    known = (targets >= 0) & (targets < unembed.shape[vocabulary_axis(layout)])
    # An ignored token may carry anything, also NaN or temperature 0, and 0 · NaN would reach the
    # gradient of the unembedding: so its inputs are replaced, not only its outputs.
    hidden = jnp.where(ignored[:, None], jnp.zeros_like(hidden), hidden)
    wide = jnp.asarray(temperature, accumulator(hidden.dtype))
    wide = jnp.where(ignored, 1.0, lax.stop_gradient(jnp.broadcast_to(wide, targets.shape)))
    column = jnp.where(known, targets, 0).astype(jnp.int32)
    return Arguments(hidden, *(x[:, None] for x in (column, 1.0 / wide, ignored, known)))


def finish(
    arguments: Arguments,
    logprob: Float[Array, "T 1"],
    entropy: Float[Array, "T 1"],
    logsumexp: Float[Array, "T 1"],
) -> TokenLogprobs:
    """The outputs, 0 for ignored tokens and a log-prob of NaN for unknown targets."""
    logprob = jnp.where(arguments.known, logprob, jnp.nan)
    outputs = (jnp.where(arguments.ignored, 0.0, x) for x in (logprob, entropy, logsumexp))
    return TokenLogprobs(*(x[:, 0] for x in outputs))


def _check(
    hidden: jax.Array,
    unembed: jax.Array,
    targets: jax.Array,
    layout: str,
    temperature: float | jax.Array,
    softcap: float | None,
) -> None:
    if layout not in ("vd", "dv"):
        raise ValueError(f"unembed_layout is {layout!r}; it must be 'vd' or 'dv'")
    if hidden.ndim != 2 or unembed.ndim != 2 or targets.ndim != 1:
        raise ValueError(
            f"hidden, unembed and targets have shapes {hidden.shape}, {unembed.shape} and "
            f"{targets.shape}; they must be [T, D], [V, D] or [D, V], and [T]"
        )
    wrong = []
    width = unembed.shape[1 - vocabulary_axis(layout)]
    if hidden.shape[1] != width:
        wrong.append(f"hidden is {hidden.shape[1]} wide and unembed {width} in layout {layout!r}")
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
