"""Scripted parts for the orchestrator's tests: engines, trainer, store and environment on timers.

They do what the real ones promise in interfaces.py and nothing else; their delays and failures are
drawn from a seed. `build` joins them to a real orchestrator.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telescope_jax.assembly import AssemblySettings
from telescope_jax.attempts import AttemptRules, Attempts, Held, InFlight
from telescope_jax.interfaces import EngineError, EnvError, RewardError, RewardTimeout
from telescope_jax.ledger import Attempt
from telescope_jax.orchestrator import Orchestrator, Schedule
from telescope_jax.prompts import PromptQueue
from telescope_jax.rollouts.episode import Episode, EpisodeSettings
from telescope_jax.staleness import AsyncBound
from telescope_jax.types import (
    Completion,
    LossStats,
    Prompt,
    Reward,
    SamplingParams,
    StopReason,
    Uid,
    VersionSpan,
    WeightsRef,
)

NO_STATS = LossStats(**dict.fromkeys(LossStats._fields, 0))


class ScriptedTokenizer:
    name, fingerprint, vocab_size, eos_ids, pad_id = "scripted", "0", 16, (1,), 0

    def encode(self, text: str) -> list[int]:
        return [2 + ord(c) % 8 for c in text]

    def prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


@dataclass
class ScriptedEngine:
    """Servers that answer after a drawn delay and are given new weights one after the other.

    `served` keeps (time, version) of every load of each server, from which a request that spans
    several loads derives its version spans.
    """

    rng: random.Random
    latency_s: Callable[[random.Random], float]
    servers: int = 1
    load_s: float = 0.1
    failure_rate: float = 0.0
    tokens: int = 4
    running: int = 0
    most_running: int = 0
    cancelled: int = 0
    loads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.served: list[list[tuple[float, int]]] = [[] for _ in range(self.servers)]

    @property
    def version(self) -> int:
        return min((loads[-1][1] for loads in self.served if loads), default=-1)

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        server = self.served[self.rng.randrange(self.servers)]
        loop = asyncio.get_running_loop()
        started, delay = loop.time(), self.latency_s(self.rng)
        first = server[-1][1]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.rng.random() < self.failure_rate:
            raise EngineError("scripted failure")
        count = min(self.tokens, sampling.max_tokens)
        moments = [started + delay * i / count for i in range(count)]
        versions = [max([first] + [v for t, v in server if t <= moment]) for moment in moments]
        spans = []
        for i, version in enumerate(versions):
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, i + 1)
            else:
                spans.append(VersionSpan(version, i, i + 1))
        return Completion(
            np.full(count, 3, np.int32),
            np.full(count, -1.0, np.float32),
            tuple(spans),
            StopReason.EOS,
        )

    async def load(self, ref: WeightsRef) -> None:
        self.loads.append(ref.version)
        for server in self.served:
            await asyncio.sleep(self.load_s)
            server.append((asyncio.get_running_loop().time(), ref.version))

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None: ...


@dataclass
class ScriptedTrainer:
    """Its parameters are its version."""

    update_s: Callable[[int], float]
    step: int = 0

    @property
    def params(self) -> int:
        return self.step

    async def update(self, batch: Sequence[Any]) -> LossStats:
        await asyncio.sleep(self.update_s(self.step))
        self.step += 1
        return NO_STATS

    def save(self) -> Mapping[str, Any]:
        return {"step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]


@dataclass
class ScriptedStore:
    publish_s: float = 0.05
    kept: list[int] = field(default_factory=list)

    async def publish(self, version: int, params: Any) -> WeightsRef:
        assert params == version, "version n is published with the parameters after n steps"
        await asyncio.sleep(self.publish_s)
        return WeightsRef(version, f"scripted/{version}", str(version))

    def latest(self) -> WeightsRef | None:
        return None

    async def prune(self, keep: Sequence[int]) -> None:
        self.kept = list(keep)


@dataclass
class ScriptedEnv:
    """Rewards and failures drawn from a seed; a uid's draw does not depend on the order of play."""

    rng: random.Random
    size: int = 50
    equal_rewards: float = 0.0
    failures: Mapping[type[Exception], float] = field(default_factory=dict)
    turns: int = 1
    name: str = "scripted"

    def __len__(self) -> int:
        return self.size

    def prompt(self, uid: Uid, split: str = "train") -> Prompt:
        return Prompt(uid, self.name, np.array([4, 5], np.int32), None)

    async def play(self, prompt: Prompt, sample: Any) -> Reward:
        for _ in range(self.turns):
            await sample()
        for kind, rate in self.failures.items():
            if self.rng.random() < rate:
                raise kind("scripted")
        draw = random.Random(hash((prompt.uid, self.equal_rewards)))
        return Reward(1.0 if draw.random() < self.equal_rewards else self.rng.random())


