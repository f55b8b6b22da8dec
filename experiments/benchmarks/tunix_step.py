"""google-tunix's synchronous GRPO step, for peer_tunix.py; a program of its own.

    python -P tunix_step.py FOLDER

Reads FOLDER (a checkpoint, config.json, and plan.json), then a word a line, and answers each in
JSON: `logprobs` scores the sequence of plan.json; `step` does a whole step of GRPOLearner and says
how long that took. The dataset that the learner pulls from is what waits for the next word, so a
step is the time from handing a batch over to being asked for the next one, with the actor's new
weights ready.
"""

# pyright: reportMissingImports=false

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3.model import ModelConfig
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

NO_TOKEN = -1
"""As end and padding: no completion is cut short, and no sampled token is taken for padding."""


class Numbers:
    """A tokenizer whose text is the ids."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none is put in front

    def eos_id(self) -> int:
        return NO_TOKEN

    def pad_id(self) -> int:
        return NO_TOKEN


class Peer:
    """The learner, and the batches that it is given."""

    def __init__(self, folder: Path) -> None:
        self.plan = plan = json.loads((folder / "plan.json").read_text())
        model = json.loads((folder / "config.json").read_text())
        sizes = ModelConfig(
            num_layers=model["num_hidden_layers"],
            vocab_size=model["vocab_size"],
            embed_dim=model["hidden_size"],
            hidden_dim=model["intermediate_size"],
            num_heads=model["num_attention_heads"],
            head_dim=model["head_dim"],
            num_kv_heads=model["num_key_value_heads"],
            rope_theta=plan["rope_theta"],
            norm_eps=model["rms_norm_eps"],
            use_tied_embedding=True,
        )
        mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        actor, reference = (
            create_model_from_safe_tensors(str(folder), sizes, mesh, dtype=jnp.float32)
            for _ in range(2)
        )
        self.lengths: set[int] = set()
        context = plan["prompt_width"] + plan["new_tokens"]
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(plan["learning_rate"], b1=0.9, b2=0.98, weight_decay=0.0),
        )
        cluster = RLCluster(
            actor=actor,
            reference=reference,
            tokenizer=Numbers(),
            cluster_config=ClusterConfig(
                role_to_mesh={role: mesh for role in (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)},
                rollout_engine="vanilla",
                training_config=RLTrainingConfig(
                    actor_optimizer=optimizer, eval_every_n_steps=10**9, max_steps=10**9
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=plan["new_tokens"],
                    max_prompt_length=plan["prompt_width"],
                    kv_cache_size=context,
                    temperature=1.0,
                ),
            ),
        )
        self.learner = GRPOLearner(
            rl_cluster=cluster,
            algo_config=GRPOConfig(
                num_generations=plan["group_size"],
                beta=plan["beta"],
                kl_loss_mode="low_var_kl",
                loss_agg_mode="token-mean",
            ),
            reward_fns=self.reward,
        )

    def reward(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """Share of even ids."""
        rewards = []
        for text in completions:
            ids = [int(word) for word in text.split()]
            self.lengths.add(len(ids))
            rewards.append(sum(one % 2 == 0 for one in ids) / len(ids))
        return rewards

    def state(self) -> Any:
        """The actor's parameters, ready."""
        return jax.block_until_ready(nnx.state(self.learner.rl_cluster.actor_trainer.model))

    def scores(self) -> list[float]:
        """Log-probs of the plan's sequence, its first `prompt_width` tokens being the prompt."""
        sequence, width = np.array([self.plan["sequence"]]), self.plan["prompt_width"]
        found = self.learner.rl_cluster.get_ref_per_token_logps(
            jnp.array(sequence[:, :width]), jnp.array(sequence[:, width:]), NO_TOKEN, NO_TOKEN
        )
        return np.asarray(found)[0].tolist()

    def batches(self, answers: Any) -> Iterator[dict[str, np.ndarray]]:
        """A batch for every `step`; ends with stdin."""
        for line in sys.stdin:
            answer: dict[str, Any] = {}
            if line.strip() == "logprobs":
                answer["logprobs"] = self.scores()
                answer["parameters"] = sum(x.size for x in jax.tree.leaves(self.state()))
            else:
                before = jax.tree.leaves(self.state())
                started = time.perf_counter()
                yield {"prompts": np.array(self.plan["prompts"])}
                after = jax.tree.leaves(self.state())
                answer["seconds"] = time.perf_counter() - started
                answer["moved"] = max(
                    float(abs(x - y).max()) for x, y in zip(before, after, strict=True)
                )
                answer["lengths"] = sorted(self.lengths)
            print(json.dumps(answer), file=answers, flush=True)


def main(folder: str) -> None:
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what the libraries print is no answer
        peer = Peer(Path(folder))
        peer.learner.train(peer.batches(answers))


if __name__ == "__main__":
    main(sys.argv[1])
