"""Every implementation of attention against float64 numpy, values and gradients."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels.attention import chunked
from kernels.attention.api import attention, sharded_attention
from tests.oracles import attention as oracle


@partial(jax.jit, static_argnames=("implementation", "interpret", "block", "mesh"))
def attend(q, k, v, segments, cotangent, *, implementation, interpret=False, block=None, mesh=None):
    """(out, d_q, d_k, d_v)."""

    def run(q, k, v):
        if block is not None:
            out = chunked.attention(q, k, v, segments, q.shape[3] ** -0.5, block=block)
            return jnp.where((segments != 0)[:, :, None, None], out, 0.0)
        options = {"implementation": implementation, "interpret": interpret}
        if mesh is not None:
            if "context" in mesh.shape:
                options["context_axes"] = ("context",)
            return sharded_attention(q, k, v, segments=segments, mesh=mesh, **options)
        return attention(q, k, v, segments=segments, **options)

    out, vjp = jax.vjp(run, q, k, v)
    return out, *vjp(cotangent)


def inputs(rows, tokens, heads, kv_heads, width, dtype=jnp.float32, seed=0):
    """q, k, v, segments and a cotangent; padding at the end, as packing leaves it."""
    rng = np.random.default_rng(seed)
    q, k, v, cotangent = (
        jnp.asarray(rng.normal(size=(rows, tokens, n, width)), dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    segments = np.sort(rng.integers(1, 5, (rows, tokens)), axis=1)
    segments[:, tokens - tokens // 8 :] = 0
    return q, k, v, jnp.asarray(segments, jnp.int32), cotangent


def check(got, q, k, v, segments, cotangent) -> None:
    want = oracle.attention(
        np.asarray(q, np.float64),
        np.asarray(k, np.float64),
        np.asarray(v, np.float64),
        np.asarray(segments),
        np.asarray(cotangent, np.float64),
    )
    tolerance = 1e-5 if q.dtype == jnp.float32 else 1e-2
    for value, right in zip(got, want, strict=True):
        assert value.dtype == q.dtype
        value = np.asarray(value, np.float64)
        # With one key d_q and d_k are 0, so the cotangent sets the scale too.
        scale = max(np.linalg.norm(right), np.linalg.norm(np.asarray(cotangent, np.float64)))
        assert np.linalg.norm(value - right) <= tolerance * scale


class AttentionTest:
    """The cases; a subclass names the implementation."""

    implementation: str
    interpret = False
    dtypes = (jnp.float32, jnp.bfloat16)
    width = 16

    def attend(self, *arrays):
        return attend(*arrays, implementation=self.implementation, interpret=self.interpret)

    @pytest.mark.parametrize("tokens", [1, 40, 200])
    def test_agrees_with_float64(self, tokens):
        for dtype in self.dtypes:
            arrays = inputs(2, tokens, 4, 2, self.width, dtype)
            check(self.attend(*arrays), *arrays)

    def test_nothing_crosses_segments(self):
        """LM-17: in a packed row sample B saw sample A. Here not by the last bit."""
        q, k, v, segments, cotangent = inputs(2, 200, 4, 2, self.width, self.dtypes[0])
        other = (segments == 2)[:, :, None, None]
        mine = jnp.where(other, cotangent, 0)
        out, *gradients = self.attend(q, k, v, segments, mine)
        for gradient in gradients:
            assert not np.any(np.where(other, 0.0, gradient))
            assert np.any(gradient)
        changed = self.attend(q, jnp.where(other, k, 9), jnp.where(other, v, 9), segments, mine)
        np.testing.assert_array_equal(np.where(other, changed[0], 0), np.where(other, out, 0))

    def test_padding_is_zero_and_without_gradient(self):
        q, k, v, segments, cotangent = inputs(2, 200, 4, 2, self.width, self.dtypes[0])
        padding = (segments == 0)[:, :, None, None]
        for value in self.attend(q, k, v, segments, cotangent):
            assert not np.any(np.where(padding, value, 0.0))
        for value in self.attend(q, k, v, jnp.zeros_like(segments), cotangent):
            np.testing.assert_array_equal(value, 0.0)

    def test_large_scores_stay_finite(self):
        q, k, v, segments, cotangent = inputs(2, 200, 4, 2, self.width, self.dtypes[0])
        for value in self.attend(100 * q, 100 * k, v, segments, cotangent):
            assert np.all(np.isfinite(value))


class TestReference(AttentionTest):
    implementation = "reference"


class TestChunked(AttentionTest):
    implementation = "chunked"

    @hypothesis.settings(max_examples=6)
    @hypothesis.given(
        st.integers(1, 60), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.sampled_from([8, 16, 64])
    )
    def test_any_length_and_any_block(self, tokens, heads, block):
        arrays = inputs(2, tokens, heads[0], heads[1], 8, seed=tokens)
        check(attend(*arrays, implementation=None, block=block), *arrays)

    def test_segments_in_any_order(self):
        """Packing sorts them; skipping blocks must not count on it."""
        q, k, v, _, cotangent = inputs(2, 60, 2, 1, 8)
        segments = jnp.asarray(np.random.default_rng(3).integers(0, 9, (2, 60)), jnp.int32)
        arrays = (q, k, v, segments, cotangent)
        check(attend(*arrays, implementation=None, block=8), *arrays)

    def test_blocks_between_segments_are_skipped(self):
        segments = jnp.asarray([[[1, 1]], [[1, 2]], [[2, 2]], [[3, 3]], [[3, 0]], [[0, 0]]])
        keys, queries = chunked.blocks_visited(segments, segments)
        # From first to last; padding visits nothing, from 0 to -1.
        np.testing.assert_array_equal(keys, [[0, 0, 1, 3, 3, 0], [0, 1, 2, 3, 4, -1]])
        np.testing.assert_array_equal(queries, [[0, 1, 2, 3, 4, 0], [1, 2, 2, 4, 4, -1]])

    def test_a_part_of_a_row_visits_the_keys_before_it(self):
        segments = jnp.asarray([[[1, 1]], [[1, 2]], [[2, 2]], [[3, 3]]])
        keys, queries = chunked.blocks_visited(segments[2:], segments, 4)
        np.testing.assert_array_equal(keys, [[1, 3], [2, 3]])
        np.testing.assert_array_equal(queries, [[0, 0, 0, 1], [-1, 0, 0, 1]])

    def test_memory_grows_with_tokens_not_their_square(self):
        def temporary(tokens: int) -> int:
            arrays = inputs(1, tokens, 2, 1, 16)
            compiled = attend.lower(*arrays, implementation="chunked").compile()
            analysis = compiled.memory_analysis()
            assert analysis is not None
            return analysis.temp_size_in_bytes

        assert temporary(8192) < 2.2 * temporary(4096)


class TestSplash(AttentionTest):
    implementation = "splash"
    interpret = True
    dtypes = (jnp.bfloat16,)
    width = 64


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_rows_and_heads_over_devices(kv_heads):
    """Key heads that do not divide over the mesh are repeated, and their gradients summed."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 1, 4), ("data", "fsdp", "tensor"))
    arrays = inputs(2, 40, 8, kv_heads, 16)
    check(attend(*arrays, implementation="chunked", mesh=mesh), *arrays)


