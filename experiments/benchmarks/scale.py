"""What 1 to 1,000 servers cost the orchestrator, and how busy it keeps them.

    python -m experiments.benchmarks.scale              # every size, ten minutes
    python -m experiments.benchmarks.scale 1 10         # 1 and 10 servers
    python -m experiments.benchmarks.scale 100 --deep   # small batches, a large lead

The real orchestrator and the real pool, on a virtual clock, over modelled servers: each decodes 50
requests at once at 50 tokens/s, lengths are lognormal of mean 1,000 tokens, cut at 8 times that; a
server dies once in half an hour (on average) with all that it was answering and is back 30 s
later; one episode in 1,000 fails. New weights take 2 s to stage and 0.2 to 0.8 s to swap, on all
servers at once; what runs goes on meanwhile. An update takes 0.9 of the time in which the slots
generate a batch.

Three rollouts may be admitted for each slot. That is a lead of 2 with batches of a rollout a slot;
with `--deep` batches stay at 64 groups of 8, so that the lead grows instead, without an age bound.

Columns: most rollouts that servers had at one time; the share of slots decoding; the share of that
which finished; mean and largest age of the trained tokens; CPU time of this thread for one trained
rollout, in microseconds, and of that what the model costs by itself (the same servers asked by
tasks that do nothing else); memory of the process, MB. Times and shares leave out the first third
of the steps and the end, where no further group starts.
"""

import argparse
import asyncio
import bisect
import logging
import random
import resource
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.benchmarks.modelled import (
    DrawnRewards,
    answer,
    heavy_tailed,
    store_without_delay,
)
from telescope_jax.inference.member import Member
from telescope_jax.inference.pool import Pool
from telescope_jax.interfaces import EngineError, EnvError, Sample
from telescope_jax.loop_guard import calm_collector
from telescope_jax.types import Completion, Prompt, Reward, SamplingParams, VersionSpan, WeightsRef
from tests.scripted import Run, build
from tests.virtual_clock import run_virtual

SLOTS, TOKEN_S, MEAN_LENGTH, SIGMA, LONGEST = 50, 0.02, 1_000, 0.5, 8.0
STAGE_S, LIFE_S, REPAIR_S, SIZE = 2.0, 1_800.0, 30.0, 8
TOKENS = 4  # of an answer as the trainer sees it; its length is modelled in time only
SERVERS = (1, 10, 100, 1_000)


@dataclass
class Usage:
    """Slot seconds, and what they brought."""

    busy_s: float = 0.0
    finished_s: float = 0.0
    deaths: int = 0
    running: int = 0
    most_asked: int = 0
    asked: int = 0


@dataclass
class ModelledServer:
    """The client of one server, and the server behind it."""

    name: str
    rng: random.Random
    usage: Usage
    life_s: float = LIFE_S
    url: str = "modelled"
    alive: bool = True
    running: dict[asyncio.Future[None], tuple[float, asyncio.TimerHandle]] = field(
        default_factory=dict
    )
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    loaded_at: list[float] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)

    async def open(self) -> tuple[None, "ModelledServer"]:
        return None, self

    async def healthy(self) -> bool:
        return self.alive

    async def check_version(self) -> None: ...

    async def stage(self, ref: WeightsRef) -> None:
        await asyncio.sleep(STAGE_S)

    async def swap(self, ref: WeightsRef) -> None:
        await asyncio.sleep(self.rng.uniform(0.2, 0.8))
        if not self.alive:
            raise EngineError(f"{self.name} died while it loaded version {ref.version}")
        self.loaded_at.append(asyncio.get_running_loop().time())
        self.loaded.append(ref.version)
        if len(self.loaded) == 1:
            self._fate()

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, salt: str = ""
    ) -> Completion:
        if not self.alive:
            raise EngineError(f"{self.name} is dead")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self.usage.asked += 1
        self.usage.most_asked = max(self.usage.most_asked, self.usage.asked)
        self.waiting.append(done)
        self._begin(loop)
        began = loop.time()
        try:
            await done
        finally:
            self.usage.asked -= 1
            self._end(done, loop)
        return answer(TOKENS, self._versions(began, loop.time()))

    async def close(self) -> None: ...

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        while self.waiting and len(self.running) < SLOTS:
            done = self.waiting.popleft()
            if not done.done():
                length = heavy_tailed(self.rng, mean=MEAN_LENGTH, sigma=SIGMA, most=LONGEST)
                finish = loop.call_later(length * TOKEN_S, _finish, done)
                self.running[done] = (loop.time(), finish)

    def _end(self, done: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        if (ran := self.running.pop(done, None)) is None:
            return
        began, finish = ran
        finish.cancel()
        self.usage.busy_s += loop.time() - began
        if not done.cancelled() and done.exception() is None:
            self.usage.finished_s += loop.time() - began
        self._begin(loop)

    def _versions(self, began: float, ended: float) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        for token in range(TOKENS):
            moment = began + (ended - began) * token / TOKENS
            version = self.loaded[max(0, bisect.bisect(self.loaded_at, moment) - 1)]
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, token + 1)
            else:
                spans.append(VersionSpan(version, token, token + 1))
        return tuple(spans)

    def _fate(self) -> None:
        loop = asyncio.get_running_loop()
        if self.life_s:
            loop.call_later(self.rng.expovariate(1 / self.life_s), self._die, loop)

    def _die(self, loop: asyncio.AbstractEventLoop) -> None:
        self.alive = False
        self.usage.deaths += 1
        for done in [*self.running, *self.waiting]:
            if not done.done():
                done.set_exception(EngineError(f"{self.name} died"))
        self.waiting.clear()
        loop.call_later(REPAIR_S, self._repaired)

    def _repaired(self) -> None:
        self.alive = True
        self._fate()


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class FailingRewards(DrawnRewards):
    """One episode in 1,000 fails."""

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        reward = await super().play(prompt, sample)
        if self.rng.random() < 0.001:
            raise EnvError("modelled failure")
        return reward


