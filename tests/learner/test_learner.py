"""The learner as a Trainer: steps, versions, skipped updates, minibatches, save and restore."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from telescope_jax.config import Config, MeshConfig, OptimizerConfig
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.loss import LossSettings
from telescope_jax.learner.settings import loss_settings
from telescope_jax.sharding import make_mesh
from telescope_jax.types import PackedBatch
from tests.learner.rows import POLICY, VOCAB, batches

ROWS = 4
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, schedule="linear", warmup_steps=4, max_skipped_updates=2
)


def make_learner(mesh: tuple[int, int, int] = (1, 1, 1), **kwargs) -> Learner:
    kwargs = {"loss": LossSettings(), "optimizer": OPTIMIZER, "number_of_steps": 10} | kwargs
    return Learner(POLICY, VOCAB, make_mesh(MeshConfig(*mesh)), rows_per_microbatch=ROWS, **kwargs)


@pytest.fixture
def learner() -> Iterator[Learner]:
    made = make_learner()
    yield made
    made.close()


def poisoned(batch: list[PackedBatch]) -> list[PackedBatch]:
    return [one._replace(advantages=np.full_like(one.advantages, np.nan)) for one in batch]


def snapshot(tree):
    return jax.tree.map(np.copy, jax.device_get(tree))


def assert_equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def test_reward_moves_the_policy_towards_what_was_rewarded(learner):
    """Advantage 1 on every token: their log-probs rise, so the loss −mean(ρ log π) falls."""
    (batch,) = batches(12, ROWS)
    batch = batch._replace(
        advantages=batch.loss_mask.astype(np.float32),
        logprobs=np.where(batch.loss_mask, np.nan, 0).astype(np.float32),  # weight 1 (LM-07)
    )
    losses = [learner.update_now([batch]).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.2


def test_a_step_counts_and_reports_what_it_trained(learner):
    (batch,) = batches(12, ROWS)
    assert learner.step == 0
    stats = learner.update_now([batch])
    assert learner.step == 1
    assert stats.token_count == batch.loss_mask.sum()
    assert stats.learning_rate == 1e-2 / 4
    assert stats.skipped_updates == 0
    assert 0 < stats.ess <= 1 and stats.grad_norm > 0 and stats.entropy > 3


def test_nothing_compiles_after_the_first_steps_whatever_the_number_of_microbatches(learner):
    compiled = [
        learner.update_now(batches(rollouts, ROWS, seed=seed)).compilations
        for seed, rollouts in enumerate((8, 16, 30, 3, 50))
    ]
    assert compiled[0] > 0 and compiled[2:] == [0, 0, 0]


def test_compilations_of_other_threads_do_not_count(learner):
    learner.update_now(batches(8, ROWS))
    count = learner._compilations.of_this_thread()
    other = threading.Thread(target=lambda: jax.jit(lambda x: x * 7 + 3)(np.arange(5)))
    other.start()
    other.join()
    assert learner._compilations.of_this_thread() == count


def test_a_skipped_update_completes_its_step_and_too_many_in_a_row_end_the_run(learner, caplog):
    good = batches(12, ROWS)
    learner.update_now(good)
    before = snapshot(learner.params)
    with caplog.at_level(logging.WARNING):
        stats = learner.update_now(poisoned(good))
    assert (stats.skipped_updates, learner.step) == (1, 2)
    assert "step 1: 1 of 1 updates skipped" in caplog.text
    assert_equal(before, learner.params)

    learner.update_now(good)  # a good one in between starts the count anew
    learner.update_now(poisoned(good))
    with pytest.raises(RuntimeError, match="not finite in 2 updates in a row .*step 4"):
        learner.update_now(poisoned(good))
    assert learner.step == 5


def test_a_batch_of_padding_changes_nothing_and_is_no_failure(learner):
    """LM-04."""
    (batch,) = batches(12, ROWS)
    learner.update_now([batch])
    before = snapshot(learner.params)
    empty = batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    for _ in range(3):
        stats = learner.update_now([empty])
    assert (stats.loss, stats.token_count, stats.skipped_updates) == (0.0, 0.0, 0)
    assert_equal(before, learner.params)


def test_versions_and_saved_states_outlive_later_updates(learner):
    """CK-04: neither an engine's version nor the state being written is donated away."""
    (batch,) = batches(12, ROWS)
    learner.update_now([batch])
    params, saved = learner.params, learner.save()
    expected = snapshot((params, saved))
    for _ in range(2):
        learner.update_now([batch])
    assert_equal((params, saved), expected)


def test_an_update_runs_beside_the_event_loop(learner):
    async def train_and_tick() -> tuple[int, int]:
        ticks = 0
        update = asyncio.ensure_future(learner.update(batches(200, ROWS)))
        while not update.done():
            ticks += 1
            await asyncio.sleep(0.001)
        await update
        return ticks, learner.step

    ticks, step = asyncio.run(train_and_tick())
    assert ticks > 3 and step == 1


