"""How much of the time async RL saves, of what it could save.

    python -m experiments.benchmarks.async_overlap virtual     # the scheduler alone, minutes
    python -m experiments.benchmarks.async_overlap real        # policy, engine and trainer, 2 cores

`virtual` runs the real orchestrator on a virtual clock against a modelled engine: 8 groups × 8
rollouts, 32 slots, a decode step costs 0.5 + 0.5·n/32 with n slots busy, lengths are lognormal and
cut at 4 × mean. It prints the speed-up over max_async_rollout = 0 and its share of the bound

    (T_gen,sync + T_train) / max(T_gen,saturated, T_train)

where T_gen,sync is one batch generated alone, with its tail, and T_gen,saturated its tokens at full
slots.

`real` runs the embedded engine in its own process beside the learner, 16 groups × 8 answers of 104
tokens a batch; the number of slots makes a batch take about as long to generate as to train. Each
side is first timed alone, pinned to one core; then the whole loop runs on two. Share =
max(T_gen, T_train) ÷ T_async.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from experiments.benchmarks.modelled import answer, heavy_tailed, store_without_delay
from telescope_jax.assembly import AssemblySettings, assemble
from telescope_jax.attempts import AttemptRules, Attempts
from telescope_jax.chat import CharTokenizer
from telescope_jax.config import Config
from telescope_jax.envs.arithmetic import Sums
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.engine_client import start_engines
from telescope_jax.interfaces import Sample
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.settings import loss_settings
from telescope_jax.ledger import Attempt
from telescope_jax.orchestrator import Orchestrator, Schedule
from telescope_jax.prompts import PromptQueue
from telescope_jax.rollouts.episode import Episode, EpisodeSettings
from telescope_jax.rollouts.group import play_group
from telescope_jax.setup import use_compilation_cache
from telescope_jax.sharding import make_mesh
from telescope_jax.staleness import AsyncBound
from telescope_jax.types import (
    Completion,
    Prompt,
    Reward,
    SamplingParams,
    Uid,
    VersionSpan,
)
from telescope_jax.weights.store import OrbaxStore
from tests.scripted import Run, ScriptedEngine, build
from tests.virtual_clock import run_virtual

GROUPS, SIZE, SLOTS, UPDATES, MEAN_LENGTH = 8, 8, 32, 120, 64


class BatchedEngine(ScriptedEngine):
    """Continuous batching in virtual time: all busy slots advance one token a step."""

    sigma = 0.0

    def start(self, sigma: float) -> None:
        self.sigma = sigma
        self.waiting: deque[tuple[list[int], asyncio.Future[None]]] = deque()
        self.active: list[tuple[list[int], asyncio.Future[None]]] = []
        self.stepper: asyncio.Task[None] | None = None

    def length(self) -> int:
        return max(1, round(heavy_tailed(self.rng, mean=MEAN_LENGTH, sigma=self.sigma, most=4.0)))

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        version = self.version
        done = asyncio.get_running_loop().create_future()
        self.waiting.append(([self.length()], done))
        if self.stepper is None or self.stepper.done():
            self.stepper = asyncio.ensure_future(self._step())
        await done
        return answer(1, (VersionSpan(version, 0, 1),))

    async def _step(self) -> None:
        while self.active or self.waiting:
            while self.waiting and len(self.active) < SLOTS:
                self.active.append(self.waiting.popleft())
            await asyncio.sleep(0.5 + 0.5 * len(self.active) / SLOTS)
            for left, done in self.active:
                left[0] -= 1
                if left[0] == 0 and not done.done():
                    done.set_result(None)
            self.active = [(left, done) for left, done in self.active if left[0] > 0]
            # Finished rollouts close their group and admit the next one before the next step.
            for _ in range(6):
                await asyncio.sleep(0)


def virtual_run(sigma: float, lead: int, train_s: float) -> tuple[Run, float]:
    """One run; returns it with its virtual duration."""
    run = build(
        steps=UPDATES,
        groups=GROUPS,
        size=SIZE,
        lead=lead,
        update_s=lambda step: train_s,
        store=store_without_delay(),
    )
    engine = run.engine
    engine.__class__ = BatchedEngine
    assert isinstance(engine, BatchedEngine)
    engine.start(sigma)
    engine.load_s = 0.0
    _, took = run_virtual(run.orchestrator.run())
    return run, took


def generation_times(sigma: float) -> tuple[float, float]:
    """(T_gen,sync, T_gen,saturated): a batch alone with its tail, and its tokens at full slots."""
    _, synchronous = virtual_run(sigma, lead=0, train_s=0.0)
    draws = BatchedEngine(random.Random(1), lambda rng: 0.0)
    draws.start(sigma)
    mean = np.mean([draws.length() for _ in range(100_000)])
    return synchronous / UPDATES, float(mean) * GROUPS * SIZE / SLOTS


def virtual() -> None:
    """The table of the module's docstring."""
    print("sigma  T_train/T_gen  max_async_rollout  speed-up  bound  share  dropped")
    for sigma, ratio in itertools.product((0.0, 0.5, 1.0), (1 / 3, 1.0)):
        gen_sync, gen_saturated = generation_times(sigma)
        train_s = ratio * gen_sync
        bound = (gen_sync + train_s) / max(gen_saturated, train_s)
        times: dict[int, float] = {}
        for lead in (0, 1, 2, 4, 8):
            run, times[lead] = virtual_run(sigma, lead, train_s)
            speed_up = times[0] / times[lead]
            dropped = run.attempts.ledger.dropped.total()
            print(
                f"{sigma:5.1f}  {ratio:13.2f}  {lead:17d}  {speed_up:8.2f}  {bound:5.2f}  "
                f"{speed_up / bound:5.2f}  {dropped:7d}",
                flush=True,
            )


