"""What each objective and weight does: rejection, limits, and whether the correction corrects."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.learner.loss import Denominators, LossSettings, policy_loss
from telescope_jax.types import PackedBatch
from tests.learner.sequences import (
    PLAIN,
    SETTINGS,
    Sequences,
    layout,
    one_row_each,
    random_sequences,
    update,
)
from tests.oracles import loss as oracle


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def no_silent_broadcasting():
    with jax.numpy_rank_promotion("raise"):
        yield


# What importance sampling rejects


@pytest.mark.usefixtures("x64")
def test_icepop_rejects_tokens_and_keeps_the_denominator():
    data = Sequences([[-1.0, -1.0, -1.0, -1.0]], [[-1.0, -2.0, 0.0, -1.1]], [1.0])
    settings = LossSettings(tis_mode="icepop", tis_floor=0.5, tis_cap=2.0)
    loss, gradient, metrics = update(jnp.asarray(data.flat), one_row_each(data), settings)
    np.testing.assert_allclose(gradient, [-0.25, 0, 0, -np.exp(0.1) / 4], rtol=1e-12)
    assert metrics["rejected_fraction"] == 0.5 and metrics["truncated_fraction"] == 0.25


@pytest.mark.usefixtures("x64")
def test_the_sequence_mask_removes_a_whole_rollout_and_keeps_the_denominator():
    """A rejected rollout adds nothing, KL and entropy included; N and S stay."""
    data = Sequences(
        [[-1.0, -1.0], [-1.0, -1.0]],
        [[-1.4, -1.4], [-1.3, -0.7]],
        [1.0, 1.0],
        entropy=[[1.0, 1.0], [1.0, 1.0]],
    )
    settings = LossSettings(sequence_mask=(0.8, 1.2), kl_coef=0.5, entropy_coef=0.1)
    loss, gradient, metrics = update(jnp.asarray(data.flat), one_row_each(data), settings)
    kept = dataclasses.replace(settings, sequence_mask=None)
    data.advantages = [0.0, 1.0]
    _, unmasked, _ = update(jnp.asarray(data.flat), one_row_each(data), kept)
    assert not np.any(gradient[:2]) and np.array_equal(gradient[2:], unmasked[2:])
    assert metrics["rejected_fraction"] == 0.5


@pytest.mark.usefixtures("x64")
def test_a_small_bias_per_token_does_not_grow_with_length():
    """LM-21: 100 tokens of log-ratio 0.012: token weights 1.0121; the sequence mask takes the mean,
    1.0121, where the product would be 3.32 and reject every long answer."""
    data = Sequences([[-1.0] * 100], [[-1.012] * 100], [1.0])
    for settings in (LossSettings(), LossSettings(sequence_mask=(0.5, 2.0))):
        loss, gradient, metrics = update(jnp.asarray(data.flat), one_row_each(data), settings)
        np.testing.assert_allclose(gradient, -np.exp(0.012) / 100, rtol=1e-12)
        assert metrics["rejected_fraction"] == 0 and metrics["truncated_fraction"] == 0


def test_clipped_tokens_are_counted():
    data = Sequences([[-1.0] * 4], [[-1.0, -1.5, -0.5, -1.1]], [1.0])
    for objective, expected in (("ppo", 0.5), ("cispo", 0.5), ("sapo", 0.0), ("pg", 0.0)):
        settings = LossSettings(objective, use_tis=False)
        flat = jnp.asarray(data.flat, jnp.float32)
        assert update(flat, one_row_each(data), settings)[2]["clipped_fraction"] == expected


# Limits


@pytest.mark.usefixtures("x64")
def test_on_policy_every_objective_has_the_reinforce_gradient():
    data = random_sequences(4, lengths=(3, 3, 3, 3))
    data.sampler, data.old = data.logprobs, data.logprobs
    flat = jnp.asarray(data.flat)
    expected = -np.repeat(data.advantages, 3) / 12
    for settings in SETTINGS.values():
        bare = dataclasses.replace(
            settings, kl_coef=0.0, reference_kl_coef=0.0, entropy_coef=0.0, normalizer="tokens"
        )
        _, gradient, metrics = update(flat, one_row_each(data), bare)
        np.testing.assert_allclose(gradient, expected, rtol=1e-12)
        assert metrics["ratio_mean"] == 1 and metrics["ess"] == 1 and metrics["kl"] == 0


@pytest.mark.usefixtures("x64")
def test_without_a_cap_tis_is_plain_importance_sampling():
    data = random_sequences(5)
    _, gradient, _ = update(
        jnp.asarray(data.flat), one_row_each(data), LossSettings(tis_cap=float("inf"))
    )
    ratio = np.exp(data.flat - np.concatenate(data.sampler))
    expected = -ratio * np.repeat(data.advantages, data.lengths) / len(data.flat)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


@pytest.mark.parametrize("objective", ["ppo", "cispo", "gspo"])
@pytest.mark.usefixtures("x64")
def test_a_clip_that_never_binds_is_plain_importance_sampling(objective):
    data = random_sequences(6, lengths=(1,) * 6)
    settings = LossSettings(objective, use_tis=False, clip_low=1.0, clip_high=1e9)
    data.old = None
    _, gradient, _ = update(jnp.asarray(data.flat), one_row_each(data), settings)
    ratio = np.exp(data.flat - np.concatenate(data.sampler))
    np.testing.assert_allclose(gradient, -ratio * data.advantages / 6, rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_gspo_has_the_gradient_of_its_sequence_ratio():
    """The token form equals the paper's sequence form, differentiated as one exp of a mean."""
    data = random_sequences(7)
    settings = LossSettings("gspo", use_tis=False, clip_low=0.1, clip_high=0.15)
    _, gradient, _ = update(jnp.asarray(data.flat), one_row_each(data), settings)
    member = np.repeat(np.eye(8), data.lengths, axis=1)
    mean = jnp.asarray(member / member.sum(1, keepdims=True))
    old, advantages = jnp.asarray(np.concatenate(data.old)), jnp.asarray(data.advantages)

    def sequence_form(flat):
        s = jnp.exp(mean @ (flat - old))
        return -jnp.minimum(s * advantages, jnp.clip(s, 0.9, 1.15) * advantages).mean()

    expected = jax.grad(sequence_form)(jnp.asarray(data.flat))
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_a_dropped_zero_advantage_group_adds_nothing_even_with_kl():
    """LM-13: left out, it is absent from loss, gradient and denominator; kept, it pulls."""
    data = random_sequences(8, lengths=(4, 3, 5, 2))
    data.advantages = [0.0, 0.0, 0.7, -0.7]
    settings = LossSettings(kl_coef=0.1)
    flat = jnp.asarray(data.flat)
    loss, gradient, _ = update(flat, layout(data, [[2], [3]]), settings)
    _, with_both, _ = update(flat, one_row_each(data), settings)
    alone = (data.logprobs[2:], data.sampler[2:], data.advantages[2:])
    expected = oracle.loss(dataclasses.asdict(settings), *alone)
    np.testing.assert_allclose(loss, expected, rtol=0, atol=1e-12)
    assert not np.any(gradient[:7]) and np.all(with_both[:7] != 0)


