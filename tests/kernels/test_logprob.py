"""Every implementation of token_logprobs against float64 numpy, values and gradients."""

import logging
from typing import Any, cast

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels import choice
from kernels.logprob import chunked, tile
from kernels.logprob.api import token_logprobs
from kernels.logprob.blocks import Blocks
from kernels.logprob.chunked import Chunked
from kernels.logprob.differentiable import Passes, differentiable
from kernels.logprob.operands import Layout
from kernels.logprob.pallas_gpu import PallasGpu, Tiling
from kernels.logprob.pallas_tpu import PallasTpu
from tests.kernels.logprob_cases import LogprobTest, Scored, operands
from tests.oracles import logprobs as oracle


class TestReference(LogprobTest):
    implementation = "reference"


class TestChunked(LogprobTest):
    implementation = "chunked"

    def test_the_largest_vocabulary(self):
        self.check(*operands(2, 96, 151936))

    def test_float64_operands_give_float64_results(self):
        """Losses compare meshes and packings to 1e-9, which float32 sums would not allow."""
        with jax.enable_x64(True):
            hidden, unembed, targets, cotangents = operands(9, 16, 700, jnp.float64)
            passes = Chunked("vd", 5.0, chunk=128)
            got = by_passes(passes, hidden, unembed, targets, cotangents)
        want = oracle.scores(
            *(np.asarray(x) for x in (hidden, unembed, targets, cotangents)), softcap=5.0
        )
        kept = targets != -100
        for value, right in zip(got[:3], want[:3], strict=True):
            np.testing.assert_allclose(value[kept], right[kept], atol=1e-12)
        for value, right in zip(got[3:], want[3:], strict=True):
            np.testing.assert_allclose(value, right, atol=1e-12)

    @hypothesis.settings(max_examples=12)
    @hypothesis.given(
        st.integers(1, 40),
        st.sampled_from([1, 8, 33, 96]),  # narrower and wider than there are tokens
        st.integers(1, 700),
        st.integers(1, 300),
        st.sampled_from(["vd", "dv"]),
        st.sampled_from([None, 4.0]),
    )
    def test_any_shape_and_any_chunk(self, tokens, width, vocabulary, chunk, layout, softcap):
        same_as_reference(
            Chunked(layout, softcap, chunk), operands(tokens, width, vocabulary), layout, softcap
        )


class TestChunkedInSeveral(LogprobTest):
    """The same, where the vocabulary is four chunks; alone it would be one."""

    implementation = "chunked"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def short_chunks(cls):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunked, "SHORTEST", 256)
            patch.setattr(chunked, "LONGEST", 256)
            # Sizes are read while tracing.
            jax.clear_caches()
            yield
        jax.clear_caches()


class TestPallasTpu(LogprobTest):
    implementation = "pallas_tpu"
    interpret = True
    narrow = False

    @pytest.mark.parametrize("layout", ["vd", "dv"])
    def test_memory_that_holds_nan_and_races(self, layout):
        """What lies past the edge of the last block, and in fresh scratch, is NaN here."""
        interpret = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
        blocks = Blocks((16, 128), (16, 256), (32, 128), 16 * 2**20)
        same_as_reference(
            PallasTpu(layout, 30.0, blocks, interpret), operands(50, 96, 1000), layout, 30.0
        )
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        assert interpret_pallas_call.races is not None, "race detection did not run"
        assert not interpret_pallas_call.races.races_found

    @hypothesis.settings(max_examples=4)
    @hypothesis.given(
        st.integers(1, 70),
        st.integers(1, 700),
        st.sampled_from([(16, 128), (32, 256), (64, 512)]),
        st.sampled_from(["vd", "dv"]),
    )
    def test_any_shape_and_any_block(self, tokens, vocabulary, block, layout):
        blocks = Blocks(block, block, block, 16 * 2**20)
        same_as_reference(
            PallasTpu(layout, None, blocks, True), operands(tokens, 40, vocabulary), layout, None
        )


class TestPallasGpu(LogprobTest):
    implementation = "pallas_gpu"
    interpret = True

    @hypothesis.settings(max_examples=4)
    @hypothesis.given(
        st.integers(1, 70),
        st.integers(1, 700),
        st.sampled_from([Tiling(16, 64, 16), Tiling(32, 128, 64)]),
        st.integers(1, 5),
        st.sampled_from(["vd", "dv"]),
    )
    def test_any_shape_tile_and_share(self, tokens, vocabulary, tiling, shares, layout):
        passes = PallasGpu(layout, None, tiling, shares, chunk=256, interpret=True)
        same_as_reference(passes, operands(tokens, 40, vocabulary), layout, None)


def by_passes(passes: Passes, hidden, stored, targets, cotangents) -> Scored:
    """As `logprob_cases.score`, of given block sizes and without the ignored tokens' zeros."""

    @jax.jit
    def run(hidden, stored, cotangents):
        def values(hidden, stored) -> tuple[jax.Array, jax.Array, jax.Array]:
            return cast(Any, differentiable(passes, hidden, stored, column, ones))

        column = jnp.asarray(targets, jnp.int32)[:, None]
        ones = jnp.ones((len(targets), 1), cotangents.dtype)
        outputs, vjp = jax.vjp(values, hidden, stored)
        return *(x[:, 0] for x in outputs), *vjp(tuple(cotangents[:, :, None]))

    kept = jnp.asarray(targets != -100)[None]
    weights = jnp.asarray(cotangents, jnp.promote_types(hidden.dtype, jnp.float32))
    return Scored(*run(hidden, stored, jnp.where(kept, weights, 0.0)))


