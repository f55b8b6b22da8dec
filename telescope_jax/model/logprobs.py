"""Per-token log-probs of packed rows: the one place that shifts by one.

Index t of the result describes token t: it comes from the hidden state at t − 1. The first token of
a segment has no predecessor; its log-prob and entropy are 0, and no loss mask may cover it.
"""

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels.logprob.api import token_logprobs
from kernels.logprob.sharded import sharded_token_logprobs
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import TOKENS, fsdp_axes, row_parts
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
    mesh = decoder.mesh
    arguments = (
        _flat(hidden, mesh),
        unembed.astype(hidden.dtype),
        _flat(next_targets, mesh),
    )
    settings: dict[str, Any] = {
        "unembed_layout": layout,
        "temperature": temperature,
        "ignore_index": _IGNORE,
        "implementation": None if name == "auto" else name,
    }
    if mesh is None or mesh.size == 1:
        scores = token_logprobs(*arguments, **settings)
    else:
        # The parameter is whole along an axis that does not divide it, and so is the work.
        scores = sharded_token_logprobs(
            *arguments,
            mesh=mesh,
            token_axes=TOKENS,
            vocabulary_axes=() if decoder.vocab_size % mesh.shape["tensor"] else ("tensor",),
            width_axes=fsdp_axes(decoder.config.width, mesh),
            **settings,
        )
    logprob, entropy = (_rows(x, tokens.shape, mesh) for x in (scores.logprob, scores.entropy))
    return _forward_by_one(logprob), _forward_by_one(entropy)


def _forward_by_one(x: Float[Array, "B T"]) -> Float[Array, "B T"]:
    # Of global arrays: across the parts of a row that is split, XLA sends the one token over.
    return jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]


def _parts(mesh: Mesh | None) -> tuple[int, int]:
    """How many parts the rows, and the tokens of each row, are split into."""
    if mesh is None:
        return 1, 1
    return row_parts(mesh), mesh.shape["context"]


def _flat(x: Shaped[Array, "B T ..."], mesh: Mesh | None) -> Shaped[Array, " ..."]:
    """All tokens in one axis, each device's together: in that order nothing has to move."""
    rows, context = _parts(mesh)
    if context == 1:
        return x.reshape(-1, *x.shape[2:])
    apart = x.reshape(rows, x.shape[0] // rows, context, x.shape[1] // context, *x.shape[2:])
    return jnp.swapaxes(apart, 1, 2).reshape(-1, *x.shape[2:])


def _rows(x: Shaped[Array, " N"], shape: tuple[int, ...], mesh: Mesh | None) -> Array:
    """Undoes `_flat`."""
    rows, context = _parts(mesh)
    if context == 1:
        return x.reshape(shape)
    apart = x.reshape(rows, context, shape[0] // rows, shape[1] // context)
    return jnp.swapaxes(apart, 1, 2).reshape(shape)
