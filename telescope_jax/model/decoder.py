"""The policy as pure functions of a parameter tree: init, packed forward, prefill, decode.

Parameters are a nested dict of arrays, float32 or, where the learner keeps them so, bfloat16. A
leaf's path is its name, for good: sharding and decay rules match it, checkpoints store it, and the
Hugging Face table maps it:

    embed/embedding [V D]
    layers/0/attention_norm/scale [D]         layers/0/mlp_norm/scale [D]
    layers/0/attention/{q,k,v,o}/kernel       layers/0/attention/{q,k,v}/bias (qwen2)
    layers/0/attention/{q_norm,k_norm}/scale  (qwen3)
    layers/0/mlp/{gate,up,down}/kernel
    final_norm/scale [D]                      unembed/kernel [D V] (untied)

Kernels are [in, out]. A tied model has one embedding and no unembed.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from telescope_jax.config import PolicyConfig
from telescope_jax.model.layers import Block, KvCache, Rotary, Stack
from telescope_jax.model.rope import YarnScaling, inverse_frequencies, scaling_of
from telescope_jax.sharding import constrain, shardings
from telescope_jax.types import Params


class Decoder:
    """A decoder of the Llama, Qwen2 or Qwen3 family; holds its structure and no arrays.

    Every method is pure and may be jitted; parameters come first.
    """

    def __init__(
        self,
        config: PolicyConfig,
        vocab_size: int,
        *,
        mesh: Mesh | None = None,
    ):
        """
        Args:
          config: sizes and numerics; `config.vocab_size`, if set, is V.
          vocab_size: the tokenizer's, V where the config leaves it at 0. V may be larger: the rows
            beyond are ordinary parameters that no text uses.
          mesh: where parameters and rows are split as sharding.py says; None says nothing of
            placement, for one device or a layout of the caller's.

        Raises:
          ValueError: the config's vocabulary is smaller than the tokenizer's, or its rope settings
            are not those of default, llama3 or yarn.
        """
        if 0 < config.vocab_size < vocab_size:
            raise ValueError(
                f"policy.vocab_size={config.vocab_size} has no room for the tokenizer's "
                f"{vocab_size} tokens; set it to {vocab_size} or more, or to 0"
            )
        self.config = config
        self.vocab_size = config.vocab_size or vocab_size
        scaling = scaling_of(config.rope_scaling)
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, scaling)
        magnitude = scaling.magnitude if isinstance(scaling, YarnScaling) else 1.0
        self.mesh, self._constrain = mesh, constrain(mesh)
        self._build = functools.partial(
            Stack, config, self.vocab_size, Rotary(tuple(frequencies), magnitude), mesh
        )
        stack = nnx.eval_shape(lambda: self._build(rngs=nnx.Rngs(0)))
        self._graph, _ = nnx.split(stack)

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype: of activations and of the KV cache."""
        return jnp.dtype(self.config.compute_dtype)

    def init(self, seed: int | jax.Array) -> Params:
        """Random parameters from a seed or a jax key; traceable, so it can run sharded."""
        key = jax.random.key(seed) if isinstance(seed, int) else seed
        state = nnx.to_pure_dict(nnx.state(self._build(rngs=nnx.Rngs(params=key))))
        return _rename(state, str)

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """The residual stream after the final norm, in the compute dtype.

        A token sees those before it in its own segment. Segment 0 is padding: finite, and unread.
        """
        stack = self._bind(params)
        x = self._constrain(stack.lookup(tokens), "residual")
        block = self._remat(lambda b, x: b.packed(x, segments, positions)[0])
        if self.config.scan_layers:
            x = self._scanned(block, stack.layers[0], params["layers"], x)
        else:
            for layer in stack.layers:
                x = block(layer, x)
        return self._constrain(stack.final_norm(x), "residual")

    def unembedding(self, params: Params) -> tuple[jax.Array, Literal["vd", "dv"]]:
        """The matrix that turns hidden states into logits, and its layout."""
        if self.config.tied_embeddings:
            return params["embed"]["embedding"], "vd"
        return params["unembed"]["kernel"], "dv"

    def logits(self, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """float32 logits at full precision, whatever the compute dtype."""
        matrix, layout = self.unembedding(params)
        return jnp.einsum(
            f"...d,{layout}->...v",
            hidden,
            matrix.astype(hidden.dtype),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def empty_cache(self, slots: int, context: int) -> KvCache:
        """Zeros for `slots` sequences of at most `context` tokens."""
        config = self.config
        shape = (slots, config.kv_heads, context, config.head_dim)
        return tuple(
            (jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))
            for _ in range(config.layers)
        )

    def prefill(
        self, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
    ) -> tuple[Float[Array, "B V"], KvCache]:
        """Reads whole prompts, each from position 0.

        Args:
          tokens: prompts, padded on the right.
          lengths: real tokens of each row, ≥ 1; of a row of length 0 nothing has a meaning.

        Returns:
          Logits after the last real token, and a cache of B slots and T positions, whose entries
          beyond the length mean nothing.
        """
        stack = self._bind(params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        segments = (positions < lengths[:, None]).astype(jnp.int32)
        x, cache = stack.lookup(tokens), []
        for layer in stack.layers:
            x, k, v = layer.packed(x, segments, positions)
            cache.append((jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)))
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        x = stack.final_norm(jnp.take_along_axis(x, last, axis=1)[:, 0])
        return self.logits(params, x), tuple(cache)

    def decode(
        self,
        params: Params,
        tokens: Int[Array, " S"],
        positions: Int[Array, " S"],
        cache: KvCache,
    ) -> tuple[Float[Array, "S V"], KvCache]:
        """One step of every slot.

        Writes each token's key and value at its position and attends to positions ≤ it, so what an
        earlier request left further on in the slot is never read. A position outside the cache
        writes nothing.

        Returns:
          Logits of the next token, and the cache.
        """
        stack = self._bind(params)
        x, written = stack.lookup(tokens), []
        for layer, kept in zip(stack.layers, cache, strict=True):
            x, kept = layer.cached(x, positions, kept)
            written.append(kept)
        return self.logits(params, stack.final_norm(x)), tuple(written)

    def _bind(self, params: Params) -> Stack:
        layers = {int(index): layer for index, layer in params["layers"].items()}
        return nnx.merge(self._graph, {**params, "layers": layers})

    def _scanned(
        self, apply: Callable[[Block, jax.Array], jax.Array], first: Block, layers: Params, x: Array
    ) -> Array:
        """`apply` of every layer in turn, as one loop over their stacked parameters.

        A layer's weights are gathered over fsdp inside the loop, one layer at a time: the stack is
        split as its layers are, and so is what a turn takes out of it.
        """
        graph, _ = nnx.split(first)
        in_order = [layers[key] for key in sorted(layers, key=int)]
        specs = in_order[0] if self.mesh is None else shardings(in_order[0], self.mesh)

        def cast(path: tuple, leaf: Array) -> Array:
            # Where the modules would cast anyway; a norm multiplies by its scale in float32.
            return leaf if path[-1].key == "scale" else leaf.astype(self.dtype)

        def pin(leaf: Array, where: Any, *, stacked: bool) -> Array:
            if self.mesh is None:
                return leaf
            spec = P(None, *where.spec) if stacked else where.spec
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))

        def stack(where: Any, *leaves: Array) -> Array:
            return pin(jnp.stack(leaves), where, stacked=True)

        # Cast before stacking: the copy is of the smaller type.
        narrow = [jax.tree_util.tree_map_with_path(cast, layer) for layer in in_order]
        stacked = jax.tree.map(stack, specs, *narrow)

        def turn(x: Array, layer: Params) -> tuple[Array, None]:
            layer = jax.tree.map(functools.partial(pin, stacked=False), layer, specs)
            return apply(nnx.merge(graph, layer), x), None

        return jax.lax.scan(turn, x, stacked)[0]

    def _remat(self, apply: Callable[[Block, jax.Array], jax.Array]) -> Callable:
        """`apply(block, x)`, of which backward recomputes what `config.remat` says."""
        if self.config.remat == "none":
            return apply
        keep_dots = self.config.remat == "dots"
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if keep_dots else None
        # A loop already keeps the recomputation apart from the first run; without one, XLA would
        # see the same operations twice and keep the first results.
        apart = not self.config.scan_layers

        def apply_remat(block: Block, x: jax.Array) -> jax.Array:
            graph, state = nnx.split(block)
            run = jax.checkpoint(
                lambda state, x: apply(nnx.merge(graph, state), x),
                policy=policy,
                prevent_cse=apart,
            )
            return run(state, x)

        return apply_remat


def _rename(tree: dict, key: Callable) -> dict:
    """The same nested dict with every key passed through `key`: string keys survive any store."""
    return {
        key(name): _rename(value, key) if isinstance(value, dict) else value
        for name, value in tree.items()
    }
