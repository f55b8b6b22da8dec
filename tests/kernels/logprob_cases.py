"""What every implementation of token_logprobs must do; test_logprob.py names the implementations.

Most tests share one shape, so that an implementation is compiled once for all of them: 24 tokens,
64 wide, 1000 columns, which are not a multiple of any block.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.logprob.api import token_logprobs
from kernels.logprob.arguments import TokenLogprobs
from kernels.logprob.operands import Layout
from tests.oracles import logprobs as oracle

TOKENS, WIDTH, VOCABULARY = 24, 64, 1000

Temperature = float | np.ndarray


class Scored(NamedTuple):
    """Three values of each token and the gradients of their weighted sum: `oracle.Scores`."""

    logprob: jax.Array
    entropy: jax.Array
    logsumexp: jax.Array
    d_hidden: jax.Array
    d_unembed: jax.Array


@partial(jax.jit, static_argnames=("implementation", "interpret", "layout", "softcap"))
def score(
    hidden: jax.Array,
    unembed: jax.Array,
    targets: jax.Array,
    cotangents: jax.Array,
    temperature: jax.Array,
    *,
    implementation: str,
    interpret: bool = False,
    layout: Layout = "vd",
    softcap: float | None = None,
) -> Scored:
    """Values and gradients; `unembed` is [V, D] whatever the layout it is stored in."""

    def values(hidden: jax.Array, stored: jax.Array) -> TokenLogprobs:
        return token_logprobs(
            hidden,
            stored,
            targets,
            unembed_layout=layout,
            temperature=temperature,
            softcap=softcap,
            implementation=implementation,
            interpret=interpret,
        )

    outputs, vjp = jax.vjp(values, hidden, unembed if layout == "vd" else unembed.T)
    d_hidden, d_stored = vjp(TokenLogprobs(*cotangents))
    return Scored(*outputs, d_hidden, d_stored if layout == "vd" else d_stored.T)


def operands(
    tokens: int, width: int, vocabulary: int, dtype=jnp.float32, seed: int = 0
) -> tuple[jax.Array, jax.Array, np.ndarray, np.ndarray]:
    """Hidden states, an unembedding, targets with some ignored, and cotangents."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), dtype)
    unembed = jnp.asarray(rng.normal(size=(vocabulary, width)) * width**-0.5, dtype)
    targets = rng.integers(0, vocabulary, tokens)
    if tokens > 1:
        targets[rng.integers(0, tokens)] = -100
    return hidden, unembed, targets, rng.normal(size=(3, tokens)).astype(np.float32)


