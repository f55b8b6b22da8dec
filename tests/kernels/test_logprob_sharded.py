"""sharded_token_logprobs on 8 CPU devices against float64 numpy, as if there were one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.logprob.arguments import TokenLogprobs
from kernels.logprob.operands import Layout
from kernels.logprob.sharded import sharded_token_logprobs
from tests.kernels.logprob_cases import operands
from tests.oracles import logprobs as oracle

AXES = ("data", "fsdp", "tensor")


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(shape), AXES)


def check(on: Mesh, layout: Layout = "vd", **options) -> tuple[jax.Array, jax.Array]:
    """Compares with the oracle; returns both gradients."""
    hidden, unembed, targets, cotangents = operands(48, 64, 1000)
    stored = unembed if layout == "vd" else unembed.T

    @jax.jit
    def run(hidden, stored):
        outputs, vjp = jax.vjp(
            lambda hidden, stored: sharded_token_logprobs(
                hidden,
                stored,
                jnp.asarray(targets),
                mesh=on,
                unembed_layout=layout,
                temperature=0.7,
                softcap=8.0,
                **options,
            ),
            hidden,
            stored,
        )
        return outputs, vjp(TokenLogprobs(*jnp.asarray(cotangents)))

    got, (d_hidden, d_stored) = run(hidden, stored)
    want = oracle.scores(
        np.asarray(hidden), np.asarray(unembed), targets, cotangents, temperature=0.7, softcap=8.0
    )
    for value, right in zip(got, want[:3], strict=True):
        np.testing.assert_allclose(value, right, atol=2e-5)
    d_unembed = d_stored if layout == "vd" else d_stored.T
    for value, right in ((d_hidden, want.d_hidden), (d_unembed, want.d_unembed)):
        assert np.linalg.norm(value - right) <= 1e-5 * np.linalg.norm(right)
    return d_hidden, d_stored


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)])
def test_any_mesh_gives_the_unsharded_result(shape):
    check(mesh(*shape), implementation="chunked")


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_kernels_on_their_share_of_the_vocabulary(implementation):
    check(mesh(2, 2, 2), "dv", implementation=implementation, interpret=True)


def test_the_vocabulary_over_two_axes_or_over_none():
    check(mesh(2, 2, 2), vocabulary_axes=("tensor", "data"), token_axes=("fsdp",))
    check(mesh(2, 2, 2), vocabulary_axes=(), token_axes=("data", "fsdp", "tensor"))


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_gradients_lie_where_the_operands_do(layout):
    """The unembedding's gradient comes back scattered, not as a copy for every device."""
    on = mesh(2, 2, 2)
    d_hidden, d_stored = check(on, layout, implementation="chunked")
    spec = PartitionSpec("tensor", "fsdp") if layout == "vd" else PartitionSpec("fsdp", "tensor")
    assert d_stored.sharding.is_equivalent_to(NamedSharding(on, spec), 2)
    rows = NamedSharding(on, PartitionSpec(("data", "fsdp"), None))
    assert d_hidden.sharding.is_equivalent_to(rows, 2)


def test_sizes_that_do_not_divide_are_refused_together():
    with pytest.raises(ValueError, match="T=47 does not divide over 4.*V=49157 does not divide"):
        sharded_token_logprobs(
            jnp.zeros((47, 8)), jnp.zeros((49157, 8)), jnp.zeros(47, jnp.int32), mesh=mesh(2, 2, 2)
        )
    with pytest.raises(NotImplementedError, match="reference cannot.*no sharded form"):
        sharded_token_logprobs(
            jnp.zeros((8, 8)),
            jnp.zeros((64, 8)),
            jnp.zeros(8, jnp.int32),
            mesh=mesh(2, 2, 2),
            implementation="reference",
        )
