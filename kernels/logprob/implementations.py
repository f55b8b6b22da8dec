"""The implementations by name: which takes what, in which order, with which block sizes."""

from typing import Any, NamedTuple

import jax

from kernels.choice import choose
from kernels.logprob import blocks, pallas_gpu, pallas_tpu
from kernels.logprob.chunked import Chunked
from kernels.logprob.differentiable import Passes
from kernels.logprob.operands import Layout, vocabulary_axis

ORDER = {
    "cpu": ("chunked",),
    "tpu": ("pallas_tpu", "chunked"),
    "gpu": ("pallas_gpu", "chunked"),
}
"""What `implementation=None` tries, by platform."""


class Case(NamedTuple):
    """What decides who can run and with which blocks; the sizes are those of one `jax.Device`."""

    device: Any
    tokens: int
    width: int
    vocabulary: int
    dtype: jax.typing.DTypeLike

    @classmethod
    def of(cls, device: Any, hidden: jax.Array, unembed: jax.Array, layout: Layout) -> "Case":
        """The case of these operands, whole, on a device."""
        tokens, width = hidden.shape
        vocabulary = unembed.shape[vocabulary_axis(layout)]
        return cls(device, tokens, width, vocabulary, hidden.dtype)


def name_of(
    implementation: str | None, case: Case, *, reference_refusals: tuple[str, ...] = ()
) -> str:
    """The implementation that runs.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: it cannot take the case; the message has every reason.
    """
    device, tokens, width, vocabulary, dtype = case
    return choose(
        "token_logprobs",
        implementation,
        ORDER.get(device.platform, ORDER["cpu"]),
        {
            "reference": lambda: reference_refusals,
            "chunked": lambda: (),
            "pallas_tpu": lambda: pallas_tpu.refusals(device.device_kind, width, dtype),
            "pallas_gpu": lambda: pallas_gpu.refusals(tokens, width, vocabulary, dtype),
        },
    )


def passes_of(
    name: str, case: Case, *, layout: Layout, softcap: float | None, interpret: bool
) -> Passes:
    """The two passes of any implementation but `reference`, which has none."""
    if name == "pallas_tpu":
        sizes = blocks.blocks_for(case.device.device_kind, case.width, case.dtype)
        assert sizes is not None, "name_of refuses a case without blocks"
        return pallas_tpu.PallasTpu(layout, softcap, sizes, interpret)
    if name == "pallas_gpu":
        tiling = pallas_gpu.tiling_for(case.tokens, case.dtype)
        return pallas_gpu.PallasGpu(layout, softcap, tiling, interpret=interpret)
    return Chunked(layout, softcap, widen=case.device.platform == "cpu")
