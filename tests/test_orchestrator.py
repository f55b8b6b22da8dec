"""The async contract, on a virtual clock with scripted parts."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_jax.attempts import NoSignalError
from telescope_jax.interfaces import Checkpoint, EngineLost
from telescope_jax.ledger import DropReason, Place
from telescope_jax.watchdog import WatchdogError
from tests.scripted import FAILURES, Run, ScriptedEnv, build
from tests.virtual_clock import Deadlock, run_virtual


def check_invariants(run: Run, *, steps: int, groups: int, lead: int, off_policy: int) -> None:
    ledger, attempts = run.attempts.ledger, run.attempts
    ledger.check()
    assert run.orchestrator.trainer_step == steps
    assert len(attempts.trained) == steps * groups
    assert ledger.trained == steps * groups
    assert ledger.count(Place.IN_FLIGHT) == ledger.count(Place.HELD) == 0, "open groups at the end"
    assert not run.engine.running, "a request outlived its run"
    for step, member in attempts.trained:
        oldest = member.group.oldest_version
        assert oldest <= step
        assert off_policy < 0 or step - oldest <= off_policy, "too old a token was trained"
        assert lead > 0 or oldest == step, "synchronous means on-policy"
        assert all(len(rollout.tokens) for rollout in member.group.rollouts)
    assert max(attempts.leads) <= lead, "a group started while inference was too far ahead"
    uids = [member.attempt.uid for _, member in attempts.trained]
    assert len(uids) == len(set(uids)), "a prompt was trained twice"
    # Every draw up to the cursor was started, in order, and a retry follows its failure.
    assert len(attempts.started) == len(set(attempts.started))
    first_tries = [attempt.uid for attempt in attempts.started if attempt.number == 0]
    cursor = run.orchestrator._prompts.state()["cursor"]
    assert first_tries == [run.orchestrator._prompts.uid(draw) for draw in range(cursor)]
    retired = {
        tuple(details["uid"])
        for name, details in run.events
        if name == "drop" and details["reason"] in ("zero_advantage", "gave_up", "prompt_too_long")
    }
    assert set(first_tries) == set(uids) | {tuple(uid) for uid in retired}, "a prompt was lost"


@settings(max_examples=300)
@given(data=st.data())
def test_no_schedule_breaks_the_contract(data: st.DataObject) -> None:
    draw = data.draw
    lead, off_policy = draw(st.integers(0, 4)), draw(st.integers(-1, 8))
    steps, groups = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    slow = draw(st.sampled_from([0.0, 0.05, 0.3]))
    seed = draw(st.integers(0, 10**6))
    update_s = draw(st.sampled_from([0.01, 0.5, 5.0]))
    rng = random.Random(seed)
    env = ScriptedEnv(
        rng,
        size=draw(st.integers(1, 30)),
        equal_rewards=draw(st.sampled_from([0.0, 0.2])),
        failures={kind: draw(st.sampled_from([0.0, 0.05])) for kind in FAILURES},
        turns=draw(st.integers(1, 3)),
    )
    run = build(
        seed=seed,
        steps=steps,
        groups=groups,
        size=draw(st.integers(2, 3)),
        lead=lead,
        off_policy=off_policy,
        latency_s=lambda r: r.uniform(10, 60) if r.random() < slow else r.uniform(0.1, 2),
        update_s=lambda step: update_s * (0.5 + rng.random()),
        servers=draw(st.integers(1, 3)),
        engine_failures=draw(st.sampled_from([0.0, 0.03])),
        eval_every=draw(st.integers(0, 3)),
        eval_s=draw(st.sampled_from([None, 0.1, 40.0])),
        shares_engine=draw(st.booleans()),
        env=env,
    )
    run_virtual(run.orchestrator.run())
    check_invariants(run, steps=steps, groups=groups, lead=lead, off_policy=off_policy)


def test_age_bound_of_zero_drops_instead_of_training_old_tokens() -> None:
    run = build(steps=10, lead=3, off_policy=0, latency_s=lambda rng: rng.uniform(0.1, 9))
    run_virtual(run.orchestrator.run())
    check_invariants(run, steps=10, groups=3, lead=3, off_policy=0)


def test_a_straggler_that_is_too_old_is_cancelled_at_the_engine_and_tried_again_first() -> None:
    slow = iter([500.0])
    run = build(
        steps=12,
        lead=4,
        off_policy=2,
        latency_s=lambda rng: next(slow, 1.0),
        update_s=lambda k: 2.0,
    )
    run_virtual(run.orchestrator.run())
    assert run.engine.cancelled > 0
    drops = [d for name, d in run.events if name == "drop"]
    assert [d["reason"] for d in drops] == ["stale_in_flight"]
    retried = [a for a in run.attempts.started if a.number == 1]
    assert [list(a.uid) for a in retried] == [drops[0]["uid"]]


def test_an_attempt_that_fails_too_often_is_given_up_and_another_prompt_takes_its_place() -> None:
    run = build(steps=2, groups=2, engine_failures=1.0, max_attempts=2, max_untrainable=9)
    with pytest.raises(NoSignalError, match="9 groups in a row ended untrainable"):
        run_virtual(run.orchestrator.run())
    dropped = run.attempts.ledger.dropped
    assert dropped[DropReason.ENGINE_ERROR] - dropped[DropReason.GAVE_UP] in (0, 1)


def test_constant_rewards_end_the_run_with_the_reason() -> None:
    """OR-13."""
    env = ScriptedEnv(random.Random(0), equal_rewards=1.0)
    run = build(env=env, max_untrainable=50)
    with pytest.raises(NoSignalError, match="zero_advantage, every reward is 1"):
        run_virtual(run.orchestrator.run())


def test_one_raising_environment_is_an_env_error_with_its_traceback_and_no_reward() -> None:
    """OR-07, OR-10, OR-12: the other groups survive and nothing poses as a reward of 0."""

    class Boom(ScriptedEnv):
        bombs = 1

        async def play(self, prompt: Any, sample: Any) -> Any:
            await sample()
            if self.bombs:
                self.bombs -= 1
                raise ValueError("boom-17")
            return await super().play(prompt, sample)

    run = build(env=Boom(random.Random(0)))
    run_virtual(run.orchestrator.run())
    (drop,) = [details for name, details in run.events if name == "drop"]
    assert drop["reason"] == "env_error" and "boom-17" in drop["detail"]
    assert "Traceback" in drop["detail"]
    check_invariants(run, steps=6, groups=3, lead=2, off_policy=8)


def test_pause_and_resume_alternate_and_pause_is_never_early() -> None:
    run = build(steps=8, lead=1, update_s=lambda step: 20.0)
    run_virtual(run.orchestrator.run())
    moves = [(name, d) for name, d in run.events if name in ("pause", "resume")]
    assert [name for name, _ in moves] == [("pause", "resume")[i % 2] for i in range(len(moves))]
    assert len(moves) > 4
    for name, details in moves:
        limit = min(details["served_version"] + 2, 8) * 3
        assert (details["admitted"] >= limit) is (name == "pause")


def test_inference_overlaps_training_and_zero_does_not() -> None:
    """Virtual time: 10 batches of 4 s each side, in turn or side by side."""
    times = {}
    for lead in (0, 1):
        run = build(steps=10, lead=lead, latency_s=lambda rng: 4.0, update_s=lambda step: 4.0)
        _, times[lead] = run_virtual(run.orchestrator.run())
    assert times[0] == pytest.approx(10 * (4 + 4 + 0.15), rel=0.02)
    assert times[1] < 0.6 * times[0]


def test_evals_finish_after_the_last_step_and_training_does_not_wait_for_them() -> None:
    """OR-02."""
    run = build(steps=4, eval_every=2, eval_s=7.0)
    run_virtual(run.orchestrator.run())
    assert run.evaluator is not None
    assert [version for version, _, _ in run.evaluator.seen] == [0, 2, 4]
    logged = [step for step, values in run.sink.rows if "eval/scripted/accuracy" in values]
    assert logged == [0, 2, 4]


def test_an_eval_on_the_training_engine_holds_its_version_and_the_deploy_then_jumps() -> None:
    """OR-01, OR-04: several steps pass in one eval; the next deploy loads the newest version."""
    run = build(
        steps=9, lead=4, eval_every=4, eval_s=30.0, shares_engine=True, update_s=lambda step: 0.5
    )
    run_virtual(run.orchestrator.run())
    assert run.evaluator is not None
    assert [seen[0] for seen in run.evaluator.seen] == [0, 4, 8, 9]
    assert all(version == before == after for version, before, after in run.evaluator.seen)
    skipped = set(range(10)) - set(run.engine.loads)
    assert skipped, "a deploy that waited should skip versions"
    check_invariants(run, steps=9, groups=3, lead=4, off_policy=8)


def test_a_lost_engine_ends_the_run_with_its_own_error() -> None:
    run = build()

    async def lost(tokens: Any, sampling: Any) -> Any:
        await asyncio.sleep(1)
        raise EngineLost("server 0 exited with code 3: out of memory")

    run.engine.sample = lost  # type: ignore[method-assign]
    with pytest.raises(EngineLost, match="out of memory"):
        run_virtual(run.orchestrator.run())


@pytest.mark.parametrize("part", ["publish", "update", "evaluate"])
def test_whatever_fails_ends_the_run_with_its_own_error(part: str) -> None:
    run = build(eval_s=0.5)

    async def fail(*args: Any) -> Any:
        await asyncio.sleep(0.5)
        raise OSError(f"disk full in {part}")

    target = {
        "publish": run.orchestrator._store,
        "update": run.trainer,
        "evaluate": run.evaluator,
    }[part]
    setattr(target, part, fail)
    with pytest.raises(OSError, match=f"disk full in {part}"):
        run_virtual(run.orchestrator.run())


def test_the_watchdog_names_what_waits_on_what_and_ends_the_run() -> None:
    run = build(watchdog_s=60)

    async def hang(tokens: Any, sampling: Any) -> Any:
        await asyncio.Event().wait()

    run.engine.sample = hang  # type: ignore[method-assign]
    with pytest.raises(WatchdogError, match=r"180 s: engine and environment: 9 groups in flight"):
        run_virtual(run.orchestrator.run())


def test_a_deadlock_would_be_seen() -> None:
    """The clock's own test: without it a hanging run would look like a slow one."""

    async def hang() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(hang())


