"""The blocked implementations by name: which takes what, in which order, with which block sizes."""

import jax
import jax.numpy as jnp

from kernels.choice import choose
from kernels.logprob import blocks, pallas_gpu, pallas_tpu
from kernels.logprob.chunked import Chunked
from kernels.logprob.differentiable import Passes
from kernels.logprob.operands import Layout

ORDER = {
    "cpu": ("chunked",),
    "tpu": ("pallas_tpu", "chunked"),
    "gpu": ("pallas_gpu", "chunked"),
}
"""What `implementation=None` tries, by platform."""


def name_of(
    implementation: str | None,
    *,
    platform: str,
    device_kind: str,
    tokens: int,
    width: int,
    vocabulary: int,
    dtype: jax.typing.DTypeLike,
    reference_refusals: tuple[str, ...] = (),
) -> str:
    """The implementation that runs; the sizes are those of one device.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: it cannot take the case; the message has every reason.
    """
    dtype = jnp.dtype(dtype)
    return choose(
        "token_logprobs",
        implementation,
        ORDER.get(platform, ORDER["cpu"]),
        {
            "reference": lambda: reference_refusals,
            "chunked": lambda: (),
            "pallas_tpu": lambda: pallas_tpu.refusals(device_kind, width, dtype),
            "pallas_gpu": lambda: pallas_gpu.refusals(tokens, width, vocabulary, dtype),
        },
    )


def passes(
    name: str,
    *,
    layout: Layout,
    softcap: float | None,
    platform: str,
    device_kind: str,
    tokens: int,
    width: int,
    dtype: jax.typing.DTypeLike,
    interpret: bool = False,
) -> Passes:
    """The two passes of `name`, with block sizes for this case on a device of this kind."""
    if name == "pallas_tpu":
        sizes = blocks.blocks_for(device_kind, width, dtype)
        assert sizes is not None, "name_of refuses a case without blocks"
        return pallas_tpu.PallasTpu(layout, softcap, sizes, interpret)
    if name == "pallas_gpu":
        tiling = pallas_gpu.tiling_for(tokens, dtype)
        return pallas_gpu.PallasGpu(layout, softcap, tiling, interpret=interpret)
    return Chunked(layout, softcap, widen=platform == "cpu")
