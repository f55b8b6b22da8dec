"""The parts of the decoder as Flax NNX modules: attention, gated MLP, block, and the stack.

One stack covers three families: Llama; Qwen2, whose q, k and v carry biases; Qwen3, whose q and k
pass an RMSNorm a head before the rotation. Everything else that differs is a size.

On a mesh, activations are pinned to the layouts of sharding.py by their kind ("residual", "heads",
"mlp") and attention runs on each device's own rows, queries and heads. Without a mesh the modules
say nothing of placement, which is what an engine wants.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kernels.attention.api import attention, sharded_attention
from telescope_jax.config import PolicyConfig
from telescope_jax.model.lookup import look_up
from telescope_jax.model.rope import rotate
from telescope_jax.sharding import ROWS, constrain

LayerCache = tuple[
    Float[Array, "slots kv_heads context head_dim"],
    Float[Array, "slots kv_heads context head_dim"],
]
"""Rotated keys, and values, of one layer in the compute dtype. Heads come before positions: a step
then reads each head's rows as they lie, where XLA CPU would transpose the whole cache first."""

KvCache = tuple[LayerCache, ...]
"""One a layer, and not one array: a layer taken out of an array is a copy of it at every step."""

_INITIAL_STD = 0.02
"""Of every matrix: `initializer_range` of the published Llama, Qwen2 and Qwen3 models. Larger ones
(fan_in^-½ at small widths) took longer to warm up, and left RL at a flatter policy that it raised
more slowly."""

_MASKED = -1e30  # finite: a slot that attends to nothing must not turn into NaN


class Rotary(NamedTuple):
    """The rotation's constants. A tuple is structure to NNX, where an array would be state."""

    frequencies: tuple[float, ...]
    magnitude: float


