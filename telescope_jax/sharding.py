"""Where every array lies: the mesh, one rule list for parameters, one table for activations.

Axes: `data` holds copies of the parameters, `fsdp` splits them (and the optimizer state), `tensor`
splits heads, MLP and vocabulary, `context` splits the tokens of each row. Rows of a batch are split
over data × fsdp.

Parameters are split over fsdp × context. The devices of a row's parts would otherwise hold the same
state and repeat each other's optimizer; a layer is gathered before it is used either way, and its
gradient is summed over both axes either way.

A parameter is placed by the first rule whose regex matches the end of its path, so the rules place
Adam's moments too, which repeat the paths. A scalar lies everywhere.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from telescope_jax.config import MeshConfig

AXES = ("data", "fsdp", "context", "tensor")
ROWS = ("data", "fsdp")
"""The axes that the rows of a batch are split over."""
TOKENS = (*ROWS, "context")
"""The axes that its tokens are split over: rows, and each row's tokens."""

Rules = Sequence[tuple[str, P]]

RULES: Rules = (
    (r"embed/embedding", P("tensor", "fsdp")),
    (r"unembed/kernel", P("fsdp", "tensor")),
    (r"attention/[qkv]/kernel", P("fsdp", "tensor")),
    (r"attention/[qkv]/bias", P("tensor")),
    (r"attention/o/kernel", P("tensor", "fsdp")),
    (r"mlp/(gate|up)/kernel", P("fsdp", "tensor")),
    (r"mlp/down/kernel", P("tensor", "fsdp")),
    (r"norm/scale", P()),
)
"""Kernels are [in, out]: what enters a branch is split by output, what leaves it by input, so that
a branch needs one all-reduce over `tensor`. "fsdp" stands for fsdp × context; see `fsdp_axes`."""

ACTIVATIONS: dict[str, P] = {
    "rows": P(ROWS, "context"),  # B T
    "residual": P(ROWS, "context", None),  # B T D
    "heads": P(ROWS, "context", "tensor", None),  # B T H K
    "mlp": P(ROWS, "context", "tensor"),  # B T F
    "split_table": P("tensor", ("fsdp", "context")),  # V D, as its parameter
    "table": P("tensor", None),  # V D, gathered over fsdp before tokens are looked up
}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of data × fsdp × context × tensor over the first devices.

    Raises:
      ValueError: there are too few devices, or a process of several has none of its own.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(getattr(config, axis) for axis in AXES)
    sizes = " × ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
    needed = math.prod(shape)
    whole = {device.process_index for device in devices}
    if len({device.process_index for device in devices[:needed]}) < len(whole):
        raise ValueError(
            f"{sizes} takes {needed} of {len(devices)} devices and leaves some of {len(whole)} "
            "processes without one; let the mesh take all devices"
        )
    if needed > len(devices):
        raise ValueError(
            f"{sizes} needs {needed} devices and there are {len(devices)}; make one of them smaller"
        )
    return Mesh(_laid_out(devices[:needed], shape), AXES)


