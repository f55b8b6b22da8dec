"""Schedules by number, AdamW against plain loops, and the clip."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import OptimizerConfig
from telescope_jax.learner.optimizer import adamw_direction, clip_factor, learning_rate


def rates(steps: int, **fields) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **fields)
    return [learning_rate(config, step, steps) for step in range(steps)]


def float32(tree: dict[str, np.ndarray]) -> dict[str, jnp.ndarray]:
    return {name: jnp.asarray(value, jnp.float32) for name, value in tree.items()}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1]),
        ({"schedule": "linear", "warmup_steps": 1}, [1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "linear", "final_fraction": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine", "final_fraction": 0.0}, [1, 0.853553, 0.5, 0.146447, 0]),
        ({"schedule": "linear", "warmup_steps": 2, "final_fraction": 0.4}, [0.5, 1, 0.8, 0.6, 0.4]),
    ],
)  # fmt: skip
def test_the_schedule_by_number(fields, expected):
    np.testing.assert_allclose(rates(5, **fields), expected, atol=1e-6)


def test_the_first_step_trains_and_the_rate_is_never_above_the_peak():
    for schedule in ("constant", "linear", "cosine"):
        found = rates(50, schedule=schedule, warmup_steps=10, final_fraction=0.1)
        assert found[0] > 0 and max(found) == 1.0 and found[9] == 1.0


def test_beyond_the_last_step_the_rate_stays():
    config = OptimizerConfig(learning_rate=2.0, schedule="linear", final_fraction=0.25)
    assert learning_rate(config, 500, 5) == learning_rate(config, 4, 5) == 0.5


def test_a_schedule_of_one_step_has_a_rate():
    assert rates(1, schedule="cosine") == [1.0]


def test_adamw_equals_plain_loops_and_decays_matrices_only():
    config = OptimizerConfig(beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1)
    rng = np.random.default_rng(0)
    params = {"matrix": rng.normal(size=(3, 2)), "scale": rng.normal(size=3)}
    direction: Any = adamw_direction(config)  # optax types its trees too widely to index
    state = direction.init(float32(params))
    m = {k: np.zeros_like(v) for k, v in params.items()}
    v = {k: np.zeros_like(x) for k, x in params.items()}
    for t in range(1, 4):
        gradient = {k: rng.normal(size=x.shape) for k, x in params.items()}
        ours, state = direction.update(float32(gradient), state, float32(params))
        for k in params:
            m[k] = 0.9 * m[k] + 0.1 * gradient[k]
            v[k] = 0.98 * v[k] + 0.02 * gradient[k] ** 2
            step = (m[k] / (1 - 0.9**t)) / (np.sqrt(v[k] / (1 - 0.98**t)) + 1e-8)
            step += 0.1 * params[k] if params[k].ndim == 2 else 0.0
            np.testing.assert_allclose(ours[k], step, rtol=1e-5, atol=1e-6)
            params[k] = params[k] - 0.01 * step


def test_the_clip_scales_down_and_never_up():
    assert float(clip_factor(jnp.float32(4.0), 1.0)) == 0.25
    assert float(clip_factor(jnp.float32(0.5), 1.0)) == 1.0
    assert float(clip_factor(jnp.float32(0.0), 1.0)) == 1.0
    assert float(clip_factor(jnp.float32(1e9), 0.0)) == 1.0


def test_a_narrow_first_moment_halves_its_bytes_and_barely_moves_the_direction():
    params = {"mlp": {"up": {"kernel": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)}}}
    gradient = jax.tree.map(lambda x: 0.1 * x + 0.02, params)
    directions = {}
    state: Any
    direction: Any
    for dtype in ("float32", "bfloat16"):
        transform = adamw_direction(OptimizerConfig(first_moment_dtype=dtype))
        state = transform.init(params)
        assert state[0].mu["mlp"]["up"]["kernel"].dtype == dtype
        assert state[0].nu["mlp"]["up"]["kernel"].dtype == "float32"
        for _ in range(3):
            direction, state = transform.update(gradient, state, params)
        directions[dtype] = np.asarray(direction["mlp"]["up"]["kernel"])
    np.testing.assert_allclose(directions["bfloat16"], directions["float32"], rtol=1e-2, atol=1e-3)
    assert (directions["bfloat16"] != directions["float32"]).any()
