"""One run from a checked config: makes the parts, joins them, and ends as it should.

The order matters. What can refuse the run (workdir, environment, mesh) comes before what costs
(warm start, engine start-up, compilation), and a checkpoint decides whether there is a warm start
at all. The engine starts while the warm start trains.

Exit codes: 0 finished; 130 Ctrl-C and 143 SIGTERM (or `checkpoint.resume_exit_code`), both after a
checkpoint; 2 refused before any work; 3 nothing to learn from (NoSignalError); 1 any other failure,
told in one line with the traceback in the log. A second signal exits at once.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from telescope_jax.allocator import few_arenas
from telescope_jax.assembly import AssemblySettings
from telescope_jax.attempts import AttemptRules, Attempts, NoSignalError
from telescope_jax.config import Config
from telescope_jax.console import Console
from telescope_jax.evals import HeldOutEvaluator, Kind
from telescope_jax.hosts import several
from telescope_jax.hosts.runtime import HostsError, Peers
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.interfaces import Engine
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.ledger import Attempt
from telescope_jax.log_lines import row
from telescope_jax.loop_guard import LoopGuard, calm_collector
from telescope_jax.metrics import Fanout, JsonlSink
from telescope_jax.metrics import read as read_metrics
from telescope_jax.orchestrator import Orchestrator, Schedule
from telescope_jax.prompts import PromptQueue
from telescope_jax.report import command_again, end_of, how_to_go_on, introduce
from telescope_jax.rollouts.archive import unpack_groups
from telescope_jax.rollouts.episode import Episode
from telescope_jax.rollouts.table import RolloutTables
from telescope_jax.run_checkpoints import RunCheckpoints
from telescope_jax.setup import (
    SetupError,
    Task,
    build_or_restore,
    build_store,
    build_task,
    episode_settings,
    eval_settings,
    place_trainer,
    refuse_foreign_kernels_package,
    start_all,
    use_compilation_cache,
)
from telescope_jax.sharding import table
from telescope_jax.signals import Signals
from telescope_jax.staleness import AsyncBound
from telescope_jax.types import Prompt
from telescope_jax.workdir import Workdir, WorkdirError

log = logging.getLogger(__name__)

PROMPTS_AHEAD = 64
NO_SIGNAL_EXIT_CODE = 3


def run(
    config: Config,
    config_file: str,
    workdir: str,
    peers: Peers | None = None,
    *,
    typed: Sequence[str] = (),
    began: float | None = None,
) -> int:
    """Runs to the end, or to a signal. Returns the exit code.

    Args:
      typed: the flags, for the command that takes an interrupted run up again.
      began: when this command did, by time.monotonic(); None is the moment of the call.
      peers: the processes of this trainer, if there are several; process 0 runs as one of one does,
        with a trainer, a store and checkpoints that take the others along (hosts/).
    """
    began = time.monotonic() if began is None else began
    few_arenas()
    try:
        refuse_foreign_kernels_package()
        place_trainer(config.placement)
        task = build_task(config)
        if peers:
            several.check(task.config, task.mesh)
            if not peers.leads:
                use_compilation_cache()
                return several.follow(peers, task)
        folder = Workdir.open(workdir or default_workdir(config_file), task.config, config_file)
    except (WorkdirError, SetupError) as error:
        print(f"telescope_jax: {error}", file=sys.stderr)
        if peers:
            peers.give_up(2, str(error))
        return 2
    again = command_again(typed or [f"--config={config_file}"], folder)
    finished = folder.finished_steps
    if finished is not None and finished >= config.number_of_steps and not peers:
        print(f"{end_of(folder)}\n{how_to_go_on(folder.path, finished)}")
        folder.note_end(0)
        folder.close()
        return 0
    use_compilation_cache()
    signals = Signals(
        grace_s=config.checkpoint.grace_s,
        resume_exit_code=config.checkpoint.resume_exit_code,
        note=folder.note,
        again=again,
    )
    code, words = 1, ""
    console = Console(config.number_of_steps)
    with folder.logging(console.say):
        introduce(task.config, task.mesh, folder, config_file)
        for warning in config.warnings():
            log.warning("%s", warning)
        try:
            code = asyncio.run(_run(task, folder, console, signals, peers, began))
        except (SetupError, HostsError) as error:
            log.error("%s", error)
            code, words = 2, str(error)
        except NoSignalError as error:
            log.error("%s", error)
            code, words = NO_SIGNAL_EXIT_CODE, str(error)
        except KeyboardInterrupt:
            words = "interrupted before the first step; nothing to save"
            log.error("%s", words)
            code = 130
        except Exception as error:
            log.debug("the run failed", exc_info=True)
            log.error("%s: %s (traceback in %s)", type(error).__name__, error, folder.log_file)
            words = f"{type(error).__name__}: {error}"
        finally:
            signals.closed()
            folder.note_end(code)
            if code in (1, *signals.codes.values()) and not peers:
                console.say(row("resume", again))
    if peers and words:
        peers.give_up(code, words)
    if peers:
        peers.end()
    return code


async def _run(
    task: Task,
    folder: Workdir,
    console: Console,
    signals: Signals,
    peers: Peers | None,
    began: float,
) -> int:
    """Joins the parts and runs the orchestrator; returns the exit code of its end."""
    config, tokenizer, env, mesh = task.config, task.tokenizer, task.env, task.mesh
    async with AsyncExitStack() as stack:
        stack.enter_context(signals)
        guard = await stack.enter_async_context(LoopGuard(end_s=3 * config.watchdog_s))
        stack.push_async_callback(task.rewards.close)
        vocab_size = config.policy.vocab_size or tokenizer.vocab_size
        checkpoints = Checkpoints(
            folder.checkpoints,
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
        )
        stack.callback(checkpoints.close)
        saver = RunCheckpoints(checkpoints, config.checkpoint)

        store = build_store(config, folder.weights)
        if peers:
            several.tell_followers(peers, folder, config)
        shape = EngineShape(
            vocab_size,
            tokenizer.eos_ids,
            context=config.engine_context(),
            prefill_width=config.sampling.max_prompt_tokens,
        )
        starting = asyncio.create_task(start_all(config, shape, store, folder.path))
        stack.push_async_callback(close_engines, starting)
        learner, saved = await asyncio.to_thread(
            build_or_restore, config, env, tokenizer, vocab_size, mesh, checkpoints, task.pretrained
        )
        stack.callback(learner.close)
        trainer = learner
        if peers:
            due = saved.evals if saved is not None else {}
            trainer, store, shared = await asyncio.to_thread(
                several.lead, peers, learner, store, checkpoints, config, due
            )
            saver = RunCheckpoints(shared, config.checkpoint)
        engines = await starting

        sink = Fanout(
            [
                JsonlSink(folder.metrics_file, resume_at=learner.step if folder.resumed else None),
                console,
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
        training, sampled = episode_settings(config), eval_settings(config)
        greedy = replace(sampled, sampling=replace(sampled.sampling, temperature=0.0))

        def training_episode(prompt: Prompt, attempt: Attempt, index: int) -> Episode:
            return Episode(engines["train"], tokenizer, prompt, attempt, index, training)

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
                first_watchdog_s=config.engine.start_timeout_s,
            ),
            attempts=attempts,
            assembly=AssemblySettings(
                config.advantages(),
                config.loss.mask_truncated,
                config.batch.seq_len,
                config.batch.rows_per_microbatch,
                config.batch.minibatches,
                tokenizer.vocab_size,
            ),
            env=env,
            prompts=prompts,
            episode=training_episode,
            engine=engines["train"],
            trainer=trainer,
            store=store,
            evaluated=evaluated_versions(folder.metrics_file),
            pending_evals=sorted(saved.evals.items()) if saved is not None else (),
            evaluator=HeldOutEvaluator(
                env,
                eval_episode,
                engines["eval"],
                store,
                items=config.eval.items,
                sampled=config.eval.sampled,
                brief_tokens=config.sampling.max_tokens if config.eval.max_tokens else 0,
                max_prompt_tokens=config.sampling.max_prompt_tokens,
                shares_engine=engines["eval"] is engines["train"],
            ),
            sink=sink,
            events=folder.event,
            checkpointer=saver,
            gauges=(saver.metrics, task.rewards.metrics, guard.metrics),
            on_batch=RolloutTables(
                folder.path / "rollouts", tokenizer, every=config.log.rollouts_every
            ).write,
            began=began,
        )
        parameters = table(learner.params, mesh)
        log.debug("parameters:\n%s", parameters)
        log.info("policy: %s\n%s", parameters.splitlines()[-1], learner.memory())
        log.info(
            "training: steps %d to %d; the first rollouts and updates compile",
            *(learner.step, config.number_of_steps),
        )
        calm_collector()
        signals.orchestrator = orchestrator
        if peers:
            several.take_signals(
                peers,
                asyncio.get_running_loop(),
                signals.arrive,
                stopping=lambda: signals.exit_code != 0,
            )
        try:
            await orchestrator.run()
            committing = time.monotonic()
            await saver.finish()
            now = time.monotonic()
            last = {"time/checkpoint": now - committing, "time/elapsed": now - began}
            sink.log(orchestrator.trainer_step, last)
            folder.note(step=orchestrator.trainer_step)
            signals.saved()
        except BaseException as error:
            signals.failed(error)
            raise
        if peers:
            several.release(peers, trainer, store, signals.exit_code)
        sink.close()
        console.say(await asyncio.to_thread(end_of, folder))
        return signals.exit_code


def evaluated_versions(metrics_file: Path) -> frozenset[int]:
    """Versions whose evals are on record; a resumed run does the one that is missing."""
    if not metrics_file.exists():
        return frozenset()
    lines = read_metrics(metrics_file)
    return frozenset(line["step"] for line in lines if any(n.startswith("eval/") for n in line))


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


def default_workdir(config_file: str) -> str:
    """runs/NAME-DATE-TIME under the current folder."""
    name = Path(config_file.split(":")[0]).stem
    return str(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
