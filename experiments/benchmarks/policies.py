"""Policies of random weights that benchmarks share, and learners and checkpoints of them.

Their speed does not depend on their values.
"""

import json
from pathlib import Path

import jax
import numpy as np

from telescope_jax.config import MeshConfig, OptimizerConfig, PolicyConfig
from telescope_jax.learner.learner import Learner
from telescope_jax.learner.loss import LossSettings
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import make_mesh
from telescope_jax.types import Params
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.hf_files import write
from telescope_jax.weights.hf_layout import to_hf

SIZES = {
    # Sizes that vLLM's attention takes on a CPU too.
    "1M": PolicyConfig(
        vocab_size=512, width=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_width=512
    ),
    # Those of SmolLM2-135M.
    "135M": PolicyConfig(
        family="llama",
        vocab_size=49_152,
        width=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        mlp_width=1_536,
        norm_eps=1e-5,
    ),
}


def random_params(policy: PolicyConfig, seed: int = 0) -> Params:
    """Parameters in float32."""
    return jax.jit(Decoder(policy, policy.vocab_size).init)(jax.random.key(seed))


def count(params: Params) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


def learner_of(
    policy: PolicyConfig,
    params: Params,
    *,
    loss: LossSettings,
    optimizer: OptimizerConfig,
    rows_per_microbatch: int,
    old_logprobs: bool = False,
) -> Learner:
    """A learner on one device, that starts from these parameters."""
    return Learner(
        policy,
        policy.vocab_size,
        make_mesh(MeshConfig(), jax.devices()[:1]),
        loss=loss,
        optimizer=optimizer,
        number_of_steps=1_000,
        rows_per_microbatch=rows_per_microbatch,
        old_logprobs=old_logprobs,
        params=params,
    )


def write_checkpoint(folder: Path, policy: PolicyConfig, params: Params, context: int) -> None:
    """Weights and config.json in the layout that Hugging Face's libraries read."""
    write(folder, {name: np.asarray(x) for name, x in to_hf(params).items()})
    described = hf_config_of(policy, policy.vocab_size, context)
    (folder / "config.json").write_text(json.dumps(described))
