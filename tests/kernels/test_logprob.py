"""Every implementation of token_logprobs against float64 numpy, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.logprob.api import token_logprobs
from kernels.logprob.operands import Layout
from tests.oracles import logprobs as oracle


class LogprobTest:
    """The cases; a subclass names the implementation."""

    implementation: str

    def check(
        self,
        tokens,
        width,
        vocabulary,
        *,
        dtype=jnp.float32,
        layout: Layout = "vd",
        seed=0,
        **options,
    ):
        rng = np.random.default_rng(seed)
        hidden = jnp.asarray(rng.normal(size=(tokens, width)), dtype)
        unembed = jnp.asarray(rng.normal(size=(vocabulary, width)) * width**-0.5, dtype)
        targets = rng.integers(0, vocabulary, tokens)
        targets[rng.random(tokens) < 0.2] = -100
        cotangents = rng.normal(size=(3, tokens)).astype(np.float32)

        def weighted(hidden, unembed):
            outputs = token_logprobs(
                hidden,
                unembed,
                jnp.asarray(targets),
                unembed_layout=layout,
                implementation=self.implementation,
                **options,
            )
            return sum(jnp.sum(g * x) for g, x in zip(cotangents, outputs, strict=True)), outputs

        stored = unembed if layout == "vd" else unembed.T
        (_, outputs), (d_hidden, d_unembed) = jax.jit(
            jax.value_and_grad(weighted, (0, 1), has_aux=True)
        )(hidden, stored)
        right = oracle.scores(
            np.asarray(hidden, np.float64),
            np.asarray(unembed, np.float64),
            targets,
            cotangents,
            **options,
        )
        values = 2e-5 * max(1.0, np.abs(right.logsumexp).max())
        for got, want in zip(outputs, right[:3], strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, atol=values, rtol=0)
        gradients = 1e-5 if dtype == jnp.float32 else 1e-2
        got_unembed = d_unembed if layout == "vd" else d_unembed.T
        for got, want in ((d_hidden, right.d_hidden), (got_unembed, right.d_unembed)):
            assert got.dtype == dtype
            got = np.asarray(got, np.float64)
            assert np.linalg.norm(got - want) <= gradients * np.linalg.norm(want)

    @pytest.mark.parametrize("layout", ["vd", "dv"])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_agrees_with_float64(self, dtype, layout):
        self.check(13, 96, 1000, dtype=dtype, layout=layout)

    @pytest.mark.parametrize("softcap", [None, 3.0])
    def test_temperature_divides_the_capped_logits(self, softcap):
        self.check(8, 32, 700, softcap=softcap, temperature=np.linspace(0.5, 2.0, 8))


class TestReference(LogprobTest):
    implementation = "reference"


class TestChunked(LogprobTest):
    implementation = "chunked"
