"""The loss against golden values and an independent loop, and what it must not depend on."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.learner.loss import (
    Denominators,
    LossSettings,
    LossSums,
    denominators,
    finish,
    policy_loss,
)
from telescope_jax.types import LossStats
from tests.learner.sequences import (
    PLAIN,
    SETTINGS,
    Sequences,
    layout,
    one_row_each,
    random_sequences,
    share,
    update,
)
from tests.oracles import loss as oracle

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "loss.json").read_text())


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def no_silent_broadcasting():
    with jax.numpy_rank_promotion("raise"):
        yield


def from_golden(settings):
    """The names of loss.json in the words of LossSettings."""
    s = dict(settings)
    algorithm = s.pop("algorithm", "grpo")
    ppo = s.pop("use_ppo_clip", False)
    return LossSettings(
        objective=algorithm if algorithm != "grpo" else "ppo" if ppo else "pg",
        use_tis=s.pop("use_tis", False),
        dual_clip=s.pop("clip_ratio_c", 0.0),
        sequence_mask=tuple(s.pop("seq_mask")) if "seq_mask" in s else None,
        **s,
    )


# Values and gradients


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: json.dumps(case["settings"]))
@pytest.mark.usefixtures("x64")
def test_golden_values_gradients_and_metrics_are_met(case):
    """All to 1e-9, which is how good the golden gradients, central differences, are themselves."""
    settings = from_golden(case["settings"])
    data = Sequences(
        case["logprobs"], case["rollout_logprobs"], case["advantages"], case["trainer_logprobs"]
    )
    loss, gradient, metrics = update(jnp.asarray(data.flat), one_row_each(data), settings)
    np.testing.assert_allclose(loss, case["loss"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(gradient, np.concatenate(case["grad_logprobs"]), rtol=0, atol=1e-9)
    expected = dict(case["metrics"])
    expected["kl"] = expected.pop("kl_rollout")
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.usefixtures("x64")
def test_value_and_gradient_equal_the_loops(name):
    """Also MT-08: the gradient that is applied is the central difference of the reported loss."""
    settings, data = SETTINGS[name], random_sequences(1)
    plain = dataclasses.asdict(settings)
    loss, gradient, metrics = update(jnp.asarray(data.flat), one_row_each(data, prompt=2), settings)
    rest = (data.sampler, data.advantages, data.old, data.reference, data.entropy)
    np.testing.assert_allclose(loss, oracle.loss(plain, data.logprobs, *rest), rtol=0, atol=1e-9)
    expected = np.concatenate(oracle.gradient(plain, data.logprobs, *rest))
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-9)
    for key, value in oracle.stats(
        dataclasses.asdict(settings), data.logprobs, data.sampler
    ).items():
        np.testing.assert_allclose(metrics[key], value, rtol=0, atol=1e-9, err_msg=key)
    np.testing.assert_allclose(metrics["entropy"], np.concatenate(data.entropy).mean(), atol=1e-9)
    assert metrics["loss"] == loss and metrics["token_count"] == len(data.flat)


@pytest.mark.usefixtures("x64")
def test_entropy_is_rewarded_in_its_own_gradient():
    data = random_sequences()
    (batch, entropy, index), flat = one_row_each(data), jnp.asarray(data.flat)
    totals = denominators(batch.segments, batch.loss_mask)
    settings = LossSettings(entropy_coef=0.5)
    gradient = jax.grad(
        lambda entropy: policy_loss(flat[index], entropy, batch, totals, settings)[0]
    )(entropy)
    expected = np.where(batch.loss_mask, -0.5 / len(data.flat), 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


# Independence from the layout


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("bits", [64, 32])
def test_loss_and_gradient_are_the_same_for_every_split_packing_and_padding(name, bits):
    """LM-01, MT-08: any microbatches; dense, sparse and empty rows; prompts and padding."""
    settings, data = SETTINGS[name], random_sequences(2)
    dtype, tolerance = (np.float64, 1e-9) if bits == 64 else (np.float32, 1e-5)
    microbatches = [
        ([[[i] for i in range(8)]], 0),
        ([[[0], [1], [2], [3]], [[4], [5], [6], [7]]], 5),
        ([[[7, 1, 5, 6], []], [[]], [[], [3, 0, 2, 4]]], 1),
    ]
    with jax.enable_x64(bits == 64):
        flat = jnp.asarray(data.flat, dtype)
        results = [
            update(flat, [layout(data, r, prompt=prompt, dtype=dtype) for r in rows], settings)
            for rows, prompt in microbatches
        ]
    loss, gradient, metrics = results[0]
    for other_loss, other_gradient, other_metrics in results[1:]:
        np.testing.assert_allclose(other_loss, loss, rtol=tolerance, atol=tolerance / 10)
        error = np.linalg.norm(other_gradient - gradient)
        assert error <= tolerance * np.linalg.norm(gradient)
        for key, value in metrics.items():
            np.testing.assert_allclose(other_metrics[key], value, rtol=10 * tolerance, atol=1e-6)


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 1, 1, 1], [1, 3], [3, 1]])
@pytest.mark.usefixtures("x64")
def test_readme_number_is_met_for_every_split(split):
    """Lengths 2/6/1/3, token losses 1, 2, 3, 4: 2.416667; the usual bug gives 2.75, 1.85 or 2.5."""
    logprobs = [[-1.0] * n for n in (2, 6, 1, 3)]
    data, rows = Sequences(logprobs, logprobs, [1, 2, 3, 4]), iter(range(4))
    placed = [layout(data, [[next(rows)] for _ in range(size)]) for size in split]
    loss, _, _ = update(jnp.asarray(data.flat), placed, PLAIN)
    np.testing.assert_allclose(loss, 29 / 12, rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_token_means_are_not_means_of_microbatch_means():
    """LM-01: token losses [1, 1] and six 3s give 20/8, not 2."""
    data = Sequences([[-1.0] * 2, [-1.0] * 6], [[-1.0] * 2, [-1.0] * 6], [1, 3])
    for placed in (one_row_each(data), [layout(data, [[0]]), layout(data, [[1]])]):
        assert update(jnp.asarray(data.flat), placed, PLAIN)[0] == 2.5


def test_centred_advantages_of_unequal_lengths_give_the_hand_value():
    """LM-23: lengths 2, 3, 5, 8, rewards 1, 0, 0, 1, ratio 1: −Σ A·len / Σ len, not 0."""
    lengths, advantages = (2, 3, 5, 8), [0.5, -0.5, -0.5, 0.5]
    data = Sequences([[-1.0] * n for n in lengths], [[-1.0] * n for n in lengths], advantages)
    settings = LossSettings("ppo", use_tis=False)
    loss, _, metrics = update(jnp.asarray(data.flat, jnp.float32), one_row_each(data), settings)
    np.testing.assert_allclose(loss, -(0.5 * (2 - 3 - 5 + 8)) / 18, rtol=1e-6)
    assert metrics["token_count"] == 18


def test_counts_are_of_rollouts_with_loss_tokens():
    segments = jnp.array([[1, 1, 2, 3, 3, 0], [1, 1, 1, 1, 0, 0], [0] * 6])
    mask = jnp.array([[0, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 1]], bool)
    counted = denominators(segments, mask)
    assert (float(counted.tokens), float(counted.sequences)) == (5, 3)


# Junk, absent and extreme inputs


@pytest.mark.parametrize("name", SETTINGS)
def test_a_batch_without_loss_tokens_is_exactly_zero(name):
    """LM-04, KN-09: everything masked, junk everywhere: loss 0, gradient 0, no made-up means."""
    data = random_sequences(3)
    batch, entropy, index = one_row_each(data, dtype=np.float32)
    placed = (batch._replace(loss_mask=jnp.zeros_like(batch.loss_mask)), entropy, index)
    loss, gradient, metrics = update(jnp.asarray(data.flat, jnp.float32), placed, SETTINGS[name])
    assert loss == 0.0 and not np.any(gradient)
    assert metrics["token_count"] == 0 and np.isnan(metrics["kl"]) and np.isnan(metrics["ess"])


BFLOAT16 = ("tis", "decoupled ppo", "sequence mask", "k3")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, jnp.float32) for name in SETTINGS] + [(name, jnp.bfloat16) for name in BFLOAT16],
)
def test_a_log_ratio_of_99_does_no_harm(name, dtype):
    """LM-06: trainer −1, sampler −100. Kept, it is finite; masked, it never happened."""
    settings = SETTINGS[name]
    data = Sequences([[-1.0, -0.5]], [[-100.0, -0.6]], [1.0])
    data.old, data.reference, data.entropy = [[-0.9, -0.7]], [[-0.8, -0.7]], [[0.5, 0.6]]
    batch, entropy, index = layout(data, [[0]], dtype=np.float32)
    totals, flat = Denominators(jnp.float32(2), jnp.float32(1)), jnp.asarray(data.flat, dtype)
    loss, sums, gradient = share(flat, batch, entropy, index, totals, settings)
    assert np.isfinite(float(loss)) and np.all(np.isfinite(gradient.astype(jnp.float32)))
    assert all(np.isfinite(float(value)) for value in sums)
    dropped = batch._replace(loss_mask=batch.loss_mask.at[0, 0].set(False))
    loss, sums, gradient = share(flat, dropped, entropy, index, totals, settings)
    assert np.isfinite(float(loss)) and gradient[0] == 0 and np.isfinite(float(gradient[1]))
    assert sums.tokens == 1 and sums.truncated == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_enormous_ratio_weighs_exactly_the_cap(dtype):
    """LM-06: kept with cap 2, the weight is exactly 2."""
    data = Sequences([[-1.0]], [[-100.0]], [1.0])
    placed = one_row_each(data, dtype=np.float32)
    loss, gradient, metrics = update(jnp.asarray(data.flat, dtype), placed, LossSettings())
    assert loss == 2.0 and gradient.astype(float) == [-2.0]
    assert metrics["truncated_fraction"] == 1.0


@pytest.mark.parametrize("absent", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["pg", "tis", "icepop", "ppo", "decoupled ppo", "sapo", "k2", "k3"]
)
def test_a_token_without_sampler_logprob_has_weight_1_and_is_counted(name, absent):
    """LM-07: the others are unchanged bit for bit, and this one is as if μ = π (or μ = π_old)."""
    settings = SETTINGS[name]
    logprobs, sampler = [[-0.3, -0.4, -0.5]], [[-0.1, absent, -0.2]]
    old = [[-0.35, -0.3, -0.4]] if settings.needs_old_logprobs else None
    data = Sequences(logprobs, sampler, [1.5], old)
    stand_in = logprobs[0][1] if old is None else old[0][1]
    flat = jnp.asarray(data.flat, jnp.float32)
    _, gradient, metrics = update(flat, one_row_each(data, dtype=np.float32), settings)
    data.sampler = [[-0.1, stand_in, -0.2]]
    _, expected, reference = update(flat, one_row_each(data, dtype=np.float32), settings)
    assert np.array_equal(gradient[[0, 2]], expected[[0, 2]])
    np.testing.assert_allclose(gradient[1], expected[1], rtol=1e-6)
    assert metrics["unscored_tokens"] == 1 and reference["unscored_tokens"] == 0
    if old is None and name not in ("k2", "k3"):
        np.testing.assert_allclose(gradient[1], -1.5 / 3, rtol=1e-6)


@pytest.mark.parametrize("name", ["tis", "decoupled gspo", "sequence mask"])
def test_jit_changes_nothing(name):
    """The trainer calls the loss inside one jitted step, with the settings as a static argument."""
    data = random_sequences(9)
    flat, (batch, entropy, index) = jnp.asarray(data.flat, jnp.float32), one_row_each(data)
    totals = denominators(batch.segments, batch.loss_mask)
    args = (flat, batch, entropy, index, totals)
    expected = share(*args, SETTINGS[name])
    got = jax.jit(share, static_argnames="settings")(*args, settings=SETTINGS[name])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Misuse


def test_both_ratios_against_the_sampler_at_once_are_refused():
    data = random_sequences()
    data.old = None
    with pytest.raises(ValueError, match="no old_logprobs"):
        update(jnp.asarray(data.flat, jnp.float32), one_row_each(data), LossSettings("ppo"))


def test_a_missing_reference_is_refused():
    data = random_sequences()
    data.reference = None
    settings = LossSettings(reference_kl_coef=0.1)
    with pytest.raises(ValueError, match="no reference_logprobs"):
        update(jnp.asarray(data.flat, jnp.float32), one_row_each(data), settings)


def test_settings_that_make_no_sense_are_refused_together():
    with pytest.raises(ValueError) as error:
        LossSettings(
            "ppu",
            tis_cap=0.5,
            tis_floor=0.6,
            clip_low=-1,
            dual_clip=0.5,
            sapo_tau_positive=0,
            sequence_mask=(2, 1),
            kl_coef=-1,
            kl_estimator="k4",
            normalizer="constant",
        )
    for word in ("ppu", "tis_cap", "clip_low", "dual_clip", "sapo", "(2, 1)", "kl_coef", "k4"):
        assert word in str(error.value)
    assert "constant_length" in str(error.value)
    with pytest.raises(ValueError, match="gspo"):
        LossSettings("gspo", normalizer="constant", constant_length=5)


def test_statistics_have_the_names_of_loss_stats():
    sums = LossSums(*(jnp.float32(1) for _ in LossSums._fields))
    assert set(finish(sums)) - {"unscored_tokens"} <= set(LossStats._fields)