def test_rows_that_do_not_fill_microbatches_are_refused(learner):
    (batch,) = batches(12, ROWS)
    cut = jax.tree.map(lambda x: x[:3], batch)
    with pytest.raises(ValueError, match="3 rows is not a multiple of rows_per_microbatch=4"):
        learner.update_now([cut])
    assert learner.step == 0


# Minibatches and the two other policies ---------------------------------------------------------


def test_two_minibatches_are_two_updates_of_one_step():
    learner = make_learner(minibatches=2)
    two = batches(24, ROWS, minibatches=2)
    assert len(two) == 2
    stats = learner.update_now(two)
    assert learner.step == 1
    assert int(learner._state.opt_state[0].count) == 2
    assert stats.token_count == sum(one.loss_mask.sum() for one in two)
    learner.close()


def test_old_logprobs_are_those_of_the_policy_when_the_batch_arrived():
    """The same rows twice: the first update cannot be clipped, u is 1; the second one is."""
    optimizer = dataclasses.replace(OPTIMIZER, learning_rate=0.3, warmup_steps=0)
    settings = LossSettings(objective="ppo", clip_low=0.01, clip_high=0.01)
    learner = make_learner(loss=settings, optimizer=optimizer, minibatches=2, old_logprobs=True)
    (batch,) = batches(12, ROWS)
    stats = learner.update_now([batch, batch])
    assert 0.3 < stats.clipped_fraction <= 0.5
    learner.close()


def test_with_one_minibatch_the_old_policy_is_the_policy():
    settings = LossSettings(objective="ppo", clip_low=1e-6, clip_high=1e-6)
    learner = make_learner(loss=settings, old_logprobs=True)
    stats = learner.update_now(batches(12, ROWS))
    assert stats.clipped_fraction == 0.0 and stats.grad_norm > 0
    learner.close()


def test_the_reference_stays_the_first_policy_also_across_a_restore():
    """With no advantage and no KL yet there is no gradient; later the KL pulls back."""
    settings = LossSettings(reference_kl_coef=1.0, use_tis=False)
    learner = make_learner(loss=settings)
    (batch,) = batches(12, ROWS)
    still = batch._replace(advantages=np.zeros_like(batch.advantages))
    assert learner.update_now([still]).grad_norm < 1e-6
    learner.update_now([batch])
    away = learner.update_now([still])
    assert away.loss > 0 and away.grad_norm > 1e-4
    resumed = make_learner(loss=settings, seed=1)
    resumed.restore(learner.save())
    expected, found = learner.update_now([still]), resumed.update_now([still])
    assert found._replace(compilations=0) == expected._replace(compilations=0)
    learner.close()
    resumed.close()


# Save and restore -------------------------------------------------------------------------------


def test_a_restored_learner_goes_on_bit_for_bit(learner):
    """CK-13, CK-16: step, schedule and moments come back, in their own dtypes."""
    first, second = batches(12, ROWS, seed=1), batches(12, ROWS, seed=2)
    learner.update_now(first)
    saved = learner.save()
    other = make_learner(seed=5)
    other.restore(saved)
    assert other.step == 1
    expected, found = learner.update_now(second), other.update_now(second)
    assert found._replace(compilations=0) == expected._replace(compilations=0)
    assert_equal(learner.save(), other.save())
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype, learner.save(), other.save())
    assert all(jax.tree.leaves(same))
    # Restoring did not tie `saved` to what the other learner donates.
    assert np.isfinite(jax.device_get(saved["opt_state"][0].count))
    other.close()


def test_a_state_of_another_model_is_refused_with_every_difference(learner):
    """CK-15."""
    state = learner.save()
    params = dict(state["params"])
    params["unembed"] = {"kernel": np.zeros((16, VOCAB), np.float32)}
    del params["final_norm"]
    with pytest.raises(ValueError) as error:
        learner.restore({**state, "params": params})
    assert "missing params/final_norm/scale" in str(error.value)
    assert "unexpected params/unembed/kernel" in str(error.value)


def test_version_0_may_be_given(learner):
    other = make_learner(params=snapshot(learner.params), seed=9)
    assert_equal(other.params, learner.params)
    with pytest.raises(ValueError, match="missing embed/embedding"):
        make_learner(params={})
    other.close()


def test_the_configuration_becomes_loss_settings():
    config = Config(algorithm="ppo", tis_cap=3.0)
    config.loss.normalizer = "constant"
    config.loss.sequence_mask_low = 0.5
    config.sampling.max_tokens = 11
    settings = loss_settings(config)
    assert (settings.objective, settings.tis_cap) == ("ppo", 3.0)
    assert settings.constant_length == 11.0
    assert settings.sequence_mask == (0.5, float("inf"))
    assert loss_settings(Config()).sequence_mask is None
    assert loss_settings(Config(algorithm="dr_grpo")).objective == "pg"
