"""Every implementation of attention against float64 numpy, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention.api import attention
from tests.oracles import attention as oracle


class AttentionTest:
    """The cases; a subclass names the implementation."""

    implementation: str

    def inputs(self, rows, tokens, heads, kv_heads, width, dtype=jnp.float32, seed=0):
        rng = np.random.default_rng(seed)
        shapes = [(rows, tokens, n, width) for n in (heads, kv_heads, kv_heads, heads)]
        q, k, v, g = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
        # Sorted, with padding at the end, as packing makes them.
        segments = np.sort(rng.integers(1, 5, (rows, tokens)), axis=1)
        segments[:, tokens - tokens // 8 :] = 0
        return q, k, v, g, jnp.asarray(segments, jnp.int32)

    def run(self, q, k, v, g, segments):
        @jax.jit
        def value_and_gradients(q, k, v, g, segments):
            out, vjp = jax.vjp(
                lambda q, k, v: attention(
                    q, k, v, segments=segments, implementation=self.implementation
                ),
                q,
                k,
                v,
            )
            return out, *vjp(g)

        return value_and_gradients(q, k, v, g, segments)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("tokens", [1, 40, 300])
    def test_agrees_with_float64(self, tokens, dtype):
        q, k, v, g, segments = self.inputs(2, tokens, 4, 2, 16, dtype)
        host = [np.asarray(x) for x in (q, k, v, segments, g)]
        right = oracle.attention(host[0], host[1], host[2], host[3], host[4])
        tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
        for got, want in zip(self.run(q, k, v, g, segments), right, strict=True):
            assert got.dtype == dtype
            got = np.asarray(got, np.float64)
            # With one key d_q and d_k are 0, so the cotangent sets the scale too.
            scale = max(np.linalg.norm(want), np.linalg.norm(np.asarray(g, np.float64)))
            assert np.linalg.norm(got - want) <= tolerance * scale

    def test_nothing_crosses_segments(self):
        """LM-17: a packed row's sample B must not see sample A."""
        q, k, v, g, segments = self.inputs(1, 200, 2, 1, 8)
        other = (segments == 2)[:, :, None, None]
        _, d_q, d_k, d_v = self.run(q, k, v, jnp.where(other, g, 0.0), segments)
        for gradient in (d_q, d_k, d_v):
            assert not np.any(np.where(other, 0.0, gradient))
            assert np.any(gradient)


class TestReference(AttentionTest):
    implementation = "reference"


class TestChunked(AttentionTest):
    implementation = "chunked"
