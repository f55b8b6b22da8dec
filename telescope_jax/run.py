"""One run from a checked config: makes the parts, joins them, and ends as it should.

The order matters. What can refuse the run (workdir, environment, mesh) comes before what costs
(warm start, engine start-up, compilation), and a checkpoint decides whether there is a warm start
at all. The engine starts while the warm start trains.

Exit codes: 0 finished; 130 Ctrl-C and 143 SIGTERM (or `checkpoint.resume_exit_code`), both after a
checkpoint; 2 refused before any work; 3 nothing to learn from (NoSignalError); 1 any other failure,
told in one line with the traceback in the log. A second signal exits at once.
"""

import asyncio
import importlib.metadata
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from telescope_jax import config_tree, plots
from telescope_jax.assembly import AssemblySettings
from telescope_jax.attempts import AttemptRules, Attempts, NoSignalError
from telescope_jax.chat import CharTokenizer, Tokenizer
from telescope_jax.config import Config
from telescope_jax.console import Console, summary
from telescope_jax.envs.registry import make_env
from telescope_jax.evals import HeldOutEvaluator, Kind
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.engine_client import start_engines
from telescope_jax.inference.vllm_pools import check_can_start, start_pools
from telescope_jax.interfaces import Engine, EngineError, Environment
from telescope_jax.learner.checkpoint import Checkpoints, Restored
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.settings import loss_settings
from telescope_jax.learner.warm_start import Solution, warm_start
from telescope_jax.ledger import Attempt
from telescope_jax.metrics import Fanout, JsonlSink
from telescope_jax.metrics import read as read_metrics
from telescope_jax.orchestrator import Orchestrator, Schedule
from telescope_jax.prompts import PromptQueue
from telescope_jax.rollouts.archive import pack_groups, unpack_groups
from telescope_jax.rollouts.episode import Episode, EpisodeSettings
from telescope_jax.scoring.reward_pool import RewardPool
from telescope_jax.sharding import make_mesh, table
from telescope_jax.staleness import AsyncBound
from telescope_jax.types import Group, Params, Prompt, SamplingParams, Uid
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.hf_layout import from_hf, to_hf
from telescope_jax.weights.store import MemoryStore, OrbaxStore
from telescope_jax.workdir import Workdir, WorkdirError

log = logging.getLogger(__name__)

PROMPTS_AHEAD = 64
NO_SIGNAL_EXIT_CODE = 3


class SetupError(RuntimeError):
    """This machine cannot run it as it is set up; the message says what to change."""


def run(config: Config, config_file: str, workdir: str) -> int:
    """Runs to the end, or to a signal. Returns the exit code."""
    try:
        refuse_foreign_kernels_package()
        folder = Workdir.open(workdir or default_workdir(config_file), config, config_file)
    except (WorkdirError, SetupError) as error:
        print(f"telescope_jax: {error}", file=sys.stderr)
        return 2
    use_compilation_cache()
    code = 1
    with folder.logging():
        try:
            code = asyncio.run(_run(config, folder))
        except SetupError as error:
            log.error("%s", error)
            code = 2
        except NoSignalError as error:
            log.error("%s", error)
            code = NO_SIGNAL_EXIT_CODE
        except Exception as error:
            log.debug("the run failed", exc_info=True)
            log.error("%s: %s (traceback in %s)", type(error).__name__, error, folder.log_file)
        finally:
            folder.note(state="finished" if code == 0 else "stopped", exit_code=code)
    return code


