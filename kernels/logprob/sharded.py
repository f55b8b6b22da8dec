"""Log-probs over a mesh: tokens over some axes, the vocabulary over another.

Each device makes the statistics of its tokens over its columns. The statistics are merged over the
vocabulary's axis (16 bytes a token: one maximum and three sums) and each device then forms its part
of both gradients from the merged ones. The custom gradient is outside of `shard_map`, so both
passes state their communication and none comes from transposing the other.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from kernels.division import divided
from kernels.logprob import tile
from kernels.logprob.arguments import TokenLogprobs, finish, prepare
from kernels.logprob.differentiable import Passes
from kernels.logprob.implementations import Case, name_of, passes_of
from kernels.logprob.operands import Layout, vocabulary_axis


def sharded_token_logprobs(
    hidden: Float[Array, "T D"],
    unembed: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, " T"],
    *,
    mesh: Mesh,
    token_axes: tuple[str, ...] = ("data", "fsdp"),
    vocabulary_axes: tuple[str, ...] = ("tensor",),
    width_axes: tuple[str, ...] = ("fsdp",),
    unembed_layout: Layout = "vd",
    temperature: float | Float[Array, " T"] = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    implementation: str | None = None,
    interpret: bool = False,
) -> TokenLogprobs:
    """`token_logprobs` of global arrays, computed where `mesh` has them.

    Called inside or outside of `jit`, not inside of `shard_map`. Arrays that are laid out otherwise
    are moved first. The result does not depend on the mesh but for rounding.

    Args:
      hidden, unembed, targets, unembed_layout, temperature, softcap, ignore_index, implementation,
        interpret: as in `token_logprobs`.
      mesh: its devices; axes that are not named below hold copies.
      token_axes: mesh axes that T is split over.
      vocabulary_axes: mesh axes that V is split over; () if it is not.
      width_axes: mesh axes that the stored unembedding's D is split over; each pass gathers it over
        them once, and its gradient is scattered over them as it is summed.

    Raises:
      ValueError: as `token_logprobs`; or T, V or D do not divide over their axes.
      NotImplementedError: as `token_logprobs`.
    """
    arguments = prepare(
        hidden,
        unembed,
        targets,
        layout=unembed_layout,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
    )
    if stray := set(width_axes) - set(token_axes):
        raise ValueError(f"width_axes {sorted(stray)} must be token_axes too: {token_axes}")
    case = Case.of(mesh.devices.flat[0], hidden, unembed, unembed_layout)
    shards = divided(
        mesh,
        {
            "T": (case.tokens, token_axes),
            "V": (case.vocabulary, vocabulary_axes),
            "D": (case.width, width_axes),
        },
    )
    case = case._replace(tokens=shards["T"], vocabulary=shards["V"])
    name = name_of(implementation, case, reference_refusals=("it has no sharded form",))
    passes = passes_of(name, case, layout=unembed_layout, softcap=softcap, interpret=interpret)
    axis = vocabulary_axis(unembed_layout)
    plan = _Plan(passes, mesh, axis, token_axes, vocabulary_axes, width_axes)
    operands = (arguments.hidden, unembed, arguments.column, arguments.inverse_temperature)
    outputs = cast(tuple[Array, Array, Array], _differentiable(plan, *operands))
    return finish(arguments, *outputs)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The passes of one device and where everything lies."""

    passes: Passes
    mesh: Mesh
    axis: int
    token_axes: tuple[str, ...]
    vocabulary_axes: tuple[str, ...]
    width_axes: tuple[str, ...]

    @property
    def tokens(self) -> PartitionSpec:
        return PartitionSpec(self.token_axes, None)

    @property
    def unembed(self) -> PartitionSpec:
        specs = (self.vocabulary_axes, self.width_axes)
        return PartitionSpec(*(specs if self.axis == 0 else specs[::-1]))

    @property
    def saved(self) -> PartitionSpec:
        """What the forward pass saves is each device's own, behind an axis of devices."""
        return PartitionSpec((*self.token_axes, *self.vocabulary_axes))

    def gathered(self, unembed: Array) -> Array:
        """The device's columns in full width."""
        if not self.width_axes:
            return unembed
        return lax.all_gather(unembed, self.width_axes, axis=1 - self.axis, tiled=True)

    def local(self, column: Array, unembed: Array) -> Array:
        """The target's column among the device's; outside of [0, columns) if it has it not."""
        if not self.vocabulary_axes:
            return column
        return column - lax.axis_index(self.vocabulary_axes) * unembed.shape[self.axis]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    plan: _Plan,
    hidden: Float[Array, "T D"],
    unembed: Float[Array, "..."],
    column: Int[Array, "T 1"],
    inverse_temperature: Float[Array, "T 1"],
) -> tuple[Float[Array, "T 1"], Float[Array, "T 1"], Float[Array, "T 1"]]:
    statistics, _ = _statistics(plan, hidden, unembed, column, inverse_temperature, keep=False)
    return tile.outputs(statistics)[1]


