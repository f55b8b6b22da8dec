"""Every fault has an outcome: a reason in the ledger, or one clear error. None hangs.

Deadlines: the virtual clock raises when nothing can happen any more, and every test has the one of
tests/conftest.py.
"""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from telescope_jax.envs.judge import LIMIT_TAG, score_in_pool
from telescope_jax.inference.questions import Questions
from telescope_jax.inference.wire import pack_completion
from telescope_jax.interfaces import EngineError, RewardError, RewardTimeout
from telescope_jax.ledger import DropReason, Place
from telescope_jax.loop_guard import LoopGuard
from telescope_jax.metrics import read as read_metrics
from telescope_jax.scoring.reward_pool import RewardPool
from telescope_jax.types import Completion, StopReason, VersionSpan
from telescope_jax.watchdog import WatchdogError
from tests.faults.starter import Starter, starter
from tests.faults.test_checkpoints import fill, small_disk  # noqa: F401 (a fixture)
from tests.scripted import Run, ScriptedEnv, build
from tests.virtual_clock import run_virtual

pytestmark = pytest.mark.deadline(900)  # whole runs, on machines that may be busy

STEPS, GROUPS = 6, 3


def finished(run: Run) -> Counter[DropReason]:
    """Runs to the end; what was dropped, by reason."""
    run_virtual(run.orchestrator.run())
    ledger = run.attempts.ledger
    ledger.check()
    assert ledger.trained == STEPS * GROUPS
    assert ledger.count(Place.HELD) == ledger.count(Place.IN_FLIGHT) == 0
    return ledger.dropped