def same_as_reference(passes: Passes, inputs, layout: Layout, softcap: float | None) -> None:
    hidden, unembed, targets, cotangents = inputs
    stored = unembed if layout == "vd" else unembed.T
    got = by_passes(passes, hidden, stored, targets, cotangents)
    want = oracle.scores(
        np.asarray(hidden, np.float64),
        np.asarray(unembed, np.float64),
        targets,
        cotangents,
        softcap=softcap,
    )
    kept = targets != -100
    for value, right in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(value[kept], right[kept], atol=1e-4)
    d_unembed = got.d_unembed if layout == "vd" else got.d_unembed.T
    for value, right in ((got.d_hidden, want.d_hidden), (d_unembed, want.d_unembed)):
        assert np.linalg.norm(value - right) <= 1e-5 * np.linalg.norm(right) + 1e-6


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ValueError, match="4 hidden states for 3 targets.*temperature is 0") as info:
        token_logprobs(
            jnp.zeros((4, 8)), jnp.zeros((10, 9)), jnp.zeros(3, jnp.int32), temperature=0
        )
    assert "hidden is 8 wide and unembed 9" in str(info.value)


def test_an_implementation_says_why_it_cannot():
    hidden, unembed = jnp.zeros((2, 9000), jnp.float16), jnp.zeros((5, 9000), jnp.float16)
    with pytest.raises(NotImplementedError, match="not float16; .* up to D=4096, not 9000"):
        token_logprobs(hidden, unembed, jnp.zeros(2, jnp.int32), implementation="pallas_tpu")
    with pytest.raises(ValueError, match="no implementation 'dense'.*chunked"):
        token_logprobs(
            jnp.zeros((2, 4)),
            jnp.zeros((5, 4)),
            jnp.zeros(2, jnp.int32),
            implementation="dense",
        )


def test_a_choice_is_logged_once_with_what_was_passed_over(caplog):
    refusals = {"fast": lambda: ["too wide", "too long"], "plain": lambda: []}
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert choice.choose("an operation", None, ["fast", "plain"], refusals) == "plain"
    assert [record.getMessage() for record in caplog.records] == [
        "an operation runs as plain (fast cannot: too wide, too long)"
    ]
    with pytest.raises(NotImplementedError, match="fast cannot take this case: too wide; too long"):
        choice.choose("an operation", "fast", ["plain"], refusals)


@pytest.mark.parametrize("layout", ["vd", "dv"])
@pytest.mark.parametrize(
    ("dtype", "width", "fitting"),
    [(jnp.float32, 33, 33), (jnp.bfloat16, 33, 16), (jnp.float32, 64, 40)],
)
def test_kept_logits_come_back_bit_for_bit(layout, dtype, width, fitting):
    """As many tokens' as fit the gradient of the unembedding; columns do not touch each other."""
    raw = np.random.default_rng(0).normal(size=(40, 24)).astype(np.float32)
    shape = (100, width) if layout == "vd" else (width, 100)
    stored = chunked.as_bits(jnp.zeros(shape, dtype))
    for start, sign in ((10, 1), (34, -1)):
        stored = chunked.write_logits(stored, sign * jnp.asarray(raw), start, layout)
    for start, sign in ((10, 1), (34, -1)):
        got = chunked.read_logits(stored, start, 24, layout, 40, jnp.dtype(jnp.float32))
        np.testing.assert_array_equal(got, sign * raw[:fitting])


def test_kept_logits_take_no_memory_of_their_own():
    """They lie in the gradient's, which is not copied; and without a gradient none are kept."""
    tokens, width, vocabulary = 256, 128, 65536

    def loss(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        targets = jnp.zeros(tokens, jnp.int32)
        scored = token_logprobs(hidden, unembed, targets, implementation="chunked")
        return jnp.sum(scored.logprob)

    for program in (loss, jax.value_and_grad(loss, argnums=(0, 1))):
        shapes = [jax.ShapeDtypeStruct((n, width), jnp.float32) for n in (tokens, vocabulary)]
        analysis = jax.jit(program).lower(*shapes).compile().memory_analysis()
        assert analysis is not None
        assert analysis.temp_size_in_bytes < 4 * chunked.TILE_BYTES < 4 * vocabulary * width / 2


def test_a_masked_logit_has_no_gradient():
    """KN-03 in the backward pass: p log p is 0 · -inf. The rest is as if it were absent."""
    z = jnp.array([[1.0, -jnp.inf, 2.0, -jnp.inf]])
    ones = jnp.ones((1, 1))

    def gradient(z: jax.Array) -> jax.Array:
        normaliser, _ = tile.outputs(tile.update(tile.empty(1, jnp.float32), z, z[:, :1]))
        rows = tile.RowGradients(*normaliser, ones, ones, ones)
        return tile.dz(z, jnp.arange(z.shape[1])[None] == 0, rows)

    masked, absent = gradient(z), gradient(z[:, ::2])
    np.testing.assert_array_equal(masked[:, 1::2], 0.0)
    np.testing.assert_allclose(masked[:, ::2], absent, rtol=1e-6)
