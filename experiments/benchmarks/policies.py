"""Policies of random weights that benchmarks share; their speed does not depend on their values."""

import jax

from telescope_jax.config import PolicyConfig
from telescope_jax.model.decoder import Decoder
from telescope_jax.types import Params

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
