"""The warm start: supervised steps on an environment's own solutions, before version 0.

−(1/N) Σ log π(y_t) over the solution's tokens is the policy gradient with advantage 1 and no
importance weight, so these are ordinary steps of the learner with a loss of that form. The
optimizer is a fresh one, and RL starts with another: only parameters leave this module.

The result is cached under a hash of all that decides it: the configuration, the mesh, every row of
data, the versions of the libraries, and the source of the code that trains.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Bool, Int

import kernels
import telescope_jax
from telescope_jax.config import OptimizerConfig, PolicyConfig, WarmStartConfig
from telescope_jax.learner.learner import Learner, check_structure
from telescope_jax.learner.loss import LossSettings
from telescope_jax.model.decoder import Decoder
from telescope_jax.model.logprobs import logprobs
from telescope_jax.packing import first_fit_decreasing, pack
from telescope_jax.sharding import path_name, place_rows, row_parts
from telescope_jax.types import PackedBatch, Params, Reward, Rollout, StopReason

_log = logging.getLogger(__name__)

_EXAM_EVERY, _EXAM_SIZE = 2, 256

Solution = tuple[Int[np.ndarray, " T"], Bool[np.ndarray, " T"]]
"""Tokens of a prompt with its solution, and a mask of the tokens to learn."""


def warm_start(
    policy: PolicyConfig,
    vocab_size: int,
    mesh: Mesh,
    config: WarmStartConfig,
    solutions: Iterable[Solution],
    *,
    seed: int,
    seq_len: int,
    optimizer: OptimizerConfig | None = None,
    cache_folder: Path | None = None,
) -> Params:
    """Parameters after at most `config.steps` supervised steps from random ones, on `mesh`.

    Args:
      solutions: at least steps × batch_size of them, and 256 more to test `until_probability`;
        drawn from training prompts only.
      seed: of the random parameters.
      seq_len: tokens a packed row; at least the longest solution.
      optimizer: betas, epsilon, decay and clip; the learning rate is `config`'s, constant, and
        parameters are float32. None takes the defaults.
      cache_folder: None takes $XDG_CACHE_HOME/telescope_jax/warm_start.

    Raises:
      ValueError: there are too few solutions, or one longer than a row.
    """
    optimizer = dataclasses.replace(
        optimizer or OptimizerConfig(),
        learning_rate=config.learning_rate,
        schedule="constant",
        warmup_steps=0,
        master_dtype="float32",
    )
    rows = _take(
        solutions,
        config.steps * config.batch_size + (_EXAM_SIZE if config.until_probability else 0),
    )
    path = None
    if config.cache:
        plain = [dataclasses.asdict(part) for part in (policy, config, optimizer)]
        decided_by = [*plain, vocab_size, sorted(mesh.shape.items()), seed, seq_len]
        path = (cache_folder or default_cache_folder()) / f"{_key(decided_by, rows)}.npz"
        cached = _of_first_process(_read(path, decoder := Decoder(policy, vocab_size)), decoder)
        if cached is not None:
            _log.info("warm start: read from the cache, %s", path)
            return cached
    params = _train(policy, vocab_size, mesh, config, optimizer, rows, seed, seq_len)
    if path is not None:
        _write(path, params)
    return params


def default_cache_folder() -> Path:
    """$XDG_CACHE_HOME/telescope_jax/warm_start, with ~/.cache as the usual default."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "telescope_jax" / "warm_start"


def _train(
    policy: PolicyConfig,
    vocab_size: int,
    mesh: Mesh,
    config: WarmStartConfig,
    optimizer: OptimizerConfig,
    rows: Sequence[Rollout],
    seed: int,
    seq_len: int,
) -> Params:
    size = config.batch_size
    microbatch = _rows_of_a_batch([len(r.tokens) for r in rows[:size]], seq_len, row_parts(mesh))
    learner = Learner(
        policy,
        vocab_size,
        mesh,
        loss=LossSettings(use_tis=False),
        optimizer=optimizer,
        number_of_steps=config.steps,
        rows_per_microbatch=microbatch,
        seed=seed,
    )
    until, probability, started = config.until_probability, 0.0, time.monotonic()
    goal = f", until a solution's probability is {until:g}" if until else ""
    _log.info("warm start: up to %d supervised steps%s", config.steps, goal)
    rows, asked = rows[: config.steps * size], rows[config.steps * size :]
    exam = _exam(Decoder(policy, vocab_size, mesh=mesh), asked, seq_len) if until else None
    try:
        step, loss = 0, math.nan
        for step, batch in enumerate(_batches(rows, size, seq_len, microbatch), start=1):
            loss = learner.update_now(batch).loss
            if step == 1 or step % 50 == 0:
                _log.debug("warm start: step %d, loss %.3f", step, loss)
            if exam and step % _EXAM_EVERY == 0:
                probability = exam(learner.params)
                if probability >= until:
                    break
        reached = f", probability {probability:.3f}" if exam else ""
        _log.info(
            "warm start: %d steps, loss %.3f%s, in %.1f s",
            *(step, loss, reached, time.monotonic() - started),
        )
        if probability < until:
            _log.warning(
                "warm start: a solution's probability is %.3f after all %d steps, not yet "
                "until_probability=%g; raise warm_start.steps for the ability that it stands for",
                *(probability, config.steps, until),
            )
        return learner.params
    finally:
        learner.close()


