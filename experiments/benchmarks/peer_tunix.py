"""Seconds of a whole synchronous step: ours against google-tunix's GRPO.

    python -m venv PEER && PEER/bin/pip install jax==0.10.2 google-tunix==0.1.7
    python -m experiments.benchmarks.peer_tunix --peer_python PEER/bin/python

A step samples a group for every prompt, scores it, passes over the reference policy, makes one
update and brings the new weights to the sampler. The same random Qwen3 weights, prompts, number of
tokens (no end token), reward, loss (GRPO clipped, π_old = π, KL to the reference β = 0.04, token
mean) and AdamW, in float32 and on all cores that this process may use. Before anything is timed,
the number of parameters and the log-probs of one sequence must agree; the first step of each, which
compiles, is left out, and no timed update of ours may compile. tunix runs in a process of its own
that waits while ours works, and the repeats take turns.

What differs. tunix samples the batch in one jitted loop, reads the prompt for each member of a
group, and sorts the vocabulary to cut at top_p = 1; it pads prompts to one width, trains all rows
at once (in microbatches it was no faster), and takes log-probs and entropy from all logits. Ours is
the embedded engine as in a run (a prompt read once a group, requests of an event loop, log-probs
kept), rollouts packed into rows and microbatches, log-probs and entropy by chunks of a large
vocabulary, and the learner's statistics. Neither writes to a disk, and neither overlaps sampling
with training.

To reach: ≥ 1.5 × tunix.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.benchmarks.peer import Peer
from experiments.benchmarks.policies import count, learner_of, random_params, write_checkpoint
from telescope_jax.assembly import AssemblySettings, assemble
from telescope_jax.config import EngineConfig, OptimizerConfig, PolicyConfig
from telescope_jax.inference.embedded import EngineShape, build_engines
from telescope_jax.inference.reference import PublishedReference
from telescope_jax.interfaces import Sample
from telescope_jax.learner.loss import LossSettings
from telescope_jax.ledger import Attempt
from telescope_jax.rollouts.episode import Episode, EpisodeSettings
from telescope_jax.rollouts.group import play_group
from telescope_jax.setup import use_compilation_cache
from telescope_jax.types import Params, Prompt, Reward, SamplingParams, Uid, WeightsRef

PROMPT, NEW_TOKENS, BETA = 32, 32, 0.04
CONTEXT = PROMPT + NEW_TOKENS
PARTS = ("sample", "pack", "update", "load")
OPTIMIZER = OptimizerConfig(learning_rate=1e-4)
LOSS = LossSettings(objective="ppo", use_tis=False, reference_kl_coef=BETA)
TINY = PolicyConfig(
    family="qwen3", vocab_size=512, mlp_width=256, rope_theta=1e6
)  # tunix's Qwen3 knows one base of its rotations
POLICIES = {"361k": TINY, "V32000": replace(TINY, vocab_size=32_000, layers=4)}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a batch: prompts × rollouts, and the rows that ours packs them into."""

    prompts: int
    group_size: int
    seq_len: int
    rows_per_microbatch: int


# Eight rows need 20 MB of temporary memory. glibc maps what is above 32 MiB anew for every call:
# the page faults cost 16 rows a quarter of their time.
SHAPES = {"4x4": Shape(4, 4, 64, 8), "16x8": Shape(16, 8, 64, 8)}


class Numbers:
    """A tokenizer whose text is the ids; nothing ends a completion."""

    name, fingerprint, vocab_size, eos_ids, pad_id = "numbers", "numbers", 0, (), 0

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class EvenIds:
    """The environment: one turn, whose reward is the share of even ids."""

    name = "even_ids"

    def __init__(self, prompts: Sequence[np.ndarray]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, uid: Uid, split: str = "train") -> Prompt:
        return Prompt(uid, self.name, self._prompts[uid.index], None)

    async def play(self, prompt: Prompt, sample: Sample) -> Reward:
        ids = [int(word) for word in (await sample()).text.split()]
        if len(ids) != NEW_TOKENS:
            raise ValueError(f"{len(ids)} tokens were sampled, not {NEW_TOKENS}")
        return Reward(sum(one % 2 == 0 for one in ids) / len(ids))


