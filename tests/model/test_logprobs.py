"""The shift by one, the temperature, and the walls between packed rollouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import PolicyConfig
from telescope_jax.model.decoder import Decoder
from telescope_jax.model.logprobs import logprobs, scored
from telescope_jax.types import Params

CONFIG = PolicyConfig(width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_width=24)
DECODER = Decoder(CONFIG, 20)
T = 9  # one shape for all tests: they are bound by compilation


@pytest.fixture(scope="module")
def params() -> Params:
    return jax.jit(DECODER.init)(jax.random.key(0))


@jax.jit
def run(params, tokens, segments, positions, temperature, wanted):
    return logprobs(
        DECODER, params, tokens, segments, positions, temperature=temperature, wanted=wanted
    )


def row(values: list[int]) -> jax.Array:
    return jnp.asarray([values + [0] * (T - len(values))], jnp.int32)


def score(params, tokens, segments=None, positions=None, temperature=1.0, wanted=None):
    """Scores of one row, cut to its length."""
    n = len(tokens)
    wanted = row([1] * n if wanted is None else wanted) > 0
    values, entropy = run(
        params,
        row(tokens),
        row([1] * n if segments is None else segments),
        row(list(range(n)) if positions is None else positions),
        jnp.float32(temperature),
        wanted,
    )
    return np.asarray(values[0, :n]), np.asarray(entropy[0, :n])


def scores_by_prefixes(
    params: Params, tokens: list[int], temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """log p(tokens[t] | tokens[<t]) and the entropy there, from one forward pass a prefix."""
    values, entropies = [0.0], [0.0]
    prefill = jax.jit(DECODER.prefill)
    for t in range(1, len(tokens)):
        last, _ = prefill(params, row(tokens[:t]), jnp.array([t]))
        logits = np.asarray(last[0], np.float64) / temperature
        log_p = logits - np.log(np.exp(logits).sum())
        values.append(log_p[tokens[t]])
        entropies.append(-(np.exp(log_p) * log_p).sum())
    return np.array(values), np.array(entropies)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_index_t_scores_token_t_given_those_before_it(params, temperature: float):
    """LM-16 (the shift) and LM-08 (logits, not log-probs, are divided by the temperature)."""
    tokens = [3, 1, 4, 1, 5]
    values, entropy = score(params, tokens, temperature=temperature)
    expected, expected_entropy = scores_by_prefixes(params, tokens, temperature)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


def test_a_packed_rollout_scores_as_if_it_were_alone(params):
    """LM-17: A = [1, 2, 3] in front changes nothing, nor does another A in its place."""
    alone, entropy_alone = score(params, [4, 5, 6, 7, 8])
    segments, positions = [1, 1, 1, 2, 2, 2, 2, 2], [0, 1, 2, 0, 1, 2, 3, 4]
    for first in ([1, 2, 3], [9, 9, 9]):
        values, entropy = score(params, [*first, 4, 5, 6, 7, 8], segments, positions)
        np.testing.assert_allclose(values[3:], alone, atol=1e-6)
        np.testing.assert_allclose(entropy[3:], entropy_alone, atol=1e-6)


def test_no_gradient_crosses_the_wall_between_rollouts(params):
    """LM-17: hidden states of B have no gradient with respect to the embeddings of A's tokens."""
    segments, positions = row([1, 1, 1, 2, 2, 2, 2, 2]), row([0, 1, 2, 0, 1, 2, 3, 4])

    @jax.jit
    @jax.grad
    def gradient(embedding: jax.Array) -> jax.Array:
        changed = {**params, "embed": {"embedding": embedding}}
        tokens = row([1, 2, 3, 4, 5, 6, 7, 8])
        return (DECODER.hidden(changed, tokens, segments, positions)[:, 3:8] ** 3).sum()

    found = np.asarray(gradient(params["embed"]["embedding"]))
    assert not found[1:4].any() and found[4:9].any(axis=1).all()


def test_first_tokens_padding_and_unwanted_tokens_score_0(params):
    segments, positions = [1, 1, 2, 2, 2, 0], [0, 1, 0, 1, 2, 0]
    expected = np.array([False, True, False, True, True, False])
    np.testing.assert_array_equal(scored(jnp.asarray([segments]))[0], expected)
    values, entropy = score(params, [7] * 6, segments, positions)
    np.testing.assert_array_equal(values != 0, expected)
    np.testing.assert_array_equal(entropy != 0, expected)
    some, _ = score(params, [7] * 6, segments, positions, wanted=[0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(some, np.where([0, 0, 0, 1, 0, 0], values, 0))


def test_a_row_of_padding_is_finite_and_gives_no_gradient(params):
    nothing = row([])

    @jax.jit
    @jax.value_and_grad
    def total(params):
        values, entropy = logprobs(DECODER, params, nothing, nothing, nothing)
        return values.sum() + entropy.sum()

    value, gradient = total(params)
    assert float(value) == 0.0
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))