def _exam(decoder: Decoder, rows: Sequence[Rollout], seq_len: int) -> Callable[[Params], float]:
    """The mean probability of a whole solution: how often sampling would write it."""
    parts = row_parts(decoder.mesh) if decoder.mesh else 1
    (batch,) = pack(rows, np.ones(len(rows)), seq_len=seq_len, rows_per_microbatch=parts)
    most = int(batch.segments.max())
    here = np.arange(1, most + 1) <= batch.segments.max(axis=1, keepdims=True)

    @jax.jit
    def mean_probability(params: Params, batch: PackedBatch) -> jax.Array:
        arrays = map(jnp.asarray, batch[:3])
        scores, _ = logprobs(decoder, params, *arrays, wanted=jnp.asarray(batch.loss_mask))
        of_a_row = functools.partial(jax.ops.segment_sum, num_segments=most + 1)
        totals = jax.vmap(of_a_row)(scores, batch.segments)[:, 1:]
        return jnp.mean(jnp.exp(totals), where=here)

    placed = batch if decoder.mesh is None else place_rows(batch, decoder.mesh)
    return lambda params: float(mean_probability(params, placed))


def _take(solutions: Iterable[Solution], count: int) -> list[Rollout]:
    rows = []
    for tokens, mask in solutions:
        if len(rows) == count:
            break
        tokens, mask = np.asarray(tokens, np.int32), np.asarray(mask, np.bool_)
        nothing = np.zeros(len(tokens), np.float32)
        rows.append(Rollout(tokens, mask, nothing, (), Reward(1.0), {}, StopReason.EOS, 1))
    if len(rows) < count:
        raise ValueError(
            f"the warm start needs {count} solutions and was given {len(rows)}; "
            "lower warm_start.steps or warm_start.batch_size"
        )
    return rows


def _rows_of_a_batch(lengths: Sequence[int], seq_len: int, parts: int) -> int:
    """Rows that nearly every batch fits into at once; a bigger one takes a second microbatch."""
    rows = len(first_fit_decreasing(lengths, seq_len))
    rows += -(-rows // 16)
    return -(-rows // parts) * parts


def _batches(
    rows: Sequence[Rollout], size: int, seq_len: int, microbatch: int
) -> Iterator[list[PackedBatch]]:
    for start in range(0, len(rows), size):
        yield pack(
            rows[start : start + size],
            np.ones(size, np.float32),
            seq_len=seq_len,
            rows_per_microbatch=microbatch,
        )


def _key(decided_by: list, rows: Sequence[Rollout]) -> str:
    digest = hashlib.sha256()
    versions = [metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")]
    backend = jax.default_backend()
    digest.update(json.dumps([decided_by, versions, backend]).encode())
    house = Path(telescope_jax.__path__[0])
    folders = (Path(kernels.__path__[0]), house / "model", house / "learner")
    for source in (
        *(s for folder in folders for s in sorted(folder.rglob("*.py"))),
        house / "packing.py",
    ):
        digest.update(source.read_bytes())
    for row in rows:
        digest.update(len(row.tokens).to_bytes(8, "little"))
        digest.update(row.tokens.tobytes())
        digest.update(row.loss_mask.tobytes())
    return digest.hexdigest()[:32]


def _read(path: Path, decoder: Decoder) -> Params | None:
    """The cached parameters; None if there are none, or, with a warning, none that can be used."""
    if not path.exists():
        return None
    expected = jax.eval_shape(decoder.init, jax.random.key(0))
    paths, structure = jax.tree_util.tree_flatten_with_path(expected)
    try:
        with np.load(path, allow_pickle=False) as archive:
            leaves = [archive[path_name(path)] for path, _ in paths]
        params = jax.tree.unflatten(structure, leaves)
        check_structure(params, expected, "the cached warm start")
        return params
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("warm start: %s cannot be used and is made again: %s", path, error)
        return None


def _of_first_process(cached: Params | None, decoder: Decoder) -> Params | None:
    """What process 0 has in its cache: several processes must all train, or none of them."""
    if jax.process_count() == 1:
        return cached
    if not multihost_utils.broadcast_one_to_all(np.int32(cached is not None)):
        return None
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return multihost_utils.broadcast_one_to_all(zeros if cached is None else cached)


def _write(path: Path, params: Params) -> None:
    """Written beside its place and renamed, so that a reader sees a whole file or none."""
    if jax.process_count() > 1:
        params = multihost_utils.process_allgather(params, tiled=True)
        if jax.process_index() > 0:
            return
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(params))
    arrays = {path_name(key): np.asarray(leaf) for key, leaf in leaves}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("warm start: not cached at %s: %s", path, error)
