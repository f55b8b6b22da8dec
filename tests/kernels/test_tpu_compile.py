"""Every kernel, and a whole training step, compiled for real TPUs ahead of time and without one.

Needs libtpu, which is large: `./run.sh test --tpu-compile tests/kernels` installs it. It finds what
lowering cannot: a block that does not fit VMEM, and what a kernel makes XLA copy around it.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu")

from experiments.benchmarks import tpu_compile as aot
from kernels.logprob.blocks import blocks_for

pytestmark = [pytest.mark.tpu_compile, pytest.mark.deadline(1200)]

KERNELS = {"logprob_forward", "logprob_d_hidden", "logprob_d_unembed"}


@pytest.fixture(params=aot.TOPOLOGIES)
def chip(request) -> Iterator[str]:
    # A program for devices that are not here cannot be read back from the compilation cache.
    name = "jax_enable_compilation_cache"
    enabled = getattr(jax.config, name)
    jax.config.update(name, False)
    yield request.param
    jax.config.update(name, enabled)


@pytest.fixture
def report(record_property, capsys) -> Callable[[str, aot.Compiled], None]:
    """Prints what a program needs, past pytest's capture: that is what this job is run for."""

    def write(title: str, got: aot.Compiled) -> None:
        vmem = aot.vmem_of(got)
        line = f"{title}: HBM temp {got.temporary / aot.MIB:.0f} MiB; VMEM MiB: {vmem}"
        record_property("needs", line)
        with capsys.disabled():
            print(f"\n{line}")

    return write


@pytest.mark.parametrize(
    ("width", "vocabulary", "dtype"),
    [
        (896, 151936, jnp.bfloat16),
        (4096, 128256, jnp.bfloat16),
        (8192, 128256, jnp.bfloat16),
        (896, 151936, jnp.float32),
        (2048, 128256, jnp.float32),
    ],
    ids=["896", "4096", "8192", "896-f32", "2048-f32"],
)
def test_logprob_kernels_compile_and_fit(chip, width, vocabulary, dtype, report):
    mesh = aot.mesh_of(chip)
    blocks = blocks_for(mesh.devices.flat[0].device_kind, width, dtype)
    if blocks is None:
        pytest.skip(f"blocks.py says that {width} does not fit a {chip}")
    got = aot.logprobs(mesh, 4096, width, vocabulary, dtype)
    report(f"{chip} log-probs {width} x {vocabulary} {jnp.dtype(dtype)}", got)
    assert got.kernels.keys() == KERNELS
    assert max(got.kernels.values()) <= blocks.vmem_bytes
    # The unembedding gathered in each pass, its gradient, and a copy for the scatter; the logits of
    # a device, 594 MiB at the first size, would come on top.
    share = vocabulary * width * jnp.dtype(dtype).itemsize / 2
    assert got.temporary < 4.2 * share + 16 * aot.MIB


def test_splash_attention_compiles(chip, report):
    got = aot.splash(aot.mesh_of(chip), 4096, 14, 2, 64)
    report(f"{chip} splash", got)
    # Scores of one row and one device alone would be 7 x 4096 x 4096 x 4 bytes.
    assert got.temporary < 448 * aot.MIB


def test_a_training_step_compiles_and_fits(chip, report):
    """All 24 layers of Qwen2.5-0.5B, as one loop."""
    got = aot.training_step(aot.mesh_of(chip), aot.QWEN_05B, rows=4, tokens=2048)
    report(f"{chip} training step", got.accumulate)
    assert got.accumulate.kernels.keys() > KERNELS, "splash attention is missing, or a kernel"
    assert got.peak < aot.HBM_GIB[chip] * 2**30
    # Its logits alone, 2 rows of 2048 tokens over half the vocabulary, would be 1187 MiB beside
    # the layers: their weights in bfloat16, and the 24 inputs that the backward pass starts from.
    assert got.accumulate.temporary < LIMIT * aot.MIB