def _forward(plan, hidden, unembed, column, inverse_temperature):
    statistics, saved = _statistics(plan, hidden, unembed, column, inverse_temperature, keep=True)
    normaliser, outputs = tile.outputs(statistics)
    return outputs, (hidden, unembed, column, inverse_temperature, saved, normaliser)


def _statistics(plan, hidden, unembed, column, inverse_temperature, *, keep: bool):
    """(statistics over all columns, what each device saves for its backward pass)."""

    def device(hidden, unembed, column, inverse_temperature):
        full = plan.gathered(unembed)
        statistics, saved = plan.passes.forward(
            hidden, full, plan.local(column, full), inverse_temperature, keep=keep
        )
        return merged(statistics, plan.vocabulary_axes), jax.tree.map(lambda x: x[None], saved)

    return jax.shard_map(
        device,
        mesh=plan.mesh,
        in_specs=(plan.tokens, plan.unembed, plan.tokens, plan.tokens),
        out_specs=(plan.tokens, plan.saved),
        check_vma=False,
    )(hidden, unembed, column, inverse_temperature)


def _backward(plan, residuals, cotangents):
    hidden, unembed, column, inverse_temperature, saved, normaliser = residuals
    rows = tile.RowGradients(*normaliser, *cotangents)

    def device(hidden, unembed, column, inverse_temperature, saved, rows):
        full = plan.gathered(unembed)
        saved = jax.tree.map(lambda x: x[0], saved)
        d_hidden, d_unembed = plan.passes.backward(
            hidden, full, plan.local(column, full), inverse_temperature, saved, rows
        )
        if plan.vocabulary_axes:
            d_hidden = lax.psum(d_hidden, plan.vocabulary_axes)
        # Scattered first, so that the sum over the other tokens' devices is of the smaller piece.
        if plan.width_axes:
            d_unembed = lax.psum_scatter(
                d_unembed, plan.width_axes, scatter_dimension=1 - plan.axis, tiled=True
            )
        if rest := tuple(axis for axis in plan.token_axes if axis not in plan.width_axes):
            d_unembed = lax.psum(d_unembed, rest)
        return d_hidden, d_unembed

    d_hidden, d_unembed = jax.shard_map(
        device,
        mesh=plan.mesh,
        in_specs=(plan.tokens, plan.unembed, *[plan.tokens] * 2, plan.saved, plan.tokens),
        out_specs=(plan.tokens, plan.unembed),
        check_vma=False,
    )(hidden, unembed, column, inverse_temperature, saved, rows)
    no_gradient = np.zeros(column.shape, jax.dtypes.float0)
    return d_hidden, d_unembed, no_gradient, jnp.zeros_like(inverse_temperature)


_differentiable.defvjp(_forward, _backward)


def merged(statistics: tile.Statistics, axes: tuple[str, ...]) -> tile.Statistics:
    """The statistics over the columns of all devices along `axes`."""
    if not axes:
        return statistics
    peak = lax.pmax(statistics.peak, axes)
    sums = (*tile.rescaled(statistics, peak), statistics.target)
    return tile.Statistics(peak, *lax.psum(sums, axes))
