"""The parts of a run, made from a checked config: first what can refuse it, then what costs.

`build_task` needs no folder and does no work. The builders below it are called in the order of
run.py; each takes what it needs of the config and hands back one part.
"""

import importlib.metadata
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from telescope_jax.chat import Tokenizer
from telescope_jax.config import Config, PlacementConfig
from telescope_jax.envs.registry import make_env
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.engine_client import start_engines
from telescope_jax.inference.vllm_pools import check_can_start, start_pools
from telescope_jax.interfaces import Engine, EngineError, Environment
from telescope_jax.learner.checkpoint import Checkpoints, Restored
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.settings import loss_settings
from telescope_jax.learner.warm_start import Solution, warm_start
from telescope_jax.pretrained import StartError, open_start
from telescope_jax.rollouts.episode import EpisodeSettings
from telescope_jax.scoring.reward_pool import RewardPool
from telescope_jax.sharding import make_mesh
from telescope_jax.types import Params, SamplingParams, Uid
from telescope_jax.weights import hf_files
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.hf_layout import from_hf, to_hf
from telescope_jax.weights.store import MemoryStore, OrbaxStore

log = logging.getLogger(__name__)


class SetupError(RuntimeError):
    """This machine cannot run it as it is set up; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Task:
    """What can refuse a configuration without a folder, and without work.

    Attributes:
      config: with the sizes of its pretrained model, if it names one.
      pretrained: folder of that model.
    """

    config: Config
    tokenizer: Tokenizer
    pretrained: Path | None
    rewards: RewardPool
    env: Environment
    mesh: Mesh


def build_task(config: Config) -> Task:
    """Tokenizer, environment and mesh; workers start when they are needed.

    Raises:
      SetupError: the starting point cannot be used, the environment does not exist or cannot be
        made so, or there are too few devices.
    """
    try:
        config, tokenizer, pretrained = open_start(config)
        rewards = RewardPool(
            workers=config.env.reward_workers,
            timeout_s=config.env.reward_timeout_s,
            memory_bytes=config.env.reward_memory_mb << 20,
            confined=config.env.reward_confined,
            preload=() if config.env.name == "sums" else ("telescope_jax.envs.symbolic",),
        )
        env = build_env(config, tokenizer, rewards)
        if config.engine.kind == "vllm":
            check_can_start(config.engine, config.policy)
        return Task(config, tokenizer, pretrained, rewards, env, make_mesh(config.mesh))
    except (StartError, EngineError, ValueError) as error:
        raise SetupError(str(error)) from error


def build_env(config: Config, tokenizer: Tokenizer, rewards: RewardPool) -> Environment:
    """The environment by its name.

    Raises:
      SetupError: it does not exist, cannot be made so, or has no solutions to start warm from.
    """
    options = dict(config.env.options)
    name = config.env.name
    if config.env.name == "sums":
        options = {"terms": config.env.terms, "digits": config.env.digits} | options
    try:
        env = make_env(
            config.env.name,
            tokenizer=tokenizer,
            seed=config.env.seed,
            rewards=rewards,
            options=options,
        )
        env.prompt(Uid(0, config.eval.items - 1), split="eval")
        lengths = [len(env.prompt(Uid(0, index)).tokens) for index in range(min(len(env), 16))]
    except ValueError as error:
        raise SetupError(str(error)) from error
    except Exception as error:  # an environment is user code
        raise SetupError(f"env.name={name}: {type(error).__name__}: {error}") from error
    if not lengths:
        raise SetupError(f"env.name={name} has no training prompts")
    if min(lengths) > config.sampling.max_prompt_tokens:
        raise SetupError(
            f"the first {len(lengths)} prompts of {name} have {min(lengths)} tokens or more "
            f"and sampling.max_prompt_tokens={config.sampling.max_prompt_tokens}; raise it"
        )
    if config.warm_start.steps and not hasattr(env, "solution"):
        raise SetupError(
            f"env.name={config.env.name} has no solutions, which warm_start.steps="
            f"{config.warm_start.steps} needs; give it a method "
            "solution(prompt) -> str, or set warm_start.steps to 0"
        )
    return env


def build_store(config: Config, folder: Path) -> OrbaxStore | MemoryStore:
    """Where engines find versions: under Hugging Face names for vLLM, in memory for an engine that
    shares it."""
    if config.engine.kind == "vllm":
        return OrbaxStore(folder, config.policy.compute_dtype, to_served=to_hf, from_served=from_hf)
    # The very bits of the trainer's, whatever an engine then computes in.
    dtype = config.optimizer.master_dtype
    return OrbaxStore(folder, dtype) if config.engine.own_process else MemoryStore()


async def start_all(
    config: Config, shape: EngineShape, store: OrbaxStore | MemoryStore, workdir: Path
) -> dict[str, Engine]:
    """The engines "train" and "eval", which may be the same one."""
    started = time.monotonic()
    if config.engine.kind == "jax":
        where = "in a process of its own" if config.engine.own_process else "in this process"
        kind = f"embedded, {where}, {config.engine.slots} slots"
        engines = await start_engines(config.engine, config.policy, shape, store, workdir=workdir)
    else:
        kind = f"vLLM, {len(config.engine.urls) or config.engine.servers} servers"
        engines = await start_pools(
            config.engine,
            config.placement,
            config.policy,
            shape,
            store,
            workdir=workdir,
            eval_servers=config.eval.servers,
            hf_config=hf_config_of(config.policy, shape.vocab_size, shape.context),
        )
    log.info("engine: %s, ready after %.1f s", kind, time.monotonic() - started)
    return engines


def build_or_restore(
    config: Config,
    env: Environment,
    tokenizer: Tokenizer,
    vocab_size: int,
    mesh: Mesh,
    checkpoints: Checkpoints,
    pretrained: Path | None,
) -> tuple[Learner, Restored | None]:
    """The trainer as of the newest checkpoint, or at version 0.

    Raises:
      SetupError: there are checkpoints, and not one of them can be read.
    """
    if not checkpoints.steps():
        if pretrained is not None:
            params = hf_files.load(pretrained, config.policy, config.optimizer.master_dtype)
        else:
            params = first_params(config, env, tokenizer, vocab_size, mesh)
        return build_learner(config, vocab_size, mesh, params), None
    learner = build_learner(config, vocab_size, mesh, None)
    try:
        saved = checkpoints.restore(learner.save_structure())
    except ValueError as error:  # of another model or optimizer: an older one would be no better
        raise SetupError(str(error)) from error
    if saved is None:
        raise SetupError(
            f"none of the checkpoints of steps {checkpoints.steps()} can be read; move them away "
            "to start over, or choose another --workdir"
        )
    learner.restore(saved.state)
    log.info("run: resumed from step %d", learner.step)
    return learner, saved


def first_params(
    config: Config, env: Environment, tokenizer: Tokenizer, vocab_size: int, mesh: Mesh
) -> Params | None:
    """Version 0: the warm start on solutions of training prompts; None is random weights."""
    if not config.warm_start.steps:
        return None
    return warm_start(
        config.policy,
        vocab_size,
        mesh,
        config.warm_start,
        solutions(env, tokenizer),
        seed=config.seed,
        seq_len=config.batch.seq_len,
        optimizer=config.optimizer,
    )


def solutions(env: Environment, tokenizer: Tokenizer) -> Iterator[Solution]:
    """Prompt, solution and end of every training prompt in turn; only what follows the prompt is
    learned."""
    for index in range(len(env)):
        prompt = env.prompt(Uid(0, index))
        answer = [*tokenizer.encode(env.solution(prompt)), tokenizer.eos_ids[0]]  # type: ignore[attr-defined]
        tokens = np.concatenate([prompt.tokens, np.asarray(answer, np.int32)])
        yield tokens, np.arange(len(tokens)) >= len(prompt.tokens)


def build_learner(config: Config, vocab_size: int, mesh: Mesh, params: Params | None) -> Learner:
    """The trainer at version 0, from `params` or from random ones."""
    return Learner(
        config.policy,
        vocab_size,
        mesh,
        loss=loss_settings(config),
        optimizer=config.optimizer,
        number_of_steps=config.number_of_steps,
        rows_per_microbatch=config.batch.rows_per_microbatch,
        temperature=config.sampling.temperature,
        minibatches=config.batch.minibatches,
        old_logprobs=config.loss.old_logprobs,
        params=params,
        seed=config.seed,
    )


def eval_settings(config: Config) -> EpisodeSettings:
    """Settings of held-out episodes at the training temperature."""
    training = episode_settings(config)
    max_tokens = config.eval.max_tokens or config.sampling.max_tokens
    return replace(
        training,
        sampling=replace(training.sampling, max_tokens=max_tokens),
        context=config.eval_context(),
    )


def episode_settings(config: Config) -> EpisodeSettings:
    """Settings of the training episodes."""
    return EpisodeSettings(
        SamplingParams(
            max_tokens=config.sampling.max_tokens, temperature=config.sampling.temperature
        ),
        context=config.context(),
        timeout_s=config.engine.request_timeout_s,
        run_seed=config.seed,
    )


def refuse_foreign_kernels_package() -> None:
    """Hugging Face's PyPI package `kernels` has the name of our folder: with both, importing
    transformers' models fails.

    Raises:
      SetupError: it is installed.
    """
    try:
        importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise SetupError(
        "the PyPI package `kernels` is installed and has the same name as this project's folder "
        "kernels/; remove it: pip uninstall kernels"
    )


def place_trainer(placement: PlacementConfig) -> None:
    """Limits JAX in this process, before it looks for devices: which GPUs, and how much of each.

    vLLM's servers get theirs on their command lines; the memory limit is in the environment, where
    an embedded engine in a process of its own finds the same one.
    """
    if placement.trainer_devices:
        jax.config.update("jax_cuda_visible_devices", placement.trainer_devices)
    if placement.trainer_memory_fraction:
        fraction = f"{placement.trainer_memory_fraction:g}"
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = fraction


def use_compilation_cache() -> None:
    """Keeps every compiled function on disk, for the engine's process and the next run."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "telescope_jax" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
