"""Attention of packed rows: causal by index, within a segment, grouped key heads."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
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
    name = _name_of(q, q.shape[1], 1, implementation, jax.devices()[0])
    return _run(name, q, k, v, segments, scale, interpret)


def sharded_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T Hkv K"],
    v: Float[Array, "B T Hkv K"],
    *,
    segments: Int[Array, "B T"],
    mesh: Mesh,
    row_axes: tuple[str, ...] = ("data", "fsdp"),
    context_axes: tuple[str, ...] = (),
    head_axes: tuple[str, ...] = ("tensor",),
    scale: float | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """`attention` of global arrays, each device doing its own rows, queries and heads.

    XLA cannot split a kernel by itself, so a program over several devices needs this one. Only
    where T is split is anything exchanged: keys, values and segments are gathered and the queries
    stay, as Llama 3 was trained (Grattafiori et al., "The Llama 3 Herd of Models", 2024, 3.3.2).
    Parts are contiguous, so of one long rollout the last device does the most; of a row of many
    rollouts, whose blocks are skipped, each does about as much.

    Args:
      q, k, v, segments, scale, implementation, interpret: as in `attention`.
      mesh: its devices; axes that are not named below hold copies.
      row_axes: mesh axes that B is split over.
      context_axes: mesh axes that T is split over.
      head_axes: mesh axes that heads are split over. Key heads that do not divide are repeated
        until they do.

    Raises:
      ValueError: as `attention`; or B, T or H does not divide over its axes.
      NotImplementedError: as `attention`.
    """
    _check(q, k, v, segments)
    heads, kv_heads = q.shape[2], k.shape[2]
    sizes = {"B": (q.shape[0], row_axes), "T": (q.shape[1], context_axes), "H": (heads, head_axes)}
    local = divided(mesh, sizes)
    shards = heads // local["H"]
    if kv_heads % shards:
        copies = math.lcm(kv_heads, shards) // kv_heads
        if heads % (kv_heads * copies):
            copies = heads // kv_heads
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    part = jax.ShapeDtypeStruct((*local.values(), q.shape[3]), q.dtype)
    parts = q.shape[1] // local["T"]
    name = _name_of(part, q.shape[1], parts, implementation, mesh.devices.flat[0])
    kernel, kernel_spec = None, None
    if parts > 1 and name == "splash":
        kernel = splash.kernel_of(local["H"], q.shape[1], parts=parts, interpret=interpret)
        where = NamedSharding(mesh, PartitionSpec(None, context_axes))
        kernel_spec = kernel.manual_sharding_spec(where)

    def of_device(q, k, v, segments, kernel):
        if parts == 1:
            return _run(name, q, k, v, segments, scale, interpret)
        whole = (lax.all_gather(x, context_axes, axis=1, tiled=True) for x in (k, v, segments))
        k, v, key_segments = whole
        offset = lax.axis_index(context_axes) * q.shape[1]
        place = _Place(key_segments, offset, kernel)
        return _run(name, q, k, v, segments, scale, interpret, place)

    heads_spec = PartitionSpec(row_axes, context_axes, head_axes, None)
    rows_spec = PartitionSpec(row_axes, context_axes)
    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(heads_spec, heads_spec, heads_spec, rows_spec, kernel_spec),
        out_specs=heads_spec,
        check_vma=False,
    )(q, k, v, segments, kernel)


class _Place(NamedTuple):
    """Where the queries of a part of a row are among its keys."""

    key_segments: Array
    offset: Array
    kernel: Any
    """Splash's, which knows by itself."""


def _name_of(q: Any, keys: int, parts: int, implementation: str | None, device: Any) -> str:
    """The implementation for one device's queries.

    Args:
      q: anything with their shape and dtype.
      parts: devices that a row is split over.
    """
    order = ORDER.get(device.platform, ORDER["cpu"])
    if device.platform == "cpu" and keys <= SHORT:
        order = ("reference",)
    return choose(
        "attention",
        implementation,
        order,
        {
            "reference": lambda: (),
            "chunked": lambda: (),
            "cudnn": lambda: cudnn.refusals(q, keys, device),
            "splash": lambda: splash.refusals(q, parts=parts),
        },
    )


def _run(
    name: str,
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    scale: float | None,
    interpret: bool,
    place: _Place | None = None,
) -> Array:
    """The checked arrays of one device through the implementation `name`."""
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    if name == "splash":
        more = {} if place is None else {"key_segments": place.key_segments, "kernel": place.kernel}
        out = splash.attention(q, k, v, segments, factor, interpret=interpret, **more)
    else:
        more = {} if place is None else {"key_segments": place.key_segments, "offset": place.offset}
        run = {"reference": reference, "chunked": chunked, "cudnn": cudnn}[name]
        out = run.attention(q, k, v, segments, factor, **more)
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
