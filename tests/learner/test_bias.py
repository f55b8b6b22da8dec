"""Does the correction correct? Exact expectations under a sampler that is not π.

Φ = default_rng(0).normal(size=(8, 2)), π = softmax(Φθ), rewards r; J = E_π[r] − 0.3·KL(π‖uniform),
ascended by the gradient of `policy_loss` over all eight actions, each weighed by its probability
under the sampler. The right values are those of the project's golden numbers, computed in numpy:
θ* = [0.8142, −0.4598] with J = 0.44590. With features shared between actions the bias of a wrong
sampler cannot hide, as it would in a table that has every action's own entry.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.learner.loss import LossSettings, denominators, policy_loss
from telescope_jax.types import PackedBatch

FEATURES = np.random.default_rng(0).normal(size=(8, 2))
REWARDS = np.array([1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0])
BEST, BEST_VALUE = [0.8142, -0.4598], 0.44590

SAMPLERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "π itself": lambda logits: logits,
    "temperature 0.6": lambda logits: logits / 0.6,
    "rounded logits": jnp.round,
}
NONE = LossSettings(use_tis=False)
TIS = LossSettings(tis_cap=2.0)
IS = LossSettings(tis_cap=float("inf"))
ICEPOP = LossSettings(tis_mode="icepop", tis_floor=0.5, tis_cap=2.0)
DECOUPLED = LossSettings("ppo", tis_cap=2.0)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def soft_rewards(logprobs: jax.Array) -> jax.Array:
    """r − 0.3·(log π + log 8), whose mean under π is J and whose policy gradient is J's."""
    return jnp.asarray(REWARDS) - 0.3 * (logprobs + jnp.log(8.0))


def ascend(sampler: str, settings: LossSettings, *, rate: float = 1.0, steps: int = 2_000):
    """θ at the end, and J over the last 500 steps."""
    columns = jnp.ones((8, 2), jnp.int32)
    mask = jnp.tile(jnp.array([False, True]), (8, 1))  # one trained token behind a prompt's

    def per_action(values: jax.Array) -> jax.Array:
        return jnp.stack([jnp.zeros(8), values], axis=1)

    def loss(theta: jax.Array) -> jax.Array:
        logits = jnp.asarray(FEATURES) @ theta
        logprobs, fixed = jax.nn.log_softmax(logits), jax.lax.stop_gradient(logits)
        policy = jax.nn.log_softmax(fixed)
        written_by = jax.nn.log_softmax(SAMPLERS[sampler](fixed))
        gains = soft_rewards(policy)
        # Eight tokens share 1/N = 1/8: times 8·μ the sum is the mean under the sampler.
        weighed = 8 * jnp.exp(written_by) * (gains - jnp.exp(policy) @ gains)
        batch = PackedBatch(
            tokens=columns,
            segments=columns,
            positions=columns,
            loss_mask=mask,
            logprobs=per_action(written_by),
            advantages=per_action(weighed),
            old_logprobs=per_action(policy) if settings.needs_old_logprobs else None,
        )
        return policy_loss(
            per_action(logprobs),
            jnp.zeros((8, 2)),
            batch,
            denominators(columns, mask),
            settings,
        )[0]

    def step(theta: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        theta = theta - rate * jax.grad(loss)(theta)
        logprobs = jax.nn.log_softmax(jnp.asarray(FEATURES) @ theta)
        return theta, jnp.exp(logprobs) @ soft_rewards(logprobs)

    theta, values = jax.jit(lambda start: jax.lax.scan(step, start, None, length=steps))(
        jnp.zeros(2)
    )
    return np.asarray(theta), np.asarray(values[-500:])


def test_on_policy_every_correction_reaches_the_optimum():
    for settings in (NONE, TIS, IS, ICEPOP, DECOUPLED):
        theta, values = ascend("π itself", settings)
        np.testing.assert_allclose(theta, BEST, atol=1e-4)
        np.testing.assert_allclose(values[-1], BEST_VALUE, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "value"),
    [(NONE, 0.44485), (IS, BEST_VALUE), (TIS, 0.44588), (DECOUPLED, 0.44588), (ICEPOP, 0.44578)],
    ids=["none", "IS", "TIS", "decoupled PPO", "icepop"],
)
def test_a_colder_sampler_costs_what_its_correction_leaves(settings: LossSettings, value: float):
    theta, values = ascend("temperature 0.6", settings)
    np.testing.assert_allclose(values[-1], value, atol=1e-5)
    assert np.allclose(theta, BEST, atol=1e-4) == (settings is IS)


@pytest.mark.parametrize("settings", [IS, TIS, DECOUPLED, ICEPOP])
def test_a_rounded_sampler_is_corrected_in_full(settings: LossSettings):
    theta, _ = ascend("rounded logits", settings)
    np.testing.assert_allclose(theta, BEST, atol=1e-4)


def test_a_rounded_sampler_without_correction_never_arrives():
    _, values = ascend("rounded logits", NONE, rate=0.1)
    assert values.mean() < 0.4440
