"""Qwen2.5-0.5B-Instruct on GSM8K, on one GPU of 80 GB: where a researcher would start.

    python -m telescope_jax.main --config=experiments/qwen2p5_0p5b_gsm8k.py
    … --config.policy.checkpoint=/models/Qwen2.5-0.5B-Instruct
    … --config.env.options="{'train_file': 'train.jsonl', 'eval_file': 'test.jsonl'}"
    … --config=experiments/qwen2p5_0p5b_gsm8k.py:vllm       # the same GPU, shared with vLLM
    python -m telescope_jax.plan --config=experiments/qwen2p5_0p5b_gsm8k.py:sizes --topology=v5e:2x2

Model and data come from the hub, or from a local folder and JSON Lines files. GRPO with truncated
importance sampling; the KL to the first policy is off, as is usual for verifiable rewards.

Memory, from the sizes alone (0.49 G parameters; nothing here was measured on a GPU): parameters,
two moments and gradient in float32 7.9 GB; keys and values of 256 slots × 1,024 tokens in bfloat16
3.2 GB (24 layers × 2 heads × 64 × 2); the logits of a microbatch are never whole. With vLLM each
side may take 0.45 of the GPU, and vLLM makes a cache of all that is left of its share.
"""

from telescope_jax.config import Config


def get_config(arg: str = "") -> Config:
    """`arg`: "", the embedded engine, which shares the trainer's parameters; "vllm"; or "sizes":
    what the checkpoint would say, for a plan without it."""
    if arg not in ("", "vllm", "sizes"):
        raise ValueError(
            f"experiments/qwen2p5_0p5b_gsm8k.py knows no variant {arg!r}; use none, vllm or sizes"
        )
    config = Config()
    config.policy.checkpoint = "Qwen/Qwen2.5-0.5B-Instruct"
    config.policy.scan_layers = True
    config.policy.compute_dtype = "bfloat16"
    config.policy.remat = "block"

    config.env.name = "gsm8k"

    config.number_of_steps = 200
    config.groups_per_batch = 32
    config.group_size = 8
    config.algorithm = "grpo"
    config.max_async_rollout = 1
    config.eval_every = 20
    config.eval.items = 512
    config.eval.timeout_s = 1_800.0

    config.sampling.max_prompt_tokens = 384
    config.sampling.max_tokens = 640
    config.optimizer.learning_rate = 1e-6
    config.optimizer.schedule = "linear"
    config.optimizer.warmup_steps = 10
    config.optimizer.final_fraction = 0.1
    config.batch.seq_len = 2_048
    config.batch.rows_per_microbatch = 4

    config.engine.own_process = arg == "vllm"  # else one process, and one copy of the parameters
    config.engine.slots = 256
    config.engine.prefill_rows = 32
    config.watchdog_s = 1_200.0
    if arg == "vllm":
        config.engine.kind = "vllm"
        config.placement.trainer_devices = "0"
        config.placement.engine_devices = ("0",)
        config.placement.trainer_memory_fraction = 0.45
        config.placement.engine_memory_fraction = 0.45
    elif arg == "sizes":
        config.policy.vocab_size = 151_936
        config.policy.width = 896
        config.policy.layers = 24
        config.policy.heads = 14
        config.policy.kv_heads = 2
        config.policy.head_dim = 64
        config.policy.mlp_width = 4_864
        config.policy.rope_theta = 1e6
    return config
