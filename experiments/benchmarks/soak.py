"""How long the system stands what clusters do to it.

    python -m experiments.benchmarks.soak --minutes=30

Runs embedded engine, learner and checkpoints of a tiny policy in this process. Every few seconds
something is broken at random: an engine's answer is lost, late or an error, a reward or an
environment fails, the event loop is blocked, a load is slow. Every 10 to 50 seconds the run ends,
by a stop with a checkpoint or by a kill without one, and goes on from the newest checkpoint.

It prints steps, groups lost (draws that are neither trained, nor alive, nor dropped for good),
memory growth after the first five minutes, file handles, and the share of the time in which the
event loop's thread computed: the orchestrator's overhead. Then `capacity.py` runs on one core, and
each aim is said to be reached or missed; the exit code is 1 if one was missed.
"""

import argparse
import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
from scipy import stats

from telescope_jax.allocator import few_arenas, give_back
from telescope_jax.assembly import AssemblySettings
from telescope_jax.attempts import AttemptRules, Attempts
from telescope_jax.chat import CharTokenizer
from telescope_jax.config import CheckpointConfig, Config
from telescope_jax.envs.arithmetic import Sums
from telescope_jax.evals import HeldOutEvaluator
from telescope_jax.inference.embedded import EngineShape, build_engines
from telescope_jax.inference.jax_engine import JaxEngine
from telescope_jax.interfaces import EngineError, RewardError, RewardTimeout, Sample
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.settings import loss_settings
from telescope_jax.ledger import FINAL, Attempt
from telescope_jax.loop_guard import LoopGuard, calm_collector
from telescope_jax.metrics import JsonlSink
from telescope_jax.orchestrator import Orchestrator, Schedule
from telescope_jax.prompts import PromptQueue
from telescope_jax.rollouts.archive import unpack_groups
from telescope_jax.rollouts.episode import Episode, EpisodeSettings
from telescope_jax.run_checkpoints import RunCheckpoints
from telescope_jax.sharding import make_mesh
from telescope_jax.staleness import AsyncBound
from telescope_jax.types import (
    Completion,
    Prompt,
    Reward,
    SamplingParams,
    WeightsRef,
)
from telescope_jax.weights.store import MemoryStore


class FaultyEngine:
    """An engine that loses answers, fails in the middle, is slow, and loads slowly."""

    def __init__(self, engine: JaxEngine, faults: "Faults") -> None:
        self._engine, self._faults = engine, faults

    @property
    def version(self) -> int:
        return self._engine.version

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        if self._faults.now("lost_reply"):
            await asyncio.sleep(3_600)
        if self._faults.now("slow_reply"):
            await asyncio.sleep(1.0)
        completion = await self._engine.sample(tokens, sampling)
        if self._faults.now("engine_error"):
            raise EngineError("a fault of the soak")
        return completion

    async def load(self, ref: WeightsRef) -> None:
        if self._faults.now("slow_load"):
            await asyncio.sleep(1.0)
        await self._engine.load(ref)

    def metrics(self) -> Mapping[str, float]:
        return self._engine.metrics()

    async def close(self) -> None:
        await self._engine.close()


class FaultySums(Sums):
    """The share of digits as reward, and what graders and environments do wrong."""

    faults: "Faults"

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        text = (await sample()).text
        for kind in (ValueError, RewardError, RewardTimeout):
            if self.faults.now(kind.__name__):
                raise kind("a fault of the soak")
        if self.faults.now("blocked_loop"):
            time.sleep(0.2)
        return Reward(sum(c.isdigit() for c in text) / 8)


FAULTS = ("lost_reply", "slow_reply", "engine_error", "slow_load", "blocked_loop")
FAULTS += ("ValueError", "RewardError", "RewardTimeout")


