"""bfloat16 parameters: each rounding is right, many are in the mean, and nothing else moves."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_jax.config import MeshConfig, OptimizerConfig
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.loss import LossSettings
from telescope_jax.learner.rounding import draw_key, round_stochastically
from telescope_jax.learner.step import Step, UpdateSums
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import make_mesh, put_tree
from tests.learner.rows import POLICY, VOCAB, batches

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGEST = float(np.uint32(0x7F7F0000).view(np.float32))
NARROW = OptimizerConfig(learning_rate=1e-2, master_dtype="bfloat16")
ROWS = 8

_round = jax.jit(round_stochastically)


def rounded(x: np.ndarray, seed: int = 0) -> np.ndarray:
    return np.asarray(_round(np.asarray(x, np.float32), jax.random.key(seed)))


def bits(tree):
    """Of every leaf as integers: NaN equals itself, and −0 is not 0."""

    def of(x):
        x = np.asarray(jax.device_get(x))
        return x.reshape(-1).view(f"u{x.dtype.itemsize}")

    return jax.tree.map(of, tree)


def assert_same_bits(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, bits(a), bits(b))


# One rounding -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(pattern=st.integers(0, 2**32 - 1), seed=st.integers(0, 2**32 - 1))
def test_a_value_becomes_a_neighbour_and_one_that_fits_stays(pattern: int, seed: int):
    """Any 32 bits: denormals, both signs, both infinities, every NaN."""
    x = np.uint32(pattern).view(np.float32)
    found = np.asarray(_round(np.broadcast_to(x, (64,)), jax.random.key(seed)))
    low = np.uint16(pattern >> 16).view(BFLOAT16)  # cut towards 0
    if np.isnan(x):
        assert np.isnan(found.astype(np.float32)).all()
    elif pattern & 0xFFFF == 0:
        assert (found.view(np.uint16) == low.view(np.uint16)).all()
    elif abs(x) > LARGEST:
        nearest = np.uint16((pattern >> 16) + (pattern & 0xFFFF >= 0x8000))
        assert set(found.view(np.uint16)) <= {low.view(np.uint16), nearest}
    else:
        assert set(found.view(np.uint16)) <= {pattern >> 16, (pattern >> 16) + 1}


def test_the_largest_number_never_becomes_infinite():
    whole = np.full(10_000, LARGEST, np.float32)
    just_above = np.full(10_000, np.uint32(0x7F7F7FFF).view(np.float32))
    for x in (whole, -whole, just_above, -just_above):
        assert (rounded(x).astype(np.float32) == np.copysign(LARGEST, x)).all()


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-3, 2.9e-39, -5e-40, 1.7e38])
def test_the_mean_of_many_roundings_is_the_value(value: float):
    """Within 4 standard errors; to the nearest all would be off by the same."""
    count = 1 << 17
    x = np.float32(value)
    low = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    high = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    up = (float(x) - float(low)) / (float(high) - float(low))
    found = rounded(np.full(count, x)).astype(np.float32)
    share = float(np.mean(found == high))
    assert set(found) == {low, high}
    assert abs(share - up) < 4 * np.sqrt(up * (1 - up) / count)


def test_every_part_of_a_draw_decides():
    x = np.random.default_rng(0).normal(size=1_000).astype(np.float32)
    draws = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32 - 1, 0, 0)]
    keys = [draw_key(jnp.asarray(draw, jnp.uint32)) for draw in draws]
    assert len({np.asarray(_round(x, key)).tobytes() for key in keys}) == len(draws)


def test_no_setting_of_jax_changes_a_rounding():
    x = jnp.asarray(np.random.default_rng(0).normal(size=8_001).astype(np.float32))

    def drawn() -> np.ndarray:
        return np.asarray(round_stochastically(x, draw_key(jnp.zeros(3, jnp.uint32))))

    expected = drawn()
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(drawn(), expected)


# One update -------------------------------------------------------------------------------------


def make_step(mesh: MeshConfig, optimizer: OptimizerConfig) -> Step:
    on = make_mesh(mesh)
    return Step(Decoder(POLICY, VOCAB, mesh=on), on, LossSettings(), optimizer, temperature=1.0)


def drawn_params():
    shapes = jax.eval_shape(Decoder(POLICY, VOCAB).init, jax.random.key(0))
    rng = np.random.default_rng(0)

    def drawn(x):  # away from 0, where bfloat16 lie too close to stand still
        return (rng.choice([-1, 1], x.shape) * rng.uniform(0.05, 0.5, x.shape)).astype(BFLOAT16)

    return jax.tree.map(drawn, shapes)


def applied(mesh: MeshConfig, *, rate: float = 1e-6, scale: float = 0.1, master: str = "bfloat16"):
    """Parameters and optimizer state before and after one update of a drawn gradient."""
    step = make_step(mesh, OptimizerConfig(master_dtype=master, clip_norm=0.0))  # type: ignore[arg-type]
    params = jax.tree.map(
        lambda x: x.astype(step.params["embed"]["embedding"].dtype), drawn_params()
    )
    params = put_tree(params, step.params_shardings)
    rng = np.random.default_rng(1)

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    gradient = jax.tree.map(lambda x: drawn(x.shape), step.params)
    sums = step.zeros()
    sums = UpdateSums(
        put_tree(gradient, step.params_shardings), sums.loss._replace(tokens=jnp.float32(5))
    )
    opt_state = step.init_opt_state(params)
    before = jax.tree.map(np.copy, jax.device_get((params, opt_state)))
    draw = jnp.asarray([3, 7, 0], jnp.uint32) if step.rounds else None
    after, opt_state, _ = step.apply(params, opt_state, sums, jnp.float32(rate), draw)
    return before, jax.device_get((after, opt_state))


def test_a_learning_rate_of_rl_moves_bfloat16_weights_by_what_it_moves_float32_ones():
    """1e-6 is some thousandth of the distance to the next bfloat16: to the nearest, none moves.

    The movements along the gradient's sign are compared: their mean is the learning rate.
    """
    before, after = applied(MeshConfig())
    wide_before, wide_after = applied(MeshConfig(), master="float32")

    def flat(tree) -> np.ndarray:
        return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])

    exact = flat(wide_after[0]) - flat(wide_before[0])
    moved = flat(after[0]) - flat(before[0])
    nearest = jax.tree.map(lambda x: x.astype(BFLOAT16), wide_after[0])
    assert_same_bits(nearest, before[0])
    # Where many small movements add up, in the direction of each.
    along = np.sign(exact) * (moved - exact)
    error = along.std(ddof=1) / np.sqrt(along.size)
    assert (moved != 0).any() and abs(along.mean()) < 4 * error


def test_the_optimizer_is_that_of_float32_parameters():
    _, (_, narrow) = applied(MeshConfig())
    _, (_, wide) = applied(MeshConfig(), master="float32")
    assert_same_bits(narrow, wide)


def test_an_update_rounds_alike_on_one_device_and_on_eight():
    _, expected = applied(MeshConfig(), rate=1e-3)
    for mesh in (MeshConfig(fsdp=8), MeshConfig(data=2, fsdp=2, tensor=2)):
        _, found = applied(mesh, rate=1e-3)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 1e37])
def test_a_skipped_update_changes_no_bit(scale: float):
    before, after = applied(MeshConfig(), scale=scale)
    assert_same_bits(before, after)


# A learner --------------------------------------------------------------------------------------


def make_learner(mesh: tuple[int, ...] = (1, 1, 1), policy=POLICY, **kwargs) -> Learner:
    kwargs = {"optimizer": NARROW, "loss": LossSettings(), "number_of_steps": 10} | kwargs
    return Learner(policy, VOCAB, make_mesh(MeshConfig(*mesh)), rows_per_microbatch=ROWS, **kwargs)


def test_a_policy_in_bfloat16_learns_and_resumes_bit_for_bit():
    (batch,) = batches(20, ROWS)
    batch = batch._replace(
        advantages=batch.loss_mask.astype(np.float32),
        logprobs=np.where(batch.loss_mask, np.nan, 0).astype(np.float32),
    )
    learner, other = make_learner(), make_learner(params=drawn_params())
    losses = [learner.update_now([batch]).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.2
    other.restore(learner.save())
    learner.update_now([batch])
    other.update_now([batch])
    assert_same_bits(learner.save(), other.save())
    assert {x.dtype for x in jax.tree.leaves(other.params)} == {BFLOAT16}
    with pytest.raises(ValueError, match="is bfloat16.*not float32"):
        make_learner(optimizer=OptimizerConfig()).restore(learner.save())
    learner.close()
    other.close()


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_the_gradient_is_that_of_float32_parameters_of_the_same_values(compute_dtype):
    policy = dataclasses.replace(POLICY, compute_dtype=compute_dtype)
    (batch,) = batches(20, ROWS)
    wide = jax.tree.map(lambda x: x.astype(np.float32), drawn_params())
    learners = [make_learner(policy=policy, params=wide, optimizer=o)
                for o in (NARROW, OptimizerConfig(learning_rate=1e-2))]  # fmt: skip
    narrow, exact = (learner.update_now([batch]) for learner in learners)
    np.testing.assert_allclose(narrow[:8], exact[:8], rtol=1e-6)
    moments = [learner.save()["opt_state"][0].mu for learner in learners]

    def close(a, b):
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-6)

    jax.tree.map(close, *moments)
    for learner in learners:
        learner.close()


def test_memory_counts_two_bytes_a_parameter_and_four_of_its_gradient():
    wide, narrow = make_learner(optimizer=OptimizerConfig()), make_learner()
    sizes = []
    for learner in (wide, narrow):
        said = learner.memory().split(": ")[1].split(", ")
        sizes.append([float(part.split()[-1]) for part in said])
        learner.close()
    count = sum(x.size for x in jax.tree.leaves(wide.params)) / (1 << 20)
    np.testing.assert_allclose(sizes, [[4 * count, 8 * count, 4 * count],
                                       [2 * count, 8 * count, 4 * count]], atol=0.06)  # fmt: skip