def over_context(context: int, tensor: int = 1) -> Mesh:
    devices = np.array(jax.devices()[:8]).reshape(-1, 1, context, tensor)
    return Mesh(devices, ("data", "fsdp", "context", "tensor"))


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize(("tokens", "context"), [(40, 4), (600, 2)])
def test_the_tokens_of_a_row_over_devices(implementation, tokens, context):
    """Segments cross the parts, and at 600 tokens the parts are no whole blocks."""
    arrays = inputs(4, tokens, 4, 1, 16)
    ends = np.arange(1, context) * tokens // context
    assert (np.asarray(arrays[3])[:, ends] == np.asarray(arrays[3])[:, ends - 1]).any()
    check(attend(*arrays, implementation=implementation, mesh=over_context(context, 2)), *arrays)


def test_splash_takes_parts_of_whole_blocks():
    arrays = inputs(4, 512, 4, 2, 64, jnp.bfloat16)
    options = {"implementation": "splash", "interpret": True}
    check(attend(*arrays, mesh=over_context(2, 2), **options), *arrays)
    arrays = inputs(4, 300, 4, 2, 64, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="multiple of 128 tokens, not 150"):
        attend(*arrays, mesh=over_context(2, 2), **options)


def test_an_implementation_says_why_it_cannot():
    q, k, v, segments, _ = inputs(1, 41, 2, 1, 20)
    with pytest.raises(
        NotImplementedError, match="NVIDIA GPU; .*not float32; .* not 20; .* not 41"
    ):
        attention(q, k, v, segments=segments, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="float32; heads must be a multiple of 64"):
        attention(q, k, v, segments=segments, implementation="splash")
    with pytest.raises(ValueError, match="2 query heads do not divide over 3"):
        attention(q, k.repeat(3, axis=2), v.repeat(3, axis=2), segments=segments)
    with pytest.raises(ValueError, match="B=1 does not divide over 2.*H=2 does not divide over 4"):
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 1, 4), ("data", "fsdp", "tensor"))
        sharded_attention(q, k, v, segments=segments, mesh=mesh)
