"""One update, compiled: the same on every mesh and every split, and harmless when not finite."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import MeshConfig, OptimizerConfig
from telescope_jax.learner.loss import Denominators, LossSettings
from telescope_jax.learner.step import Step, UpdateSums
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import make_mesh, place_rows
from tests.learner.rows import POLICY, VOCAB, batches

ROWS = 16
MESHES = [(d, f, 8 // (d * f)) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if 8 % (d * f) == 0]


def make_step(mesh, optimizer: OptimizerConfig | None = None, policy=POLICY, vocab=VOCAB) -> Step:
    decoder = Decoder(policy, vocab, mesh=mesh)
    return Step(decoder, mesh, LossSettings(), optimizer or OptimizerConfig(), temperature=0.7)


def host_params(policy=POLICY, vocab=VOCAB):
    """Drawn on the host: the test compares updates, not initialisations."""
    shapes = jax.eval_shape(Decoder(policy, vocab).init, jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0.1, 0.3, x.shape).astype(np.float32), shapes)


def update_sums(mesh_shape: tuple[int, int, int], rows_per_microbatch: int, **model) -> UpdateSums:
    """Loss and gradient of one fixed batch of 16 rows, before the optimizer."""
    mesh = make_mesh(MeshConfig(*mesh_shape))
    step = make_step(mesh, **model)
    params = jax.device_put(host_params(**model), step.params_shardings)
    (batch,) = batches(27, ROWS)
    assert batch.tokens.shape[0] == ROWS
    parts = [
        place_rows(jax.tree.map(lambda x, at=at: x[at : at + rows_per_microbatch], batch), mesh)
        for at in range(0, ROWS, rows_per_microbatch)
    ]
    totals = Denominators(jnp.float32(0), jnp.float32(0))
    for part in parts:
        totals = step.count(part, totals)
    sums = step.zeros()
    for part in parts:
        sums = step.accumulate(params, sums, part, totals)
    return jax.device_get(sums)


@pytest.fixture(scope="module")
def on_one_device() -> UpdateSums:
    return update_sums((1, 1, 1), 8)


def assert_same(found: UpdateSums, expected: UpdateSums) -> None:
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)

    def close(path, a, b):
        scale = np.abs(b).max()
        assert scale > 0, path
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-5, err_msg=str(path))

    jax.tree_util.tree_map_with_path(close, found.gradient, expected.gradient)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_every_mesh_of_8_devices_gives_the_gradient_of_one(mesh_shape, on_one_device):
    assert_same(update_sums(mesh_shape, 8), on_one_device)


def test_an_untied_vocabulary_that_does_not_divide_gives_the_gradient_of_one():
    model = {"policy": dataclasses.replace(POLICY, tied_embeddings=False), "vocab": VOCAB + 1}
    assert_same(update_sums((2, 2, 2), 8, **model), update_sums((1, 1, 1), 8, **model))


@pytest.mark.parametrize("rows_per_microbatch", [2, 16])
def test_every_split_into_microbatches_gives_the_same_gradient(rows_per_microbatch, on_one_device):
    """LM-01: a mean of microbatch means would not."""
    assert_same(update_sums((1, 1, 1), rows_per_microbatch), on_one_device)


def test_the_compiler_replicates_nothing_behind_our_back():
    """Without the constraints it does, so the search for its words can fail."""
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(root),
    }
    script = Path(__file__).with_name("remat_warnings.py")
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # What XLA says while it compiles stands before the name of what was compiled.
    said, names = re.split(r"=== compiled .*\n", done.stderr), re.findall("=== comp.*", done.stderr)
    words = "nvoluntary full rematerialization"
    assert [words in text for text in said[:-1]] == [False] * 4 + [True], names


# apply ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step() -> Step:
    optimizer = OptimizerConfig(learning_rate=1.0, clip_norm=1.0, weight_decay=0.1)
    return make_step(make_mesh(MeshConfig()), optimizer)


def apply(step: Step, gradient_scale: float, tokens: float = 5.0):
    """Applies a gradient of `gradient_scale` everywhere, after one ordinary update."""

    def sums(scale: float, tokens: float) -> UpdateSums:
        zeros = step.zeros()
        gradient = jax.tree.map(lambda x: x + scale, zeros.gradient)
        return UpdateSums(gradient, zeros.loss._replace(tokens=jnp.float32(tokens)))

    params = jax.device_put(host_params(), step.params_shardings)
    rate = jnp.float32(0.01)
    params, opt_state, _ = step.apply(params, step.init_opt_state(params), sums(0.1, 5.0), rate)
    before = jax.device_get((params, opt_state))
    before = jax.tree.map(np.copy, before)
    params, opt_state, report = step.apply(params, opt_state, sums(gradient_scale, tokens), rate)
    return before, jax.device_get((params, opt_state)), report


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 1e38])
def test_a_gradient_that_is_not_finite_changes_nothing(step, scale):
    """1e38 is finite, but its norm is not, and clipping by it would train on zeros."""
    before, after, report = apply(step, scale)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert not bool(report.finite)


def test_an_update_without_loss_tokens_changes_nothing():
    """LM-04: not even what Adam's moments and the decay would still do; and it is no failure."""
    optimizer = OptimizerConfig(learning_rate=1.0, clip_norm=1.0, weight_decay=0.1)
    before, after, report = apply(make_step(make_mesh(MeshConfig()), optimizer), 0.0, tokens=0.0)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert bool(report.finite)


def test_a_finite_gradient_moves_every_parameter_and_reports_its_norm(step):
    before, after, report = apply(step, 0.5)
    moved = jax.tree.map(lambda a, b: bool((a != b).all()), before[0], after[0])
    assert all(jax.tree.leaves(moved))
    size = sum(x.size for x in jax.tree.leaves(before[0]))
    np.testing.assert_allclose(report.grad_norm, 0.5 * size**0.5, rtol=1e-5)


def test_parameters_are_not_donated(step):
    """CK-04: engines and the checkpoint writer read a version while the next one is made."""
    params = jax.device_put(host_params(), step.params_shardings)
    step.apply(params, step.init_opt_state(params), step.zeros(), jnp.float32(0.01))
    jax.tree.map(np.testing.assert_array_equal, params, host_params())
