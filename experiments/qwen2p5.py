"""Qwen2.5-7B-Instruct and 32B on GSM8K: for a slice of TPUs, with vLLM servers beside it.

    python -m telescope_jax.plan --config=experiments/qwen2p5.py:7b --topology=v5e:16x16
    python -m telescope_jax.plan --config=experiments/qwen2p5.py:32b --topology=v5e:16x16

Neither has been run. What their plans say is in docs/results.md; the sizes are written here so that
a plan needs no checkpoint. How to start one on many hosts: docs/launch.md.
"""

from telescope_jax.config import Config


def get_config(arg: str = "7b") -> Config:
    """`arg`: 7b or 32b."""
    config = Config()
    if arg == "7b":
        config.policy.checkpoint = "Qwen/Qwen2.5-7B-Instruct"
        config.policy.width = 3_584
        config.policy.layers = 28
        config.policy.heads = 28
        config.policy.kv_heads = 4
        config.policy.mlp_width = 18_944
        config.mesh.fsdp = 64
        config.mesh.tensor = 4
        config.batch.rows_per_microbatch = 64
    elif arg == "32b":
        config.policy.checkpoint = "Qwen/Qwen2.5-32B-Instruct"
        config.policy.width = 5_120
        config.policy.layers = 64
        config.policy.heads = 40
        config.policy.kv_heads = 8
        config.policy.mlp_width = 27_648
        # tensor 8 with fsdp 32 plans 1.54 times the arithmetic (docs/results.md).
        config.mesh.fsdp = 64
        config.mesh.tensor = 4
        config.batch.rows_per_microbatch = 64
    else:
        raise ValueError(f"experiments/qwen2p5.py knows no variant {arg!r}; use 7b or 32b")
    config.policy.vocab_size = 152_064
    config.policy.head_dim = 128
    config.policy.rope_theta = 1e6
    config.policy.tied_embeddings = False
    config.policy.scan_layers = True
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
    config.batch.seq_len = 2_048
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 10

    config.engine.kind = "vllm"
    config.engine.slots = 256
    return config
