"""The reward pool keeps its promises whatever a grader does; every test has a deadline."""

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from telescope_jax.envs.judge import LIMIT_TAG, score_in_pool
from telescope_jax.interfaces import RewardError, RewardTimeout
from telescope_jax.scoring.reward_pool import AnswerLimit, RewardPool

F = "tests.scoring.reward_functions"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Every test ends with no scratch folder left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert os.listdir(folder) == []


def run(story, **settings):
    async def main():
        # Not confined: the functions tell the tests what they do through files.
        settings_ = {"workers": 1, "timeout_s": 20.0, "grace_s": 20.0, "confined": False}
        settings_ |= settings
        async with asyncio.timeout(60), RewardPool(**settings_) as pool:
            return await story(pool)

    return asyncio.run(main())


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until(condition):
    while not condition():
        await asyncio.sleep(0.02)


async def pid_in(path):
    await until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_values_come_back_and_calls_run_side_by_side():
    async def story(pool):
        await pool.prewarm()
        values = await asyncio.gather(*(pool.call(f"{F}:add", i, 1) for i in range(20)))
        assert values == list(range(1, 21))
        assert pool.metrics() == {
            "reward/calls": 20,
            "reward/limits": 0,
            "reward/errors": 0,
            "reward/started": 2,
        }

    run(story, workers=2)


@pytest.mark.parametrize("function", ["hang", "spin"])
def test_a_call_that_never_ends_is_killed_on_its_deadline_and_the_worker_goes_on(function):
    async def story(pool):
        await pool.call(f"{F}:add", 1, 1)
        start = time.monotonic()
        with pytest.raises(AnswerLimit, match="deadline"):
            await pool.call(f"{F}:{function}", timeout_s=0.5)
        assert time.monotonic() - start < 10
        assert await pool.call(f"{F}:add", 2, 2) == 4
        assert pool.metrics()["reward/started"] == 1

    run(story)


def test_memory_is_bounded_and_the_next_call_has_it_again():
    """A reward that eats memory reaches its limit; its worker serves the next one."""

    async def story(pool):
        with pytest.raises(AnswerLimit, match="memory"):
            await pool.call(f"{F}:eat_memory")
        assert await pool.call(f"{F}:large", 1 << 20) == "x" * (1 << 20)

    run(story, memory_bytes=128 << 20)


def test_a_grader_that_raises_gives_its_message_and_traceback():
    async def story(pool):
        with pytest.raises(RewardError, match="(?s)KeyError.*lost key.*reward_functions.py") as e:
            await pool.call(f"{F}:fail", "lost key")
        assert not isinstance(e.value, RewardTimeout)
        for function in ("no_such_function", "not_json", "not_finite", "leave"):
            with pytest.raises(RewardError):
                await pool.call(f"{F}:{function}")
        with pytest.raises(RewardError, match="no_such_module"):
            await pool.call("no_such_module:f")
        with pytest.raises(RewardError, match="longer than"):
            await pool.call(f"{F}:large", 5 << 20)
        with pytest.raises(TypeError):
            await pool.call(f"{F}:add", object(), 1)
        assert await pool.call(f"{F}:add", 1, 1) == 2
        assert pool.metrics()["reward/started"] == 1

    run(story)


def test_a_crashed_call_is_a_limit_and_a_dead_worker_an_error_and_both_are_replaced():
    async def story(pool):
        with pytest.raises(AnswerLimit, match="crashed"):
            await pool.call(f"{F}:crash")
        with pytest.raises(RewardError, match="ended"):
            await pool.call(f"{F}:kill_worker")
        assert await pool.call(f"{F}:add", 1, 1) == 2

    run(story)


def test_a_worker_that_does_not_answer_is_a_timeout_and_not_the_answers_fault():
    async def story(pool):
        with pytest.raises(RewardTimeout) as error:
            await pool.call(f"{F}:stop_worker", timeout_s=0.5)
        assert not isinstance(error.value, AnswerLimit)
        assert await pool.call(f"{F}:add", 1, 1) == 2
        assert pool.metrics()["reward/started"] == 2

    run(story, grace_s=3.0)


def test_one_answer_cannot_change_the_verdict_on_the_next():
    """GR-17: a patched grader would forge every later reward."""

    async def story(pool):
        assert [await pool.call(f"{F}:patch") for _ in range(3)] == [False] * 3

    run(story)


@linux
def test_a_call_sees_no_environment_no_descriptor_of_ours_no_jax_and_an_empty_scratch_folder():
    async def story(pool):
        seen = [await pool.call(f"{F}:surroundings") for _ in range(2)]
        for view in seen:
            assert view["environment"] == {}
            assert view["files"] == ["left_behind"]
            assert view["folder"] != os.getcwd()
            assert not os.path.exists(view["folder"])
            assert not {"jax", "numpy"} & set(view["modules"])
            assert not any("socket" in target for target in view["descriptors"])
            assert sum("pipe" in target for target in view["descriptors"]) == 1
        assert seen[0]["folder"] != seen[1]["folder"]

    os.environ["TELESCOPE_TEST_SECRET"] = "1"
    try:
        run(story)
    finally:
        del os.environ["TELESCOPE_TEST_SECRET"]


def test_a_grader_that_prints_cannot_forge_a_reply():
    async def story(pool):
        assert await pool.call(f"{F}:chatter") == "true value"

    run(story)


def test_a_copy_that_a_call_forks_of_itself_does_not_reply():
    async def story(pool):
        for _ in range(5):
            assert await pool.call(f"{F}:fork_and_return") == "the call"

    run(story)


