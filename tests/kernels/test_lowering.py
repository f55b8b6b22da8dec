"""Every kernel lowered for its platform at real sizes, on a machine that has neither.

Lowering runs Pallas' own checks (block shapes, memory spaces, what each backend takes); it does not
run the chip's compiler. tests/kernels/test_tpu_compile.py does.
"""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from kernels.attention.api import attention
from kernels.logprob.blocks import CHIPS, blocks_for
from kernels.logprob.differentiable import Passes, differentiable
from kernels.logprob.operands import Layout
from kernels.logprob.pallas_gpu import PallasGpu, tiling_for
from kernels.logprob.pallas_tpu import PallasTpu

SIZES = [
    (2048, 896, 151936, jnp.bfloat16),
    (2048, 4096, 128256, jnp.bfloat16),
    (1024, 576, 49152, jnp.float32),
    (1, 896, 49157, jnp.bfloat16),
]
NAMES = ["896x151936", "4096x128256", "576x49152-f32", "one-token"]


def on_h100() -> contextlib.AbstractContextManager:
    """Newer jax will not guess which GPU to lower Triton for; jax 0.10 does not ask."""
    device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    return use_abstract_mesh(mesh)


def lowered(passes: Passes, platform: str, tokens, width, vocabulary, dtype, layout: Layout) -> str:
    """The StableHLO of both passes."""

    def both(hidden, unembed, targets, inverse_temperature, cotangents):
        outputs, vjp = jax.vjp(
            lambda hidden, unembed: differentiable(
                passes, hidden, unembed, targets, inverse_temperature
            ),
            hidden,
            unembed,
        )
        return outputs, vjp(cotangents)

    shape = (vocabulary, width) if layout == "vd" else (width, vocabulary)
    column = jax.ShapeDtypeStruct((tokens, 1), jnp.float32)
    triton = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    exporter = export.export(jax.jit(both), platforms=[platform], disabled_checks=[triton])
    with on_h100() if platform == "cuda" else contextlib.nullcontext():
        module = exporter(
            jax.ShapeDtypeStruct((tokens, width), dtype),
            jax.ShapeDtypeStruct(shape, dtype),
            jax.ShapeDtypeStruct((tokens, 1), jnp.int32),
            column,
            (column, column, column),
        ).mlir_module()
    if tokens > 1:
        assert f"tensor<{tokens}x{vocabulary}x" not in module, "the logits are in memory"
    if dtype != jnp.float32:
        wide = "x".join(map(str, shape)) + "xf32"
        assert wide not in module, "the unembedding, or its gradient, is in float32"
    return module


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
def test_tpu_kernels_lower(kind, size):
    tokens, width, vocabulary, dtype = size
    layout = "vd" if kind == "TPU v5 lite" else "dv"
    blocks = blocks_for(kind, width, dtype)
    assert blocks is not None
    module = lowered(
        PallasTpu(layout, 30.0, blocks), "tpu", tokens, width, vocabulary, dtype, layout
    )
    assert module.count("@tpu_custom_call") == 3


@pytest.mark.parametrize("size", SIZES, ids=NAMES)
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_gpu_kernels_lower(layout, size):
    tokens, width, vocabulary, dtype = size
    passes = PallasGpu(layout, None, tiling_for(tokens, dtype))
    module = lowered(passes, "cuda", tokens, width, vocabulary, dtype, layout)
    # Forward, one in the loop over chunks of dz, and one more for a last chunk that is shorter.
    assert 2 <= module.count("@__gpu$xla.gpu.triton") <= 3


@pytest.mark.parametrize("kind", [*CHIPS, "a chip of next year"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_chip_has_blocks_for_the_common_widths(kind, dtype):
    for width in (64, 576, 896, 1024):
        blocks = blocks_for(kind, width, dtype)
        assert blocks is not None
        for tokens, columns in blocks[:3]:
            assert tokens % 16 == 0 and columns % 128 == 0, "the units of a TPU's registers"


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(14, 2, 64), (32, 8, 128)])
def test_splash_attention_lowers(heads, kv_heads, width):
    def both(q, k, v, segments, cotangent):
        out, vjp = jax.vjp(
            lambda q, k, v: attention(q, k, v, segments=segments, implementation="splash"), q, k, v
        )
        return out, vjp(cotangent)

    q = jax.ShapeDtypeStruct((2, 2000, heads, width), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 2000, kv_heads, width), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 2000), jnp.int32)
    exported = export.export(jax.jit(both), platforms=["tpu"])(q, k, k, segments, q)
    assert exported.mlir_module().count("@tpu_custom_call") == 3
