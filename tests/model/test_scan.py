"""The layers as one loop: the same numbers as one after another, on every mesh and in bfloat16."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import MeshConfig, OptimizerConfig, PolicyConfig
from telescope_jax.learner.loss import LossSettings
from telescope_jax.learner.lowering import abstract_batch, lower_update
from telescope_jax.learner.step import Step
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import make_mesh, place_rows, shardings
from tests.model.test_decoder import FAMILIES, TINY, random_params

VOCAB = 48


def hidden_and_gradient(config: PolicyConfig, mesh_sizes: MeshConfig | None):
    """(hidden states, the gradient of a sum that weighs them all differently)."""
    mesh = None if mesh_sizes is None else make_mesh(mesh_sizes)
    decoder = Decoder(config, VOCAB, mesh=mesh)
    params = random_params(decoder)
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, VOCAB, (8, 12)).astype(np.int32)
    segments = np.sort(rng.integers(0, 3, (8, 12)), axis=1)[:, ::-1].astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (8, 12))
    weights = jnp.asarray(rng.normal(size=(8, 12, config.width)), jnp.float32)
    rows = (tokens, segments, positions)
    if mesh is not None:
        params, rows = jax.device_put(params, shardings(params, mesh)), place_rows(rows, mesh)

    def weighed(params, *rows):
        hidden = decoder.hidden(params, *rows)
        return (hidden * weights).sum(), hidden

    gradient, hidden = jax.jit(jax.grad(weighed, has_aux=True))(params, *rows)
    return jax.device_get((hidden, gradient))


def assert_same(found, expected, tolerance: float = 1e-5) -> None:
    def close(path, a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max()
        assert scale > 0, path
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance, err_msg=str(path))

    jax.tree_util.tree_map_with_path(close, found, expected)


@pytest.mark.parametrize("remat", ["none", "dots", "block"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loop_over_layers_is_the_layers_one_after_another(family, remat):
    config = dataclasses.replace(TINY, family=family, layers=3, remat=remat)
    scanned = dataclasses.replace(config, scan_layers=True)
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    assert_same(hidden_and_gradient(scanned, mesh), hidden_and_gradient(config, mesh))


def test_a_loop_needs_no_mesh():
    config = dataclasses.replace(TINY, layers=3)
    scanned = dataclasses.replace(config, scan_layers=True)
    assert_same(hidden_and_gradient(scanned, None), hidden_and_gradient(config, None))


def test_eleven_layers_keep_their_order():
    """Names sort as text: 10 comes before 2."""
    config = dataclasses.replace(TINY, layers=11)
    scanned = dataclasses.replace(config, scan_layers=True)
    assert_same(hidden_and_gradient(scanned, None)[0], hidden_and_gradient(config, None)[0])


def test_bfloat16_rounds_in_the_loop_what_it_rounds_outside():
    """Tolerance: two roundings of the largest value, 2^-8 each."""
    config = dataclasses.replace(TINY, layers=3, compute_dtype="bfloat16", remat="block")
    scanned = dataclasses.replace(config, scan_layers=True)
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    assert_same(
        hidden_and_gradient(scanned, mesh), hidden_and_gradient(config, mesh), tolerance=1e-2
    )


def lowered_update(layers: int):
    policy = dataclasses.replace(
        TINY, layers=layers, mlp_width=40, scan_layers=True, remat="block", family="llama"
    )
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    decoder = Decoder(policy, VOCAB, mesh=mesh)
    step = Step(decoder, mesh, LossSettings(), OptimizerConfig(), temperature=1.0)
    return lower_update(step, mesh, abstract_batch(mesh, 4, 12))["accumulate"]


def test_the_program_of_a_loop_does_not_grow_with_depth_but_for_its_arguments():
    def products(layers: int) -> int:
        return lowered_update(layers).as_text().count("stablehlo.dot_general")

    assert products(2) == products(9) > 7


def test_a_layer_is_gathered_in_the_loop_and_never_all_of_them():
    text = lowered_update(5).compile().as_text()
    assert text is not None
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
    shapes = [tuple(map(int, dims.split(","))) for dims in gathered]
    assert shapes and all(len(shape) <= 2 or shape[0] != 5 for shape in shapes), shapes
    # Once forward and once in the backward pass, whatever the depth.
    assert sum(np.prod(shape) == 32 * 20 for shape in shapes) == 2 * 3  # gate, up, down
