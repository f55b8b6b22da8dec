"""Attention of packed rows: causal by index, within a segment, grouped key heads."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from kernels.attention import chunked, cudnn, reference, splash
from kernels.choice import choose
from kernels.division import divided

SHORT = 128
"""Rows up to this many tokens run dense on a CPU: they are one block of `chunked`, which costs as
much to run and more to compile."""

ORDER = {
    "cpu": ("chunked",),
    "gpu": ("cudnn", "chunked"),
    "tpu": ("splash", "chunked"),
}
"""What `implementation=None` tries, by platform."""


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hkv K"],
    v: Float[Array, "B T Hkv K"],
    *,
    segments: Int[Array, "B T"],
    scale: float | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """softmax(scale · q kᵀ) v over the keys s ≤ t of the query's own segment.

    Args:
      q, k, v: of one float type; H is a multiple of Hkv, and query head h reads key head
        h // (H / Hkv). The softmax is in float32 whatever the type.
      segments: the rollouts of a row, numbered from 1; 0 is padding, whose rows are 0 and give and
        receive no gradient.
      scale: of the scores; None is K^-½.
      implementation: `reference` (dense), `chunked` (plain JAX), `cudnn`, `splash`, or None to pick
        by platform and T.
      interpret: run `splash` in Python, on any platform; for tests.

    Raises:
      ValueError: shapes or types do not fit, or there is no such implementation.
      NotImplementedError: the implementation asked for cannot take the case.
    """
    _check(q, k, v, segments)
    return _attention(q, k, v, segments, scale, implementation, interpret, jax.devices()[0])


def sharded_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hkv K"],
    v: Float[Array, "B T Hkv K"],
    *,
    segments: Int[Array, "B T"],
    mesh: Mesh,
    row_axes: tuple[str, ...] = ("data", "fsdp"),
    head_axes: tuple[str, ...] = ("tensor",),
    scale: float | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """`attention` of global arrays, each device doing its own rows and heads; nothing is exchanged.

    XLA cannot split a kernel by itself, so a program over several devices needs this one.

    Args:
      q, k, v, segments, scale, implementation, interpret: as in `attention`.
      mesh: its devices; axes that are not named below hold copies.
      row_axes: mesh axes that B is split over.
      head_axes: mesh axes that heads are split over. Key heads that do not divide are repeated
        until they do.

    Raises:
      ValueError: as `attention`; or B or H does not divide over its axes.
      NotImplementedError: as `attention`.
    """
    _check(q, k, v, segments)
    heads, kv_heads = q.shape[2], k.shape[2]
    local = divided(mesh, {"B": (q.shape[0], row_axes), "H": (heads, head_axes)})
    shards = heads // local["H"]
    if kv_heads % shards:
        copies = math.lcm(kv_heads, shards) // kv_heads
        if heads % (kv_heads * copies):
            copies = heads // kv_heads
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    device = mesh.devices.flat[0]

    def of_device(q, k, v, segments):
        return _attention(q, k, v, segments, scale, implementation, interpret, device)

    heads_spec = PartitionSpec(row_axes, None, head_axes, None)
    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(heads_spec, heads_spec, heads_spec, PartitionSpec(row_axes, None)),
        out_specs=heads_spec,
        check_vma=False,
    )(q, k, v, segments)


def _attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    scale: float | None,
    implementation: str | None,
    interpret: bool,
    device: Any,
) -> Array:
    """The checked arrays of one device through the implementation that takes them."""
    order = ORDER.get(device.platform, ORDER["cpu"])
    if device.platform == "cpu" and q.shape[1] <= SHORT:
        order = ("reference",)
    name = choose(
        "attention",
        implementation,
        order,
        {
            "reference": lambda: (),
            "chunked": lambda: (),
            "cudnn": lambda: cudnn.refusals(q, device),
            "splash": lambda: splash.refusals(q),
        },
    )
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    if name == "splash":
        out = splash.attention(q, k, v, segments, factor, interpret=interpret)
    else:
        run = {"reference": reference, "chunked": chunked, "cudnn": cudnn}[name]
        out = run.attention(q, k, v, segments, factor)
    # Also cuts the gradient of padding: nothing of it may reach the parameters.
    return jnp.where((segments != 0)[:, :, None, None], out, jnp.zeros_like(out))


def _check(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> None:
    """Raises ValueError with everything that is wrong with the arguments."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or segments.ndim != 2:
        raise ValueError(
            f"q, k, v and segments have shapes {q.shape}, {k.shape}, {v.shape} and "
            f"{segments.shape}; they must be [B, T, H, K], twice [B, T, Hkv, K], and [B, T]"
        )
    wrong = []
    if not q.shape[:2] == k.shape[:2] == segments.shape or q.shape[3] != k.shape[3]:
        wrong.append(
            f"q {q.shape}, k {k.shape} and segments {segments.shape} disagree on B, T or K"
        )
    if q.shape[2] % k.shape[2]:
        wrong.append(f"{q.shape[2]} query heads do not divide over {k.shape[2]} key heads")
    if not jnp.issubdtype(q.dtype, jnp.floating) or not q.dtype == k.dtype == v.dtype:
        wrong.append(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; cast to one float type")
    if not jnp.issubdtype(segments.dtype, jnp.integer):
        wrong.append(f"segments are {segments.dtype}, not integers")
    if wrong:
        raise ValueError("; ".join(wrong))
