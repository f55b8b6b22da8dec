"""Rotary frequencies by number, and the rotation by its defining property."""

import jax.numpy as jnp
import numpy as np

from telescope_jax.model.rope import Llama3Scaling, inverse_frequencies, rotate


def test_llama_3_1_frequencies_are_the_published_ones():
    """MX-11: theta 500000, head_dim 8, factor 8, low 1, high 4, original length 8192."""
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    stretched = [1.0, 0.0376060, 5.24846e-4, 6.64787e-6]
    np.testing.assert_allclose(inverse_frequencies(8, 5e5, scaling), stretched, rtol=2e-6)
    plain = [1.0, 0.0376060, 1.414214e-3, 5.318296e-5]
    np.testing.assert_allclose(inverse_frequencies(8, 5e5), plain, rtol=2e-6)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 8)), jnp.float32) for _ in range(2))
    frequencies = inverse_frequencies(8, 1e4)

    def score(at: int, distance: int) -> float:
        turned_q = rotate(q, jnp.array([at + distance]), frequencies)
        return float((turned_q * rotate(k, jnp.array([at]), frequencies)).sum())

    np.testing.assert_allclose(score(3, 5), score(40, 5), rtol=1e-4)
    assert abs(score(3, 5) - score(3, 6)) > 1e-3


def test_position_0_turns_nothing_and_norms_are_kept():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 8)), jnp.float32)
    frequencies = inverse_frequencies(8, 1e4)
    np.testing.assert_array_equal(rotate(x, jnp.zeros(4, jnp.int32), frequencies), x)
    turned = rotate(x, jnp.arange(4), frequencies)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5
    )
