"""Per-token log-probs of packed rows: the one place that shifts by one.

Index t of the result describes token t: it comes from the hidden state at t − 1. The first token of
a segment has no predecessor; its log-prob and entropy are 0, and no loss mask may cover it.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.logprob.api import token_logprobs
from kernels.logprob.sharded import sharded_token_logprobs
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import ROWS
from telescope_jax.types import Params

_IGNORE = -100


def scored(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Which tokens have a log-prob: those whose predecessor is of the same rollout."""
    before = jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    return (segments > 0) & (segments == before)


def logprobs(
    decoder: Decoder,
    params: Params,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    wanted: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(tokens[t] | tokens[<t]) and the entropy of the distribution that token t came from.

    Args:
      segments: the rollouts of a row, numbered from 1; 0 is padding.
      positions: places within the rollout, from 0.
      temperature: the sampling temperature, > 0; logits are divided by it.
      wanted: tokens to score, for instance the loss mask; None scores all that can be.

    Returns:
      Log-probs and entropies in nats, float32; both 0 where nothing was scored.
    """
    hidden = decoder.hidden(params, tokens, segments, positions)
    unembed, layout = decoder.unembedding(params)
    mask = scored(segments) if wanted is None else scored(segments) & wanted
    targets = jnp.where(mask, tokens, _IGNORE)
    # The state at t scores token t + 1; the last state of a row scores nothing.
    next_targets = jnp.pad(targets, ((0, 0), (0, 1)), constant_values=_IGNORE)[:, 1:]
    name = decoder.config.logprob
    arguments = (
        hidden.reshape(-1, hidden.shape[-1]),
        unembed.astype(hidden.dtype),
        next_targets.reshape(-1),
    )
    settings: dict[str, Any] = {
        "unembed_layout": layout,
        "temperature": temperature,
        "ignore_index": _IGNORE,
        "implementation": None if name == "auto" else name,
    }
    mesh = decoder.mesh
    if mesh is None or mesh.size == 1:
        scores = token_logprobs(*arguments, **settings)
    else:
        # The parameter is whole along an axis that does not divide it, and so is the work.
        tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
        scores = sharded_token_logprobs(
            *arguments,
            mesh=mesh,
            token_axes=ROWS,
            vocabulary_axes=() if decoder.vocab_size % tensor else ("tensor",),
            width_axes=() if decoder.config.width % fsdp else ("fsdp",),
            **settings,
        )
    return _forward_by_one(scores.logprob, tokens), _forward_by_one(scores.entropy, tokens)


def _forward_by_one(flat: Float[Array, " N"], like: Int[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.pad(flat.reshape(like.shape), ((0, 0), (1, 0)))[:, :-1]
