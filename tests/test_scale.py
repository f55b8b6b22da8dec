"""What one rollout costs the orchestrator and the pool does not depend on how many there are.

Counted in calls of functions, which are the same on every machine, and not in seconds.
"""

import asyncio
import random
import sys
from types import FrameType

import pytest

from experiments.benchmarks import scale
from telescope_jax.inference.member import Member
from telescope_jax.inference.routes import Routes
from telescope_jax.interfaces import EngineError
from telescope_jax.ledger import DropReason
from tests.scripted import build
from tests.virtual_clock import run_virtual


class Calls:
    """Counts the calls of Python and C functions while the block runs."""

    def __enter__(self) -> "Calls":
        self.count = 0
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1


def calls_a_rollout(lead: int, *, bounded: bool) -> float:
    """Of a run of batches of 4 × 2 rollouts, with (lead + 1) times as many admitted."""
    steps = 60 + lead
    run = build(
        steps=steps,
        groups=4,
        lead=lead,
        off_policy=lead if bounded else -1,
        latency_s=lambda rng: rng.uniform(0.5, 1.5) * lead,
        update_s=lambda step: 0.1,
        engine_failures=0.01,
    )
    with Calls() as calls:
        run_virtual(run.orchestrator.run())
    assert run.engine.most_running > 4 * lead
    assert bool(run.attempts.ledger.dropped[DropReason.STALE_IN_FLIGHT]) == bounded
    return calls.count / (steps * 8)


@pytest.mark.parametrize("bounded", [False, True])
def test_a_rollout_costs_the_same_however_many_are_in_flight(bounded: bool):
    few, many = (calls_a_rollout(lead, bounded=bounded) for lead in (4, 256))
    assert many < 1.1 * few


class Nowhere:
    """A source of servers that are never opened."""

    name = "nowhere"

    async def open(self):
        raise AssertionError


def serving_members(count: int) -> list[Member]:
    members = [Member(Nowhere(), start_timeout_s=1) for _ in range(count)]
    for member in members:
        member.version, member.serving = 0, True
    return members


def test_a_request_is_routed_at_the_same_cost_however_many_servers_there_are():
    def calls_a_request(servers: int) -> float:
        routes = Routes(serving_members(servers))
        chosen: list[Member] = []
        with Calls() as calls:
            for index in range(4 * servers):
                if index >= 3 * servers:
                    chosen[index - 3 * servers].in_flight -= 1
                member = routes.least_loaded()
                assert member is not None and routes.oldest_served == 0
                member.in_flight += 1
                chosen.append(member)
        return calls.count / (4 * servers)

    assert calls_a_request(256) < 1.25 * calls_a_request(8)


def test_routes_are_what_a_look_at_every_member_gives():
    rng = random.Random(0)
    members = serving_members(7)
    routes = Routes(members)
    for _ in range(5_000):
        member = rng.choice(members)
        change = rng.randrange(5)
        if change == 0:
            member.serving = not member.serving
        elif change == 1:
            member.swapping = not member.swapping
        elif change == 2:
            member.version += 1
        elif change == 3:
            member.in_flight += 1
        else:
            member.in_flight = max(0, member.in_flight - 1)
        free = [m for m in members if m.takes_requests]
        assert routes.least_loaded() is min(free, key=lambda m: m.in_flight, default=None)
        served = [m.version for m in members if m.serving]
        assert routes.oldest_served == min(served, default=None)


def test_the_benchmark_runs_at_its_smallest_size_and_keeps_its_servers_busy():
    row = scale.measure(1, rollouts=1_500)
    assert row["busy"] > 0.7 and row["deaths"] >= 0
    assert 1 <= row["age"] <= 3 and row["oldest"] <= 8
    assert 50 < row["in_flight"] <= 150
    assert 0 < row["model_us"] < row["us"]


def test_a_modelled_server_that_dies_fails_what_it_was_answering_and_comes_back():
    async def story() -> None:
        usage = scale.Usage()
        [server] = scale.servers_of(1, usage, life_s=0.001)
        pool = scale.pool_of([server])
        await pool.start()
        loading = asyncio.create_task(pool.load(scale.WeightsRef(0, "", "")))
        while not usage.deaths:
            await asyncio.sleep(0.01)
        server.life_s = 0.0
        await loading
        with pytest.raises(EngineError, match="s0 is dead"):
            await pool.sample([4], scale.SamplingParams(max_tokens=4))
        answer = await pool.sample([4], scale.SamplingParams(max_tokens=4))
        assert answer.versions[0].version == 0 and server.alive and usage.deaths == 1
        await pool.close()

    run_virtual(story())
