"""How much of the time async RL saves, of what it could save.

    python -m experiments.benchmarks.async_overlap virtual     # the scheduler alone, minutes
    python -m experiments.benchmarks.async_overlap real        # policy, engine and trainer, 2 cores

`virtual` runs the real orchestrator on a virtual clock against a modelled engine: 8 groups × 8
rollouts, 32 slots, a decode step costs 0.5 + 0.5·n/32 with n slots busy, lengths are lognormal and
cut at 4 × mean. It prints the speed-up over max_async_rollout = 0 and its share of the bound

    (T_gen,sync + T_train) / max(T_gen,saturated, T_train)

where T_gen,sync is one batch generated alone, with its tail, and T_gen,saturated its tokens at full
slots. `real` is described at `real()`.
"""

import argparse
import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from telescope_jax.types import Completion, SamplingParams, StopReason, VersionSpan
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
        # exp(N(−σ²/2, σ²)) has mean 1.
        draw = math.exp(self.rng.gauss(-(self.sigma**2) / 2, self.sigma))
        return max(1, round(MEAN_LENGTH * min(draw, 4.0)))

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        version = self.version
        done = asyncio.get_running_loop().create_future()
        self.waiting.append(([self.length()], done))
        if self.stepper is None or self.stepper.done():
            self.stepper = asyncio.ensure_future(self._step())
        await done
        return Completion(
            np.full(1, 3, np.int32),
            np.zeros(1, np.float32),
            (VersionSpan(version, 0, 1),),
            StopReason.EOS,
        )

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
    run = build(steps=UPDATES, groups=GROUPS, size=SIZE, lead=lead, update_s=lambda step: train_s)
    engine = run.engine
    engine.__class__ = BatchedEngine
    assert isinstance(engine, BatchedEngine)
    engine.start(sigma)
    engine.load_s = 0.0
    run.orchestrator._store.publish_s = 0.0  # type: ignore[attr-defined]
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


def main(argv: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("virtual",))
    parser.parse_args(argv)
    virtual()


if __name__ == "__main__":
    main()