class Meter:
    """A sink that keeps what the table needs, and forgets what the scripted parts record."""

    def __init__(self, usage: Usage, first: int, last: int) -> None:
        self.usage, self.first, self.last = usage, first, last
        self.run: Run
        self.ages: list[float] = []
        self.oldest = 0.0
        self.began = self.ended = (0.0, 0.0, 0.0, 0.0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for record in (self.run.attempts.started, self.run.attempts.leads, self.run.events):
            record.clear()
        self.run.attempts.trained.clear()
        if "train/loss" not in values or not self.first <= step <= self.last:
            return
        loop_s = asyncio.get_running_loop().time()
        moment = (time.thread_time(), loop_s, self.usage.busy_s, self.usage.finished_s)
        if step == self.first:
            self.began = moment
        self.ended = moment
        self.ages.append(values["staleness/mean"])
        self.oldest = max(self.oldest, values["staleness/max"])

    def close(self) -> None: ...


def servers_of(count: int, usage: Usage, life_s: float = LIFE_S) -> list[ModelledServer]:
    return [ModelledServer(f"s{i}", random.Random(i), usage, life_s) for i in range(count)]


def pool_of(servers: Sequence[Any]) -> Pool:
    members = [Member(server, start_timeout_s=1e9) for server in servers]
    return Pool(members, max_restarts=10**9, at_once=True)


def measure(servers: int, *, deep: bool = False, rollouts: int = 0) -> dict[str, float]:
    """One size; `rollouts` is about how many are trained, 0 chooses by the size."""
    slots = servers * SLOTS
    groups = 64 if deep else max(1, slots // SIZE)
    batch = groups * SIZE
    lead = max(2, round(3 * slots / batch) - 1)
    rollouts = rollouts or 40_000
    steps = max(4 * (lead + 1), round(rollouts / batch))
    batch_s = batch / slots * MEAN_LENGTH * TOKEN_S
    usage = Usage()
    meter = Meter(usage, steps // 3, steps - lead - 2)
    pool = pool_of(servers_of(servers, usage))
    run = build(
        steps=steps,
        groups=groups,
        size=SIZE,
        lead=lead,
        off_policy=-1 if deep else 8,
        update_s=lambda step: 0.9 * batch_s,
        max_attempts=10**6,
        env=FailingRewards(random.Random(1), size=10**6),
        engine=pool,
        store=store_without_delay(),
        sink=meter,
    )
    meter.run = run

    async def main() -> None:
        await pool.start()
        await run.orchestrator.run()
        await pool.close()

    run_virtual(main())
    cpu_s, loop_s, busy_s, finished_s = (
        b - a for a, b in zip(meter.began, meter.ended, strict=True)
    )
    trained = (meter.last - meter.first) * batch
    dropped = {reason.value: n for reason, n in run.attempts.ledger.dropped.items()}
    return {
        "servers": servers,
        "in_flight": usage.most_asked,
        "lead": lead,
        "batch": batch,
        "busy": busy_s / (slots * loop_s),
        "finished": finished_s / busy_s,
        "age": sum(meter.ages) / len(meter.ages),
        "oldest": meter.oldest,
        "deaths": usage.deaths,
        "us": 1e6 * cpu_s / trained,
        "model_us": model_alone(servers, 4 * slots + 2_000),
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **dropped,
    }


def model_alone(servers: int, rollouts: int) -> float:
    """Microseconds a rollout that the servers cost when tasks ask them directly."""
    usage = Usage()
    clients = servers_of(servers, usage, life_s=0.0)
    asked = iter(range(rollouts))

    async def ask(client: ModelledServer) -> None:
        for _ in asked:
            await client.generate([4, 5], SamplingParams(max_tokens=4))

    async def main() -> float:
        for client in clients:
            await client.swap(WeightsRef(0, "", ""))
        before = time.thread_time()
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                for _ in range(SLOTS):
                    tasks.create_task(ask(client))
        return time.thread_time() - before

    return 1e6 * run_virtual(main())[0] / rollouts


HEAD = ("servers", "in_flight", "lead", "batch", "busy", "finished", "age", "oldest", "deaths")
HEAD += ("us", "model_us", "mb")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="*", type=int, default=list(SERVERS))
    parser.add_argument("--deep", action="store_true", help="64 groups a batch, a large lead")
    parser.add_argument("--rollouts", type=int, default=0, help="trained ones; 0 by the size")
    asked = parser.parse_args(argv)
    logging.getLogger("telescope_jax").setLevel(logging.ERROR)  # deaths are many here
    calm_collector()
    print("| " + " | ".join([*HEAD, "dropped groups"]) + " |\n" + "|---" * (len(HEAD) + 1) + "|")
    for servers in asked.servers:
        row = measure(servers, deep=asked.deep, rollouts=asked.rollouts)
        cells = [f"{row.pop(name):.4g}" for name in HEAD]
        cells.append(", ".join(f"{n} {reason}" for reason, n in row.items()) or "none")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