class LogprobTest:
    """The cases; a subclass names the implementation."""

    implementation: str
    interpret = False
    narrow = True  # takes operands of 16 bits other than bfloat16

    def score(
        self, hidden, unembed, targets, cotangents, temperature: Temperature = 1.0, **options
    ) -> Scored:
        return score(
            hidden,
            unembed,
            jnp.asarray(targets),
            jnp.asarray(cotangents, jnp.promote_types(hidden.dtype, jnp.float32)),
            jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (len(targets),)),
            implementation=self.implementation,
            interpret=self.interpret,
            **options,
        )

    def score_logits(self, logits: np.ndarray, target: int, cotangents=(1.0, 0.0, 0.0)) -> Scored:
        """The shared shape with the same `logits` (up to 1000 of them) for every token."""
        hidden = jnp.zeros((TOKENS, WIDTH)).at[:, 0].set(1.0)
        unembed = jnp.zeros((VOCABULARY, WIDTH)).at[:, 0].set(jnp.asarray(logits, jnp.float32))
        weights = np.repeat(np.asarray(cotangents, np.float32)[:, None], TOKENS, axis=1)
        return self.score(hidden, unembed, np.full(TOKENS, target), weights)

    def check(
        self, hidden, unembed, targets, cotangents, temperature: Temperature = 1.0, **options
    ) -> None:
        got = self.score(hidden, unembed, targets, cotangents, temperature, **options)
        want = oracle.scores(
            np.asarray(hidden, np.float64),
            np.asarray(unembed, np.float64),
            targets,
            cotangents,
            temperature=temperature,
            softcap=options.get("softcap"),
        )
        size = max(1.0, float(np.abs(want.logsumexp).max()))
        for name in ("logprob", "entropy", "logsumexp"):
            value = getattr(got, name)
            assert value.dtype == jnp.float32
            np.testing.assert_allclose(
                value, getattr(want, name), atol=1e-5 * size, rtol=0, err_msg=name
            )
        # KN-13: under 1 % in bfloat16, 1e-5 in float32, and the same direction.
        tolerance = 1e-5 if hidden.dtype == jnp.float32 else 1e-2
        for name in ("d_hidden", "d_unembed"):
            gradient, right = getattr(got, name), getattr(want, name)
            assert gradient.dtype == hidden.dtype
            gradient = np.asarray(gradient, np.float64)
            norm = np.linalg.norm(right)
            assert np.linalg.norm(gradient - right) <= tolerance * norm, name
            assert np.sum(gradient * right) >= 0.9999 * np.linalg.norm(gradient) * norm, name

    @pytest.mark.parametrize("layout", ["vd", "dv"])
    def test_float32_agrees_with_float64(self, layout):
        temperature = np.linspace(0.5, 2.0, TOKENS)
        self.check(*operands(TOKENS, WIDTH, VOCABULARY), temperature, layout=layout)

    @pytest.mark.parametrize("width", [96, 576])
    def test_bfloat16_agrees_with_float64(self, width):
        self.check(*operands(TOKENS, width, VOCABULARY, jnp.bfloat16))

    def test_temperature_divides_the_capped_logits(self):
        hidden, unembed, targets, cotangents = operands(TOKENS, WIDTH, VOCABULARY)
        temperature = np.linspace(0.5, 2.0, TOKENS)
        self.check(4 * hidden, unembed, targets, cotangents, temperature, softcap=3.0)

    @pytest.mark.parametrize(
        ("tokens", "vocabulary"), [(1, 1), (7, 63), (8, 127), (8, 128), (1, 129), (24, 640)]
    )
    def test_edges_of_blocks_hold_nothing(self, tokens, vocabulary):
        """KN-01: a last block of 63 columns of 512 broke; three blocks gave NaN."""
        self.check(*operands(tokens, WIDTH, vocabulary))

    def test_a_vocabulary_that_no_block_divides(self):
        self.check(*operands(3, 96, 49157))

    def test_equal_logits_are_uniform_in_bfloat16(self):
        """KN-02: a sum of 32768 ones in bfloat16 saturates at 256."""
        count = 32768
        hidden, unembed = jnp.zeros((2, 64), jnp.bfloat16), jnp.ones((count, 64), jnp.bfloat16)
        got = self.score(hidden, unembed, np.array([0, count - 1]), np.ones((3, 2)))
        np.testing.assert_allclose(got.logprob, -np.log(count), atol=1e-5)
        np.testing.assert_allclose(got.entropy, np.log(count), atol=1e-5)

    @pytest.mark.parametrize(
        ("logits", "entropy"),
        [([0, -np.inf], 0.0), ([0, 0, -np.inf], np.log(2)), ([65504, -65504], 0.0)],
    )
    def test_a_probability_of_zero_adds_no_entropy(self, logits, entropy):
        """KN-03: 0 · -inf is NaN; so is the difference of the extremes of float16."""
        dtype = jnp.float16 if np.isfinite(logits).all() and self.narrow else jnp.float32
        unembed = jnp.asarray(logits, dtype)[:, None]
        got = self.score(jnp.ones((1, 1), dtype), unembed, np.array([0]), np.ones((3, 1)))
        np.testing.assert_allclose(got.entropy, entropy, atol=1e-6)
        np.testing.assert_allclose(got.logprob, -entropy, atol=1e-6)

    def test_one_huge_logit_in_any_block(self):
        """KN-06: a maximum that is not the true one overflows; columns in any order."""
        rng = np.random.default_rng(1)
        logits = np.append(rng.normal(size=VOCABULARY - 1), 3000.0)
        for order in (np.arange(VOCABULARY), np.arange(VOCABULARY)[::-1], np.argsort(logits)):
            place = int(np.flatnonzero(order == VOCABULARY - 1)[0])
            got = self.score_logits(logits[order], target=place)
            np.testing.assert_allclose(got.logprob, 0.0, atol=1e-6)
            np.testing.assert_allclose(got.logsumexp, 3000.0, rtol=1e-6)
            assert np.all(np.isfinite(got.d_unembed))

    def test_entropy_does_not_cancel_at_large_logits(self):
        """(log Σ e^z) - Σ p z is 1.6 nats wrong here; the gradient needs m and log l apart."""
        rng = np.random.default_rng(2)
        logits = 1e4 + rng.integers(-24, 1, VOCABULARY) / 8.0  # exact in float32
        near = self.score_logits(logits - 1e4, target=7, cotangents=(0.5, 1.0, 0.25))
        far = self.score_logits(logits, target=7, cotangents=(0.5, 1.0, 0.25))
        np.testing.assert_allclose(far.entropy, near.entropy, atol=3e-5)
        np.testing.assert_allclose(far.logprob, near.logprob, atol=3e-5)
        error = np.linalg.norm(far.d_unembed - near.d_unembed) / np.linalg.norm(near.d_unembed)
        assert error < 1e-5

    @pytest.mark.parametrize("vocabulary", [1000, 1100])
    def test_padded_columns_never_count(self, vocabulary):
        """tokamax 0.0.12 and 0.0.17: a block filled up with zeros counts e^0 for each column. With
        every logit at -50 its log-sum-exp is that of the padding, near +3, and not -43."""
        hidden = jnp.zeros((8, WIDTH)).at[:, 0].set(1.0)
        unembed = jnp.zeros((vocabulary, WIDTH)).at[:, 0].set(-50.0)
        got = self.score(hidden, unembed, np.arange(8), np.ones((3, 8)))
        np.testing.assert_allclose(got.logsumexp, np.log(vocabulary) - 50, atol=1e-5)
        np.testing.assert_allclose(got.logprob, -np.log(vocabulary), atol=1e-5)

    def test_gradients_are_the_weighted_sum_of_those_of_tokens(self):
        """KN-08: a gradient made in the forward pass ignores the weights that come back."""
        hidden, unembed, targets, _ = operands(TOKENS, WIDTH, VOCABULARY)
        targets[3] = -100
        weights = np.zeros((3, TOKENS), np.float32)
        weights[0, :5] = [1, 0, 2, 5, -1]
        together = self.score(hidden, unembed, targets, weights)
        alone = np.zeros(unembed.shape)
        for token in range(5):
            one = np.zeros_like(weights)
            one[0, token] = weights[0, token]
            alone += self.score(hidden, unembed, targets, one).d_unembed
        np.testing.assert_allclose(together.d_unembed, alone, atol=1e-6)
        np.testing.assert_array_equal(together.d_hidden[jnp.array([1, 3])], 0.0)

    def test_ignored_tokens_give_nothing_whatever_they_hold(self):
        """KN-09, and junk where nothing is scored: NaN states, temperature 0."""
        hidden, unembed, targets, cotangents = operands(TOKENS, WIDTH, VOCABULARY)
        temperature = np.ones(TOKENS)
        clean = self.score(hidden, unembed, targets, cotangents, temperature)
        ignored = targets == -100
        junk = jnp.where(ignored[:, None], jnp.nan, hidden)
        got = self.score(junk, unembed, targets, cotangents, np.where(ignored, 0.0, temperature))
        for value in got[:3]:
            np.testing.assert_array_equal(value[ignored], 0.0)
        np.testing.assert_array_equal(got.d_hidden[ignored], 0.0)
        np.testing.assert_array_equal(got.d_unembed, clean.d_unembed)

        nothing = self.score(junk * jnp.nan, unembed, np.full(TOKENS, -100), cotangents, 0.0)
        for value in nothing:
            np.testing.assert_array_equal(value, 0.0)

    def test_a_target_outside_the_vocabulary_is_nan_not_a_number(self):
        """optax gives -100 a finite loss; here only `ignore_index` is left out."""
        hidden, unembed, targets, cotangents = operands(TOKENS, WIDTH, VOCABULARY)
        targets[:3] = [VOCABULARY, -1, 5]
        got = self.score(hidden, unembed, targets, cotangents)
        assert np.isnan(got.logprob[:2]).all()
        assert np.isfinite(got.logprob[2])
        assert np.isfinite(got.entropy).all()

    def test_tokens_do_not_depend_on_their_neighbours(self):
        hidden, unembed, targets, cotangents = operands(TOKENS, WIDTH, VOCABULARY)
        whole = self.score(hidden, unembed, targets, cotangents)
        order = np.roll(np.arange(TOKENS), 5)
        moved = self.score(hidden[order], unembed, targets[order], cotangents[:, order])
        for name in ("logprob", "entropy", "logsumexp", "d_hidden"):
            np.testing.assert_allclose(
                getattr(moved, name), getattr(whole, name)[order], atol=2e-6, err_msg=name
            )

    def test_fifty_steps_of_training_follow_the_reference(self):
        """KN-13: gradient errors that early losses do not show."""
        hidden, unembed, targets, _ = operands(TOKENS, WIDTH, VOCABULARY, jnp.bfloat16)

        @partial(jax.jit, static_argnums=(0, 1))
        def losses(implementation: str, interpret: bool) -> jax.Array:
            def loss(parameters: tuple[jax.Array, jax.Array]) -> jax.Array:
                narrow_hidden, narrow_unembed = (x.astype(jnp.bfloat16) for x in parameters)
                scored = token_logprobs(
                    narrow_hidden,
                    narrow_unembed,
                    jnp.asarray(targets),
                    implementation=implementation,
                    interpret=interpret,
                )
                return -jnp.mean(scored.logprob)

            def step(parameters, _):
                value, gradient = jax.value_and_grad(loss)(parameters)
                return jax.tree.map(lambda x, g: x - 2.0 * g, parameters, gradient), value

            start = (hidden.astype(jnp.float32), unembed.astype(jnp.float32))
            return jax.lax.scan(step, start, length=50)[1]

        got, want = losses(self.implementation, self.interpret), losses("reference", False)
        assert want[-1] < 0.8 * want[0]
        np.testing.assert_allclose(got, want, rtol=1e-2)