class Handed:
    """A weight store in memory: the engine reads the version that the learner just made."""

    params: Params = None

    def read(self, ref: WeightsRef) -> Params:
        return self.params


class Ours:
    """The parts of a run, one step after another."""

    def __init__(self, policy: PolicyConfig, shape: Shape, params: Params) -> None:
        self._shape, self._store = shape, Handed()
        draw = np.random.default_rng(0)
        lengths = draw.integers(PROMPT // 2, PROMPT + 1, shape.prompts)
        self.prompts = [draw.integers(0, policy.vocab_size, n).astype(np.int32) for n in lengths]
        self._env = EvenIds(self.prompts)
        self._engine = build_engines(
            EngineConfig(slots=shape.prompts * shape.group_size, prefill_rows=shape.prompts),
            policy,
            EngineShape(policy.vocab_size, (), CONTEXT, PROMPT),
            self._store,
            names=["train"],
        )["train"]
        self.learner = learner_of(
            policy,
            params,
            loss=LOSS,
            optimizer=OPTIMIZER,
            rows_per_microbatch=shape.rows_per_microbatch,
            old_logprobs=True,
        )
        self._episodes = EpisodeSettings(SamplingParams(NEW_TOKENS), CONTEXT, 600.0, 0)
        self._assembly = AssemblySettings(
            "grpo", False, shape.seq_len, shape.rows_per_microbatch, 1
        )

    @property
    def version(self) -> int:
        """What the engine samples from."""
        return self._engine.version

    async def step(self) -> dict[str, float]:
        """One step: the seconds of its parts, `all` of them, compilations and trained tokens."""
        marks = [time.perf_counter()]
        step = self.learner.step
        groups = await asyncio.gather(*(self._play(Uid(step, i)) for i in range(len(self._env))))
        marks.append(time.perf_counter())
        batch = assemble(step, groups, self._assembly)
        marks.append(time.perf_counter())
        stats = await self.learner.update(batch.minibatches)
        marks.append(time.perf_counter())
        await self.load(step + 1)
        marks.append(time.perf_counter())
        parts = dict(zip(PARTS, np.diff(marks), strict=True))
        counted = {"compilations": stats.compilations, "tokens": stats.token_count}
        return {**parts, "all": marks[-1] - marks[0], **counted}

    async def close(self) -> None:
        await self._engine.close()
        self.learner.close()

    def logprobs(self, sequence: list[int]) -> np.ndarray:
        """Of the tokens after the first PROMPT, by the code that trains."""
        reference = PublishedReference(self.learner.decoder, self._store)
        row = sequence[:PROMPT], sequence[PROMPT:]
        return reference.logprobs(WeightsRef(0, "", ""), [row], 1.0)[0]

    async def _play(self, uid: Uid):
        return await play_group(
            self._env,
            lambda prompt, attempt, index: Episode(
                self._engine, Numbers(), prompt, attempt, index, self._episodes
            ),
            self._env.prompt(uid),
            Attempt(uid, 0),
            self._shape.group_size,
        )

    async def load(self, version: int) -> None:
        self._store.params = self.learner.params
        await self._engine.load(WeightsRef(version, "", ""))


def tunix_process(folder: Path, python: str, packages: str) -> Peer:
    """It answers `logprobs` and `step`."""
    # -P: the folder of the script holds modules with the names of packages.
    script = Path(__file__).with_name("tunix_step.py")
    return Peer("tunix", [python, "-P", script, folder], folder, packages)


def compare(name: str, ours: Ours, tunix: Peer, sequence: list[int]) -> None:
    """Prints by how much the two models differ.

    Raises:
      ValueError: they are not the same model.
    """
    theirs, mine = tunix.ask("logprobs"), count(ours.learner.params)
    apart = float(np.abs(ours.logprobs(sequence) - theirs["logprobs"]).max())
    print(f"{name}: {mine:,} and {theirs['parameters']:,} parameters, log-probs {apart:.1e} apart")
    if mine != theirs["parameters"] or not apart < 1e-3:
        raise ValueError(f"{name}: the two are not the same model; nothing is timed")


def measure(size: str, batch: str, asked: argparse.Namespace) -> None:
    """Prints what one size and batch give."""
    name, policy, shape = f"{size}, {batch}", POLICIES[size], SHAPES[batch]
    params = random_params(policy)
    with tempfile.TemporaryDirectory() as path, asyncio.Runner() as runner:
        folder, ours = Path(path), Ours(policy, shape, params)
        write_checkpoint(folder, policy, params, CONTEXT)
        told = {
            "prompts": [" ".join(map(str, prompt)) for prompt in ours.prompts],
            "sequence": np.random.default_rng(1).integers(0, policy.vocab_size, CONTEXT).tolist(),
            "group_size": shape.group_size,
            "prompt_width": PROMPT,
            "new_tokens": NEW_TOKENS,
            "rope_theta": int(policy.rope_theta),
            "learning_rate": OPTIMIZER.learning_rate,
            "beta": BETA,
        }
        (folder / "plan.json").write_text(json.dumps(told))
        tunix = tunix_process(folder, asked.peer_python, asked.peer_path)
        try:
            runner.run(ours.load(0))
            compare(name, ours, tunix, told["sequence"])
            mine, theirs = [], []
            for _ in range(asked.repeats + 1):
                mine += [runner.run(ours.step()) for _ in range(asked.steps)]
                theirs += [tunix.ask("step") for _ in range(asked.steps)]
            rollouts = shape.prompts * shape.group_size
            # The first turn compiles.
            report(name, rollouts, mine[asked.steps :], theirs[asked.steps :])
        finally:
            tunix.close()
            runner.run(ours.close())


def report(name: str, rollouts: int, mine: list[dict], theirs: list[dict]) -> None:
    """Prints a row a side.

    Raises:
      ValueError: a step of one side did not do what the other's did.
    """
    compiled = sum(step["compilations"] for step in mine)
    lengths = {length for step in theirs for length in step["lengths"]}
    if compiled or lengths != {NEW_TOKENS} or not all(step["moved"] > 0 for step in theirs):
        raise ValueError(
            f"{name}: {compiled} compilations, tunix sampled {lengths} tokens and moved its "
            f"weights by {[step['moved'] for step in theirs]}"
        )
    seconds = {"ours": [s["all"] for s in mine], "tunix": [s["seconds"] for s in theirs]}
    for side, took in seconds.items():
        best, middle = min(took), float(np.median(took))
        cells = [name, side, f"{best:.4f}", f"{middle:.4f}"]
        cells += [f"{rollouts / best:,.0f}", f"{rollouts / middle:,.0f}"]
        cells += [f"{min(seconds['tunix']) / best:.2f}"]
        cells += [f"{np.median(seconds['tunix']) / middle:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    parts = {key: np.median([s[key] for s in mine]) for key in PARTS}
    print("ours, medians: " + ", ".join(f"{key} {1e3 * x:.1f} ms" for key, x in parts.items()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(POLICIES), default=["361k"])
    parser.add_argument("--batches", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--peer_path", default="", help="PYTHONPATH of the peer alone")
    asked = parser.parse_args(argv)
    use_compilation_cache()
    print("| size, batch | side | s/step, best | median | rollouts/s | median | ÷ tunix | median |")
    print("|---|---|---|---|---|---|---|---|")
    for size in asked.sizes:
        for batch in asked.batches:
            measure(size, batch, asked)


if __name__ == "__main__":
    main()