class Faulty(ScriptedEnv):
    """Raises `error` after the first completion, `times` times."""

    error: Exception = ValueError("boom")
    times = 3

    async def play(self, prompt: Any, sample: Any) -> Any:
        await sample()
        if self.times:
            self.times -= 1
            raise self.error
        return await super().play(prompt, sample)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("boom-17"), DropReason.ENV_ERROR),
        (RewardError("no grader"), DropReason.REWARD_ERROR),
        (RewardTimeout("no answer"), DropReason.REWARD_TIMEOUT),
        (EngineError("lost in the middle"), DropReason.ENGINE_ERROR),
        (asyncio.CancelledError(), DropReason.ENV_ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_an_episode_raises_is_a_reason_in_the_ledger(error: Any, reason: DropReason) -> None:
    env = Faulty(random.Random(0))
    env.error = error
    dropped = finished(build(env=env))
    assert dropped[reason] == dropped.total() > 0


def test_an_engine_that_fails_in_the_middle_of_decoding_loses_attempts_and_no_prompt() -> None:
    dropped = finished(build(engine_failures=0.1, max_attempts=100))
    assert dropped[DropReason.ENGINE_ERROR] == dropped.total() > 0


def test_a_reply_that_is_lost_is_an_engine_error_after_its_timeout() -> None:
    run, lost = build(), iter([True] * 3)
    answer = run.engine.sample

    async def lose(tokens: Any, sampling: Any) -> Any:
        if next(lost, False):
            await asyncio.Event().wait()
        return await answer(tokens, sampling)

    run.engine.sample = lose  # type: ignore[method-assign]
    dropped = finished(run)
    assert 0 < dropped[DropReason.ENGINE_ERROR] <= 3
    details = [d["detail"] for name, d in run.events if name == "drop"]
    assert all("no completion in" in detail for detail in details)


def test_a_reply_that_comes_twice_counts_once() -> None:
    async def main() -> None:
        questions = Questions()
        answer = questions.pending[7] = asyncio.get_running_loop().create_future()
        spans = (VersionSpan(0, 0, 2),)
        import numpy as np

        completion = Completion(
            np.array([3, 4], np.int32), np.zeros(2, np.float32), spans, StopReason.EOS
        )
        message = ["answer", 7, pack_completion(completion)]
        questions.hear(message)
        questions.hear(message)
        questions.hear(["refused", 7, "EngineError", "too late"])
        assert (await answer).tokens.tolist() == [3, 4]

    asyncio.run(main())


def test_a_group_that_finishes_after_it_was_dropped_is_discarded() -> None:
    run = build()
    finish, twice = run.attempts.finish, []

    def again(attempt: Any, group: Any) -> None:
        finish(attempt, group)
        finish(attempt, group)
        twice.append(attempt)

    run.attempts.finish = again  # type: ignore[method-assign]
    assert not finished(run)
    assert len(twice) >= STEPS * GROUPS


def test_a_server_that_is_twenty_times_slower_costs_time_and_nothing_else() -> None:
    def latency(rng: random.Random) -> float:
        return 20.0 if rng.random() < 1 / 3 else 1.0

    run = build(latency_s=latency, servers=3)
    _, took = run_virtual(run.orchestrator.run())
    assert run.attempts.ledger.trained == STEPS * GROUPS
    assert not run.attempts.ledger.dropped
    assert took < STEPS * 25


def test_an_environment_that_never_ends_is_named_by_the_watchdog() -> None:
    class Hung(ScriptedEnv):
        async def play(self, prompt: Any, sample: Any) -> Any:
            await sample()
            await asyncio.Event().wait()

    run = build(env=Hung(random.Random(0)), watchdog_s=60)
    with pytest.raises(WatchdogError, match="9 groups in flight, the oldest"):
        run_virtual(run.orchestrator.run())


@pytest.mark.parametrize("part", ["update of step", "publish of version", "load of version"])
def test_a_part_that_hangs_is_named_by_the_watchdog(part: str) -> None:
    run = build(watchdog_s=60, steps=8)

    async def until_the_second(original: Any, *args: Any) -> Any:
        if run.trainer.step < 2:
            return await original(*args)
        await asyncio.Event().wait()

    target, name = {
        "update of step": (run.trainer, "update"),
        "publish of version": (run.orchestrator._store, "publish"),
        "load of version": (run.engine, "load"),
    }[part]
    original = getattr(target, name)
    setattr(target, name, lambda *args: until_the_second(original, *args))
    with pytest.raises(WatchdogError, match=part):
        run_virtual(run.orchestrator.run())


def test_the_last_update_may_not_hang_for_ever_either() -> None:
    """When no further group is needed, steps and evals are what moves."""
    run = build(watchdog_s=60, steps=2, update_s=lambda step: 1e9 if step == 1 else 1.0)
    with pytest.raises(WatchdogError, match="trainer: update of step 1 for"):
        run_virtual(run.orchestrator.run())


def test_compilation_is_not_a_stall_and_a_slow_last_eval_is_none() -> None:
    """The first update takes ten periods, and an eval has a deadline of its own."""
    settings: dict[str, Any] = {"watchdog_s": 10, "eval_s": 500.0, "eval_every": 100}
    run = build(update_s=lambda step: 100.0 if step == 0 else 1.0, first_watchdog_s=60, **settings)
    finished(run)
    run = build(update_s=lambda step: 100.0 if step == 0 else 1.0, **settings)
    with pytest.raises(WatchdogError, match="trainer: update of step 0"):
        run_virtual(run.orchestrator.run())


F = "tests.scoring.reward_functions"


@pytest.mark.parametrize("function", ["hang", "spin", "eat_memory", "crash"])
def test_an_answer_that_hangs_or_eats_its_grader_twice_is_a_wrong_answer(function: str) -> None:
    async def main() -> Any:
        async with RewardPool(workers=1, timeout_s=1.0, memory_bytes=128 << 20) as pool:
            reward = await score_in_pool(pool, f"{F}:{function}")
            return reward, await pool.call(f"{F}:add", 1, 1)

    reward, after = asyncio.run(main())
    assert (reward.total, reward.tags, after) == (0.0, (LIMIT_TAG,), 2)


def test_a_loop_that_is_blocked_for_good_is_ended_with_the_line_that_blocks_it() -> None:
    words: list[str] = []
    freed = asyncio.Event()

    async def main() -> None:
        import time

        async with LoopGuard(alarm_s=0.5, end_s=1.0, end=words.append) as guard:
            while not words:  # the fault
                time.sleep(0.05)
            await asyncio.sleep(0)
            assert guard.metrics()["loop/alarms"] == 1
            freed.set()

    asyncio.run(main())
    assert freed.is_set()
    assert "test_liveness.py" in words[0] and "time.sleep(0.05)" in words[0]


@pytest.fixture(scope="module")
def starting() -> Any:
    with starter() as found:
        yield found


SHORT = ("--config.number_of_steps=3", "--config.eval_every=0", "--config.eval.at_start=False")


def test_an_environment_that_blocks_the_loop_is_named_and_counted(
    starting: Starter, tmp_path: Path
) -> None:
    flags = (*SHORT, "--config.env.name=tests.faults.worlds:Naps")
    run = starting.run(tmp_path / "run", *flags)
    assert run.wait() == 0, run.text()
    assert "the event loop is blocked" in run.text() and "worlds.py" in run.text()
    lines = read_metrics(tmp_path / "run" / "metrics" / "metrics.jsonl")
    assert max(line.get("loop/alarms", 0) for line in lines) >= 1
    assert max(line.get("loop/lag_max", 0) for line in lines) > 2


def test_one_that_never_gives_the_loop_back_ends_the_run_with_its_line(
    starting: Starter, tmp_path: Path
) -> None:
    flags = (*SHORT, "--config.env.name=tests.faults.worlds:Blocks", "--config.watchdog_s=1")
    run = starting.run(tmp_path / "run", *flags)
    assert run.wait() == 1
    assert "the event loop was blocked for 3 s" in run.text() and "worlds.py" in run.text()


def test_wall_time_that_jumps_by_days_changes_nothing(starting: Starter, tmp_path: Path) -> None:
    run = starting.run(tmp_path / "run", *SHORT, before="tests.faults.slow:jumping_clock")
    assert run.wait() == 0, run.text()
    lines = read_metrics(tmp_path / "run" / "metrics" / "metrics.jsonl")
    trained = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in trained] == [0, 1, 2]
    assert all(0 <= line["time/step"] < 600 for line in trained)


def test_a_run_on_a_full_disk_ends_with_one_line_and_goes_on_when_there_is_room(
    starting: Starter,
    tmp_path: Path,
    small_disk: Path,  # noqa: F811
) -> None:
    """Metrics, events and the log lose lines; what was saved before stays whole."""
    flags = ("--config.number_of_steps=40", "--config.checkpoint.every=2", "--config.eval_every=0")
    flags += ("--config.checkpoint.keep_last=1",)
    workdir = small_disk / "run"
    run = starting.run(workdir, *flags, output=tmp_path / "output")
    assert run.until(lambda: any((workdir / "checkpoints").glob("step_*[0-9]"))), run.text()
    fill(small_disk)
    assert run.wait() == 1
    assert "SaveFailed: a checkpoint could not be written" in run.text()
    assert "the newest whole one is of step" in run.text() and "make room" in run.text()
    (small_disk / "filler").unlink()
    run = starting.run(workdir, *flags, output=tmp_path / "output")
    assert run.wait() == 0, run.text()
    trained = [x for x in read_metrics(workdir / "metrics" / "metrics.jsonl") if "train/loss" in x]
    assert trained[-1]["step"] == 39
    assert len({line["step"] for line in trained}) == len(trained), "a step is there twice"