class Faults:
    """One fault every few seconds, of a drawn kind: the next time that its place is passed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._due = ""
        self.happened: Counter[str] = Counter()

    async def draw(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(1, 5))
            self._due = self._rng.choice(FAULTS)

    def now(self, kind: str) -> bool:
        if self._due != kind:
            return False
        self._due = ""
        self.happened[kind] += 1
        return True


class Awake:
    """Seconds in which this process could run: what it was stopped for is left out."""

    seconds = 0.0

    async def count(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            self.seconds += min(now - before, 5.0)
            before = now


class Soak:
    """The real parts; `live` builds a run from the newest checkpoint and goes on with it."""

    def __init__(self, folder: Path, seed: int) -> None:
        config = self.config = Config()
        config.policy.width, config.policy.head_dim, config.policy.mlp_width = 32, 8, 64
        config.sampling.max_tokens, config.sampling.max_prompt_tokens = 8, 16
        config.batch.seq_len, config.batch.rows_per_microbatch = 64, 2
        config.engine.slots, config.engine.prefill_rows = 16, 4
        self.tokenizer = CharTokenizer()
        self.faults = Faults(seed)
        self.env = FaultySums(self.tokenizer)
        self.env.faults = self.faults
        self.learner = Learner(
            config.policy,
            self.tokenizer.vocab_size,
            make_mesh(config.mesh, jax.devices()[:1]),
            loss=loss_settings(config),
            optimizer=config.optimizer,
            number_of_steps=_NO_END,
            rows_per_microbatch=2,
        )
        self.first = jax.tree.map(np.asarray, self.learner.save())
        self.store = MemoryStore()
        shape = EngineShape(self.tokenizer.vocab_size, self.tokenizer.eos_ids, 24, 16)
        built = build_engines(
            config.engine, config.policy, shape, self.store, names=["train", "eval"]
        )
        self.engines = {name: FaultyEngine(engine, self.faults) for name, engine in built.items()}
        self.checkpoints = Checkpoints(folder / "checkpoints", keep_last=2)
        self.sink = JsonlSink(folder / "metrics.jsonl")
        self.lives = self.lost = 0
        self.steps = 0
        self.attempts: Attempts | None = None

    async def live(self, guard: LoopGuard, seconds: float, *, kill: bool) -> None:
        """One life of the run: to a stop with a checkpoint, or to a kill without one."""
        saved = await asyncio.to_thread(self.checkpoints.restore, self.learner.save_structure())
        self.learner.restore(saved.state if saved else self.first)
        prompts = PromptQueue(self.env, seed=0, prefetch=16)
        attempts = Attempts(
            AsyncBound(1, 8, 4, _NO_END), AttemptRules(max_prompt_tokens=16), prompts, _no_events
        )
        if saved is not None:
            held = unpack_groups(saved.host["groups"], saved.held or {}, self.env)
            attempts.restore(saved.step, saved.host["run"], held)
        settings = EpisodeSettings(SamplingParams(max_tokens=8), 24, 2.0, 0)

        def episode(name: str, prompt: Prompt, attempt: Attempt, index: int) -> Episode:
            return Episode(
                self.engines[name], self.tokenizer, prompt, attempt, index, settings, purpose=name
            )

        # The engines hold the version of the life before, which may be newer.
        for engine in self.engines.values():
            await engine.load(await self.store.publish(self.learner.step, self.learner.params))
        orchestrator = Orchestrator(
            schedule=Schedule(
                _NO_END, 4, eval_every=50, checkpoint_every=20, eval_at_start=False, watchdog_s=60
            ),
            attempts=attempts,
            assembly=AssemblySettings("dr_grpo", False, 64, 2, 1),
            env=self.env,
            prompts=prompts,
            episode=lambda prompt, attempt, index: episode("train", prompt, attempt, index),
            engine=self.engines["train"],
            trainer=self.learner,
            store=self.store,
            evaluator=HeldOutEvaluator(
                self.env,
                lambda prompt, attempt, kind: episode("eval", prompt, attempt, 0),
                self.engines["eval"],
                self.store,
                items=8,
                max_prompt_tokens=16,
            ),
            sink=self.sink,
            events=_no_events,
            checkpointer=RunCheckpoints(self.checkpoints, CheckpointConfig()),
            pending_evals=sorted(saved.evals.items()) if saved else (),
            gauges=(guard.metrics,),
        )
        running = asyncio.create_task(orchestrator.run())
        before = self.learner.step
        await asyncio.wait([running], timeout=seconds)
        if running.done() or not kill:
            orchestrator.stop("soak")
            await running
        else:
            running.cancel()
            await asyncio.wait([running])
        self.lives += 1
        self.steps += max(0, self.learner.step - before)
        attempts.ledger.check()
        ledger = attempts.ledger
        final = sum(n for reason, n in ledger.dropped.items() if reason in FINAL)
        state = prompts.state()
        live = ledger.admitted  # trained and alive
        waiting = len(state["front"])
        self.lost += state["cursor"] - (live + final + waiting)
        self.attempts = attempts
        await asyncio.to_thread(self.checkpoints.wait)


_NO_END = 10**7


def _no_events(name: str, details: Mapping[str, Any]) -> None: ...


def soak(minutes: float, seed: int) -> dict[str, Any]:
    """Prints one line of JSON a life; returns what is said at the end."""
    process, samples = psutil.Process(), []
    rng = random.Random(seed)

    async def main() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            parts = Soak(Path(folder), seed)
            faults = asyncio.create_task(parts.faults.draw())
            awake = Awake()
            counting = asyncio.create_task(awake.count())
            started = time.monotonic()
            async with LoopGuard(end_s=300) as guard:
                calm_collector()
                loop_cpu = time.thread_time()
                while (left := 60 * minutes - awake.seconds) > 0:
                    await parts.live(guard, min(left, rng.uniform(10, 50)), kill=rng.random() < 0.5)
                    gc.collect()  # a process that ends leaves no cycles to the next
                    give_back()  # as every save does; what is free would be noise of 2 %
                    sample = {
                        "minute": round(awake.seconds / 60, 1),
                        "steps": parts.steps,
                        "lost": parts.lost,
                        "rss_mb": round(process.memory_info().rss / 2**20, 1),
                        "device_arrays": len(jax.live_arrays()),
                        "handles": process.num_fds(),
                        "threads": process.num_threads(),
                    }
                    samples.append(sample)
                    print(json.dumps(sample), flush=True)
                loop_cpu = time.thread_time() - loop_cpu
                seconds = awake.seconds
            faults.cancel()
            counting.cancel()
            assert parts.attempts is not None
            dropped = {r.value: n for r, n in parts.attempts.ledger.dropped.items()}
            for engine in parts.engines.values():
                await engine.close()
            parts.learner.close()
            parts.sink.close()
            parts.checkpoints.close()
        late = [s for s in samples if s["minute"] >= min(5, minutes / 2)]
        growth, low, high = trend([s["minute"] for s in late], [s["rss_mb"] for s in late])
        return {
            "minutes": round(seconds / 60, 1),
            "stopped_minutes": round((time.monotonic() - started - seconds) / 60, 1),
            "lives": parts.lives,
            "steps": parts.steps,
            "groups_lost": parts.lost,
            "faults": dict(parts.faults.happened),
            "dropped_in_last_life": dropped,
            "rss_mb": [late[0]["rss_mb"], late[-1]["rss_mb"]],
            "memory_growth": growth,
            "memory_growth_95": [low, high],
            "handles": [max(s["handles"] for s in some) for some in (late[:4], late[-4:])],
            "event_loop_cpu_share": round(loop_cpu / seconds, 3),
        }

    return asyncio.run(main())


def trend(minutes: Sequence[float], mb: Sequence[float]) -> tuple[float, float, float]:
    """Growth from the first to the last sample by Theil and Sen's line, and its 95 % interval, as
    shares of where it starts: single samples move by 2 %, and the line needs all of them."""
    line = stats.theilslopes(mb, minutes)
    slope, intercept, low, high = (float(value) for value in np.array(line))
    share = (minutes[-1] - minutes[0]) / (intercept + slope * minutes[0])
    return round(slope * share, 4), round(low * share, 4), round(high * share, 4)


def capacity() -> dict[str, Any]:
    """`capacity.py` in a process of its own, as nothing here may share its core."""
    command = [sys.executable, "-m", "experiments.benchmarks.capacity"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def verdicts(stood: Mapping[str, Any], carried: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Each aim: whether it was reached, and a line that says so with its number."""
    before, after = stood["handles"]
    aims = [
        (stood["steps"] > 0, f"steps are done: {stood['steps']:,} in {stood['lives']} lives"),
        (stood["groups_lost"] == 0, f"no group is lost: {stood['groups_lost']}"),
        (stood["minutes"] >= 30, f"30 minutes: {stood['minutes']}"),
        (
            stood["memory_growth"] < 0.02,
            f"memory grows < 2 %: {stood['memory_growth']:.2%} {stood['memory_growth_95']}",
        ),
        (after <= before, f"file handles are steady: {before}, then {after}"),
        (carried["rollouts_per_s"] >= 3_000, f">= 3,000 rollouts/s: {carried['rollouts_per_s']:,}"),
        (carried["in_flight"] >= 10_000, f">= 10,000 in flight: {carried['in_flight']:,}"),
        (
            carried["loop_lag_p99_ms"] < 50,
            f"event-loop lag p99 < 50 ms: {carried['loop_lag_p99_ms']}",
        ),
    ]
    return [(ok, f"{'reached' if ok else 'MISSED '}  {line}") for ok, line in aims]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    few_arenas()
    stood = soak(asked.minutes, asked.seed)
    print(json.dumps(stood), flush=True)
    carried = capacity()
    print(json.dumps(carried))
    said = verdicts(stood, carried)
    print("\n".join(line for _, line in said))
    print(
        f"orchestrator: {stood['event_loop_cpu_share']:.1%} of the time; its capacity in CPU time, "
        f"as if it had the core for itself: {carried['rollouts_per_cpu_s']:,} rollouts/s, lag p99 "
        f"{carried['computed_lag_p99_ms']} ms, at most {carried['computed_lag_max_ms']} ms"
    )
    sys.exit(not all(ok for ok, _ in said))


if __name__ == "__main__":
    main()
