"""With max_async_rollout = 0 a run is the plain sequential loop, bit for bit.

The same real parts (embedded engine, learner, sums) are driven twice: by the orchestrator, and by
the loop that a textbook would write.
"""

import asyncio
from typing import Any

import jax
import numpy as np
import pytest

from telescope_jax.assembly import AssemblySettings, assemble
from telescope_jax.attempts import AttemptRules, Attempts
from telescope_jax.chat import CharTokenizer
from telescope_jax.config import Config
from telescope_jax.envs.arithmetic import Sums
from telescope_jax.inference.embedded import EngineShape, build_engines
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.settings import loss_settings
from telescope_jax.ledger import Attempt
from telescope_jax.orchestrator import Orchestrator, Schedule
from telescope_jax.prompts import PromptQueue
from telescope_jax.rollouts.episode import Episode, EpisodeSettings
from telescope_jax.sharding import make_mesh
from telescope_jax.staleness import AsyncBound
from telescope_jax.types import Group, Prompt, Reward, SamplingParams
from telescope_jax.weights.store import MemoryStore
from tests.scripted import ListSink

STEPS, GROUPS, SIZE = 4, 3, 4


class FirstDigit(Sums):
    """Rewards the share of digits, so that random weights have something to learn at once."""

    async def play(self, prompt: Prompt, sample: Any) -> Reward:
        text = (await sample()).text
        return Reward(sum(c.isdigit() for c in text) / 8)


def small() -> Config:
    config = Config()
    config.policy.width, config.policy.head_dim, config.policy.mlp_width = 32, 8, 64
    config.sampling.max_tokens, config.sampling.max_prompt_tokens = 8, 16
    config.batch.seq_len, config.batch.rows_per_microbatch = 64, 1
    config.optimizer.learning_rate = 1e-2
    config.engine.slots, config.engine.prefill_rows, config.engine.tokens_per_call = 8, 4, 4
    config.group_size, config.number_of_steps, config.algorithm = SIZE, STEPS, "dr_grpo"
    return config


class Parts:
    """Fresh parts from one seed."""

    def __init__(self) -> None:
        config = small()
        tokenizer = CharTokenizer()
        self.env = FirstDigit(tokenizer)
        self.learner = Learner(
            config.policy,
            tokenizer.vocab_size,
            make_mesh(config.mesh, jax.devices()[:1]),
            loss=loss_settings(config),
            optimizer=config.optimizer,
            number_of_steps=STEPS,
            rows_per_microbatch=1,
        )
        self.store = MemoryStore()
        shape = EngineShape(tokenizer.vocab_size, tokenizer.eos_ids, 24, 16)
        engines = build_engines(config.engine, config.policy, shape, self.store, names=["train"])
        self.engine = engines["train"]
        self.assembly = AssemblySettings("dr_grpo", False, 64, 1, 1)
        self.prompts = PromptQueue(self.env, seed=0)
        self.settings = EpisodeSettings(SamplingParams(max_tokens=8), 24, 60.0, 0)

        def episode(prompt: Prompt, attempt: Attempt, index: int) -> Episode:
            return Episode(self.engine, tokenizer, prompt, attempt, index, self.settings)

        self.episode = episode

    async def close(self) -> None:
        await self.engine.close()
        self.learner.close()


async def orchestrated(lead: int) -> tuple[Any, list[dict[str, float]]]:
    parts = Parts()
    sink = ListSink()
    attempts = Attempts(
        AsyncBound(lead, 8, GROUPS, STEPS),
        AttemptRules(max_prompt_tokens=16),
        parts.prompts,
        lambda name, details: None,
    )
    orchestrator = Orchestrator(
        schedule=Schedule(STEPS, SIZE),
        attempts=attempts,
        assembly=parts.assembly,
        env=parts.env,
        prompts=parts.prompts,
        episode=parts.episode,
        engine=parts.engine,
        trainer=parts.learner,
        store=parts.store,
        evaluator=None,
        sink=sink,
        events=lambda name, details: None,
    )
    await orchestrator.run()
    params = jax.device_get(parts.learner.params)
    await parts.close()
    return params, [values for _, values in sink.rows if "train/loss" in values]


async def sequential() -> tuple[Any, list[float]]:
    """Sample a batch, train it, publish, and again."""
    parts = Parts()
    drawn, losses = 0, []
    for step in range(STEPS):
        await parts.engine.load(await parts.store.publish(step, parts.learner.params))
        groups = []
        while len(groups) < GROUPS:
            prompt = parts.env.prompt(parts.prompts.uid(drawn))
            drawn += 1
            rollouts = []
            for index in range(SIZE):
                episode = parts.episode(prompt, Attempt(prompt.uid, 0), index)
                rollouts.append(episode.finish(await parts.env.play(prompt, episode.sample)))
            if len({rollout.reward.total for rollout in rollouts}) > 1:
                groups.append(Group(prompt, 0, tuple(rollouts)))
        batch = assemble(step, groups, parts.assembly)
        losses.append((await parts.learner.update(batch.minibatches)).loss)
    params = jax.device_get(parts.learner.params)
    await parts.close()
    return params, losses


def test_zero_steps_ahead_is_the_sequential_loop_bit_for_bit() -> None:
    params, rows = asyncio.run(orchestrated(lead=0))
    expected, losses = asyncio.run(sequential())
    assert [row["train/loss"] for row in rows] == losses
    assert all(row["staleness/max"] == 0 for row in rows)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(one, other)
    start = Parts()
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), params, start.learner.params)
    assert any(jax.tree.leaves(moved)), "nothing was trained, so nothing was compared"
    asyncio.run(start.close())


def test_on_policy_the_ratio_is_one() -> None:
    """Engine and trainer score the same tokens alike, so nothing is truncated."""
    _, rows = asyncio.run(orchestrated(lead=0))
    for row in rows:
        assert row["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["train/truncated_fraction"] == 0.0
        assert row["train/kl"] < 1e-7


def test_steps_ahead_train_older_tokens_within_the_bound() -> None:
    _, rows = asyncio.run(orchestrated(lead=1))
    assert max(row["staleness/max"] for row in rows) in (1, 2)
