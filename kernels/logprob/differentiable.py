"""One custom gradient around every blocked implementation.

An implementation is two functions, `forward` (the statistics of its columns) and `backward` (two
matrix gradients, given each token's normaliser); what lies between is the same for all.
"""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.logprob import tile


class Passes(Protocol):
    """An implementation with every option bound. Hashable: equal passes are compiled once.

    Targets and inverse temperatures are [T, 1]; a target outside the vocabulary has logit 0.
    """

    def forward(
        self,
        hidden: Array,
        unembed: Array,
        targets: Array,
        inverse_temperature: Array,
        *,
        keep: bool,
    ) -> tuple[tile.Statistics, Any]:
        """The statistics of the columns of `unembed`, and what `backward` wants saved if `keep`."""
        ...

    def backward(
        self,
        hidden: Array,
        unembed: Array,
        targets: Array,
        inverse_temperature: Array,
        saved: Any,
        rows: tile.RowGradients,
    ) -> tuple[Array, Array]:
        """(d hidden, d unembed), in the types of the operands."""
        ...


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(
    passes: Passes,
    hidden: Float[Array, "T D"],
    unembed: Float[Array, "..."],
    targets: Int[Array, "T 1"],
    inverse_temperature: Float[Array, "T 1"],
) -> tuple[Float[Array, "T 1"], Float[Array, "T 1"], Float[Array, "T 1"]]:
    """(log-prob, entropy, log-sum-exp), with gradients to `hidden` and `unembed` alone."""
    statistics, _ = passes.forward(hidden, unembed, targets, inverse_temperature, keep=False)
    return tile.outputs(statistics)[1]


def _forward(passes, hidden, unembed, targets, inverse_temperature):
    statistics, saved = passes.forward(hidden, unembed, targets, inverse_temperature, keep=True)
    normaliser, outputs = tile.outputs(statistics)
    return outputs, (hidden, unembed, targets, inverse_temperature, saved, normaliser)


def _backward(passes, residuals, cotangents):
    hidden, unembed, targets, inverse_temperature, saved, normaliser = residuals
    rows = tile.RowGradients(*normaliser, *cotangents)
    d_hidden, d_unembed = passes.backward(
        hidden, unembed, targets, inverse_temperature, saved, rows
    )
    no_gradient = np.zeros(targets.shape, jax.dtypes.float0)
    return d_hidden, d_unembed, no_gradient, jnp.zeros_like(inverse_temperature)


differentiable.defvjp(_forward, _backward)
