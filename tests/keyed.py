"""Scripted parts whose every draw is decided by what is asked, never by when: for exact resume.

A process that goes on from a checkpoint then meets the same answers as one that was never stopped,
as a seeded engine gives them. `Disk` is what outlives a process.
"""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from telescope_jax.interfaces import Checkpoint, EngineError
from telescope_jax.ledger import Attempt
from telescope_jax.metrics import JsonlSink
from telescope_jax.metrics import read as read_metrics
from telescope_jax.rollouts.archive import pack_groups, unpack_groups
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
from tests.scripted import NO_STATS, Run, ScriptedEngine, ScriptedEnv, ScriptedTrainer, build


def draw(*identity: Any) -> random.Random:
    """A generator of its own for everything that is asked."""
    return random.Random(repr(identity))


@dataclass
class KeyedEngine(ScriptedEngine):
    """Tokens depend on the request's seed and the version, failure on the seed, delay on `pace` as
    well: no two processes need the same time for the same request."""

    pace: int = 0

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        rng = draw(sampling.seed)
        server = self.served[draw(sampling.seed, "server").randrange(self.servers)]
        first = server[-1][1]
        self.running += 1
        try:
            await asyncio.sleep(self.latency_s(draw(sampling.seed, self.pace)))
        finally:
            self.running -= 1
        if rng.random() < self.failure_rate:
            raise EngineError("scripted failure")
        count = min(sampling.max_tokens, 1 + rng.randrange(4))
        words = draw(sampling.seed, first)
        sampled = np.array([2 + words.randrange(8) for _ in range(count)], np.int32)
        logprobs = np.array([-words.random() for _ in range(count)], np.float32)
        last = server[-1][1]
        spans = [VersionSpan(first, 0, count)]
        if last != first and count > 1:
            spans = [VersionSpan(first, 0, count - 1), VersionSpan(last, count - 1, count)]
        return Completion(sampled, logprobs, tuple(spans), StopReason.EOS)


class KeyedEnv(ScriptedEnv):
    """Rewards and failures depend on the prompt and the text."""

    async def play(self, prompt: Prompt, sample: Any) -> Reward:
        texts = [(await sample()).text for _ in range(self.turns)]
        rng = draw(prompt.uid, texts)
        for kind, rate in self.failures.items():
            if rng.random() < rate:
                raise kind("scripted")
        if draw(prompt.uid).random() < self.equal_rewards:
            return Reward(1.0)
        return Reward(rng.random())


@dataclass
class KeyedTrainer(ScriptedTrainer):
    """Its parameters are a hash of all that it was ever trained on, in order."""

    digest: str = ""

    @property
    def params(self) -> tuple[int, str]:  # type: ignore[override]
        return self.step, self.digest

    async def update(self, batch: Sequence[Any]) -> LossStats:
        await asyncio.sleep(self.update_s(self.step))
        trained = [(x.dtype.str, x.shape, x.tobytes()) for b in batch for x in b if x is not None]
        self.digest = hashlib.sha256(repr((self.digest, trained)).encode()).hexdigest()
        self.step += 1
        return NO_STATS._replace(loss=int(self.digest[:8], 16) / 2**32)

    def save(self) -> Mapping[str, Any]:
        return {"step": self.step, "digest": self.digest}


@dataclass
class KeyedStore:
    publish_s: float = 0.05

    async def publish(self, version: int, params: Any) -> WeightsRef:
        assert params[0] == version
        await asyncio.sleep(self.publish_s)
        return WeightsRef(version, "", params[1])

    async def prune(self, keep: Sequence[int]) -> None: ...

    def latest(self) -> WeightsRef | None:
        return None


@dataclass
class KeyedEvaluator:
    """Its result is a number of the parameters; it must find the engine where it left it."""

    duration_s: float
    engine: ScriptedEngine
    shares_engine: bool

    async def evaluate(self, version: int, params: Any) -> Mapping[str, float]:
        before = self.engine.version
        await asyncio.sleep(self.duration_s)
        if self.shares_engine:
            assert before == version == self.engine.version
        assert params[0] == version
        return {"eval/scripted/accuracy": int((params[1] or "0")[:8], 16) / 2**32}


@dataclass
class Saved:
    step: int
    digest: str
    host: str  # JSON, as on the disk
    held: dict[str, np.ndarray]
    evals: list[tuple[int, Any]]