async def _run(config: Config, folder: Workdir) -> int:
    """Joins the parts and runs the orchestrator; returns the exit code of its end."""
    async with AsyncExitStack() as stack:
        tokenizer = CharTokenizer()
        rewards = RewardPool(
            workers=config.env.reward_workers,
            timeout_s=config.env.reward_timeout_s,
            memory_bytes=config.env.reward_memory_mb << 20,
            preload=() if config.env.name == "sums" else ("telescope_jax.envs.symbolic",),
        )
        stack.push_async_callback(rewards.close)
        env = build_env(config, tokenizer, rewards)
        vocab_size = config.policy.vocab_size or tokenizer.vocab_size
        mesh = build_mesh(config)
        checkpoints = Checkpoints(folder.checkpoints, keep_last=config.checkpoint.keep_last)
        stack.callback(checkpoints.close)

        check_engine(config)
        store = build_store(config, folder)
        shape = EngineShape(
            vocab_size,
            tokenizer.eos_ids,
            context=config.context(),
            prefill_width=config.sampling.max_prompt_tokens,
        )
        starting = asyncio.create_task(start_all(config, shape, store, folder))
        stack.push_async_callback(close_engines, starting)
        learner, saved = await asyncio.to_thread(
            build_or_restore, config, env, tokenizer, vocab_size, mesh, checkpoints
        )
        stack.callback(learner.close)
        engines = await starting

        sink = Fanout(
            [
                JsonlSink(folder.metrics_file, resume_at=learner.step if saved else None),
                console := Console(config.number_of_steps, first_step=learner.step),
            ]
        )
        stack.callback(sink.close)
        prompts = PromptQueue(env, seed=config.seed, prefetch=PROMPTS_AHEAD)
        attempts = Attempts(
            AsyncBound(
                config.max_async_rollout,
                config.max_off_policy_steps,
                config.groups_per_batch,
                config.number_of_steps,
            ),
            AttemptRules(
                max_prompt_tokens=config.sampling.max_prompt_tokens,
                max_attempts=config.max_attempts,
                drop_zero_advantage=config.loss.drop_zero_advantage,
                max_untrainable_groups=config.max_untrainable_groups,
            ),
            prompts,
            folder.event,
        )
        if saved is not None:
            held = unpack_groups(saved.host["groups"], saved.held or {}, env)
            attempts.restore(learner.step, saved.host["run"], held)
        sampled = episode_settings(config)
        greedy = replace(sampled, sampling=replace(sampled.sampling, temperature=0.0))

        def training_episode(prompt: Prompt, attempt: Attempt, index: int) -> Episode:
            return Episode(engines["train"], tokenizer, prompt, attempt, index, sampled)

        def eval_episode(prompt: Prompt, attempt: Attempt, kind: Kind) -> Episode:
            settings = greedy if kind == "greedy" else sampled
            return Episode(engines["eval"], tokenizer, prompt, attempt, 0, settings, purpose=kind)

        orchestrator = Orchestrator(
            schedule=Schedule(
                config.number_of_steps,
                config.group_size,
                eval_every=config.eval_every,
                checkpoint_every=config.checkpoint.every,
                eval_at_start=config.eval.at_start,
                eval_timeout_s=config.eval.timeout_s,
                watchdog_s=config.watchdog_s,
            ),
            attempts=attempts,
            assembly=AssemblySettings(
                config.advantages(),
                config.loss.mask_truncated,
                config.batch.seq_len,
                config.batch.rows_per_microbatch,
                config.batch.minibatches,
            ),
            env=env,
            prompts=prompts,
            episode=training_episode,
            engine=engines["train"],
            trainer=learner,
            store=store,
            evaluator=HeldOutEvaluator(
                env,
                eval_episode,
                engines["eval"],
                store,
                items=config.eval.items,
                shares_engine=engines["eval"] is engines["train"],
            ),
            sink=sink,
            events=folder.event,
            checkpointer=RunCheckpoints(checkpoints),
        )
        console.start(
            config="\n".join(config_tree.overrides(config)),
            mesh=", ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
            parameters=table(learner.params, mesh),
        )
        with Signals(config, orchestrator) as signals:
            await orchestrator.run()
        await asyncio.to_thread(checkpoints.wait)
        sink.close()
        lines = read_metrics(folder.metrics_file)
        picture = plots.save(lines, folder.path / "curves.png", title=folder.path.name)
        files = {"metrics": str(folder.metrics_file), "curves": str(picture)}
        print(summary(lines, files))
        return signals.exit_code


