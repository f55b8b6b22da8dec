"""Advantages against golden values, an independent loop, and what must hold of any group."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax.scoring.advantages import ALGORITHMS, compute_advantages
from tests.oracles import advantages as oracle

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "advantages.json").read_text())
WITHIN_GROUP = ("grpo", "dr_grpo", "rloo")
rewards_G = st.lists(st.floats(-10, 10), min_size=1, max_size=9)


def one_group(algorithm, rewards):
    return compute_advantages(algorithm, [rewards], [[3] * len(rewards)])[0]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["algorithm"])
def test_golden_values_are_met(case):
    groups = case.get("reward_groups", [case.get("rewards")])
    lengths = case.get("lengths", [[1] * len(group) for group in groups])
    expected = case["advantages"] if "reward_groups" in case else [case["advantages"]]
    got = compute_advantages(case["algorithm"], groups, lengths)
    for got_G, expected_G in zip(got, expected, strict=True):
        np.testing.assert_allclose(got_G, expected_G, rtol=0, atol=1e-12)


def test_readme_numbers_are_met():
    """The worked number of golden/README.md: rewards [1,0,0,1,1,0,0,0] → 1.207381/−0.724429."""
    got = one_group("grpo", [1, 0, 0, 1, 1, 0, 0, 0])
    high, low = 1.207381, -0.724429
    np.testing.assert_allclose(got, [high, low, low, high, high, low, low, low], atol=5e-7)


@pytest.mark.parametrize("algorithm", WITHIN_GROUP)
@given(rewards=rewards_G)
def test_advantages_equal_the_loops(algorithm, rewards):
    expected = getattr(oracle, algorithm)(rewards)
    np.testing.assert_allclose(one_group(algorithm, rewards), expected, rtol=1e-7, atol=1e-9)


@given(
    st.lists(
        st.lists(st.tuples(st.floats(-3, 3), st.integers(1, 20)), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    )
)
def test_whitened_advantages_equal_the_loops_and_have_mean_0_and_variance_1(groups):
    rewards = [[reward for reward, _ in group] for group in groups]
    lengths = [[length for _, length in group] for group in groups]
    got = compute_advantages("reinforce_pp", rewards, lengths)
    spread = max(max(r) - min(r) for r in rewards)
    if spread < 1e-6:  # nothing but roundings to divide by
        assert np.all(np.isfinite(np.concatenate(got)))
        return
    for got_G, expected_G in zip(got, oracle.reinforce_pp(rewards, lengths), strict=True):
        np.testing.assert_allclose(got_G, expected_G, rtol=1e-6, atol=1e-8)
    tokens = np.repeat(np.concatenate(got), np.concatenate(lengths))
    np.testing.assert_allclose([tokens.mean(), tokens.var()], [0, 1], atol=1e-6)


@pytest.mark.parametrize("algorithm", WITHIN_GROUP)
@given(rewards=rewards_G)
def test_advantages_of_a_group_sum_to_zero(algorithm, rewards):
    assert abs(one_group(algorithm, rewards).sum()) < 1e-9


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("rewards", [[0.7], [0.1 + 0.2, 0.3], [0.7] * 5, [-1e9] * 3])
def test_a_group_without_signal_gets_exact_zeros(algorithm, rewards):
    """LM-12: a singleton with a ddof-1 std is 0/0; equal rewards may differ by a rounding."""
    assert np.array_equal(one_group(algorithm, rewards), np.zeros(len(rewards)))


def test_rollouts_that_a_filter_left_out_do_not_weigh_in_the_whitening():
    rewards, kept = [[1.0, 0.0, 0.5], [2.0, 0.0]], [[4, 0, 2], [1, 3]]
    got = compute_advantages("reinforce_pp", rewards, kept)
    tokens = np.repeat(np.concatenate(got), np.concatenate(kept))
    np.testing.assert_allclose([tokens.mean(), tokens.var()], [0, 1], atol=1e-12)
    nothing = compute_advantages("reinforce_pp", [[1.0, 0.0]], [[0, 0]])
    assert np.array_equal(nothing[0], [0, 0])


@pytest.mark.parametrize("algorithm", ["cispo", "gspo", "sapo"])
def test_algorithms_that_change_the_loss_keep_grpo_advantages(algorithm):
    rewards = [0.2, 1.0, 0.0]
    assert np.array_equal(one_group(algorithm, rewards), one_group("grpo", rewards))


@pytest.mark.parametrize(
    ("algorithm", "rewards", "lengths", "message"),
    [
        ("grop", [[1, 0]], [[1, 1]], "grop.*grpo"),
        ("grpo", [[1, 0]], [[1]], "one length a rollout"),
        ("grpo", [[1, float("nan")]], [[1, 1]], "reward_error"),
        ("grpo", [[]], [[]], "no rollouts"),
        ("grpo", [[1, 0]], [[1, -1]], "≥ 0"),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm, rewards, lengths, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages(algorithm, rewards, lengths)


def test_no_groups_give_no_advantages():
    assert compute_advantages("reinforce_pp", [], []) == []