ANSWER, ROW, STEPS, REAL_GROUPS = 104, 128, 18, 16


class Babble(Sums):
    """Sums whose reward is drawn from the answer's text: long answers, and always a signal."""

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        return Reward(random.Random((await sample()).text).random())


class Parts:
    """The real parts of one run; the engine has no end token, so every answer has one length."""

    def __init__(self, slots: int, folder: str) -> None:
        config = self.config = Config()
        config.engine.slots = slots
        config.batch.seq_len, config.batch.rows_per_microbatch = ROW, 4
        config.optimizer.learning_rate = 1e-5
        self.tokenizer = CharTokenizer()
        self.env = Babble(self.tokenizer)
        self.store = OrbaxStore(folder)
        self.folder = folder
        self.learner = Learner(
            config.policy,
            self.tokenizer.vocab_size,
            make_mesh(config.mesh, jax.devices()[:1]),
            loss=loss_settings(config),
            optimizer=config.optimizer,
            number_of_steps=STEPS,
            rows_per_microbatch=config.batch.rows_per_microbatch,
        )
        self.assembly = AssemblySettings("dr_grpo", False, ROW, 4, 1)
        self.settings = EpisodeSettings(SamplingParams(max_tokens=ANSWER), ROW, 600.0, 0)

    async def start_engine(self, *, own_process: bool) -> None:
        self.config.engine.own_process = own_process
        shape = EngineShape(self.tokenizer.vocab_size, (), context=ROW, prefill_width=16)
        engines = await start_engines(
            self.config.engine,
            self.config.policy,
            shape,
            self.store,
            workdir=self.folder,
            names=["train"],
        )
        self.engine = engines["train"]

    def episode(self, prompt: Prompt, attempt: Attempt, index: int) -> Episode:
        return Episode(self.engine, self.tokenizer, prompt, attempt, index, self.settings)


async def generate_alone(parts: Parts) -> float:
    """Seconds a batch at saturation: all rollouts of several batches are asked for at once."""
    await parts.start_engine(own_process=False)
    await parts.engine.load(await parts.store.publish(0, parts.learner.params))

    async def batches(count: int) -> float:
        started = time.perf_counter()
        prompts = [parts.env.prompt(Uid(0, i)) for i in range(count * REAL_GROUPS)]
        await asyncio.gather(
            *(play_group(parts.env, parts.episode, p, Attempt(p.uid, 0), SIZE) for p in prompts)
        )
        return time.perf_counter() - started

    await batches(1)
    # The difference of two lengths leaves out the tail, in which slots run empty.
    short, long = await batches(2), await batches(6)
    await parts.engine.close()
    return (long - short) / 4