class RecordingAttempts(Attempts):
    """Notes what was started and trained, for the invariants."""

    def __init__(self, *args: Any, trainer: ScriptedTrainer) -> None:
        super().__init__(*args)
        self._trainer = trainer
        self.started: list[Attempt] = []
        self.leads: list[int] = []
        self.trained: list[tuple[int, Held]] = []

    def start(self, attempt: Attempt, flight: InFlight) -> None:
        self.started.append(attempt)
        self.leads.append(self.inference_step - self._trainer.step)
        super().start(attempt, flight)

    def train(self, members: Sequence[Held]) -> None:
        super().train(members)
        self.trained += [(self._trainer.step - 1, member) for member in members]


class ListSink:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None: ...


@dataclass
class ScriptedEvaluator:
    duration_s: float
    engine: ScriptedEngine
    shares_engine: bool = False
    seen: list[tuple[int, int, int]] = field(default_factory=list)

    async def evaluate(self, version: int, params: Any) -> Mapping[str, float]:
        before = self.engine.version
        await asyncio.sleep(self.duration_s)
        self.seen.append((version, before, self.engine.version))
        return {"eval/scripted/accuracy": 0.0}


@dataclass
class Run:
    """A real orchestrator on scripted parts, with all that its tests look at."""

    orchestrator: Orchestrator
    attempts: RecordingAttempts
    engine: ScriptedEngine
    trainer: ScriptedTrainer
    sink: ListSink
    events: list[tuple[str, dict[str, Any]]]
    evaluator: ScriptedEvaluator | None


def build(
    *,
    seed: int = 0,
    steps: int = 6,
    groups: int = 3,
    size: int = 2,
    lead: int = 2,
    off_policy: int = 8,
    latency_s: Callable[[random.Random], float] = lambda rng: rng.uniform(0.5, 1.5),
    update_s: Callable[[int], float] = lambda step: 1.0,
    servers: int = 1,
    engine_failures: float = 0.0,
    eval_every: int = 0,
    eval_s: float | None = None,
    shares_engine: bool = False,
    watchdog_s: float = 1e6,
    max_attempts: int = 3,
    max_untrainable: int = 1_000_000,
    env: ScriptedEnv | None = None,
    checkpointer: Any = None,
    trainer_step: int = 0,
    engine: Any = None,
    trainer: ScriptedTrainer | None = None,
    store: Any = None,
    evaluator: Any = None,
    sink: Any = None,
    first_watchdog_s: float = 0.0,
    **orchestrated: Any,
) -> Run:
    rng = random.Random(seed)
    env = env or ScriptedEnv(rng)
    engine = engine or ScriptedEngine(rng, latency_s, servers=servers, failure_rate=engine_failures)
    trainer = trainer or ScriptedTrainer(update_s, trainer_step)
    events: list[tuple[str, dict[str, Any]]] = []

    def record(name: str, details: Mapping[str, Any]) -> None:
        events.append((name, dict(details)))

    prompts = PromptQueue(env, seed=seed)
    attempts = RecordingAttempts(
        AsyncBound(lead, off_policy, groups, steps),
        AttemptRules(
            max_prompt_tokens=8, max_attempts=max_attempts, max_untrainable_groups=max_untrainable
        ),
        prompts,
        record,
        trainer=trainer,
    )
    settings = EpisodeSettings(SamplingParams(max_tokens=4), 16, 1e5, seed)
    sink = sink or ListSink()
    if eval_s is not None:
        evaluator = evaluator or ScriptedEvaluator(eval_s, engine, shares_engine)
    orchestrator = Orchestrator(
        schedule=Schedule(
            steps,
            size,
            eval_every=eval_every,
            watchdog_s=watchdog_s,
            first_watchdog_s=first_watchdog_s,
            eval_timeout_s=1e5,
            checkpoint_every=2 if checkpointer else 0,
        ),
        attempts=attempts,
        assembly=AssemblySettings("dr_grpo", False, 16, 1, 1),
        env=env,
        prompts=prompts,
        episode=lambda prompt, attempt, i: Episode(
            engine, ScriptedTokenizer(), prompt, attempt, i, settings
        ),
        engine=engine,
        trainer=trainer,
        store=store or ScriptedStore(),
        evaluator=evaluator,
        sink=sink,
        events=record,
        checkpointer=checkpointer,
        **orchestrated,
    )
    return Run(orchestrator, attempts, engine, trainer, sink, events, evaluator)


FAILURES: tuple[type[Exception], ...] = (EnvError, RewardError, RewardTimeout, ZeroDivisionError)
