"""A whole run on a real vLLM server in bfloat16: it learns, and two kills cost it no step.

The engine core is killed in the middle of a weight update, and a worker while requests decode. Both
moments are chosen by what the run does, never by a clock.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telescope_jax import run as run_module
from telescope_jax.config import Config
from telescope_jax.inference.handshake import TOLERANCES, compare
from telescope_jax.inference.pool import Pool
from telescope_jax.inference.reference import PublishedReference
from telescope_jax.inference.server_process import ServerProcess
from telescope_jax.inference.vllm_server import VllmClient
from telescope_jax.metrics import read as read_metrics
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import SamplingParams, WeightsRef
from tests.inference.vllm_rig import CONFIG, engine_core, worker
from tests.inference.vllm_site import make_visible

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.deadline(1_200),
]

STEPS = 20
KILL_IN_UPDATE_TO, KILL_WHILE_SERVING = 5, 12  # versions


def study() -> Config:
    config = Config()
    config.number_of_steps = STEPS
    config.groups_per_batch, config.group_size = 8, 8
    config.max_async_rollout = 1
    config.env.name = "tests.inference.share_of_token:ShareOfToken"
    config.sampling.max_prompt_tokens, config.sampling.max_tokens = 12, 16
    config.policy.layers = 3
    config.policy.compute_dtype = "bfloat16"
    config.optimizer.learning_rate = 3e-3
    config.batch.seq_len, config.batch.rows_per_microbatch = 64, 8
    config.engine.kind = "vllm"
    config.engine.slots = 64
    config.engine.start_timeout_s = CONFIG.start_timeout_s
    config.engine.server_arguments = CONFIG.server_arguments
    config.eval_every, config.eval.items, config.eval.at_start = 0, 2, False
    config.watchdog_s = 900.0  # a restart takes minutes on a busy machine
    config.checkpoint.every = config.log.rollouts_every = 0
    config.check()
    return config


@dataclass
class Story:
    """What happened in the run beside its metrics."""

    pool: Pool | None = None
    killed: list[str] = field(default_factory=list)
    processes: list[ServerProcess] = field(default_factory=list)
    ours: list[np.ndarray] = field(default_factory=list)
    theirs: list[np.ndarray] = field(default_factory=list)
    lines: Sequence[dict[str, Any]] = ()

    def kill(self, which: str) -> None:
        assert self.pool is not None
        process = self.pool.members[0].process
        assert process is not None
        self.processes.append(process)
        os.kill({"core": engine_core, "worker": worker}[which](process), signal.SIGKILL)
        self.killed.append(which)


def watch(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares log-probs at version 0, and kills at the two moments."""
    start_all, post, generate = run_module.start_all, VllmClient._post, VllmClient.generate

    async def start(config: Config, shape: Any, store: Any, workdir: Path) -> Any:
        engines = await start_all(config, shape, store, workdir)
        pool = engines["train"]
        assert isinstance(pool, Pool)
        story.pool = pool
        decoder = Decoder(config.policy, shape.vocab_size)
        reference, load = PublishedReference(decoder, store), pool.load

        async def load_and_compare(ref: WeightsRef) -> None:
            await load(ref)
            if ref.version:
                return
            for seed in range(4):
                prompt = list(range(seed, 12))
                completion = await pool.sample(prompt, SamplingParams(16, seed=seed))
                row = (prompt, completion.tokens.tolist())
                story.ours += reference.logprobs(ref, [row], 1.0)
                story.theirs.append(completion.logprobs)

        monkeypatch.setattr(pool, "load", load_and_compare)
        return engines

    async def post_or_kill(self: VllmClient, path: str, body: Any, *, retry: bool = False) -> Any:
        updates = path == "/update_weights" and not story.killed
        if updates and body["update_info"]["version"] == KILL_IN_UPDATE_TO:
            # Between start and finish: its model is neither the old one nor the new one.
            story.kill("core")
        return await post(self, path, body, retry=retry)

    async def generate_or_kill(self: VllmClient, *args: Any, salt: str) -> Any:
        serving = salt.isdigit() and int(salt) >= KILL_WHILE_SERVING
        busy = story.pool is not None and story.pool.members[0].in_flight >= 16
        if serving and busy and len(story.killed) == 1:
            story.kill("worker")
        return await generate(self, *args, salt=salt)

    monkeypatch.setattr(run_module, "start_all", start)
    monkeypatch.setattr(VllmClient, "_post", post_or_kill)
    monkeypatch.setattr(VllmClient, "generate", generate_or_kill)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder, story = tmp_path_factory.mktemp("run"), Story()
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_visible(folder / "site", monkeypatch)
        watch(story, monkeypatch)
        assert run_module.run(study(), "share", str(folder / "run")) == 0
    story.lines = read_metrics(folder / "run" / "metrics" / "metrics.jsonl")
    yield story


def trained(story: Story) -> list[dict[str, Any]]:
    return [line for line in story.lines if "train/loss" in line]


def test_a_server_that_is_killed_twice_costs_the_run_no_step(story: Story):
    """OR-19: killed in the middle of an update, and while it decodes."""
    assert story.killed == ["core", "worker"]
    assert [line["step"] for line in trained(story)] == list(range(STEPS))
    last = trained(story)[-1]
    assert last["engine/restarts"] == 2
    assert sum(line["ledger/dropped/engine_error"] > 0 for line in trained(story)) > 0
    assert all(process.members() == [] for process in story.processes)


def test_the_books_balance_at_every_step_of_it(story: Story):
    for line in trained(story):
        places = ("trained", "batched", "held", "in_flight", "dropped")
        assert line["ledger/dispatched"] == sum(line[f"ledger/{place}"] for place in places), line
    last = trained(story)[-1]
    assert last["ledger/trained"] == STEPS * 8


def test_the_policy_learns_on_vllm(story: Story):
    # Of the trained batch: between two quick steps no group may have finished.
    rewards = np.array([line["rollout/reward_trained"] for line in trained(story)])
    first, last = rewards[:5], rewards[-5:]
    error = np.sqrt(first.var(ddof=1) / 5 + last.var(ddof=1) / 5)
    print("reward by step", rewards.round(3).tolist())
    assert last.mean() > first.mean() + 3 * error


def test_trainer_and_vllm_agree_in_bfloat16(story: Story):
    """Both round to 8 bits of mantissa, at different places."""
    agreement = compare(story.theirs, story.ours)
    print("bfloat16", agreement)
    assert len(np.concatenate(story.ours)) == 64
    assert agreement.greatest < TOLERANCES["bfloat16"] / 4
    assert agreement.mean < agreement.greatest / 2
