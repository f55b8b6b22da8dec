"""The warm start learns, and its cache is hit by the same inputs and by nothing else."""

import dataclasses
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telescope_jax.config import MeshConfig, PolicyConfig, WarmStartConfig
from telescope_jax.learner import warm_start as module
from telescope_jax.learner.warm_start import warm_start
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import make_mesh

VOCAB, BEGIN, END = 16, 14, 15
POLICY = PolicyConfig(width=32, layers=1, heads=4, kv_heads=2, head_dim=8, mlp_width=64)
CONFIG = WarmStartConfig(steps=40, batch_size=32, learning_rate=1e-2)


def successors(seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A prompt of one number; its solution is the three numbers after it."""
    rng = np.random.default_rng(seed)
    while True:
        first = int(rng.integers(0, 10))
        tokens = np.array([BEGIN, first, first + 1, first + 2, first + 3, END])
        yield tokens, np.arange(6) >= 2


def run(folder: Path, *, config=CONFIG, solutions=None, seed: int = 0):
    return warm_start(
        POLICY,
        VOCAB,
        make_mesh(MeshConfig()),
        config,
        successors() if solutions is None else solutions,
        seed=seed,
        seq_len=32,
        cache_folder=folder,
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("cache")
    return folder, run(folder)


@pytest.fixture
def never_trains(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("it trained")

    monkeypatch.setattr(module, "_train", refuse)


def test_it_learns_the_solutions(first):
    decoder = Decoder(POLICY, VOCAB)
    tokens = np.array([[BEGIN, n, n + 1, n + 2] for n in range(10)], np.int32)
    logits, _ = jax.jit(decoder.prefill)(first[1], tokens, np.full(10, 4))
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), np.arange(10) + 3)


def test_the_same_inputs_are_read_from_the_cache(first, never_trains):
    again = run(first[0])
    jax.tree.map(np.testing.assert_array_equal, again, jax.device_get(first[1]))
    assert [path.suffix for path in first[0].iterdir()] == [".npz"]


def test_other_data_or_settings_are_not(first, never_trains):
    faster = WarmStartConfig(steps=40, batch_size=32, learning_rate=2e-2)
    for other in (
        lambda: run(first[0], solutions=successors(seed=1)),
        lambda: run(first[0], seed=1),
        lambda: run(first[0], config=faster),
    ):
        with pytest.raises(AssertionError, match="it trained"):
            other()


@pytest.mark.parametrize("damage", ["cut", "garbage", "other model"])
def test_a_damaged_cache_is_made_again_with_a_warning(first, damage, tmp_path, monkeypatch, caplog):
    (path,) = first[0].iterdir()
    copy = tmp_path / path.name
    if damage == "other model":
        np.savez(copy, allow_pickle=False, **{"embed/embedding": np.zeros((2, 2), np.float32)})
    else:
        whole = path.read_bytes()
        copy.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"no archive")
    monkeypatch.setattr(module, "_train", lambda *args: first[1])
    with caplog.at_level(logging.WARNING):
        run(tmp_path)
    assert "cannot be used and is made again" in caplog.text
    assert copy.read_bytes() == path.read_bytes()


def test_it_ends_at_the_ability_that_was_asked_for_and_warns_where_it_is_not_reached(
    tmp_path, caplog
):
    def ended(**changes) -> tuple[str, dict]:
        config = dataclasses.replace(CONFIG, cache=False, **changes)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            params = run(tmp_path, config=config)
        return caplog.records[-1].getMessage(), params

    message, params = ended(until_probability=0.3)
    told = r"warm start: (\d+) steps, loss [\d.]+, probability ([\d.]+), in [\d.]+ s"
    step, said = re.fullmatch(told, message).groups()  # type: ignore[union-attr]
    assert 2 <= int(step) < CONFIG.steps
    assert float(said) == pytest.approx(_probability_by_hand(params), abs=6e-4) and said >= "0.3"
    message, _ = ended(until_probability=1.0, steps=5)
    assert "after all 5 steps, not yet until_probability=1" in message


def _probability_by_hand(params) -> float:
    """One solution a row, dense: the first 256 after those that 40 steps of 32 would train on."""
    decoder = Decoder(POLICY, VOCAB)
    rows = itertools.islice(successors(), 40 * 32, 40 * 32 + 256)
    tokens = np.stack([tokens for tokens, _ in rows])
    positions = np.broadcast_to(np.arange(6), tokens.shape)
    hidden = decoder.hidden(params, *map(jnp.asarray, (tokens, np.ones_like(tokens), positions)))
    logp = np.asarray(jax.nn.log_softmax(decoder.logits(params, hidden))[:, 1:5])
    return float(np.exp(np.take_along_axis(logp, tokens[:, 2:, None], -1).sum((1, 2))).mean())


def test_too_few_solutions_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="needs 1280 solutions and was given 100"):
        run(tmp_path, solutions=itertools.islice(successors(), 100))


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.default_cache_folder() == tmp_path / "telescope_jax" / "warm_start"