def test_what_calls_share_is_made_once_and_no_call_can_change_it():
    async def story(pool):
        given = (f"{F}:make", 7)
        assert [await pool.call(f"{F}:use", i, given=given) for i in range(3)] == [
            [1007 + i, 1] for i in range(3)
        ]
        assert await pool.call(f"{F}:use", 0, given=(f"{F}:make", 8)) == [1008, 2]

    run(story)


@linux
def test_cancelling_a_call_kills_it_and_gives_the_worker_back(tmp_path):
    async def story(pool):
        call = asyncio.create_task(pool.call(f"{F}:hang", str(tmp_path / "pid")))
        pid = await pid_in(tmp_path / "pid")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await pool.call(f"{F}:add", 1, 1) == 2
        assert not is_alive(pid)
        assert pool.metrics()["reward/started"] == 1

    run(story)


def test_cancelling_while_a_worker_starts_or_while_waiting_for_one_loses_no_place():
    async def story(pool):
        starting = asyncio.create_task(pool.call(f"{F}:add", 1, 1))
        waiting = asyncio.create_task(pool.call(f"{F}:add", 1, 1))
        await asyncio.sleep(0)  # one turn of the loop: no process can be ready after it
        for call in (waiting, starting):
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await pool.call(f"{F}:add", 2, 3) == 5

    run(story)


def test_calls_cancelled_at_any_moment_leave_a_pool_that_works():
    async def story(pool):
        for i in range(40):
            call = asyncio.create_task(pool.call(f"{F}:add", i, 0))
            await asyncio.sleep(0.0005 * i)
            call.cancel()
            (result,) = await asyncio.gather(call, return_exceptions=True)
            assert result == i or isinstance(result, asyncio.CancelledError)
        assert await asyncio.gather(*(pool.call(f"{F}:add", i, 1) for i in range(5))) == [
            1,
            2,
            3,
            4,
            5,
        ]

    run(story, workers=2)


@linux
def test_what_a_call_started_dies_with_it(tmp_path):
    async def story(pool):
        with pytest.raises(AnswerLimit):
            await pool.call(f"{F}:spawn_and_hang", str(tmp_path / "pid"), timeout_s=1.0)
        pid = await pid_in(tmp_path / "pid")
        await until(lambda: not is_alive(pid))

    run(story)


@linux
def test_closing_ends_calls_in_flight_and_leaves_nothing(tmp_path):
    async def story(pool):
        call = asyncio.create_task(pool.call(f"{F}:hang", str(tmp_path / "pid")))
        pid = await pid_in(tmp_path / "pid")
        await pool.close()
        with pytest.raises(RewardError):
            await call
        await until(lambda: not is_alive(pid))
        with pytest.raises(RewardError, match="closed"):
            await pool.call(f"{F}:add", 1, 1)
        await pool.close()

    run(story)


@linux
def test_workers_and_calls_die_with_a_parent_that_is_killed(tmp_path):
    program = f"""
        import asyncio, sys
        from telescope_jax.scoring.reward_pool import RewardPool
        sys.path.insert(0, {os.getcwd()!r})
        async def main():
            pool = RewardPool(workers=1, confined=False)
            await pool.call("{F}:hang", {str(tmp_path / "pid")!r}, timeout_s=300)
        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        pid = asyncio.run(asyncio.wait_for(pid_in(tmp_path / "pid"), 40))
        with open(f"/proc/{pid}/stat") as stat:
            worker = int(stat.read().rpartition(")")[2].split()[1])
    finally:
        parent.kill()
        parent.wait()
    gone = until(lambda: not is_alive(pid) and not is_alive(worker))
    asyncio.run(asyncio.wait_for(gone, 20))


def test_deadlines_hold_in_a_thread_beside_running_threads_of_jax():
    """GR-16: an alarm signal works in the main thread only, and fork breaks what JAX runs."""
    import jax

    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))))

    def in_thread():
        assert threading.current_thread() is not threading.main_thread()

        async def story(pool):
            with pytest.raises(AnswerLimit):
                await pool.call(f"{F}:spin", timeout_s=0.3)
            return await pool.call(f"{F}:add", 20, 1)

        return run(story)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(in_thread).result(timeout=60) == 21


def test_a_worker_that_cannot_start_says_why():
    async def story(pool):
        with pytest.raises(RewardError, match="no_such_module"):
            await pool.call(f"{F}:add", 1, 1)

    run(story, preload=("no_such_module",))


def test_a_limit_hit_twice_is_a_wrong_answer_with_a_tag(tmp_path):
    """Twice, in fresh processes; anything else stays an infrastructure failure."""

    async def story(pool):
        counted = tmp_path / "count"
        reward = await score_in_pool(pool, f"{F}:count_and_hang", str(counted))
        assert (reward.total, reward.tags) == (0.0, (LIMIT_TAG,))
        assert counted.read_text() == "xx"

    run(story, timeout_s=1.5)


def test_a_limit_hit_once_is_no_verdict(tmp_path):
    async def story(pool):
        reward = await score_in_pool(pool, f"{F}:hang_once", str(tmp_path / "seen"))
        assert (reward.total, reward.tags) == (1.0, ())

    run(story, timeout_s=1.5)


def test_a_failure_of_the_grader_is_never_reward_zero():
    async def story(pool):
        with pytest.raises(RewardError):
            await score_in_pool(pool, f"{F}:fail", "x")
        with pytest.raises(RewardError):
            await score_in_pool(pool, f"{F}:kill_worker")

    run(story)


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"timeout_s": 0}, {"memory_bytes": 0}])
def test_settings_that_are_not_positive_are_refused(wrong):
    with pytest.raises(ValueError, match="positive"):
        RewardPool(**wrong)