async def train_alone(parts: Parts) -> float:
    """Seconds an update, median, on a batch that was generated here."""
    await parts.start_engine(own_process=False)
    await parts.engine.load(await parts.store.publish(0, parts.learner.params))
    prompts = [parts.env.prompt(Uid(0, i)) for i in range(REAL_GROUPS)]
    groups = await asyncio.gather(
        *(play_group(parts.env, parts.episode, p, Attempt(p.uid, 0), SIZE) for p in prompts)
    )
    await parts.engine.close()
    batch = assemble(0, groups, parts.assembly).minibatches
    times = []
    for _ in range(8):
        started = time.perf_counter()
        await parts.learner.update(batch)
        times.append(time.perf_counter() - started)
    return float(np.median(times[2:]))


class Moments:
    """A sink that notes when each step ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "train/loss" in values:
            self.at.append(time.perf_counter())

    def close(self) -> None: ...


async def run_async(parts: Parts, lead: int) -> float:
    """Seconds a step of the whole loop, after its first steps."""
    await parts.start_engine(own_process=True)
    moments = Moments()
    prompts = PromptQueue(parts.env, seed=0, prefetch=64)
    attempts = Attempts(
        AsyncBound(lead, 8, REAL_GROUPS, STEPS),
        AttemptRules(max_prompt_tokens=16),
        prompts,
        lambda name, details: None,
    )
    await Orchestrator(
        schedule=Schedule(STEPS, SIZE),
        attempts=attempts,
        assembly=parts.assembly,
        env=parts.env,
        prompts=prompts,
        episode=parts.episode,
        engine=parts.engine,
        trainer=parts.learner,
        store=parts.store,
        evaluator=None,
        sink=moments,
        events=lambda name, details: None,
    ).run()
    await parts.engine.close()
    if attempts.ledger.dropped:
        print(f"dropped: {dict(attempts.ledger.dropped)}", file=sys.stderr)
    return (moments.at[-1] - moments.at[5]) / (len(moments.at) - 6)


def measure(what: str, slots: int, lead: int) -> float:
    """One measurement, in this process."""
    use_compilation_cache()
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(slots, folder)
        match what:
            case "generate":
                return asyncio.run(generate_alone(parts))
            case "train":
                return asyncio.run(train_alone(parts))
            case _:
                return asyncio.run(run_async(parts, lead))


def in_process(what: str, slots: int, cores: set[int], lead: int = 2) -> float:
    """One measurement, in a fresh process on `cores`."""
    command = [sys.executable, "-m", "experiments.benchmarks.async_overlap", what]
    command += [f"--slots={slots}", f"--lead={lead}"]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def real() -> None:
    """The numbers of the module's docstring, each three times, in turn."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    train = in_process("train", 32, {first})
    generation = {slots: in_process("generate", slots, {first}) for slots in (4, 5, 6, 8)}
    slots = min(generation, key=lambda n: abs(generation[n] - train))
    print(f"slots {slots}: T_gen {generation[slots]:.3f} s, T_train {train:.3f} s a batch")
    print("repeat  lead  T_gen  T_train  T_async  T_sync  share  speed-up")
    for repeat in range(3):
        gen_s = in_process("generate", slots, {first})
        train_s = in_process("train", slots, {first})
        sync_s = in_process("run", slots, {first, second}, lead=0)
        for lead in (1, 2):
            async_s = in_process("run", slots, {first, second}, lead=lead)
            print(
                f"{repeat:6d}  {lead:4d}  {gen_s:5.3f}  {train_s:7.3f}  {async_s:7.3f}  "
                f"{sync_s:6.3f}  {max(gen_s, train_s) / async_s:5.2f}  {sync_s / async_s:8.2f}",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("virtual", "real", "generate", "train", "run"))
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--lead", type=int, default=2)
    arguments = parser.parse_args(argv)
    if arguments.part == "virtual":
        virtual()
    elif arguments.part == "real":
        real()
    else:
        print(measure(arguments.part, arguments.slots, arguments.lead))


if __name__ == "__main__":
    main()
