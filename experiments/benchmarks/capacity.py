"""How many rollouts the orchestrator can carry.

    python -m experiments.benchmarks.capacity             # a minute, pinned to one core

Runs the real orchestrator, with episodes, advantages, packing and books, against an engine that
answers at once and a trainer that takes no time: rollouts/s, rollouts in flight, and how late the
event loop is. A rollout is one episode of one turn with 14 sampled tokens.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.benchmarks.modelled import (
    DrawnRewards,
    InstantTrainer,
    answer,
    store_without_delay,
)
from telescope_jax.loop_guard import LoopGuard, calm_collector
from telescope_jax.types import Completion, SamplingParams, VersionSpan, WeightsRef
from tests.scripted import ScriptedEngine, build

GROUPS, SIZE, IN_FLIGHT = 64, 8, 10_000


class FloodEngine(ScriptedEngine):
    """Answers the oldest request as soon as more than IN_FLIGHT wait, or when nobody asks more."""

    def open(self) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.pumping = False
        self.answered = 0
        self.most = 0
        self.full_s, self.since = 0.0, 0.0

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        version = self.version
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self.waiting.append(done)
        if not self.pumping:
            self.pumping = True
            loop.call_soon(self._pump, 0)
        await done
        self.answered += 1
        return answer(14, (VersionSpan(version, 0, 14),))

    def _pump(self, before: int) -> None:
        count = len(self.waiting)
        self.most = max(self.most, count)
        # A few at a time, as answers arrive: each one is a turn of its group's tasks.
        answers = min(32, count - IN_FLIGHT) if count > IN_FLIGHT else int(count <= before)
        for _ in range(max(0, answers)):
            done = self.waiting.popleft()
            if not done.done():
                done.set_result(None)
        if self.waiting:
            asyncio.get_running_loop().call_soon(self._pump, len(self.waiting))
        else:
            self.pumping = False

    async def load(self, ref: WeightsRef) -> None:
        self.loads.append(ref.version)
        for server in self.served:
            server.append((0.0, ref.version))


class ComputedLag:
    """How late the loop runs by its own work alone, in the CPU time of its thread.

    LoopGuard's lag counts what other programs take of the core as well. Here every pass of the loop
    is timed: what arrives in a pass that computes for L seconds waits for the rest of it. Nothing
    is left out of a loop that never idles, as under this load.
    """

    def __init__(self) -> None:
        self._passes: list[float] = []

    def start(self) -> None:
        self._before = time.thread_time()
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        now = time.thread_time()
        self._passes.append(now - self._before)
        self._before = now
        self._loop.call_soon(self._tick)

    def p99_and_max(self) -> tuple[float, float]:
        """The lag x for which sum(max(0, L - x)) = 1 % of sum(L), and the longest pass."""
        passes = np.sort(np.array(self._passes))[::-1]
        rest = np.cumsum(passes) - passes * np.arange(1, len(passes) + 1)  # for x = each L
        share = 0.01 * passes.sum()
        k = int(np.searchsorted(rest, share))  # the k longest ones are longer than x
        return float((passes[:k].sum() - share) / k), float(passes[0])


def capacity(steps: int, profile: bool) -> dict[str, float]:
    """What one core carried; with `profile`, prints where the time went."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rng = random.Random(0)
    lead = IN_FLIGHT // (GROUPS * SIZE) + 4
    engine = FloodEngine(rng, lambda r: 0.0)
    engine.open()
    run = build(
        steps=steps,
        groups=GROUPS,
        size=SIZE,
        lead=lead,
        off_policy=-1,
        env=DrawnRewards(rng, size=100_000),
        engine=engine,
        trainer=InstantTrainer(lambda step: 0.0),
        store=store_without_delay(),
    )

    calm_collector()

    computed = ComputedLag()

    async def main() -> Mapping[str, float]:
        async with LoopGuard(end_s=600) as guard:
            computed.start()
            await run.orchestrator.run()
            return guard.metrics()

    if profile:
        import cProfile
        import pstats

        with cProfile.Profile() as profiler:
            lag = asyncio.run(main())
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    started, cpu = time.perf_counter(), time.process_time()
    if not profile:
        lag = asyncio.run(main())
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    rollouts = steps * GROUPS * SIZE
    computed_p99, computed_max = computed.p99_and_max()
    return {
        "rollouts": rollouts,
        "in_flight": engine.most,
        "rollouts_per_s": round(rollouts / seconds),
        "rollouts_per_cpu_s": round(rollouts / max(cpu_s, 1e-9)),
        "loop_lag_p99_ms": round(1e3 * lag["loop/lag_p99"], 1),
        "loop_lag_max_ms": round(1e3 * lag["loop/lag_max"], 1),
        "computed_lag_p99_ms": round(1e3 * computed_p99, 1),
        "computed_lag_max_ms": round(1e3 * computed_max, 1),
        "dropped": run.attempts.ledger.dropped.total(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="also print where the time went")
    asked = parser.parse_args()
    print(json.dumps(capacity(asked.steps, asked.profile)))


if __name__ == "__main__":
    main()
