"""A number for every array, by which a checkpoint is known again, bit for bit, on any mesh.

    f(x) = Σ_i bits(x_i) · (2i + 1)   mod 2³²

Integer sums have no order, so the number does not depend on how an array is spread over devices and
processes, and every device reads only its own part. A weight is odd, so one flipped bit always
changes the number; two values that changed places do too, unless they are equal.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from telescope_jax.sharding import path_name

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def fingerprints(tree: Any) -> dict[str, int]:
    """The number of every leaf, by its path; leaves are numpy's or jax's arrays.

    numpy's are read on the host: their shapes may differ at every call, as those of held groups do,
    and each new shape would be compiled and kept.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = {path_name(path): _fold_host(x) for path, x in leaves if isinstance(x, np.ndarray)}
    on_devices = {path_name(path): x for path, x in leaves if not isinstance(x, np.ndarray)}
    values = jax.device_get(_fold_all(list(on_devices.values())))
    found |= {name: int(value) for name, value in zip(on_devices, values, strict=True)}
    return found


def differences(found: dict[str, int], expected: dict[str, int]) -> list[str]:
    """Paths whose numbers differ, or that only one of the two has."""
    return sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))


def _fold_host(x: np.ndarray) -> int:
    word = np.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")
    bits = np.ascontiguousarray(x).reshape(-1).view(word).astype(np.uint32)
    weights = 2 * np.arange(bits.size, dtype=np.uint32) + np.uint32(1)
    return int(np.sum(bits * weights, dtype=np.uint32))


@jax.jit
def _fold_all(leaves: list[Any]) -> list[UInt32[Array, ""]]:
    return [_fold(leaf) for leaf in leaves]


def _fold(x: Any) -> UInt32[Array, ""]:
    bits = jnp.asarray(x)
    if bits.dtype != jnp.bool_:
        bits = jax.lax.bitcast_convert_type(bits, _WORDS[bits.dtype.itemsize])
    bits = bits.astype(jnp.uint32)
    # The index is made from one iota an axis: a reshape to one axis would gather sharded arrays.
    index, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
