"""The pool over scripted servers: routing, deploys, deaths and returns."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from telescope_jax.inference.handshake import Handshake, HandshakeError
from telescope_jax.inference.member import AttachedSource, LocalSource, Member
from telescope_jax.inference.pool import Pool
from telescope_jax.inference.vllm_server import ServerShape, WeightsRefused
from telescope_jax.interfaces import EngineError, EngineLost
from telescope_jax.metrics import METRICS
from telescope_jax.types import SamplingParams, WeightsRef
from tests.inference.stub_vllm import VOCAB, Script, log_probs, serving
from tests.inference.test_vllm_server import stub_command

SHAPE = ServerShape("model", 64, "float32", (1,), 16, 8)


def ref(version: int) -> WeightsRef:
    return WeightsRef(version, f"/weights/{version:08d}", f"f{version}")


def asking(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, **changes})


class Formula:
    """The trainer's half of the handshake, for the stub's model."""

    def logprobs(self, ref: WeightsRef, rows, temperature: float):
        return [log_probs(ref.version, prompt, tokens, temperature) for prompt, tokens in rows]


HANDSHAKE = Handshake(Formula(), vocab_size=VOCAB, context=64, tolerance=0.01)


def with_stubs(scripts: list[Script], use: Callable[[Pool], Coroutine], **arguments):
    """The result of `use(pool)` on servers in this process."""

    async def run():
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving(script)) for script in scripts]
            members = [
                Member(
                    AttachedSource(
                        url, "secret", eos_ids=(1,), context=64, vocab_size=16, timeout_s=20
                    ),
                    start_timeout_s=10,
                )
                for url in urls
            ]
            pool = Pool(members, **arguments)
            await pool.start()
            stack.push_async_callback(pool.close)
            return await use(pool)

    return asyncio.run(run())


def test_no_request_is_served_before_the_first_version():
    async def use(pool: Pool) -> None:
        assert pool.version == -1
        waiting = asyncio.create_task(pool.sample([2], asking()))
        await asyncio.sleep(0.05)
        assert not waiting.done() and pool.metrics()["waiting"] == 1
        await pool.load(ref(0))
        assert (await waiting).versions[0].version == 0

    with_stubs([Script()], use)


def test_requests_go_to_the_least_loaded_and_a_group_stays_together():
    scripts = [Script(name=f"s{i}", answer_s=0.3) for i in range(2)]

    async def use(pool: Pool) -> None:
        await pool.load(ref(0))
        groups = [f"g{i // 3}" for i in range(12)]
        await asyncio.gather(
            *(pool.sample([2 + i // 3], asking(group=g)) for i, g in enumerate(groups))
        )
        assert pool._groups == {}

    with_stubs(scripts, use)
    prompts = [[body["token_ids"][0] for body in script.bodies] for script in scripts]
    assert sorted(len(p) for p in prompts) == [6, 6]
    assert set(prompts[0]).isdisjoint(prompts[1])


@pytest.mark.parametrize("at_once", [False, True])
def test_a_deploy_reaches_every_server_and_the_version_is_the_lowest(at_once: bool):
    scripts = [Script(name=f"s{i}") for i in range(3)]

    async def use(pool: Pool) -> None:
        await pool.load(ref(0))
        await pool.load(ref(5))
        assert pool.version == 5
        pool.members[1].version = 4
        assert pool.version == 4

    with_stubs(scripts, use, at_once=at_once)
    assert [script.version for script in scripts] == [5, 5, 5]


def test_a_request_during_a_swap_waits_for_the_new_version():
    script = Script()

    async def use(pool: Pool):
        await pool.load(ref(0))
        pool.members[0].swapping = True
        waiting = asyncio.create_task(pool.sample([2], asking()))
        await asyncio.sleep(0.05)
        assert script.bodies == []
        pool.members[0].swapping = False
        await pool.load(ref(1))
        return await waiting

    completion = with_stubs([script], use)
    assert script.bodies[-1]["cache_salt"] == "1"
    assert completion.versions[0].version == 1


def test_a_damaged_version_is_refused_and_the_old_one_goes_on():
    script = Script()

    async def use(pool: Pool):
        await pool.load(ref(0))
        script.stage_error = "WeightsError: version 1 is damaged: 1 of 9 tensors differ"
        with pytest.raises(WeightsRefused, match="damaged"):
            await pool.load(ref(1))
        return await pool.sample([2], asking())

    assert with_stubs([script], use).versions[0].version == 0


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("raw", "returns raw log-probs, which ignore the temperature"),
        ("shifted", "shifted by one: entry t describes the token after t"),
        ("stale", "serves the weights of version 6: stale weights"),
        ("noisy", "another dtype or precision"),
        ("other", "another model, or weights in a wrong layout"),
    ],
)
def test_the_handshake_stops_and_says_what_is_wrong(way: str, words: str):  # VL-01, VL-10
    script = Script()

    async def use(pool: Pool) -> None:
        await pool.load(ref(6))
        assert pool.metrics()["handshake_error"] < 1e-5
        script.logprobs = way
        with pytest.raises(HandshakeError, match=words) as raised:
            await pool.load(ref(7))
        assert "stub" not in words and "handshake_tol=0.01" in str(raised.value)

    with_stubs([script], use, handshake=HANDSHAKE)


def test_noise_below_the_tolerance_passes():  # VL-10
    async def use(pool: Pool) -> float:
        await pool.load(ref(7))
        return pool.metrics()["handshake_error"]

    loose = Handshake(Formula(), vocab_size=VOCAB, context=64, tolerance=0.3)
    error = with_stubs([Script(logprobs="noisy")], use, handshake=loose)
    assert 0.03 < error < 0.3


def test_every_metric_of_a_pool_is_listed():
    async def use(pool: Pool) -> set[str]:
        await pool.load(ref(7))
        await pool.sample([2], asking())
        return {f"engine/{name}" for name in pool.metrics()}

    names = with_stubs([Script()], use, handshake=HANDSHAKE)
    assert "engine/handshake_error" in names and names <= METRICS.keys()


def test_a_probe_shares_no_prefix_with_the_rollouts():
    script = Script()

    async def use(pool: Pool) -> None:
        await pool.load(ref(7))
        await pool.sample([2], asking())

    with_stubs([script], use, handshake=HANDSHAKE)
    *probes, rollout = [body["cache_salt"] for body in script.bodies]
    assert set(probes) == {"handshake-7"} and rollout == "7"


# Servers as processes


def with_processes(workdir: Path, count: int, use, *script: str, **arguments):
    async def run():
        members = [
            Member(
                LocalSource(
                    f"run-{i}",
                    SHAPE,
                    workdir=workdir,
                    timeout_s=20,
                    command=stub_command(*script),
                ),
                start_timeout_s=60,
            )
            for i in range(count)
        ]
        pool = Pool(members, handshake=HANDSHAKE, **arguments)
        await pool.start()
        try:
            return await use(pool)
        finally:
            await pool.close()
            for member in members:
                assert member.process is not None and member.process.members() == []

    return asyncio.run(run())


def kill(member: Member) -> int:
    assert member.process is not None
    pid = member.process.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_killed_server_comes_back_with_the_newest_version_while_others_serve(tmp_path: Path):
    async def use(pool: Pool) -> None:
        await pool.load(ref(0))
        doomed, other = pool.members
        asked = [asyncio.create_task(pool.sample([2], asking(seed=i))) for i in range(6)]
        while not doomed.in_flight or not other.in_flight:
            await asyncio.sleep(0.005)
        dead = kill(doomed)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        assert 1 <= len(errors) < 6
        assert all(isinstance(error, EngineError) for error in errors)
        await pool.load(ref(3))  # the dead one does not hold it up
        assert pool.version == 3
        assert (await pool.sample([2], asking())).versions[0].version == 3
        while not doomed.serving:
            await asyncio.sleep(0.02)
        assert doomed.version == 3 and doomed.restarts == 1
        assert doomed.process is not None and doomed.process.pid != dead
        assert pool.metrics()["restarts"] == 1

    with_processes(tmp_path, 2, use, "answer_s=1.0")


def test_a_server_that_dies_of_a_load_is_replaced_and_loads_it_again(tmp_path: Path):
    flag = tmp_path / "died-once"

    async def use(pool: Pool) -> None:
        member = pool.members[0]
        await pool.load(ref(0))
        swap = member.client.swap

        async def dying(ref: WeightsRef) -> None:
            if not flag.exists():
                flag.touch()
                kill(member)
            await swap(ref)

        member.client.swap = dying  # type: ignore[method-assign]
        await pool.load(ref(1))
        assert flag.exists() and pool.version == 1 and member.restarts == 1
        assert (await pool.sample([2], asking())).versions[0].version == 1

    with_processes(tmp_path, 1, use)


def test_a_server_that_dies_while_its_log_probs_are_compared_is_replaced(tmp_path: Path):
    """After a swap the handshake runs beside serving: its broken connection ended a whole run."""
    killed: list[int] = []

    async def use(pool: Pool) -> None:
        member = pool.members[0]
        await pool.load(ref(0))
        sample = member.sample

        async def dying(tokens, sampling, *, salt: str = ""):
            if salt == "handshake-" and member.version == 1 and not killed:
                killed.append(kill(member))
            return await sample(tokens, sampling, salt=salt)

        member.sample = dying  # type: ignore[method-assign]
        await pool.load(ref(1))
        assert killed and pool.version == 1 and member.restarts == 1
        assert (await pool.sample([2], asking())).versions[0].version == 1

    with_processes(tmp_path, 1, use)


def test_a_server_whose_engine_is_dead_is_replaced_too(tmp_path: Path):
    async def use(pool: Pool) -> None:
        member = pool.members[0]
        await pool.load(ref(0))
        dead = member.process
        # The next update answers 500 and /health 503 from then on; the process lives.
        with pytest.raises(EngineLost, match="more often than engine.max_restarts=1"):
            await pool.load(ref(1))
        assert dead is not None and dead.members() == []
        assert member.process is not dead

    with_processes(tmp_path, 1, use, "dead_from=1", max_restarts=1)


def test_a_dead_engine_does_not_draw_every_request():
    """Idle, it would always be the least loaded one."""
    scripts = [Script(name="dead"), Script(name="well")]

    async def use(pool: Pool) -> None:
        await pool.load(ref(0))
        scripts[0].dead, scripts[0].failures = True, [500] * 1000
        answers = await asyncio.gather(
            *(pool.sample([2], asking(seed=i)) for i in range(2)), return_exceptions=True
        )
        assert sum(isinstance(answer, EngineError) for answer in answers) == 1
        for i in range(6):
            await pool.sample([2], asking(seed=i))

    with_stubs(scripts, use)


def test_a_server_that_never_comes_back_ends_the_run_with_its_last_words(tmp_path: Path):
    async def use(pool: Pool) -> None:
        await pool.load(ref(0))
        source = pool.members[0]._source
        source._command = stub_command("exit=4")  # type: ignore[attr-defined]
        waiting = asyncio.create_task(pool.sample([2], asking()))
        await asyncio.sleep(0.1)
        kill(pool.members[0])
        with pytest.raises(EngineError):
            await waiting
        with pytest.raises(EngineLost) as raised:
            await pool.sample([2], asking())
        assert "max_restarts=2" in str(raised.value)
        assert "exited with code 4" in str(raised.value)
        assert "the last word of a server" in str(raised.value)

    with_processes(tmp_path, 1, use, "answer_s=5.0", max_restarts=2)


def test_several_servers_started_at_once_all_come_up(tmp_path: Path):  # OR-31 (c)
    async def use(pool: Pool) -> None:
        assert len({member.client.url for member in pool.members}) == 3

    with_processes(tmp_path, 3, use)
