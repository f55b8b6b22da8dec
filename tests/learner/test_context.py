"""Rows whose tokens are split over devices: the same losses and gradients, and less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import MeshConfig, OptimizerConfig, PolicyConfig
from telescope_jax.learner.loss import Denominators, LossSettings
from telescope_jax.learner.lowering import abstract_batch, lower_update
from telescope_jax.learner.step import Step, UpdateSums
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import make_mesh, place_rows
from tests.learner.rows import POLICY, SEQ_LEN, VOCAB, batches
from tests.learner.test_step import assert_same, host_params

ROWS = 8
MESHES = {
    "data 2, context 4": MeshConfig(data=2, context=4),
    "fsdp 2, context 2, tensor 2": MeshConfig(fsdp=2, context=2, tensor=2),
}
OBJECTIVES = {
    "policy gradient": LossSettings(),
    # Of whole rollouts: their sums run over the parts of a row.
    "gspo": LossSettings(objective="gspo", use_tis=False, normalizer="sequences", kl_coef=0.1),
}


def update_sums(sizes: MeshConfig, settings: LossSettings) -> UpdateSums:
    """Loss and gradient of one fixed microbatch, before the optimizer."""
    mesh = make_mesh(sizes)
    decoder = Decoder(POLICY, VOCAB, mesh=mesh)
    step = Step(decoder, mesh, settings, OptimizerConfig(), temperature=0.7)
    params = jax.device_put(host_params(), step.params_shardings)
    (batch,) = batches(13, ROWS)
    assert batch.tokens.shape == (ROWS, SEQ_LEN)
    ends = np.arange(1, 4) * SEQ_LEN // 4
    trained = np.asarray(batch.loss_mask)[:, ends]
    same = np.asarray(batch.segments)[:, ends] == np.asarray(batch.segments)[:, ends - 1]
    assert (trained & same).any(axis=0).all(), "no trained token is the first of a part"
    rows = place_rows(batch, mesh)
    totals = step.count(rows, Denominators(jnp.float32(0), jnp.float32(0)))
    return jax.device_get(step.accumulate(params, step.zeros(), rows, totals))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_parts_of_rows_give_the_gradient_of_whole_rows(objective):
    whole = update_sums(MeshConfig(), OBJECTIVES[objective])
    for name, sizes in MESHES.items():
        found = update_sums(sizes, OBJECTIVES[objective])
        assert found.loss.tokens == whole.loss.tokens, name
        assert_same(found, whole)


def test_the_log_prob_of_a_parts_first_token_comes_from_the_part_before():
    """The one shift by one, over the boundary: nothing is lost there, and nothing made up."""
    (batch,) = batches(13, ROWS)

    def scores(sizes: MeshConfig) -> np.ndarray:
        mesh = make_mesh(sizes)
        decoder = Decoder(POLICY, VOCAB, mesh=mesh)
        step = Step(decoder, mesh, LossSettings(), OptimizerConfig(), temperature=1.0)
        params = jax.device_put(host_params(), step.params_shardings)
        return jax.device_get(step.score(params, place_rows(batch, mesh)))

    whole, parts = scores(MeshConfig()), scores(MESHES["data 2, context 4"])
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)
    firsts = np.arange(1, 4) * SEQ_LEN // 4
    assert (whole[:, firsts] != 0).any(axis=0).all()


def test_parameters_are_split_over_the_parts_of_rows_too():
    mesh = make_mesh(MeshConfig(fsdp=2, context=2, tensor=2))
    decoder = Decoder(POLICY, VOCAB, mesh=mesh)
    step = Step(decoder, mesh, LossSettings(), OptimizerConfig(), temperature=1.0)
    up = step.params_shardings["layers"]["0"]["mlp"]["up"]["kernel"]
    assert up.shard_shape((16, 32)) == (4, 16)


def test_the_memory_of_activations_falls_with_the_parts():
    """The same row of 1,024 tokens; keys and values of a layer are whole for a moment."""
    policy = PolicyConfig(width=32, layers=4, heads=4, kv_heads=1, head_dim=8, mlp_width=128)

    def temporary(context: int) -> int:
        mesh = make_mesh(MeshConfig(context=context))
        decoder = Decoder(policy, VOCAB, mesh=mesh)
        step = Step(decoder, mesh, LossSettings(), OptimizerConfig(), temperature=1.0)
        lowered = lower_update(step, mesh, abstract_batch(mesh, 1, 1_024))["accumulate"]
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary(4) < 0.4 * temporary(1)
