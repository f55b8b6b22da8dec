"""Every kernel compiled for real TPUs by their own compiler, ahead of time and without one.

Needs libtpu, which is large, so it is not installed by default. It finds what lowering cannot: a
block that does not fit VMEM, and what a kernel makes XLA copy around it.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.attention.api import sharded_attention
from kernels.logprob.blocks import blocks_for
from kernels.logprob.sharded import sharded_token_logprobs

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_compile

MIB = 2**20
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}


@pytest.fixture(params=TOPOLOGIES)
def mesh(request, monkeypatch) -> Iterator[Mesh]:
    """Four chips of a kind, as fsdp 2 and tensor 2."""
    # Else libtpu asks a metadata server that is not there which machine this is.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[request.param])
    devices = np.array(topology.devices[:4]).reshape(1, 2, 2)
    # A program for devices that are not here cannot be read back from the compilation cache.
    enabled = jax.config.read("jax_enable_compilation_cache")
    jax.config.update("jax_enable_compilation_cache", False)
    yield Mesh(devices, ("data", "fsdp", "tensor"))
    jax.config.update("jax_enable_compilation_cache", enabled)


def shaped(mesh: Mesh, shape, dtype, *spec) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def temporary_mib(compiled: jax.stages.Compiled) -> float:
    """HBM of one device beyond arguments and results."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes / MIB


@pytest.mark.deadline(600)
@pytest.mark.parametrize(
    ("width", "vocabulary", "dtype"),
    [
        (896, 151936, jnp.bfloat16),
        (4096, 128256, jnp.bfloat16),
        (8192, 128256, jnp.bfloat16),
        (896, 151936, jnp.float32),
    ],
    ids=["896", "4096", "8192", "896-f32"],
)
def test_logprob_kernels_compile_and_fit(mesh, width, vocabulary, dtype, record_property):
    tokens = 4096
    assert blocks_for(mesh.devices.flat[0].device_kind, width, dtype) is not None

    def both(hidden, unembed, targets, cotangent):
        def logprob(hidden, unembed):
            return sharded_token_logprobs(
                hidden, unembed, targets, mesh=mesh, implementation="pallas_tpu"
            ).logprob

        out, vjp = jax.vjp(logprob, hidden, unembed)
        return out, vjp(cotangent)

    rows = ("data", "fsdp")
    compiled = (
        jax.jit(both)
        .trace(
            shaped(mesh, (tokens, width), dtype, rows, None),
            shaped(mesh, (vocabulary, width), dtype, "tensor", "fsdp"),
            shaped(mesh, (tokens,), jnp.int32, rows),
            shaped(mesh, (tokens,), jnp.float32, rows),
        )
        .lower()
        .compile()
    )
    temporary = temporary_mib(compiled)
    record_property("temporary_mib", temporary)
    # The unembedding gathered in each pass, its gradient, and a copy for the scatter; the logits of
    # a device, 594 MiB at the first size, would come on top.
    share = vocabulary * width * jnp.dtype(dtype).itemsize / 2 / MIB
    assert temporary < 4.2 * share + 16


@pytest.mark.deadline(600)
def test_splash_attention_compiles(mesh):
    def both(q, k, v, segments, cotangent):
        out, vjp = jax.vjp(
            lambda q, k, v: sharded_attention(
                q, k, v, segments=segments, mesh=mesh, implementation="splash"
            ),
            q,
            k,
            v,
        )
        return out, vjp(cotangent)

    rows = ("data", "fsdp")
    q = shaped(mesh, (4, 4096, 14, 64), jnp.bfloat16, rows, None, "tensor", None)
    k = shaped(mesh, (4, 4096, 2, 64), jnp.bfloat16, rows, None, "tensor", None)
    segments = shaped(mesh, (4, 4096), jnp.int32, rows, None)
    compiled = jax.jit(both).trace(q, k, k, segments, q).lower().compile()
    # Scores of one row and one device alone would be 7 x 4096 x 4096 x 4 bytes.
    assert temporary_mib(compiled) < 448
