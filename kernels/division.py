"""How much of each dimension one device of a mesh has."""

import math
from collections.abc import Mapping

from jax.sharding import Mesh


def divided(mesh: Mesh, dimensions: Mapping[str, tuple[int, tuple[str, ...]]]) -> dict[str, int]:
    """The size on one device of each dimension, given as name: (size, mesh axes it is split over).

    Raises:
      ValueError: the mesh has no such axis, or a size does not divide; everything at once.
    """
    sizes, wrong = {}, []
    for name, (size, axes) in dimensions.items():
        if missing := [axis for axis in axes if axis not in mesh.shape]:
            wrong.append(f"the mesh has no axis {missing}, only {list(mesh.axis_names)}")
            continue
        count = math.prod(mesh.shape[axis] for axis in axes)
        if size % count:
            wrong.append(
                f"{name}={size} does not divide over {count} devices of {axes}; pad it, or leave "
                f"{name} whole and give the axis to another dimension"
            )
        sizes[name] = size // count
    if wrong:
        raise ValueError("; ".join(wrong))
    return sizes