def _laid_out(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """The devices as a mesh: on TPUs along their links, and of several slices `data` across them.

    Between slices there is only the data center's network, so only gradients may go over it.
    """
    if devices[0].platform != "tpu" or len(devices) == 1:
        # In order: neighbours in the last axis are of one process.
        return np.asarray(devices).reshape(shape)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    data, *rest = shape
    if data % slices:
        raise ValueError(
            f"mesh.data={data} does not divide over {slices} slices; set it to a multiple, since "
            "nothing else may be split between slices"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (data // slices, *rest),
        (slices, *[1] * len(rest)),
        devices,
        allow_split_physical_axes=True,
    )


def bytes_per_device(tree: Any) -> int:
    """What one device holds of arrays, or of shapes that say where they lie."""

    def of(leaf: Any) -> int:
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(map(of, jax.tree.leaves(tree)))


def shardings(tree: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """One NamedSharding a leaf, for arrays or shapes.

    An axis that does not divide a dimension is left out there (a vocabulary of 31 entries over 2
    devices is replicated): `table` shows it.

    Raises:
      ValueError: lists every parameter that no rule covers, or whose rule has too many dimensions.
    """
    problems: list[str] = []

    def place(path: tuple, leaf: Any) -> NamedSharding:
        name, shape = path_name(path), tuple(leaf.shape)
        spec = P() if not shape else _match(name, rules)
        if spec is None:
            problems.append(f"no sharding rule covers {name} {list(shape)}")
        elif len(spec) > len(shape):
            problems.append(f"rule {spec} has more dimensions than {name} {list(shape)}")
        else:
            return NamedSharding(mesh, _split(spec, shape, mesh))
        return NamedSharding(mesh, P())

    placed = jax.tree_util.tree_map_with_path(place, tree)
    if problems:
        raise ValueError("; ".join(problems) + "; add a rule to sharding.RULES")
    return placed


def constrain(mesh: Mesh | None) -> Callable[[jax.Array, str], jax.Array]:
    """`f(x, kind)` that pins an activation to its row of ACTIVATIONS; without a mesh, to nothing.

    Without these pins the compiler picks layouts of its own at the seams between data, fsdp and
    tensor, and then has to replicate whole arrays ("involuntary full rematerialization").
    """

    def pin(x: jax.Array, kind: str) -> jax.Array:
        if mesh is None:
            return x
        spec = _divisible(ACTIVATIONS[kind], x.shape, mesh)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return pin


def place_rows(batch: Any, mesh: Mesh) -> Any:
    """Host arrays [B T] to the devices, rows split over data × fsdp and tokens over context.

    Raises:
      ValueError: the rows, or their tokens, do not divide over the devices.
    """
    parts, context = row_parts(mesh), mesh.shape["context"]
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] % parts:
            raise ValueError(
                f"a microbatch of {leaf.shape[0]} rows does not divide over data × fsdp = {parts} "
                f"devices; set batch.rows_per_microbatch to a multiple of {parts}"
            )
        if leaf.shape[1] % context:
            raise ValueError(
                f"rows of {leaf.shape[1]} tokens do not divide over mesh.context={context}; set "
                f"batch.seq_len to a multiple of {context}"
            )
    rows = NamedSharding(mesh, ACTIVATIONS["rows"])
    return jax.tree.map(lambda x: put(x, rows), batch)


def put(x: Any, sharding: Any) -> jax.Array:
    """One array to where `sharding` says; of several processes each feeds its own devices only.

    Every process must hold the same values: nothing is sent between them.
    """
    on_devices = isinstance(x, jax.Array) and not x.is_fully_addressable
    if sharding.is_fully_addressable or on_devices:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    indices = sharding.addressable_devices_indices_map(x.shape)
    # One explicit transfer a device: jax.make_array_from_callback trips the transfer guard.
    parts = [jax.device_put(x[index], device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def put_tree(tree: Any, shardings: Any) -> Any:
    """`put` of every leaf."""
    return jax.tree.map(put, tree, shardings)


def row_parts(mesh: Mesh) -> int:
    """Devices that the rows of a batch are split over."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def table(tree: Any, mesh: Mesh) -> str:
    """One line a parameter for the start log: path, shape, and how it is split."""
    lines = []
    placed = jax.tree.leaves(shardings(tree, mesh))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), sharding in zip(leaves, placed, strict=True):
        axes = ", ".join("-" if axis is None else str(axis) for axis in sharding.spec)
        lines.append(f"{path_name(path):44} {str(list(leaf.shape)):18} {axes or 'everywhere'}")
    total = sum(math.prod(leaf.shape) for _, leaf in leaves)
    return "\n".join([*lines, f"{total:,} parameters"])


def path_name(path: tuple) -> str:
    """`layers/0/mlp/up/kernel` of a jax key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def fsdp_axes(size: int, mesh: Mesh) -> tuple[str, ...]:
    """The axes that a parameter's dimension of `size` is split over where a rule says "fsdp"."""
    for axes in (("fsdp", "context"), ("fsdp",)) if mesh.shape["context"] > 1 else (("fsdp",),):
        if size % math.prod(mesh.shape[axis] for axis in axes) == 0:
            return axes
    return ()


def _split(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """A parameter's rule, as far as the shape allows."""

    def axes(name: Any, size: int) -> Any:
        if name != "fsdp":
            return name
        found = fsdp_axes(size, mesh)
        return found if len(found) > 1 else (found or (None,))[0]

    wide = P(*(axes(name, size) for name, size in zip(spec, shape, strict=False)))
    return _divisible(wide, shape, mesh)


def _match(name: str, rules: Rules) -> P | None:
    for pattern, spec in rules:
        if re.search(rf"{pattern}$", name):
            return spec
    return None


def _divisible(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    def size(axes: str | tuple[str, ...] | None) -> int:
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(mesh.shape[name] for name in names)

    return P(*(a if n % size(a) == 0 else None for a, n in zip(spec, shape, strict=False)))