@dataclass
class Disk:
    """The workdir of a run: committed checkpoints and the metrics file."""

    folder: Path
    committed: list[Saved] = field(default_factory=list)

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    def copy(self, folder: Path) -> "Disk":
        folder.mkdir()
        if self.metrics_file.exists():
            (folder / "metrics.jsonl").write_bytes(self.metrics_file.read_bytes())
        return Disk(folder, list(self.committed))


@dataclass
class DiskCheckpointer:
    """Copies at once, commits later: a process that is killed in between has not saved."""

    disk: Disk
    write_s: float
    history: Callable[[], Any]
    writing: asyncio.Future[None] | None = None

    async def save(self, checkpoint: Checkpoint) -> None:
        if self.writing is not None:
            await self.writing
        await asyncio.sleep(0.02)
        records, arrays = pack_groups(checkpoint.held)
        host = {"run": checkpoint.run, "groups": records, "history": self.history()}
        saved = Saved(
            checkpoint.step,
            checkpoint.trainer["digest"],
            json.dumps(host),
            arrays,
            list(checkpoint.evals),
        )
        loop = asyncio.get_running_loop()
        self.writing = loop.create_future()
        loop.call_later(self.write_s, self._commit, saved)

    def _commit(self, saved: Saved) -> None:
        assert self.writing is not None
        self.disk.committed.append(saved)
        self.writing.set_result(None)


@dataclass
class Process:
    """One start of the same command on the same disk."""

    run: Run
    saver: DiskCheckpointer
    sink: JsonlSink
    before: list[tuple[int, Attempt]]  # trained by processes that this one goes on from

    async def main(self) -> None:
        await self.run.orchestrator.run()
        if self.saver.writing is not None:
            await self.saver.writing
        self.sink.close()

    def trained(self) -> list[tuple[int, Attempt]]:
        now = [(step, member.attempt) for step, member in self.run.attempts.trained]
        return self.before + now


def start(
    disk: Disk, *, story: random.Random, servers: int, pace: int, lead: int, **settings: Any
) -> Process:
    """Builds the parts from what the disk holds. `story` decides the same world at every start."""
    rng = random.Random(0)
    latency, update_s = story.choice([0.2, 1.0, 4.0]), story.choice([0.05, 1.0])
    # One kind a story: of a group in which two kinds happen, the first one is booked.
    engine_failures, env_failures = story.choice([(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)])
    env = KeyedEnv(
        rng,
        size=story.randrange(3, 40),
        equal_rewards=story.choice([0.0, 0.3]),
        failures={ValueError: env_failures},
        turns=story.randrange(1, 3),
    )
    engine = KeyedEngine(
        rng,
        lambda r: latency * r.uniform(0.2, 3),
        servers=servers,
        failure_rate=engine_failures,
        pace=pace,
    )
    saved = disk.committed[-1] if disk.committed else None
    trainer = KeyedTrainer(lambda step: update_s, saved.step if saved else 0)
    trainer.digest = saved.digest if saved else ""
    saver = DiskCheckpointer(disk, story.choice([0.01, 3.0]), list)
    resumed = disk.metrics_file.exists()
    done = {
        line["step"]
        for line in (read_metrics(disk.metrics_file) if resumed else [])
        if any(name.startswith("eval/") for name in line)
    }
    sink = JsonlSink(disk.metrics_file, resume_at=trainer.step if resumed else None)
    evaluator = KeyedEvaluator(story.choice([0.1, 6.0]), engine, shares_engine=story.random() < 0.5)
    run = build(
        env=env,
        lead=lead,
        engine=engine,
        trainer=trainer,
        store=KeyedStore(),
        evaluator=evaluator,
        eval_every=story.choice([1, 3]),
        sink=sink,
        checkpointer=saver,
        evaluated=frozenset(done),
        pending_evals=saved.evals if saved else (),
        **settings,
    )
    before = []
    if saved is not None:
        host = json.loads(saved.host)
        run.attempts.restore(
            saved.step, host["run"], unpack_groups(host["groups"], saved.held, env)
        )
        before = [(s, Attempt(Uid(e, i), n)) for s, e, i, n in host["history"]]
    process = Process(run, saver, sink, before)
    saver.history = lambda: [[s, *a.uid, a.number] for s, a in process.trained()]
    return process