# Does the correction correct?


REWARD = np.array([1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0])
FEATURES = np.random.default_rng(0).normal(size=(8, 2))


def objective_value(theta):
    logits = FEATURES @ np.asarray(theta)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return float(p @ REWARD - 0.3 * (p @ np.log(p * 8)))


@functools.partial(jax.jit, static_argnames=("settings", "sampler"))
def ascend(settings, sampler):
    """Gradient steps with the exact expectation under the sampler: one-token rollouts, each of the
    eight once, its advantage multiplied by the sampler's probability, and N = 1."""
    features, reward = jnp.asarray(FEATURES), jnp.asarray(REWARD)
    one = jnp.ones((8, 1), jnp.int32)
    totals = Denominators(jnp.asarray(1.0), jnp.asarray(1.0))

    def loss(theta):
        logits = features @ theta
        logprobs = jax.nn.log_softmax(logits)
        fixed = jax.lax.stop_gradient(logprobs)
        shifted = logits / 0.6 if sampler == "sharp" else jnp.round(logits)
        written = jax.lax.stop_gradient(jax.nn.log_softmax(shifted))
        gain = reward - 0.3 * fixed
        advantages = jnp.exp(written) * (gain - jnp.exp(fixed) @ gain)
        batch = PackedBatch(one, one, 0 * one, one > 0, written[:, None], advantages[:, None])
        return policy_loss(logprobs[:, None], 0.0 * logprobs[:, None], batch, totals, settings)[0]

    def step(_, theta):
        return theta - 0.5 * jax.grad(loss)(theta)

    return jax.lax.fori_loop(0, 4000, step, jnp.zeros(2))


OPTIMUM = [0.8142, -0.4598]
IS = LossSettings(tis_cap=float("inf"))
ICEPOP = LossSettings(tis_mode="icepop", tis_floor=0.5, tis_cap=2.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [(PLAIN, 0.4448), (IS, 0.44590), (LossSettings(), 0.44588), (ICEPOP, 0.44577)],
    ids=["none", "is", "tis", "icepop"],
)
@pytest.mark.usefixtures("x64")
def test_the_correction_corrects_a_sharper_sampler(settings, expected):
    """golden/README.md: a sampler of temperature 0.6 and no correction ends beside the optimum."""
    theta = ascend(settings, "sharp")
    assert abs(objective_value(theta) - expected) < (1e-4 if settings == PLAIN else 1e-5)
    if settings == IS:
        np.testing.assert_allclose(theta, OPTIMUM, atol=5e-5)


@pytest.mark.parametrize("settings", [IS, LossSettings(), ICEPOP], ids=["is", "tis", "icepop"])
@pytest.mark.usefixtures("x64")
def test_every_correction_undoes_a_sampler_of_rounded_logits(settings):
    """golden/README.md: all three reach the optimum; without correction J stays below 0.4440."""
    np.testing.assert_allclose(ascend(settings, "rounded"), OPTIMUM, atol=5e-5)
    assert objective_value(ascend(PLAIN, "rounded")) < 0.4440