def test_too_long_prompts_are_dropped_once_and_never_tried_again() -> None:
    class Long(ScriptedEnv):
        def prompt(self, uid: Any, split: str = "train") -> Any:
            prompt = super().prompt(uid, split)
            if uid.index % 2:
                return type(prompt)(uid, self.name, prompt.tokens.repeat(10), None)
            return prompt

    run = build(env=Long(random.Random(0)))
    run_virtual(run.orchestrator.run())
    drops = [d for name, d in run.events if name == "drop"]
    assert {d["reason"] for d in drops} == {"prompt_too_long"}
    assert drops[0]["detail"] == "20 tokens, limit 8"
    assert max(Counter(tuple(d["uid"]) for d in drops).values()) == 1


def test_every_group_that_finished_is_trained_in_time_order() -> None:
    """OR-27: a fast engine is held back by admission, and nothing is thrown away for room."""
    run = build(steps=10, lead=2, latency_s=lambda rng: 0.01, update_s=lambda step: 10.0)
    run_virtual(run.orchestrator.run())
    assert not run.attempts.ledger.dropped
    assert run.engine.most_running <= 3 * 3 * 2
    check_invariants(run, steps=10, groups=3, lead=2, off_policy=8)


def test_each_prompt_is_used_once_an_epoch() -> None:
    """OR-15: 10 prompts, batches of 3, and the data cycles."""
    run = build(steps=10, groups=3, env=ScriptedEnv(random.Random(0), size=10))
    run_virtual(run.orchestrator.run())
    epochs = Counter(member.attempt.uid.epoch for _, member in run.attempts.trained)
    assert epochs == {0: 10, 1: 10, 2: 10}