class RunCheckpoints:
    """The orchestrator's Checkpointer: the trainer's arrays, the books and the held groups."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    async def save(
        self, step: int, trainer: Mapping[str, Any], run: Mapping[str, Any], held: Sequence[Group]
    ) -> None:
        """Returns once the arrays are copied; what follows goes on in the background."""
        groups, arrays = pack_groups(held)
        host = {"run": run, "groups": groups}
        await asyncio.to_thread(self._checkpoints.save, trainer, host=host, held=arrays)


class Signals:
    """Ctrl-C and SIGTERM: the first one asks for a checkpoint and an end, the second one ends."""

    def __init__(self, config: Config, orchestrator: Orchestrator) -> None:
        self.exit_code = 0
        self._orchestrator = orchestrator
        self._grace_s = config.checkpoint.grace_s
        self._codes = {
            signal.SIGINT: 130,
            signal.SIGTERM: config.checkpoint.resume_exit_code or 143,
        }

    def __enter__(self) -> "Signals":
        for number in self._codes:
            asyncio.get_running_loop().add_signal_handler(number, self._arrived, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._codes:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _arrived(self, number: signal.Signals) -> None:
        code = self._codes[number]
        if self.exit_code:
            os._exit(code)
        self.exit_code = code
        log.warning(
            "%s: finishing the running update, then a checkpoint; again to exit at once",
            number.name,
        )
        self._orchestrator.stop(number.name)
        # An update cannot be interrupted: past the grace time the last checkpoint has to do.
        asyncio.get_running_loop().call_later(self._grace_s, os._exit, code)


def build_env(config: Config, tokenizer: Tokenizer, rewards: RewardPool) -> Environment:
    """The environment by its name.

    Raises:
      SetupError: it does not exist, cannot be made so, or has no solutions to start warm from.
    """
    options = dict(config.env.options)
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
    except ValueError as error:
        raise SetupError(str(error)) from error
    if config.warm_start.steps and not hasattr(env, "solution"):
        raise SetupError(
            f"env.name={config.env.name} has no solutions, which warm_start.steps="
            f"{config.warm_start.steps} needs; set warm_start.steps to 0"
        )
    return env


def check_engine(config: Config) -> None:
    """Raises SetupError if vLLM servers are asked for and cannot be had."""
    if config.engine.kind == "vllm":
        try:
            check_can_start(config.engine, config.policy)
        except EngineError as error:
            raise SetupError(str(error)) from error


def build_store(config: Config, folder: Workdir) -> OrbaxStore | MemoryStore:
    """Where engines find versions: under Hugging Face names for vLLM, in memory for an engine that
    shares it."""
    if config.engine.kind == "vllm":
        return OrbaxStore(
            folder.weights, config.policy.compute_dtype, to_served=to_hf, from_served=from_hf
        )
    return OrbaxStore(folder.weights) if config.engine.own_process else MemoryStore()


async def start_all(
    config: Config, shape: EngineShape, store: OrbaxStore | MemoryStore, folder: Workdir
) -> dict[str, Engine]:
    """The engines "train" and "eval", which may be the same one."""
    if config.engine.kind == "jax":
        return await start_engines(config.engine, config.policy, shape, store, workdir=folder.path)
    return await start_pools(
        config.engine,
        config.placement,
        config.policy,
        shape,
        store,
        workdir=folder.path,
        eval_servers=config.eval.servers,
        hf_config=hf_config_of(config.policy, shape.vocab_size, shape.context),
    )


def build_mesh(config: Config) -> Mesh:
    """The trainer's mesh; SetupError if there are too few devices."""
    try:
        return make_mesh(config.mesh)
    except ValueError as error:
        raise SetupError(str(error)) from error


def build_or_restore(
    config: Config,
    env: Environment,
    tokenizer: Tokenizer,
    vocab_size: int,
    mesh: Mesh,
    checkpoints: Checkpoints,
) -> tuple[Learner, Restored | None]:
    """The trainer as of the newest checkpoint, or at version 0.

    Raises:
      SetupError: there are checkpoints, and not one of them can be read.
    """
    if not checkpoints.steps():
        params = first_params(config, env, tokenizer, vocab_size, mesh)
        return build_learner(config, vocab_size, mesh, params), None
    learner = build_learner(config, vocab_size, mesh, None)
    saved = checkpoints.restore(learner.save_structure())
    if saved is None:
        raise SetupError(
            f"none of the checkpoints of steps {checkpoints.steps()} can be read; move them away "
            "to start over, or choose another --workdir"
        )
    learner.restore(saved.state)
    log.info("resumed from step %d", learner.step)
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


async def close_engines(starting: asyncio.Task[dict[str, Engine]]) -> None:
    """Closes the engines, also when the run failed while they were starting."""
    if not starting.done():
        starting.cancel()
    try:
        engines = await starting
    except (asyncio.CancelledError, Exception):
        return  # whoever awaited the start has the error
    for engine in engines.values():
        await engine.close()


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


def use_compilation_cache() -> None:
    """Keeps every compiled function on disk, for the engine's process and the next run."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "telescope_jax" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def default_workdir(config_file: str) -> str:
    """runs/NAME-DATE-TIME under the current folder."""
    name = Path(config_file.split(":")[0]).stem
    return str(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
