"""The client of one server, against a scripted stub: what it sends, what it makes of answers."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from telescope_jax.inference.member import LocalSource, Member
from telescope_jax.inference.vllm_server import (
    ServerBroken,
    ServerShape,
    VllmClient,
    WeightsRefused,
    command_line,
)
from telescope_jax.interfaces import EngineError, PromptTooLong
from telescope_jax.types import SamplingParams, StopReason, VersionSpan, WeightsRef
from tests.inference.stub_vllm import Script, log_probs, serving

REF = WeightsRef(3, "/weights/00000003", "f3")
SAMPLING = SamplingParams(max_tokens=4, temperature=0.5, seed=7)


def with_server(script: Script, use: Callable[[VllmClient], Coroutine], **arguments) -> Any:
    """The result of `use(client)` on a stub that serves version 3."""

    async def run() -> Any:
        settings = {"eos_ids": (1,), "context": 64, "vocab_size": 16, "timeout_s": 20.0} | arguments
        async with serving(script) as url:
            client = VllmClient(url, script.key, script.name, **settings)
            try:
                assert await client.healthy()
                return await use(client)
            finally:
                await client.close()

    script.version = 3
    return asyncio.run(run())


def generate(script: Script, tokens=(2, 3), sampling=SAMPLING, **arguments):
    return with_server(script, lambda c: c.generate(tokens, sampling, salt="3"), **arguments)


def test_an_answer_carries_tokens_log_probs_and_versions():
    completion = generate(Script())
    expected = log_probs(3, [2, 3], completion.tokens.tolist(), 0.5)
    np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-6)
    assert completion.versions == (VersionSpan(3, 0, 4),)
    assert completion.stop is StopReason.LENGTH


def test_a_request_names_its_version_its_seed_and_its_priority():
    script = Script()
    generate(script, sampling=SamplingParams(max_tokens=4, seed=2**64 - 1, priority=-2))
    (body,) = script.bodies
    assert body["cache_salt"] == "3" and body["priority"] == -2
    assert 0 <= body["sampling_params"]["seed"] < 2**63
    assert body["sampling_params"]["logprobs"] == 0
    assert body["sampling_params"]["stop_token_ids"] == [1]


def test_members_of_a_group_with_different_seeds_differ():  # VL-08
    answers = {
        tuple(generate(Script(), sampling=SamplingParams(max_tokens=4, seed=s)).tokens.tolist())
        for s in range(4)
    }
    assert len(answers) == 4


@pytest.mark.parametrize("failures", [[429], [500, 503], [502, 429, 500]])
def test_what_may_pass_is_tried_again_as_the_same_request(failures: list[int]):
    script = Script(failures=list(failures))
    assert len(generate(script).tokens) == 4
    assert len(script.bodies) == len(failures) + 1
    assert all(body == script.bodies[0] for body in script.bodies)


def test_a_half_answer_is_tried_again():
    assert len(generate(Script(half=2)).tokens) == 4


def test_a_server_that_never_recovers_is_an_engine_error():  # OR-10
    script = Script(failures=[500] * 50)
    with pytest.raises(EngineError, match="answered 500: scripted"):
        generate(script)
    assert len(script.bodies) == 5


def test_a_dead_server_is_not_asked_again():
    script = Script(failures=[500] * 50)
    with pytest.raises(EngineError):
        generate(script, gone=lambda: True)
    assert len(script.bodies) == 1


def test_a_refused_request_is_not_asked_again():
    script = Script(failures=[400])
    with pytest.raises(ValueError, match="answered 400"):
        generate(script)
    assert len(script.bodies) == 1


def test_a_prompt_beyond_the_context_is_too_long_whoever_finds_out():  # VL-03
    script = Script()
    with pytest.raises(PromptTooLong, match="64 tokens leaves no room in a context of 64"):
        generate(script, tokens=[2] * 64)
    assert script.bodies == []
    script = Script(too_long=True)
    with pytest.raises(PromptTooLong, match="maximum context length"):
        generate(script)
    assert len(script.bodies) == 1


def test_a_long_prompt_gets_the_room_that_is_left():  # VL-03
    script = Script()
    generate(script, tokens=[2] * 62)
    assert script.bodies[0]["sampling_params"]["max_tokens"] == 2


def test_a_token_outside_the_vocabulary_never_reaches_the_engine():
    script = Script()
    with pytest.raises(ValueError, match="from 2 to 16, the vocabulary has 16"):
        generate(script, tokens=[2, 16])
    assert script.bodies == []


def test_a_missing_log_prob_is_an_error_and_never_zero():
    with pytest.raises(EngineError, match="4 tokens and 3 log-probs"):
        generate(Script(drop_logprob=True))


def test_an_aborted_request_says_so():  # VL-12
    assert generate(Script(finish="abort")).stop is StopReason.ABORTED


def test_a_cut_distribution_is_not_offered():
    with pytest.raises(NotImplementedError):
        generate(Script(), sampling=SamplingParams(max_tokens=4, top_p=0.9))


def test_cancelling_closes_the_request_at_any_moment():  # OR-25
    script = Script(answer_s=30.0)

    async def use(client: VllmClient) -> None:
        rng = np.random.default_rng(0)
        tasks = [
            asyncio.create_task(client.generate([2, 3], SAMPLING, salt="3")) for _ in range(40)
        ]
        for task in tasks:
            await asyncio.sleep(rng.uniform(0, 0.005))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while await client.requests_running():
            await asyncio.sleep(0.01)
        script.answer_s = 0.0
        assert len((await client.generate([2, 3], SAMPLING, salt="3")).tokens) == 4

    with_server(script, use)
    assert script.running == 0


def test_no_request_waits_on_a_connection_that_the_server_may_be_closing():
    """A server closes an idle connection after seconds; a request sent on it just then is lost, and
    lost in a load it ended the server."""
    script = Script()
    generate(script)
    load(script)
    assert len(script.seen) > 5 and script.kept == 0


def test_a_foreign_server_gets_nothing_but_a_probe():  # OR-31
    script = Script(name="somebody-else")

    async def run() -> None:
        async with serving(script) as url:
            client = VllmClient(
                url, "secret", "ours", eos_ids=(1,), context=64, vocab_size=16, timeout_s=5
            )
            with pytest.raises(EngineError, match="answered by somebody-else, not by ours"):
                await client.healthy()
            with pytest.raises(EngineError, match="has not told its name"):
                await client.generate([2], SAMPLING, salt="0")
            await client.close()

    asyncio.run(run())
    assert script.seen == [] and script.strangers == 0


def load(script: Script) -> None:
    async def use(client: VllmClient) -> None:
        await client.stage(REF)
        await client.swap(REF)

    with_server(script, use)


def test_a_load_checks_first_and_pauses_without_aborting():  # OR-24, VL-02
    script = Script()
    load(script)
    assert script.seen == [
        "/collective_rpc",
        "/collective_rpc",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
        "/weight_info",
        "/collective_rpc",
    ]
    assert script.staged == {"version": 3, "path": REF.path, "fingerprint": "f3"}
    assert script.aborted == 0 and not script.paused


def test_a_damaged_version_is_refused_before_anything_pauses():
    script = Script(stage_error="WeightsError: version 3 is damaged")
    with pytest.raises(WeightsRefused, match="the old one is still served: WeightsError"):
        load(script)
    assert "/pause" not in script.seen


def test_a_swap_that_fails_half_way_breaks_the_server():
    with pytest.raises(ServerBroken, match="version 3 failed half-way: /update_weights"):
        load(Script(update_fails=1))


def test_a_server_that_was_given_something_else_is_found_out():
    with pytest.raises(ServerBroken, match="expected version 3 with fingerprint f3"):
        load(Script(fingerprint="f2"))


def test_a_request_that_spans_a_load_carries_both_versions():
    script = Script(answer_s=0.2)

    async def use(client: VllmClient):
        asking = asyncio.create_task(client.generate([2, 3], SAMPLING, salt="3"))
        while not script.running:
            await asyncio.sleep(0.01)
        newer = WeightsRef(4, "/weights/00000004", "f4")
        await client.stage(newer)
        await client.swap(newer)
        return await asking

    completion = with_server(script, use)
    assert completion.versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 4))


# Processes

SHAPE = ServerShape("model", 64, "float32", (1,), 16, 8)
STUB = [str(Path(__file__).with_name("stub_vllm.py"))]


def stub_command(*script: str) -> Callable[..., list[str]]:
    def command(shape: ServerShape, *, name: str, port: int) -> list[str]:
        return [sys.executable, *STUB, f"--port={port}", f"--name={name}", *script]

    return command


def member(workdir: Path, *script: str, start_timeout_s: float = 60.0, **arguments) -> Member:
    command = arguments.pop("command", stub_command(*script))
    source = LocalSource("run-0", SHAPE, workdir=workdir, timeout_s=20, command=command)
    return Member(source, start_timeout_s=start_timeout_s)


def test_a_server_that_dies_at_its_start_is_quoted_at_once(tmp_path: Path):  # OR-16
    started = time.monotonic()
    with pytest.raises(EngineError) as raised:
        asyncio.run(member(tmp_path, "exit=3", start_timeout_s=300.0).start())
    assert "exited with code 3" in str(raised.value)
    assert "the last word of a server" in str(raised.value)
    assert time.monotonic() - started < 100  # not the 300 s of a server that is still loading


def test_a_server_that_is_slow_to_load_is_waited_for(tmp_path: Path):  # OR-16
    async def run() -> None:
        slow = member(tmp_path, "ready_s=1.5")
        await slow.start()
        await slow.stop(kill=True)

    asyncio.run(run())


def test_what_a_server_died_of_is_quoted_beside_its_last_lines(tmp_path: Path):
    """vLLM shuts down at length: its last lines never hold the reason."""
    lines = ["ERROR 1 RuntimeError: head_dim=8 is not supported", *["INFO closing"] * 40]
    program = f"import sys; print({chr(10).join(lines)!r}); sys.exit(2)"

    def command(shape: ServerShape, *, name: str, port: int) -> list[str]:
        return [sys.executable, "-c", program]

    with pytest.raises(EngineError) as raised:
        asyncio.run(member(tmp_path, command=command).start())
    assert "head_dim=8 is not supported" in str(raised.value)
    assert str(raised.value).count("INFO closing") == 15


def test_an_untried_release_is_refused_and_the_tried_one_is_named(tmp_path: Path):  # VL-13
    async def run() -> None:
        with pytest.raises(EngineError, match=r"runs vLLM 0.33.1.*0.32.x is the one"):
            await member(tmp_path, 'release="0.33.1"').start()

    asyncio.run(run())


def test_a_server_that_never_answers_names_the_limit_and_is_gone(tmp_path: Path):
    async def run() -> None:
        mute = member(tmp_path, "ready_s=1e9", start_timeout_s=1.0)
        with pytest.raises(EngineError, match="within engine.start_timeout_s=1"):
            await mute.start()
        assert mute.process is not None and mute.process.members() == []

    asyncio.run(run())


def test_a_taken_port_is_given_up_for_another(tmp_path: Path):  # OR-31
    foreign, tries = Script(name="somebody-else"), []

    async def run() -> None:
        async with serving(foreign) as url:

            def command(shape: ServerShape, *, name: str, port: int) -> list[str]:
                tries.append(port)
                if len(tries) == 1:
                    shift = "import sys; sys.exit('OSError: [Errno 98] Address already in use')"
                    return [sys.executable, "-c", shift]
                return stub_command()(shape, name=name, port=port)

            second = member(tmp_path, command=command)
            await second.start()
            assert second.client.url != url
            await second.stop(kill=True)

    asyncio.run(run())
    assert len(tries) == 2 and foreign.seen == []


def test_the_whole_group_ends_with_the_server_and_its_orphans(tmp_path: Path):  # OR-17, OR-19
    pids = tmp_path / "pids"

    async def run() -> None:
        doomed = member(tmp_path, f"child={pids}")
        await doomed.start()
        process = doomed.process
        assert process is not None
        child = int(pids.read_text())
        assert set(process.members()) == {process.pid, child}
        os.kill(process.pid, signal.SIGKILL)
        assert "was killed by signal 9" in await doomed.died()
        assert process.members() == [child]  # it lives on, as vLLM's engine core does
        await doomed.stop(kill=True)
        assert process.members() == []
        assert not psutil.pid_exists(child) or (
            psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        )

    asyncio.run(run())


def test_the_command_line_asks_for_what_training_needs():
    line = command_line(SHAPE, name="run-0", port=1)
    joined = " ".join(line)
    assert "--logprobs-mode processed_logprobs" in joined
    assert "--host 127.0.0.1" in joined and "--enable-scale-out" in joined
    assert "trust" not in joined and "key" not in joined.lower().replace("requirekey", "")
    cpu = command_line(replace(SHAPE, chunked_prefill=False), name="run-0", port=1)
    assert {*cpu} - {*line} == {"--no-enable-chunked-prefill"}