class MemoryCheckpointer:
    def __init__(self) -> None:
        self.saved: list[Checkpoint] = []

    async def save(self, checkpoint: Checkpoint) -> None:
        self.saved.append(checkpoint)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), lead=st.integers(0, 3), at=st.integers(0, 2))
def test_a_resumed_run_skips_no_prompt_and_trains_none_twice(seed: int, lead: int, at: int) -> None:
    """OR-05, OR-20: the resumed run starts with the checkpoint's version and its books."""
    saver = MemoryCheckpointer()
    first = build(seed=seed, steps=8, lead=lead, checkpointer=saver)
    run_virtual(first.orchestrator.run())
    saved = saver.saved[at % 3]  # of steps 2, 4 and 6
    step = saved.step
    before = [member.attempt.uid for k, member in first.attempts.trained if k < step]

    second = build(seed=seed, steps=8, lead=lead, trainer_step=saved.trainer["step"])
    second.attempts.restore(step, saved.run, saved.held)
    run_virtual(second.orchestrator.run())
    assert second.engine.loads[0] == step
    after = [member.attempt.uid for _, member in second.attempts.trained]
    assert len(before) + len(after) == 8 * 3 == len(set(before + after))
    second.attempts.ledger.check()
    assert second.attempts.ledger.trained == 8 * 3
    assert max(second.attempts.leads, default=0) <= lead
    for k, member in second.attempts.trained:
        assert 0 <= k - member.group.oldest_version <= lead + 1


def test_stop_ends_after_the_running_update_and_keeps_what_is_in_flight_for_resume() -> None:
    saver = MemoryCheckpointer()
    run = build(steps=50, checkpointer=saver)

    async def main() -> None:
        asyncio.get_running_loop().call_later(20.25, run.orchestrator.stop, "SIGTERM")
        await run.orchestrator.run()

    _, took = run_virtual(main())
    assert 20.25 <= took < 22
    saved = saver.saved[-1]
    assert saved.step == run.orchestrator.trainer_step < 50
    live = [place for *_, place in saved.run["ledger"]["live"]]
    assert "in_flight" in live, "the checkpoint knows what to start again"
    assert run.attempts.ledger.dropped[DropReason.SHUTDOWN] == live.count("in_flight")
