"""The compiled functions of an update, lowered from shapes alone: no array is made.

Serves what must know the program without running it: the plan of a run on hardware that is not
here, and the check that all processes of a trainer run the same one.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from telescope_jax.learner.loss import Denominators
from telescope_jax.learner.step import Step
from telescope_jax.sharding import ACTIVATIONS, bytes_per_device
from telescope_jax.types import PackedBatch


def abstract_batch(
    mesh: Mesh, rows: int, seq_len: int, *, old: bool = False, reference: bool = False
) -> PackedBatch:
    """The shapes of one microbatch, where they lie.

    Args:
      old, reference: with π_old's and the reference policy's log-probs, which the trainer adds.
    """
    where = NamedSharding(mesh, ACTIVATIONS["rows"])

    def shaped(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, seq_len), dtype, sharding=where)

    return PackedBatch(
        tokens=shaped(jnp.int32),
        segments=shaped(jnp.int32),
        positions=shaped(jnp.int32),
        loss_mask=shaped(jnp.bool_),
        logprobs=shaped(jnp.float32),
        advantages=shaped(jnp.float32),
        old_logprobs=shaped(jnp.float32) if old else None,
        reference_logprobs=shaped(jnp.float32) if reference else None,
    )


def lower_update(step: Step, mesh: Mesh, batch: PackedBatch) -> Mapping[str, jax.stages.Lowered]:
    """`score`, if the batch has log-probs that the trainer adds, which runs once a microbatch for
    each of them; `accumulate`, once a microbatch; and `apply`, once an update.

    Args:
      mesh: of real devices, or of a topology that is not here.
      batch: one microbatch, as `abstract_batch` gives it.
    """
    everywhere = NamedSharding(mesh, P())
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    params, opt_state = _state(step)
    sums = jax.eval_shape(step.zeros)
    sums = sums._replace(
        gradient=_placed(sums.gradient, step.params_shardings),
        loss=jax.tree.map(lambda _: scalar, sums.loss),
    )
    totals: Any = Denominators._make([scalar] * len(Denominators._fields))
    draw = jax.ShapeDtypeStruct((3,), jnp.uint32, sharding=everywhere) if step.rounds else None
    arrived = batch._replace(old_logprobs=None, reference_logprobs=None)
    scored = batch.old_logprobs is not None or batch.reference_logprobs is not None
    return {
        **({"score": step.score.lower(params, arrived)} if scored else {}),
        "accumulate": step.accumulate.lower(params, sums, batch, totals),
        "apply": step.apply.lower(params, opt_state, sums, scalar, draw),
    }


def bytes_beside(step: Step, *, reference: bool, updates: int) -> Mapping[str, int]:
    """What a device holds while a function of the update runs, and is no argument of it.

    Args:
      reference: whether the trainer keeps the reference policy.
      updates: of one batch; from the second on, the parameters that it met on arrival stay.
    """
    params, opt_state = map(bytes_per_device, _state(step))
    kept = params if reference else 0
    met = params if updates > 1 else 0
    return {"score": opt_state + kept, "accumulate": opt_state + kept + met, "apply": kept + met}


def _state(step: Step) -> tuple[Any, Any]:
    """Shapes of parameters and optimizer state, where they lie."""
    opt_state = jax.eval_shape(step.init_opt_state, step.params)
    return (
        _placed(step.params, step.params_shardings),
        _placed(opt_state, step.opt_shardings),
    )


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def count_params(step: Step) -> int:
    """Parameters of the policy."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(step.params))
