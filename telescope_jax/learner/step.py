"""The compiled parts of one update, as pure functions of arrays.

    totals  = Σ count(microbatch)                       over the whole update, on all devices
    sums    = zeros(); for each microbatch: sums = accumulate(params, sums, microbatch, totals)
    params, opt_state, report = apply(params, opt_state, sums, learning_rate)

Every microbatch is divided by the totals of the update, so gradients add: they are the same for
every split into microbatches and every mesh. One microbatch shape means one compilation.

Sums and optimizer state are donated: use them once. Parameters are not: engines, evals and the
checkpoint writer may read a version while the next one is made.

Parameters are kept in `optimizer.master_dtype`. Gradients, norm, clip and direction are float32
whatever that is; a bfloat16 value is rounded stochastically once, at the end of an update.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, UInt32

from telescope_jax.config import OptimizerConfig
from telescope_jax.learner.loss import (
    Denominators,
    LossSettings,
    LossSums,
    denominators,
    policy_loss,
)
from telescope_jax.learner.optimizer import adamw_direction, clip_factor
from telescope_jax.learner.rounding import draw_key, round_tree
from telescope_jax.model.decoder import Decoder
from telescope_jax.model.logprobs import logprobs
from telescope_jax.sharding import ACTIVATIONS, shardings
from telescope_jax.types import PackedBatch, Params


class UpdateSums(NamedTuple):
    """What microbatches add up to."""

    gradient: Params
    loss: LossSums


class UpdateReport(NamedTuple):
    """Of one optimizer update; it changed nothing if not finite, or if there was no loss token."""

    grad_norm: Float[Array, ""]
    finite: Bool[Array, ""]
    loss: LossSums


class Step:
    """The compiled functions for one model, mesh, loss and optimizer."""

    def __init__(
        self,
        decoder: Decoder,
        mesh: Mesh,
        settings: LossSettings,
        optimizer: OptimizerConfig,
        *,
        temperature: float,
        stable_old: bool = False,
    ):
        """
        Args:
          settings: the loss; static.
          temperature: the sampling temperature, which divides the logits here too.
          stable_old: the batch's π_old is π itself, without gradient: right when each batch is
            trained by one update, and it saves a forward pass.
        """
        self.decoder = decoder
        self._settings, self._temperature = settings, temperature
        self._stable_old = stable_old
        self._direction, self._clip = adamw_direction(optimizer), optimizer.clip_norm
        self._master = jnp.dtype(optimizer.master_dtype)
        self.rounds = self._master != jnp.float32

        self.params = jax.eval_shape(self._init, jax.random.key(0))
        self.params_shardings = shardings(self.params, mesh)
        self.opt_shardings = shardings(jax.eval_shape(self._init_opt_state, self.params), mesh)
        rows, everywhere = NamedSharding(mesh, ACTIVATIONS["rows"]), NamedSharding(mesh, P())
        sums = UpdateSums(self.params_shardings, jax.tree.map(lambda _: everywhere, _no_loss()))

        self.init_params = jax.jit(self._init, out_shardings=self.params_shardings)
        self.init_opt_state = jax.jit(self._init_opt_state, out_shardings=self.opt_shardings)
        self.zeros = jax.jit(self._zeros, out_shardings=sums)
        self.count = jax.jit(self._count, out_shardings=everywhere)
        self.score = jax.jit(self._score, out_shardings=rows)
        self.accumulate = jax.jit(self._accumulate, donate_argnums=1, out_shardings=sums)
        self.apply = jax.jit(
            self._apply,
            # New parameters take the place of the gradient, if they are as wide as it.
            donate_argnums=(1,) if self.rounds else (1, 2),
            out_shardings=(self.params_shardings, self.opt_shardings, everywhere),
        )
        # A copy that no later update can donate away under a slow reader (CK-04).
        self.copy_opt_state = jax.jit(
            lambda state: jax.tree.map(jnp.copy, state), out_shardings=self.opt_shardings
        )

    def _init(self, key: jax.Array) -> Params:
        return _cast(self.decoder.init(key), self._master)

    def _init_opt_state(self, params: Params) -> Any:
        return self._direction.init(_cast(params, jnp.float32))

    def _zeros(self) -> UpdateSums:
        gradient = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), self.params)
        return UpdateSums(gradient, _no_loss())

    def _count(self, batch: PackedBatch, so_far: Denominators) -> Denominators:
        return jax.tree.map(
            jnp.add, so_far, denominators(jnp.asarray(batch.segments), jnp.asarray(batch.loss_mask))
        )

    def _score(self, params: Params, batch: PackedBatch) -> Float[Array, "B T"]:
        """log π of the loss tokens, for π_old and the reference policy; 0 elsewhere."""
        return self._policy(params, batch)[0]

    def _policy(self, params: Params, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        return logprobs(
            self.decoder,
            params,
            jnp.asarray(batch.tokens),
            jnp.asarray(batch.segments),
            jnp.asarray(batch.positions),
            temperature=self._temperature,
            wanted=jnp.asarray(batch.loss_mask),
        )

    def _accumulate(
        self, params: Params, sums: UpdateSums, batch: PackedBatch, totals: Denominators
    ) -> UpdateSums:
        def share(params: Params) -> tuple[Float[Array, ""], LossSums]:
            scores, entropy = self._policy(params, batch)
            old = jax.lax.stop_gradient(scores) if self._stable_old else batch.old_logprobs
            return policy_loss(
                scores, entropy, batch._replace(old_logprobs=old), totals, self._settings
            )

        # Of float32 copies, that no gradient is rounded on its way here; they are cast back before
        # a product in bfloat16, and XLA drops such a pair.
        gradient, loss = jax.grad(share, has_aux=True)(_cast(params, jnp.float32))
        return jax.tree.map(jnp.add, sums, UpdateSums(gradient, loss))

    def _apply(
        self,
        params: Params,
        opt_state: Any,
        sums: UpdateSums,
        learning_rate: Float[Array, ""],
        draw: UInt32[Array, "3"] | None = None,
    ) -> tuple[Params, Any, UpdateReport]:
        """One update; `draw` is (seed, step, update within the step) where parameters round."""
        norm = optax.tree.norm(sums.gradient)
        # A sum of squares overflows before its terms do, so this also catches what is merely huge.
        finite = jnp.isfinite(norm)
        # Without a loss token Adam's moments would still move the parameters (LM-04).
        applied = finite & (sums.loss.tokens > 0)
        factor = clip_factor(norm, self._clip)
        clipped = jax.tree.map(lambda g: g * factor, sums.gradient)
        wide = _cast(params, jnp.float32)
        direction, new_opt_state = self._direction.update(clipped, opt_state, wide)
        new_params = jax.tree.map(lambda p, d: p - learning_rate * d, wide, direction)
        if self.rounds:
            assert draw is not None, "parameters in bfloat16 are rounded by a draw"
            new_params = round_tree(new_params, draw_key(draw))

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(applied, new, old)

        return (
            jax.tree.map(keep, new_params, params),
            jax.tree.map(keep, new_opt_state, opt_state),
            UpdateReport(norm, finite, sums.loss),
        )


def _cast(params: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _no_loss() -> LossSums:
    return LossSums(*(jnp.zeros((), jnp.float32) for _ in LossSums._fields))
