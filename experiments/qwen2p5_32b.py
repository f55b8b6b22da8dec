"""Qwen2.5-32B-Instruct on GSM8K: for a slice of TPUs, with vLLM servers beside it.

    python -m telescope_jax.plan --config=experiments/qwen2p5_32b.py --topology=v5e:16x16

It has not been run, and its plan has not been waited for yet (docs/results.md): the sizes are
written here so that the plan needs no checkpoint. How to start it on many hosts: docs/launch.md.
"""

from telescope_jax.config import Config


def get_config(arg: str = "") -> Config:
    """`arg`: none."""
    if arg:
        raise ValueError(f"experiments/qwen2p5_32b.py knows no variant {arg!r}; use none")
    config = Config()
    config.policy.checkpoint = "Qwen/Qwen2.5-32B-Instruct"
    config.policy.vocab_size = 152_064
    config.policy.width = 5_120
    config.policy.layers = 64
    config.policy.heads = 40
    config.policy.kv_heads = 8
    config.policy.head_dim = 128
    config.policy.mlp_width = 27_648
    config.policy.rope_theta = 1e6
    config.policy.tied_embeddings = False
    config.policy.compute_dtype = "bfloat16"
    config.policy.remat = "block"

    config.env.name = "gsm8k"

    config.number_of_steps = 200
    config.groups_per_batch = 64
    config.group_size = 16
    config.eval_every = 20
    config.eval.items = 512

    config.sampling.max_prompt_tokens = 512
    config.sampling.max_tokens = 1_536
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 10

    config.mesh.fsdp = 32
    config.mesh.tensor = 8
    config.batch.seq_len = 2_048
    config.batch.rows_per_microbatch = 32

    config.engine.kind = "vllm"
    config.engine.slots = 256
    return config