class Projection(nnx.Linear):
    """A linear map of the last axis.

    The rows are flattened first: XLA CPU transposes a whole activation for the backward pass of a
    product with two row axes, which costs as much again as the products (measured, 1.6×).
    """

    def __call__(self, x: Float[Array, "*rows n"]) -> Float[Array, "*rows m"]:
        flat = super().__call__(x.reshape(-1, x.shape[-1]))
        return flat.reshape(*x.shape[:-1], flat.shape[-1])


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions."""

    def __init__(self, config: PolicyConfig, rotary: Rotary, mesh: Mesh | None, rngs: nnx.Rngs):
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.head_dim
        self.implementation = None if config.attention == "auto" else config.attention
        self.rotary = rotary
        self.mesh, self.constrain = mesh, constrain(mesh)
        biased = config.family == "qwen2"
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q = _linear(config.width, queries, config, rngs, bias=biased)
        self.k = _linear(config.width, keys, config, rngs, bias=biased)
        self.v = _linear(config.width, keys, config, rngs, bias=biased)
        self.o = _linear(queries, config.width, config, rngs)
        self.normed = config.family == "qwen3"
        if self.normed:
            self.q_norm = _norm(self.head_dim, config, rngs)
            self.k_norm = _norm(self.head_dim, config, rngs)

    def project(
        self, x: Float[Array, "*rows D"], positions: Int[Array, "*rows"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [*rows H K], keys and values [*rows kv_heads K], rotated."""
        q = self.q(x).reshape(*x.shape[:-1], self.heads, self.head_dim)
        k = self.k(x).reshape(*x.shape[:-1], self.kv_heads, self.head_dim)
        v = self.v(x).reshape(*x.shape[:-1], self.kv_heads, self.head_dim)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        turn = np.asarray(self.rotary.frequencies), self.rotary.magnitude
        return rotate(q, positions, *turn), rotate(k, positions, *turn), v

    def packed(
        self,
        x: Float[Array, "B T D"],
        segments: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], jax.Array, jax.Array]:
        """Causal attention inside each segment; also the keys and values [B T kv_heads K]."""
        q, k, v = (self.constrain(part, "heads") for part in self.project(x, positions))
        if self.mesh is None or self.mesh.size == 1:
            mixed = attention(q, k, v, segments=segments, implementation=self.implementation)
        else:
            mixed = sharded_attention(
                q,
                k,
                v,
                segments=segments,
                mesh=self.mesh,
                row_axes=ROWS,
                context_axes=("context",),
                head_axes=("tensor",),
                implementation=self.implementation,
            )
        return self.o(mixed.reshape(*x.shape[:-1], self.heads * self.head_dim)), k, v

    def cached(
        self, x: Float[Array, "S D"], positions: Int[Array, " S"], cache: LayerCache
    ) -> tuple[Float[Array, "S D"], LayerCache]:
        """One token a slot: writes its key and value at `positions`, attends to those ≤ it."""
        q, k, v = self.project(x, positions)
        slots, (keys, values) = jnp.arange(x.shape[0]), cache
        keys = keys.at[slots, :, positions].set(k.astype(keys.dtype))
        values = values.at[slots, :, positions].set(v.astype(values.dtype))
        grouped = q.reshape(x.shape[0], self.kv_heads, -1, self.head_dim)
        scores = jnp.einsum("sgrk,sgck->sgrc", grouped, keys, preferred_element_type=jnp.float32)
        seen = jnp.arange(keys.shape[2])[None, :] <= positions[:, None]
        scores = jnp.where(seen[:, None, None, :], scores * self.head_dim**-0.5, _MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("sgrc,sgck->sgrk", weights, values)
        return self.o(mixed.reshape(x.shape[0], -1)), (keys, values)


class Mlp(nnx.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020): down(silu(gate x) · up x)."""

    def __init__(self, config: PolicyConfig, mesh: Mesh | None, rngs: nnx.Rngs):
        self.constrain = constrain(mesh)
        self.gate = _linear(config.width, config.mlp_width, config, rngs)
        self.up = _linear(config.width, config.mlp_width, config, rngs)
        self.down = _linear(config.mlp_width, config.width, config, rngs)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        gate, up = self.constrain(self.gate(x), "mlp"), self.constrain(self.up(x), "mlp")
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """Pre-norm block: x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: PolicyConfig, rotary: Rotary, mesh: Mesh | None, rngs: nnx.Rngs):
        self.constrain = constrain(mesh)
        self.attention_norm = _norm(config.width, config, rngs)
        self.attention = Attention(config, rotary, mesh, rngs)
        self.mlp_norm = _norm(config.width, config, rngs)
        self.mlp = Mlp(config, mesh, rngs)

    def packed(
        self, x: Float[Array, "B T D"], segments: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], jax.Array, jax.Array]:
        mixed, k, v = self.attention.packed(self.attention_norm(x), segments, positions)
        x = self.constrain(x + mixed, "residual")
        return self.constrain(x + self.mlp(self.mlp_norm(x)), "residual"), k, v

    def cached(
        self, x: Float[Array, "S D"], positions: Int[Array, " S"], cache: LayerCache
    ) -> tuple[Float[Array, "S D"], LayerCache]:
        mixed, cache = self.attention.cached(self.attention_norm(x), positions, cache)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Stack(nnx.Module):
    """Embedding, blocks, final norm, and the unembedding unless it is the embedding."""

    def __init__(
        self,
        config: PolicyConfig,
        vocab_size: int,
        rotary: Rotary,
        mesh: Mesh | None,
        rngs: nnx.Rngs,
    ):
        self.embed = nnx.Embed(
            vocab_size,
            config.width,
            dtype=_dtype(config),
            embedding_init=nnx.initializers.normal(_INITIAL_STD),
            rngs=rngs,
        )
        self.layers = nnx.List([Block(config, rotary, mesh, rngs) for _ in range(config.layers)])
        self.constrain = constrain(mesh)
        self.final_norm = _norm(config.width, config, rngs)
        if not config.tied_embeddings:
            self.unembed = _linear(config.width, vocab_size, config, rngs)

    def lookup(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Embeddings of `tokens`, in the compute dtype; NaN for an id outside the vocabulary."""
        dtype = jnp.dtype(self.embed.dtype)
        return look_up(self.embed.embedding[...], tokens, dtype, self.constrain)


def _dtype(config: PolicyConfig) -> jnp.dtype:
    return jnp.dtype(config.compute_dtype)


def _linear(
    fan_in: int, fan_out: int, config: PolicyConfig, rngs: nnx.Rngs, *, bias: bool = False
) -> Projection:
    return Projection(
        fan_in,
        fan_out,
        use_bias=bias,
        dtype=_dtype(config),
        kernel_init=nnx.initializers.normal(_INITIAL_STD),
        rngs=rngs,
    )


def _norm(size: int, config: PolicyConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(size, epsilon=config.norm_eps, dtype=_dtype(config), rngs=rngs)
